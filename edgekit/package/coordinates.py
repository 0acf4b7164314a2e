"""What an app must depend on for a provider: coordinates in the registries that its build system uses."""

from collections.abc import Mapping, Sequence

import msgspec

from edgekit.package.variant import Variant


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


_QNN = (
    ("com.qualcomm.qti", "onnxruntime-android-qnn", "onnxruntime-qnn", "2.7.0"),
    ("com.qualcomm.qti", "qnn-runtime", "qairt", "2.51.0"),
)
"""Group, artifact, its name in the manifest's `versions`, and the version that this edgekit knows."""


def list_android_dependencies(variants: Sequence[Variant]) -> tuple[Dependency, ...]:
    """Returns what an Android app needs for these bundles, in the versions that they were made with."""
    newest = max((_ort_version(variant) for variant in variants), key=_sortable)
    ort = Dependency(group="com.microsoft.onnxruntime", artifact="onnxruntime-android", version=newest)
    qnn = next((variant for variant in variants if variant.provider == "QNNExecutionProvider"), None)
    if qnn is None:
        return (ort,)
    return (ort, *(_runtime(qnn.versions, *known) for known in _QNN))


def _runtime(versions: Mapping[str, str], group: str, artifact: str, key: str, known: str) -> Dependency:
    return Dependency(group=group, artifact=artifact, version=versions.get(key, known), runtime=True)


def _ort_version(variant: Variant) -> str:
    return variant.versions.get("onnxruntime", variant.minimum_ort)


def _sortable(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())
