"""What an app store checks of an app with a package, as far as its libraries are at hand."""

import msgspec

from edgekit.app_runtime import NativeLibrary

PAGE_BYTES = 16 << 10
"""The size of pages that Google Play asks 64-bit libraries to be aligned to, since November 2025."""

_NARROW = {"armeabi-v7a": "arm64-v8a", "x86": "x86_64"}
"""The ABIs of 32 bits, each with its twin of 64 bits, which Google Play asks for beside it."""


class StoreReport(msgspec.Struct, frozen=True, kw_only=True):
    """What an app store looks at in what a package brings into an app.

    `archive` is ONNX Runtime's, of `version`, on which the package depends; the bundles need `minimum_ort` or newer.
    `unseen` are dependencies with libraries that are not at hand.
    """

    archive: str
    archive_sha256: str
    version: str
    minimum_ort: str
    libraries: tuple[NativeLibrary, ...]
    unseen: tuple[str, ...]

    @property
    def abis(self) -> tuple[str, ...]:
        """The ABIs that the archive has libraries for, sorted."""
        return tuple(sorted({library.abi for library in self.libraries}))

    @property
    def complaints(self) -> tuple[str, ...]:
        """What Google Play refuses, a line each (developer.android.com: page sizes, 64-bit architectures)."""
        unaligned = (
            f"'jni/{library.abi}/{library.name}' of '{self.archive}' is aligned to {library.alignment} bytes and not"
            " to 16 KB"
            for library in self.libraries
            if library.abi not in _NARROW and library.alignment % PAGE_BYTES
        )
        lonely = (
            f"'{self.archive}' has libraries for {abi} and none for {_NARROW[abi]}"
            for abi in self.abis
            if abi in _NARROW and _NARROW[abi] not in self.abis
        )
        return (*unaligned, *lonely)

    @property
    def remarks(self) -> tuple[str, ...]:
        """What there is to say, a line each."""
        aligned = f"all {len(self.libraries)} libraries are aligned to 16 KB, for {', '.join(self.abis)}"
        return (
            f"ONNX Runtime {self.version} of '{self.archive}'; the bundles need {self.minimum_ort} or newer",
            *(f"Google Play refuses: {complaint}" for complaint in self.complaints),
            *(() if self.complaints else (f"Google Play: {aligned}",)),
            *(f"not looked into, as it is not at hand: {name}" for name in self.unseen),
        )

    @property
    def passed(self) -> bool:
        """True if there is nothing that Google Play refuses."""
        return not self.complaints
