"""What an app must depend on for a provider: coordinates in the registries that its build system uses."""

from collections.abc import Mapping

import msgspec

from edgekit.target import read_version


class Dependency(msgspec.Struct, frozen=True, kw_only=True):
    """A Maven artifact; `runtime` is True for one that only the running app needs."""

    group: str
    artifact: str
    version: str
    runtime: bool = False

    @property
    def notation(self) -> str:
        """As Gradle writes it."""
        return f"{self.group}:{self.artifact}:{self.version}"


ANDROID_RELEASE = "1.29.0"
"""The ONNX Runtime in the archive for Android that edgekit fetches, and so the one that has verified bundles."""

SWIFT_PACKAGE = "https://github.com/microsoft/onnxruntime-swift-package-manager"
"""ONNX Runtime for SwiftPM, by Microsoft; its product is `onnxruntime`."""

# By provider: group, artifact, its name in the manifest's `versions`, and the version that this edgekit knows.
_PLUGINS = {
    "QNNExecutionProvider": (
        ("com.qualcomm.qti", "onnxruntime-android-qnn", "onnxruntime-qnn", "2.7.0"),
        ("com.qualcomm.qti", "qnn-runtime", "qairt", "2.51.0"),
    ),
}


def choose_android_release(minimum_ort: str) -> str:
    """Returns the version of `onnxruntime-android` for a bundle: the one that edgekit runs, or the newer one it needs.

    What made the bundle is a wheel for desktops, and not each of those versions has an archive for Android.
    """
    return max(ANDROID_RELEASE, minimum_ort, key=read_version)


def list_android_dependencies(provider: str, versions: Mapping[str, str], ort: str) -> tuple[Dependency, ...]:
    """Returns what an Android app needs for a provider: ONNX Runtime of version `ort`, and what goes with it.

    `versions` are those that the bundle was made with.
    """
    own = Dependency(group="com.microsoft.onnxruntime", artifact="onnxruntime-android", version=ort)
    return (
        own,
        *(
            Dependency(group=group, artifact=artifact, version=versions.get(key, known), runtime=True)
            for group, artifact, key, known in _PLUGINS.get(provider, ())
        ),
    )
