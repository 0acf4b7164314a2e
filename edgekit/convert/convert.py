"""Converts a model into every file that its target loads."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import AnyPath, as_path, digest_file, move_file, work_folder
from edgekit._ort import VERSION, Level
from edgekit.convert.context import DEFAULT_CONTEXT, ContextOptions, compile_context, require_compiler
from edgekit.convert.equality import Equality
from edgekit.convert.forms import ORT_FILES, Source, Written, write_ort_form, write_stamped
from edgekit.convert.fusions import OpFusion
from edgekit.convert.ort_form import OrtOptions, refuse_size
from edgekit.convert.ort_format.canonical import CANONICAL_VERSION
from edgekit.convert.ort_format.report import UnfusedNode
from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.target import Form, Target


class ConvertedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a converted model, and the facts about them.

    `files` has for each form, in the target's order, the file names in the folder, the one to load first; `reason` says
    why these forms. For each `.ort` form, `census` counts the nodes that will run, `fates` says what became of the
    nodes of the source, `unfused` lists the quantized nodes that keep a float activation, `equality` compares its
    results with those of the source, and `host_traits` says what another kind of CPU would write differently. `sha256`
    and `size_bytes` are by file name. `versions` names what wrote the files: onnxruntime, the version of the canonical
    form, and for a context onnxruntime-qnn and qairt. `target` is empty if the styles were asked for instead of a
    target.
    """

    target: str
    reason: str
    files: dict[Form, tuple[str, ...]]
    census: dict[Form, dict[str, int]]
    fates: dict[Form, tuple[OpFusion, ...]]
    unfused: dict[Form, tuple[UnfusedNode, ...]]
    equality: dict[Form, Equality]
    host_traits: dict[Form, tuple[str, ...]]
    sha256: dict[str, str]
    size_bytes: dict[str, int]
    versions: dict[str, str]
    compatibility: str


class ConvertedModel(ConvertedFiles, frozen=True, kw_only=True):
    """The files of a converted model, in a folder."""

    source_sha256: str
    folder: Path
    canonical_version: int


def convert_model(
    model: Model,
    target: Target,
    out: AnyPath,
    *,
    ort_source: Model | None = None,
    origin: Model | None = None,
    samples: Samples | None = None,
    checked: bool = True,
    context: ContextOptions = DEFAULT_CONTEXT,
) -> ConvertedModel:
    """Writes every form that the target loads into the folder `out`: each file whole or not at all.

    Args:
        model: a prepared model, quantized or not.
        target: its `conversion.forms` are written, in its order of preference.
        out: the folder; existing files with other names stay.
        ort_source: the source of the `.ort` forms, if it is another model: the float32 form of an fp16 model, because
            ONNX Runtime's CPU provider would bake a cast to float32 around every node of the latter.
        origin: the model before it was prepared, from which one sees whose constants were folded.
        samples: the inputs on which each `.ort` form and its source run; drawn at random if there are none.
        checked: whether they run at all.
        context: the options of a QNN context.

    Raises:
        ModelError: the ORT format cannot hold the model, quantized nodes would run in float, or an `.ort` form gives
            other results than its source.
        RuntimeRefusal: ONNX Runtime, or QNN for a context, refuses the model.
        MissingExtraError: a context is wanted and onnxruntime-qnn is not installed.
        DeviceError: QNN's compiler crashed or ran out of time.
        OutputError: `out` cannot be written.
    """
    cpu, saves = target.conversion.cpu, target.conversion.saves_fusions
    options: dict[Form, OrtOptions] = {
        "full": OrtOptions(style="full", cpu=cpu),
        "runtime": OrtOptions(style="runtime", cpu=cpu, level=Level.ALL if saves else Level.BASIC),
    }
    source = Source(model=ort_source or model, origin=origin or ort_source or model, samples=samples, checked=checked)
    return _convert(model, source, target.conversion.forms, options, as_path(out), target, context)


def convert_styles(
    model: Model,
    out: Path,
    options: OrtOptions,
    forms: Sequence[Form],
    *,
    origin: Model | None = None,
    samples: Samples | None = None,
    checked: bool = True,
) -> ConvertedModel:
    """Writes a prepared model into the folder `out` in ORT format, in the styles asked for, or as its ONNX form.

    Raises:
        ModelError: the ORT format cannot hold the model, quantized nodes would run in float, or a file gives other
            results than its source.
        RuntimeRefusal: ONNX Runtime refuses the model.
        OutputError: `out` cannot be written.
    """
    styles: dict[Form, OrtOptions] = {style: msgspec.structs.replace(options, style=style) for style in ORT_FILES}
    source = Source(model=model, origin=origin or model, samples=samples, checked=checked)
    return _convert(model, source, forms, styles, out)


def _convert(
    model: Model,
    source: Source,
    forms: Sequence[Form],
    options: Mapping[Form, OrtOptions],
    out: Path,
    target: Target | None = None,
    context: ContextOptions = DEFAULT_CONTEXT,
) -> ConvertedModel:
    """Writes a model as ONNX or context, and the source model in ORT format; without a target there is no context."""
    if options.keys() & set(forms):
        refuse_size(source.model.path, source.model.size_bytes)
    if "context" in forms:
        require_compiler()
    with work_folder(out) as work:
        (work / "ort").mkdir()
        stamped = write_stamped(model, work)
        ort_stamped = stamped if source.model is model else write_stamped(source.model, work / "ort")
        source = msgspec.structs.replace(source, model=ort_stamped)

        def write(form: Form) -> Written:
            if form in options:
                return write_ort_form(source, work, options[form])
            if form == "context" and target is not None:
                made = compile_context(stamped.path.name, target, work, context)
                return Written(files=made.files, compatibility=made.compatibility, versions=made.versions)
            return Written(files=(stamped.path.name, *stamped.external_files))

        written = {form: write(form) for form in forms}
        names = [name for form in written.values() for name in form.files]
        sha256 = {name: digest_file(work / name) for name in names}
        sizes = {name: (work / name).stat().st_size for name in names}
        # The file to load comes last.
        for name in reversed(names):
            move_file(work / name, out / name)
    versions = {"onnxruntime": VERSION, "ort-canonical-form": str(CANONICAL_VERSION)}
    # The facts of every form, by form: the fields of `Written` that have the same name in the result.
    by_form: dict[str, Any] = {
        name: {form: found for form, item in written.items() if (found := getattr(item, name))}
        for name in ("files", "census", "fates", "unfused", "equality", "host_traits")
    }
    return ConvertedModel(
        **by_form,
        source_sha256=model.sha256,
        target="" if target is None else target.name,
        folder=out,
        sha256=sha256,
        size_bytes=sizes,
        canonical_version=CANONICAL_VERSION,
        versions=versions | {key: value for item in written.values() for key, value in item.versions.items()},
        compatibility="".join(item.compatibility for item in written.values()),
        reason="the style, the level and the CPU were asked for" if target is None else target.conversion.reason,
    )
