"""ONNX Runtime's own model package: one component, a variant for each bundle, and files that they share stored once.

The layout is that of `model_package/README.md` in ONNX Runtime's source (schema 1.0, ONNX Runtime 1.28 and newer); what
stands under `executor_info.ort` is what its C API sets when it makes a session of the variant that it chose.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgekit._files import digest_bytes
from edgekit.bundle.folder import Bundle
from edgekit.bundle.manifest.checks import read_bounded
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.bundle.statement import SIGNATURE
from edgekit.model.skim import skim_model
from edgekit.package.variant import Identity, Part, Variant, Workplace

_COMPATIBILITY = "ep_compatibility_info."
_SHAREABLE = ("golden/",)


def collect_ort_package(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a model package: `manifest.json`, `<name>/component.json`, and a folder for each variant.

    A file that several bundles hold, such as the golden inputs, lies once in `shared_assets/sha256-<hex>/`. What each
    file of a bundle is called, its sha256 and where it lies stands in the variant's `additional_metadata`.
    """
    # By name and digest: an asset keeps the file name that loaders ask for.
    counts = Counter(key for part in parts for key in _keys(part.bundle, part.variant))
    shared = {key for key, count in counts.items() if count > 1}
    entries: dict[str, Path | bytes] = {}
    described: dict[str, object] = {}
    for part in parts:
        bundle, variant = part.bundle, part.variant
        places: dict[str, str] = {}
        for name, file in variant.files.items():
            asset = _asset(name, file.sha256) if (name, file.sha256) in shared else None
            places[name] = name if asset is None else f"sha256:{asset}/{Path(name).name}"
            folder = f"{identity.name}/{variant.name}/{name}" if asset is None else _asset_path(asset, name)
            entries[folder] = part.cut.files[name]
        if (bundle.folder / SIGNATURE).exists():
            entries[f"{identity.name}/{variant.name}/{SIGNATURE}"] = read_bounded(bundle.folder, SIGNATURE)
        described[variant.name] = _describe(bundle, variant, places)
    entries[f"{identity.name}/component.json"] = encode_json({"component_name": identity.name, "variants": described})
    entries["manifest.json"] = encode_json(
        {
            "schema_version": "1.0",
            "package_name": identity.name,
            "package_version": identity.version,
            # Everything lies in the folder, by relative paths.
            "layout": "portable",
            "components": {identity.name: identity.name},
            "additional_metadata": {"producer": "edgekit"},
        }
    )
    return entries


def _keys(bundle: Bundle, variant: Variant) -> list[tuple[str, str]]:
    """Returns what a bundle may share: golden files, and model forms of one file, which names no other."""
    # A model with weights beside it names them by their place: it cannot move to the shared folder alone.
    alone = {names[0] for names in bundle.manifest.forms.values() if len(names) == 1}
    return [(name, file.sha256) for name, file in variant.files.items() if name in alone or name.startswith(_SHAREABLE)]


def _asset(name: str, sha256: str) -> str:
    """Returns the digest of a folder that holds one file, as ONNX Runtime computes it."""
    return digest_bytes(f"{sha256}  {Path(name).name}\n".encode())


def _asset_path(asset: str, name: str) -> str:
    return f"shared_assets/sha256-{asset}/{Path(name).name}"


def _describe(bundle: Bundle, variant: Variant, places: Mapping[str, str]) -> dict[str, object]:
    info: dict[str, object] = {"model_file": places[variant.model], "session_options": variant.session_config}
    if variant.provider_options:
        info["provider_options"] = variant.provider_options
    described: dict[str, object] = {
        "variant_directory": variant.name,
        "ep": variant.provider,
        "executor_info": {"ort": info},
        "additional_metadata": {
            "minimum_ort": variant.minimum_ort,
            "precision": variant.precision,
            "target": variant.target,
            "files": {
                name: {"path": places[name], "sha256": file.sha256, "size_bytes": file.size_bytes}
                for name, file in variant.files.items()
            },
        },
    }
    compatibility = _read_compatibility(bundle.folder / variant.model, variant.provider)
    return {**described, "compatibility_string": compatibility} if compatibility else described


def _read_compatibility(model: Path, provider: str) -> str:
    """Returns what a compiled model says of the devices it is for, "" for any other model."""
    if model.suffix != ".onnx":
        return ""
    properties = skim_model(model).metadata_props
    return next((entry.value for entry in properties if entry.key == f"{_COMPATIBILITY}{provider}"), "")
