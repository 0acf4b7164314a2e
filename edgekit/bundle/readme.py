"""The README of a bundle, for the developer of an app: rendered from the manifest, so that the two cannot disagree."""

from collections.abc import Mapping
from pathlib import Path

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.manifest.coordinates import SWIFT_PACKAGE, choose_android_release, list_android_dependencies
from edgekit.bundle.manifest.manifest import Manifest
from edgekit.bundle.snippets import describe_interface, make_environment
from edgekit.evidence import Evidence
from edgekit.target import Target

README = "README.md"
LEVELS: dict[str, Evidence] = {
    "android": Evidence.SAME_BINARY,
    "android:x86_64": Evidence.SAME_EP,
    "arm64": Evidence.SAME_ARCH,
    "coreml": Evidence.DEVICE,
    "emulated": Evidence.EMULATED,
    "host": Evidence.EMULATED,
    "host:cuda": Evidence.DEVICE,
    "host:directml": Evidence.DEVICE,
    "host:tensorrt": Evidence.DEVICE,
    "ios-sim": Evidence.SAME_EP,
    "openvino": Evidence.SAME_EP,
    "qnn-htp-sim": Evidence.SIMULATOR,
    "webgpu": Evidence.SAME_EP,
}
"""How good the evidence of the devices is that targets name."""

_TEMPLATES = Path(__file__).parent / "templates"


def render_readme(target: Target, manifest: Manifest, notes: str, snippets: Mapping[str, str]) -> str:
    """Returns the README; `notes` is what the target says of itself, `snippets` are the files of `app/`.

    It holds nothing that differs from run to run: figures stand in `verify.json`.
    """
    template = make_environment(_TEMPLATES).get_template("README.md.j2")
    release = choose_android_release(manifest.minimum_ort)
    dependencies = list_android_dependencies(manifest.provider, manifest.versions, release)
    return template.render(
        manifest=manifest,
        title=target.title,
        notes=notes.strip(),
        snippets=sorted(snippets),
        interface=describe_interface(manifest),
        dependencies=dependencies,
        swift_package=SWIFT_PACKAGE,
        evidence=[(entry.device, *_level(entry.device, manifest)) for entry in manifest.verification],
    )


def _level(device: str, manifest: Manifest) -> tuple[str, str]:
    level = Evidence.SAME_EP if manifest.provider == CPU_PROVIDER else LEVELS.get(device)
    return (level.value, level.meaning) if level else ("by device", "see verify.json")
