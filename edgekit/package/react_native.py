"""A package for React Native: the bundles as assets of an npm package, with a loader in TypeScript.

The plug-in `onnxruntime-react-native` supports less than ONNX Runtime's other bindings: no session config, and only a
few flags of providers. A bundle that needs more is refused when it is packed, not only later on a phone.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit.bundle.archive import list_files
from edgekit.bundle.manifest import Manifest, encode_json
from edgekit.bundle.snippets import choose_android_release
from edgekit.package.formats import render_table
from edgekit.package.variant import Identity, Part, Variant, Workplace, find_minimum_ort, list_entries
from edgekit.target import read_version

PLUGIN = "1.24.3"
"""The newest `onnxruntime-react-native`; its `cpp/SessionUtils.cpp` shows which options it takes."""

_NAMES = {
    "CPUExecutionProvider": "cpu",
    "CoreMLExecutionProvider": "coreml",
    "NnapiExecutionProvider": "nnapi",
    "XnnpackExecutionProvider": "xnnpack",
}
PROVIDERS = frozenset(_NAMES)
"""The plug-in's providers but QNN, whose options it misnames (`backendType` for `backend_type`)."""

_SYSTEMS = {"CoreMLExecutionProvider": ("ios",), "NnapiExecutionProvider": ("android",)}
_NNAPI = {
    "NNAPI_FLAG_CPU_DISABLED": "cpuDisabled",
    "NNAPI_FLAG_CPU_ONLY": "cpuOnly",
    "NNAPI_FLAG_USE_FP16": "useFP16",
    "NNAPI_FLAG_USE_NCHW": "useNCHW",
}
# COREMLFlags of coreml_provider_factory.h: the plug-in takes their sum, and none of the newer options by name.
_COREML = {
    "EnableOnSubgraphs=0": 0,
    "EnableOnSubgraphs=1": 2,
    "MLComputeUnits=ALL": 0,
    "MLComputeUnits=CPUAndGPU": 32,
    "MLComputeUnits=CPUAndNeuralEngine": 4,
    "MLComputeUnits=CPUOnly": 1,
    "ModelFormat=MLProgram": 16,
    "ModelFormat=NeuralNetwork": 0,
    "RequireStaticInputShapes=0": 0,
    "RequireStaticInputShapes=1": 8,
}
_THREADS = "intra_op_num_threads"
_HARMLESS = {
    "session.intra_op.allow_spinning=0": "threads that wait will spin, which costs time and changes no number",
    "session.qdqisint8allowed=1": "it is so on Arm without it; an emulator for x86-64 computes otherwise",
}
"""Entries of a session's config that may be omitted: they are the default on a phone, or change no result."""

_DTYPES = frozenset({"bool", "float32", "float64", "int16", "int32", "int64", "int8", "uint16", "uint8"})


def find_unsupported(manifest: Manifest) -> str | None:
    """Returns why the plug-in cannot run a bundle as its manifest says, or None if it can."""
    known = {
        "CoreMLExecutionProvider": _COREML.keys(),
        "NnapiExecutionProvider": {f"{name}=1" for name in _NNAPI},
        "XnnpackExecutionProvider": {pair for pair in _pairs(manifest.provider_options) if pair.startswith(_THREADS)},
    }
    unsupported = sorted(
        ({*_pairs(manifest.session_config)} - _HARMLESS.keys())
        | ({*_pairs(manifest.provider_options)} - {*known.get(manifest.provider, ())})
    )
    odd = sorted({spec.dtype for spec in (*manifest.inputs, *manifest.outputs)} - _DTYPES)
    if unsupported:
        return f"onnxruntime-react-native {PLUGIN} cannot be told '{unsupported[0]}'"
    if odd:
        return f"onnxruntime-react-native's tensors of {odd[0]} are not those of every JavaScript engine"
    if manifest.buckets:
        return "the loader for React Native picks none of several sizes"
    return None


def list_remarks(parts: Sequence[Part]) -> Iterator[str]:
    """Yields where the plug-in differs from the manifests, and which ONNX Runtime the app must link."""
    for entry in sorted({entry for part in parts for entry in _pairs(part.variant.session_config)}):
        yield f"onnxruntime-react-native {PLUGIN} cannot be told '{entry}': {_HARMLESS[entry]}"
    least = find_minimum_ort(parts)
    if read_version(least) > read_version(PLUGIN):
        yield (
            f"the bundles need ONNX Runtime {least}, and the plug-in's newest release is {PLUGIN}: the README pins"
            f" {choose_android_release(least)} for Gradle and CocoaPods"
        )


def _pairs(entries: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(f"{key}={value}" for key, value in entries.items())


def collect_react_native(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of an npm package: TypeScript under `src/`, the bundles under `assets/NAME/`, a podspec."""
    least = find_minimum_ort(parts)
    identity = msgspec.structs.replace(identity, name=identity.name.lower())  # npm takes no capitals
    values = {
        "identity": identity,
        "plugin": PLUGIN,
        "minimum_ort": least,
        "release": choose_android_release(least),
        "remarks": list(list_remarks(parts)),
    }
    # JSON is valid TypeScript; the types of the parts that are read are in `variant.ts`.
    table = encode_json([_describe(part.variant) for part in parts]).decode().strip()
    return {
        **list_entries(parts, f"assets/{identity.name}"),
        **list_files(Path(__file__).parent / "standalone" / "react_native"),
        "src/bundles.ts": render_table("bundles.ts.j2", parts, table=table, **values),
        "package.json": render_table("package.json.j2", parts, **values),
        f"{identity.name}.podspec": render_table("podspec.j2", parts, **values),
        "README.md": render_table("react_native.md.j2", parts, **values),
    }


_UNUSED = ("buckets", "chain", "provider_options", "session_config", "tuned", "versions")


def _describe(variant: Variant) -> dict[str, object]:
    """Returns what the loader reads of a bundle, with the session options in the plug-in's form."""
    options = variant.provider_options
    provider: dict[str, object] = {"name": _NAMES[variant.provider]}
    if variant.provider == "NnapiExecutionProvider":
        provider |= {_NNAPI[key]: True for key in options}
    if variant.provider == "CoreMLExecutionProvider":
        provider["coreMlFlags"] = sum(_COREML[pair] for pair in _pairs(options))
    # One provider is enough, because the plug-in skips those that a system lacks, and the CPU takes the remaining nodes
    # anyway.
    session: dict[str, object] = {"executionProviders": [provider]}
    if _THREADS in options:
        session["intraOpNumThreads"] = int(options[_THREADS])
    described: dict[str, object] = msgspec.to_builtins(variant)
    kept = {key: value for key, value in described.items() if key not in _UNUSED}
    return {**kept, "systems": _SYSTEMS.get(variant.provider, ()), "session": session}
