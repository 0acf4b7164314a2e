"""Converting a model into every file its target loads."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._files import AnyPath, as_path, digest_file, move_file, work_folder
from edgekit._ort import VERSION, Level
from edgekit.convert.context import DEFAULT_CONTEXT, ContextOptions, require_compiler
from edgekit.convert.equality import Equality
from edgekit.convert.forms import (
    ORT_FILES,
    Source,
    Written,
    write_context_form,
    write_onnx_form,
    write_ort_form,
    write_stamped,
)
from edgekit.convert.fusions import OpFusion
from edgekit.convert.ort_form import OrtOptions, refuse_large
from edgekit.convert.ort_format.canonical import CANONICAL_VERSION
from edgekit.convert.ort_format.report import UnfusedNode
from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.target import Form, Target

_ASKED_FOR = "the style, the level and the CPU were asked for"


class ConvertedFiles(msgspec.Struct, frozen=True, kw_only=True):
    """The files of a model and what is known of them.

    `files` has, for each form in the target's order, the names in the folder, the one to load first; `reason` says why
    these forms. `census` counts the nodes that each `.ort` form will run, `fates` says what became of those of the
    source, `unfused` which quantized nodes keep a float activation, `equality` how it compares with the source,
    `host_traits` what another kind of CPU would write otherwise. `sha256` and `size_bytes` go by file name. `versions`
    name what wrote the files: onnxruntime, the version of the canonical form, and for a context onnxruntime-qnn and
    qairt. `target` is empty where the styles were asked for.
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
    """The files that the model of a digest became, in a folder."""

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
        target: whose `conversion.forms` are written, in its order of preference.
        out: the folder; files that are there already and have other names stay.
        ort_source: what the `.ort` forms are written from, where that is another model: the float32 form of an fp16
            model, because ONNX Runtime's CPU provider would bake a cast to float32 around every node of the latter.
        origin: the model before it was prepared, which tells whose constants were folded.
        samples: what each `.ort` form and its source run on; inputs drawn at random where there are none.
        checked: whether they run at all.
        context: how a QNN context is compiled.

    Raises:
        ModelError: the ORT format cannot hold the model, quantized nodes would run in float, or an `.ort` form gives
            other results than its source.
        RuntimeRefusal: ONNX Runtime, or QNN for a context, refuses the model.
        MissingExtraError: a context is wanted and onnxruntime-qnn is not installed.
        DeviceError: QNN's compiler crashed or ran out of time.
        OutputError: `out` cannot be written.
    """
    out = as_path(out)
    forms = target.conversion.forms
    if _ORT_FORMS & set(forms):
        refuse_large(ort_source or model)
    if "context" in forms:
        require_compiler()
    with work_folder(out) as work:
        (work / "ort").mkdir()
        stamped = write_stamped(model, work)
        ort_stamped = stamped if ort_source is None else write_stamped(ort_source, work / "ort")
        source = Source(model=ort_stamped, origin=origin or ort_source or model, samples=samples, checked=checked)
        options = OrtOptions(style="full", cpu=target.conversion.cpu)
        level = Level.ALL if target.conversion.saves_fusions else Level.BASIC
        runtime = OrtOptions(style="runtime", cpu=target.conversion.cpu, level=level)
        writers: Mapping[Form, Callable[[], Written]] = {
            **_portable_writers(source, stamped, work, options),
            "runtime": lambda: write_ort_form(source, work, runtime),
            "context": lambda: write_context_form(stamped, target, work, context),
        }
        written: dict[Form, Written] = {form: writers[form]() for form in forms}
        return _publish(model, written, work, out, target=target.name, reason=target.conversion.reason)


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
    if _ORT_FORMS & set(forms):
        refuse_large(model)
    with work_folder(out) as work:
        stamped = write_stamped(model, work)
        source = Source(model=stamped, origin=origin or model, samples=samples, checked=checked)
        writers = _portable_writers(source, stamped, work, options)
        written: dict[Form, Written] = {form: writers[form]() for form in forms}
        return _publish(model, written, work, out, target="", reason=_ASKED_FOR)


def _portable_writers(
    source: Source, stamped: Model, work: Path, options: OrtOptions
) -> Mapping[Form, Callable[[], Written]]:
    return {
        "onnx": lambda: write_onnx_form(stamped),
        "full": lambda: write_ort_form(source, work, msgspec.structs.replace(options, style="full")),
        "runtime": lambda: write_ort_form(source, work, msgspec.structs.replace(options, style="runtime")),
    }


def _publish(
    model: Model, written: Mapping[Form, Written], work: Path, out: Path, *, target: str, reason: str
) -> ConvertedModel:
    names = [name for form in written.values() for name in form.files]
    sha256 = {name: digest_file(work / name) for name in names}
    sizes = {name: (work / name).stat().st_size for name in names}
    for name in reversed(names):
        move_file(work / name, out / name)
    versions = {"onnxruntime": VERSION, "ort-canonical-form": str(CANONICAL_VERSION)}
    return ConvertedModel(
        source_sha256=model.sha256,
        target=target,
        folder=out,
        files={form: item.files for form, item in written.items()},
        census={form: item.census for form, item in written.items() if item.census},
        fates={form: item.fates for form, item in written.items() if item.fates},
        unfused={form: item.unfused for form, item in written.items() if item.unfused},
        equality={form: item.equality for form, item in written.items() if item.equality is not None},
        host_traits={form: item.host_traits for form, item in written.items() if item.host_traits},
        sha256=sha256,
        size_bytes=sizes,
        canonical_version=CANONICAL_VERSION,
        versions=versions | {key: value for item in written.values() for key, value in item.versions.items()},
        compatibility="".join(item.compatibility for item in written.values()),
        reason=reason,
    )


_ORT_FORMS = frozenset(ORT_FILES)
