"""What an app must depend on for a provider: coordinates in the registries that its build system uses."""

from collections.abc import Mapping

import msgspec


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


SWIFT_PACKAGE = "https://github.com/microsoft/onnxruntime-swift-package-manager"
"""ONNX Runtime for SwiftPM, by Microsoft; its product is `onnxruntime`."""

# By provider: group, artifact, its name in the manifest's `versions`, and the version that this edgekit knows.
_PLUGINS = {
    "QNNExecutionProvider": (
        ("com.qualcomm.qti", "onnxruntime-android-qnn", "onnxruntime-qnn", "2.7.0"),
        ("com.qualcomm.qti", "qnn-runtime", "qairt", "2.51.0"),
    ),
}


def list_android_dependencies(provider: str, versions: Mapping[str, str], minimum_ort: str) -> tuple[Dependency, ...]:
    """Returns what an Android app needs for a provider, in the versions that a bundle was made with."""
    version = versions.get("onnxruntime", minimum_ort)
    ort = Dependency(group="com.microsoft.onnxruntime", artifact="onnxruntime-android", version=version)
    return (
        ort,
        *(
            Dependency(group=group, artifact=artifact, version=versions.get(key, known), runtime=True)
            for group, artifact, key, known in _PLUGINS.get(provider, ())
        ),
    )
