"""Converting a model into every file its target loads."""

from collections.abc import Callable
from pathlib import Path

import msgspec

from edgekit._files import digest_file, move_file, work_folder
from edgekit._ort import VERSION
from edgekit.convert.canonical import CANONICAL_VERSION
from edgekit.convert.census import UnfusedNode, count_ops, find_unfused, replay_saved
from edgekit.convert.context import compile_context, require_compiler
from edgekit.convert.ort_form import OrtOptions, Style, refuse_large, write_ort
from edgekit.convert.ort_report import read_graph
from edgekit.convert.twin import write_twin
from edgekit.errors import ModelError
from edgekit.model import Model
from edgekit.target import Form, Target

ORT_FILES: dict[Style, str] = {"full": "model.ort", "runtime": "model.runtime.ort"}
"""The name of the file of each style."""


class Written(msgspec.Struct, frozen=True, kw_only=True):
    """A form on disk: its files, the one to load first, and what is known of them.

    `census` counts the nodes that will run, by operator. `unfused` are quantized nodes that keep a float activation
    between themselves and their Q node. `compatibility` says which device a context fits; it is empty for other forms.
    """

    files: tuple[str, ...]
    census: dict[str, int] = {}
    unfused: tuple[UnfusedNode, ...] = ()
    compatibility: str = ""
    versions: dict[str, str] = {}


class ConvertedModel(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model for one target.

    `files` has, for each form in the target's order, the names in the folder, the one to load first. `census` counts
    the nodes that each `.ort` form will run. `sha256` and `size_bytes` go by file name. `versions` name what wrote the
    files: onnxruntime, and for a context onnxruntime-qnn and qairt.
    """

    source_sha256: str
    target: str
    folder: Path
    files: dict[Form, tuple[str, ...]]
    census: dict[Form, dict[str, int]]
    unfused: dict[Form, tuple[UnfusedNode, ...]]
    sha256: dict[str, str]
    size_bytes: dict[str, int]
    canonical_version: int
    versions: dict[str, str]
    compatibility: str
    reason: str


def convert_model(model: Model, target: Target, out: Path, *, ort_source: Model | None = None) -> ConvertedModel:
    """Writes every form that the target loads into the folder `out`: each file whole or not at all.

    Args:
        model: a prepared model, quantized or not.
        target: whose `conversion.forms` are written, in its order of preference.
        out: the folder; files that are there already and have other names stay.
        ort_source: what the `.ort` forms are written from, where that is another model: the float32 form of an fp16
            model, because ONNX Runtime's CPU provider would bake a cast to float32 around every node of the latter.

    Raises:
        ModelError: the ORT format cannot hold the model, or quantized nodes would run in float.
        RuntimeRefusal: ONNX Runtime, or QNN for a context, refuses the model.
        MissingExtraError: a context is wanted and onnxruntime-qnn is not installed.
        DeviceError: QNN's compiler crashed or ran out of time.
        OutputError: `out` cannot be written.
    """
    forms = target.conversion.forms
    if _ORT_FORMS & set(forms):
        refuse_large(ort_source or model)
    if "context" in forms:
        require_compiler()
    with work_folder(out) as work:
        twin = write_twin(model, work)
        ort_twin = twin if ort_source is None else write_twin(ort_source, _make_folder(work / "ort"))
        written = {form: _WRITERS[form](ort_twin if form in _ORT_FORMS else twin, target, work) for form in forms}
        names = [name for form in forms for name in written[form].files]
        sha256 = {name: digest_file(work / name) for name in names}
        sizes = {name: (work / name).stat().st_size for name in names}
        for name in reversed(names):
            move_file(work / name, out / name)
    return ConvertedModel(
        source_sha256=model.sha256,
        target=target.name,
        folder=out,
        files={form: written[form].files for form in forms},
        census={form: written[form].census for form in forms if written[form].census},
        unfused={form: written[form].unfused for form in forms if written[form].unfused},
        sha256=sha256,
        size_bytes=sizes,
        canonical_version=CANONICAL_VERSION,
        versions={"onnxruntime": VERSION}
        | {key: value for form in forms for key, value in written[form].versions.items()},
        compatibility="".join(written[form].compatibility for form in forms),
        reason=target.conversion.reason,
    )


def _make_folder(path: Path) -> Path:
    path.mkdir()
    return path


def _write_onnx(twin: Model, _target: Target, _work: Path) -> Written:
    return Written(files=(twin.path.name, *twin.external_files))


def _write_full(twin: Model, target: Target, work: Path) -> Written:
    return _write_ort(twin, work / ORT_FILES["full"], OrtOptions(style="full", cpu=target.conversion.cpu))


def _write_runtime(twin: Model, target: Target, work: Path) -> Written:
    return _write_ort(twin, work / ORT_FILES["runtime"], OrtOptions(style="runtime", cpu=target.conversion.cpu))


def _write_ort(twin: Model, path: Path, options: OrtOptions) -> Written:
    write_ort(twin, path, options)
    graph = read_graph(path)
    nodes = replay_saved(graph)
    unfused = find_unfused(nodes, graph.outputs)
    stuck = [node for node in unfused if not node.activation]
    if stuck:
        names = ", ".join(f"'{node.name}' ({node.op})" for node in stuck[:10])
        raise ModelError(
            f"INT8 did not stick: {len(stuck)} nodes of '{path.name}' would run in float on {options.cpu}: {names}",
            hint="ORT's CPU kernels want u8 or s8 activations with s8 weights, and u8 with u8: edgekit quantize MODEL",
        )
    return Written(files=(path.name,), census=count_ops(nodes), unfused=unfused)


def _write_context(twin: Model, target: Target, work: Path) -> Written:
    context = compile_context(twin.path.name, target, work)
    return Written(
        files=context.files,
        compatibility=context.compatibility,
        versions={**context.versions, "qairt": context.qairt_version},
    )


_ORT_FORMS = frozenset(ORT_FILES)
_WRITERS: dict[Form, Callable[[Model, Target, Path], Written]] = {
    "onnx": _write_onnx,
    "full": _write_full,
    "runtime": _write_runtime,
    "context": _write_context,
}
