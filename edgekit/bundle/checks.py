"""Checks a bundle from an untrusted source against its manifest, before anything in it is used.

Names must mean the same file on every system and nothing outside their folder, sizes and digests must be right, and
session options must have values that cannot read, write or run anything else.
"""

import re
import unicodedata
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from itertools import pairwise
from operator import attrgetter
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import digest_file, safe_join
from edgekit.bundle.manifest import MAX_MANIFEST_BYTES, BundledFile, Manifest
from edgekit.errors import BundleError, UsageError, suggest_name
from edgekit.serialize import read_own_toml
from edgekit.target import Target, TaskLimit

_MAX_NAME_BYTES = 512
# The longest name in ext4 (in bytes) and NTFS (in UTF-16 units).
_MAX_PART_BYTES = 255
_MAX_DEPTH = 16
_FORBIDDEN = frozenset('<>:"|?*\\')
# Windows treats superscript digits as 1, 2 and 3 ("Naming files, paths, and namespaces").
_DEVICES = frozenset(
    {"con", "prn", "aux", "nul", "conin$", "conout$"}
    | {f"{kind}{digit}" for kind in ("com", "lpt") for digit in "123456789¹²³"}
)


def find_fault(name: str) -> str | None:
    """Returns why a name with `/` between folders is no safe file name, None if it is one.

    A safe name means the same file below the folder on Linux, macOS and Windows: see Microsoft's "Naming files, paths,
    and namespaces" for forbidden characters, final dots and spaces, and the names of devices.
    """
    try:
        size_bytes = len(name.encode())
    except UnicodeEncodeError:
        return "is no text"
    parts = name.split("/")
    if not name or size_bytes > _MAX_NAME_BYTES or len(parts) > _MAX_DEPTH:
        return "is empty or too long"
    for part in parts:
        if part in {"", ".", ".."}:
            return "is absolute or climbs"
        if not _FORBIDDEN.isdisjoint(part) or any(unicodedata.category(each).startswith("C") for each in part):
            return "holds a character that is not allowed everywhere"
        if part[-1] in ". " or len(part.encode()) > _MAX_PART_BYTES:
            return "ends in a dot or a space, or is too long"
        # "nul.txt" is the device too: Windows ignores the part after the first dot.
        if part.partition(".")[0].rstrip().casefold() in _DEVICES:
            return "is the name of a device on Windows"
    return None


def find_clash(names: Iterable[str]) -> tuple[str, str] | None:
    """Returns two names that cannot both be files: they differ in case or Unicode form only, or one is in the other."""
    # Split before sorting: otherwise "a-b" would be sorted between "a" and "a/b", which must be neighbours.
    folded = sorted((tuple(_fold(name).split("/")), name) for name in names)
    for (first, name), (second, other) in pairwise(folded):
        if second[: len(first)] == first:
            return name, other
    return None


def find_unsafe(names: Iterable[str], where: str) -> str | None:
    """Returns a sentence why files of these names cannot be in one folder on every system, None if they can."""
    names = list(names)
    for name in names:
        if (fault := find_fault(name)) is not None:
            return f"{name[:200]!r} {where} {fault}"
    clash = find_clash(names)
    return None if clash is None else f"{clash[0]!r} and {clash[1]!r} {where} are one file on some systems"


def _fold(name: str) -> str:
    # NFC again, because folding the case may decompose a letter. macOS ignores both in comparisons.
    return unicodedata.normalize("NFC", unicodedata.normalize("NFC", name).casefold())


# The file that lists what a folder holds, and the command that opens such a folder.
_KINDS = {"manifest.json": "one model: edgekit verify", "group.json": "a group of models: edgekit group verify"}


def read_bounded(folder: Path, name: str) -> bytes:
    """Returns the bytes of a manifest or index in a folder, at most MAX_MANIFEST_BYTES + 1.

    Raises:
        BundleError: it is missing, a link, or no regular file.
    """
    file = safe_join(folder, name)
    _check_regular(file, name, folder)
    with file.open("rb") as stream:
        # With one byte more than allowed, the decoder refuses it.
        return stream.read(MAX_MANIFEST_BYTES + 1)


def check_files(folder: Path, files: Mapping[str, BundledFile], optional: Collection[str]) -> None:
    """Checks that a folder holds exactly these files, with their digests, and none but the `optional` ones besides.

    Names are checked before any file is opened, and sizes before digests are computed.

    Raises:
        BundleError: a file is missing, altered, unlisted, a link, or bears an unsafe name.
    """
    present = {name for name, _ in iterate_files(folder)} - set(optional)
    # An additional file is an alteration too, because apps copy whole folders.
    for name in sorted(present - files.keys()):
        words = f"bundle '{folder}' holds {name!r}, which its manifest does not list"
        raise BundleError(words, hint="remove that file")
    for name in sorted(files.keys() - present):
        raise BundleError(f"bundle '{folder}' lacks the file {name[:200]!r}", hint="build the bundle again")
    if (unsafe := find_unsafe(sorted(files), f"of bundle '{folder}'")) is not None:
        raise BundleError(unsafe, hint="build the bundle again")
    for name, entry in files.items():
        path = safe_join(folder, name)
        _check_regular(path, name, folder)
        # All sizes are checked before the first digest: a file of terabytes is refused without being read.
        if (size_bytes := path.stat().st_size) != entry.size_bytes:
            words = f"{name!r} of bundle '{folder}' has {size_bytes} bytes, the manifest says {entry.size_bytes}"
            raise BundleError(words, hint="the bundle was altered or copied badly: build it again")
    for name, entry in files.items():
        if digest_file(folder / name) != entry.sha256:
            words = f"{name!r} of bundle '{folder}' was altered: its sha256 is not that of the manifest"
            raise BundleError(words, hint="build the bundle again")


def iterate_files(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yields everything below a folder that is no folder, by its name with `/`, sorted."""
    for path in sorted(folder.rglob("*")):
        # A link to a folder is not followed but listed, so that it is refused as no regular file.
        if path.is_symlink() or not path.is_dir():
            yield path.relative_to(folder).as_posix(), path


def _check_regular(path: Path, name: str, folder: Path) -> None:
    if path.is_file() and not path.is_symlink():
        return
    hint = "build the bundle again"
    # Without this file, the folder may be of another kind, or contain several bundles.
    if name in _KINDS:
        hint = "give a folder that edgekit build made, or build it again"
        others = [what for other, what in _KINDS.items() if other != name and (folder / other).is_file()]
        places = [place for depth in ("*", "bundles/*") for place in folder.glob(f"{depth}/{name}")]
        inside = sorted(place.parent.relative_to(folder).as_posix() for place in places)
        hint = f"it holds {', '.join(inside[:8])}: name one of them" if inside else hint
        hint = f"it holds {others[0]} '{folder}'" if others else hint
    reason = "is a link or no regular file" if path.is_symlink() or path.exists() else "is missing"
    raise BundleError(f"{name[:200]!r} of bundle '{folder}' {reason}", hint=hint)


class _SessionOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`session_options.toml`: named patterns, and the pattern of the value of each session key and provider option."""

    patterns: dict[str, str]
    session: dict[str, str]
    providers: dict[str, dict[str, str]]

    def expand(self, values: Mapping[str, str]) -> dict[str, str]:
        """Returns the patterns of values, in which each `<name>` is replaced by the pattern of that name."""

        def replace(pattern: str) -> str:
            return re.sub(r"<(\w+)>", lambda name: replace(self.patterns[name[1]]), pattern)

        return {key: replace(pattern) for key, pattern in values.items()}


_OPTIONS_FILE = Path(__file__).parent / "session_options.toml"
_OPTIONS = read_own_toml(_OPTIONS_FILE, _SessionOptions)
_SESSION: Mapping[str, str] = _OPTIONS.expand(_OPTIONS.session)
PROVIDER_OPTIONS: Mapping[str, Mapping[str, str]] = {
    provider: _OPTIONS.expand(values) for provider, values in _OPTIONS.providers.items()
}
"""The options of each provider that a bundle may set, each with the pattern that its whole value must match."""
# The values of options of an unknown provider.
_NUMBER_OR_SWITCH = r"\d{1,9}|true|false|on|off"
_VERSIONED_NAME, _VERSION = r"[A-Za-z][\w.-]{0,63}", r"[0-9A-Za-z][0-9A-Za-z.+_-]{0,63}"

_REPEATED = ("settings", "provider", "minimum_ort", "thresholds", "verification", "fallback")
TARGET_FIELDS: Mapping[str, Callable[[Target], Any]] = {
    "target": attrgetter("name"),
    **{name: attrgetter(name) for name in _REPEATED},
    **{name: attrgetter(f"session.{name}") for name in ("provider_options", "chain", "platforms")},
    "session_config": attrgetter("session.config"),
}
"""The fields of a manifest that repeat `target.json`, each with the function that reads it from the target."""


def check_requests(manifest: Manifest, source: str) -> None:
    """Checks that a manifest sets only session keys and provider options that are allowed, to allowed values.

    Versions are copied into POMs and Gradle files, so each must look like a version.

    Raises:
        BundleError: a session key, a provider option or its value is not allowed, or a version is malformed.
    """
    _check_options(manifest.session_config, _SESSION, "session_config", source)
    options = PROVIDER_OPTIONS.get(manifest.provider)
    _check_options(manifest.provider_options, options, "provider_options", source)
    for chained in manifest.chain or ():
        _check_options({chained.provider: ""}, dict.fromkeys(PROVIDER_OPTIONS, ""), "chain", source)
        _check_options(chained.provider_options, PROVIDER_OPTIONS[chained.provider], "chain", source)
    for index, tuned in enumerate(manifest.tuned or ()):
        place = f"tuned[{index}].setting"
        _check_options(tuned.setting.config, _SESSION, f"{place}.config", source)
        _check_options(tuned.setting.provider_options, options, f"{place}.provider_options", source)
        if tuned.setting.form and tuned.setting.form not in manifest.forms:
            words = f"'{source}' has no files of the form {tuned.setting.form!r}, which {place} wants"
            raise BundleError(words, hint="tune it again: edgekit tune BUNDLE --apply")
    # Anything else than a version could be code in a POM or Gradle file.
    for name, version in {**manifest.versions, "minimum_ort": manifest.minimum_ort}.items():
        if not re.fullmatch(_VERSIONED_NAME, name) or not re.fullmatch(_VERSION, version):
            words = f"'{source}' has no version that a build file could hold: {name[:99]!r} = {version[:99]!r}"
            raise BundleError(words, hint="build the bundle again")
    for name, platform in manifest.platforms.items():
        _check_options(platform.provider_options, options, f"platforms.{name[:99]}.provider_options", source)


def bundled_task(manifest: Manifest) -> TaskLimit | None:
    """Returns the metric that a bundle asks for, None if it asks for none.

    Raises:
        UsageError: it is a function (`module:name`), which runs only if the user names it.
    """
    task = manifest.thresholds.task
    # `module:function` imports and runs Python.
    if task is not None and ":" in task.name:
        words = f"bundle '{manifest.name}' asks for the metric {task.name[:200]!r}, code that no bundle may run"
        raise UsageError(words, hint=f"if it is yours: --metric {task.name[:200]}")
    return task


def _check_options(options: Mapping[str, str], allowed: Mapping[str, str] | None, place: str, source: str) -> None:
    """Raises a BundleError for a key or value that is not allowed; None allows any key, with numbers and switches."""
    for key, value in options.items():
        if allowed is not None and key not in allowed:
            names = list(allowed)
            raise BundleError(
                f"{key[:99]!r} in {place} of '{source}' is not for a bundle to set",
                hint=suggest_name(key, names) if names else "leave it out: this provider takes no options",
            )
        if not re.fullmatch(_NUMBER_OR_SWITCH if allowed is None else allowed[key], value):
            words = f"{key!r} in {place} of '{source}' cannot be {value[:99]!r}"
            raise BundleError(words, hint="build the bundle again")
