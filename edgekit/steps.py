"""One stage at a time, for a model as the user has it: it is prepared, then the stage runs."""

import resource
import time
from importlib.metadata import version
from pathlib import Path

import msgspec

from edgekit import _ort
from edgekit._files import move_file, replacing_file, work_folder
from edgekit.checking import TargetGain, fix_for_target
from edgekit.data_check import check_samples, warn_if_few
from edgekit.images import Preprocess
from edgekit.model import Model, load_model
from edgekit.prepare import Fix, fix_model
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.external import place_weights, refuse_inline
from edgekit.prepare.reface import InterfaceChanges, reface_model, remaining_preprocess
from edgekit.progress import Progress, say_nothing
from edgekit.quantize import Candidate, FloatNode, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.ranges import AUTO_METHODS
from edgekit.recipe import Data, Recipe, choose_precision, load_targets
from edgekit.samples import limit_samples, load_samples
from edgekit.target import Precision, Target


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to prepare a model; see `prepare_model`, `reface_model` and `fix_model`.

    `external` puts the weights beside the model or into it; None decides by size. With a `target` the rewrites by which
    it takes more are applied too.
    """

    dims: dict[str, int] = {}
    opset: int | None = None
    outputs: tuple[str, ...] = ()
    constants: dict[str, float] = {}
    changes: InterfaceChanges = InterfaceChanges()
    fix: bool = True
    external: bool | None = None
    target: Target | None = None


class PrepareReport(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared model and the rewrites that were applied; `preprocess` is what an app still does to an image.

    `gain` is what a target takes of it before and after the rewrites, where one was named.
    """

    model: Model
    fixes: tuple[Fix, ...]
    is_refaced: bool
    preprocess: Preprocess | None
    gain: TargetGain | None = None


class QuantizeReport(msgspec.Struct, frozen=True, kw_only=True):
    """A model quantized for a target, which nodes stayed float and why, and what was tried, best first."""

    model: str
    out: Path
    target: str
    precision: Precision
    samples: int
    data_warnings: tuple[str, ...]
    size_before: int
    size_after: int
    quantized_nodes: int
    float_nodes: tuple[FloatNode, ...]
    steps: tuple[Candidate, ...]
    seconds: float
    peak_rss_bytes: int


def prepare_for(source: Model, out: Path, options: PrepareOptions, progress: Progress | None = None) -> PrepareReport:
    """Writes the prepared form of a model to `out`.

    Raises:
        EdgekitError: the model or an option is wrong.
    """
    progress, changes = progress or say_nothing, options.changes
    if options.external is False:
        refuse_inline(source)
    progress("prepare the model")
    with work_folder(out.parent) as work:
        staged = work / out.name
        prepared = prepare_model(
            source, staged, options.dims, opset=options.opset, outputs=options.outputs, constants=options.constants
        )
        prepared = reface_model(prepared, staged, changes)
        fixes: tuple[Fix, ...] = ()
        gain: TargetGain | None = None
        if options.fix and options.target is not None:
            better, gain = fix_for_target(prepared, staged, options.target)
            prepared, fixes = better.model, better.fixes
        elif options.fix:
            fixed = fix_model(prepared, staged)
            prepared, fixes = fixed.model, fixed.fixes
        if options.external is not None:
            prepared = place_weights(prepared, external=options.external)
        for name in (*prepared.external_files, out.name):
            move_file(work / name, out.with_name(name))
    prepared = msgspec.structs.replace(prepared, path=out)
    left = None if changes.preprocess is None else remaining_preprocess(changes.preprocess)
    return PrepareReport(model=prepared, fixes=fixes, is_refaced=not changes.is_empty, preprocess=left, gain=gain)


def quantize_for(
    model: Path,
    data: Data,
    out: Path,
    recipe: Recipe,
    *,
    method: str = "auto",
    progress: Progress | None = None,
) -> QuantizeReport:
    """Writes the QDQ form of a model for the one target of the recipe; `method` is that of `plan_quantization`.

    Raises:
        EdgekitError: the model, the data or the recipe is wrong, or the target takes no integers.
    """
    start, progress = time.monotonic(), progress or say_nothing
    (target,), source = load_targets(recipe), load_model(model)
    precision = choose_precision(target, recipe.precision)
    with work_folder() as work, replacing_file(out) as temporary:
        prepared = prepare_model(source, work / "prepared.onnx", recipe.dims)
        samples = limit_samples(load_samples(data.source, prepared.inputs, data.preprocess), recipe.samples)
        facts = check_samples(samples)
        progress(f"calibrate with {samples.count} samples")
        named = () if method in {"auto", "best"} else (method,)
        calibration = calibrate_model(
            prepared, samples, work=work / "calibration", methods=named or AUTO_METHODS, fitting=not named
        )
        plan = plan_quantization(prepared, calibration, target, precision, method=method)
        progress("quantize")
        quantized = quantize_model(prepared, plan, temporary)
    return QuantizeReport(
        model=source.name,
        out=out,
        target=target.name,
        precision=precision,
        samples=samples.count,
        data_warnings=warn_if_few(facts),
        size_before=source.size_bytes,
        size_after=quantized.size_after,
        quantized_nodes=quantized.quantized_nodes,
        float_nodes=quantized.float_nodes,
        steps=plan.judged,
        seconds=round(time.monotonic() - start, 2),
        peak_rss_bytes=peak_rss_bytes(),
    )


def list_versions() -> dict[str, str]:
    """Returns the versions of edgekit and of what it stands on."""
    return {"edgekit": version("edgekit"), "onnxruntime": _ort.VERSION, "onnx": version("onnx")}


def peak_rss_bytes() -> int:
    """Returns the peak memory of this process plus that of its largest child."""
    own, children = (resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return (own + children) * 1024
