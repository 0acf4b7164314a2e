"""One stage at a time, for a model as the user has it: it is prepared, then the stage runs."""

import resource
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import msgspec

from edgekit import _ort
from edgekit._files import move_file, replacing_file, work_folder
from edgekit.check.check import check_model
from edgekit.check.ort_opinion import OrtOpinions, ask_ort_checker
from edgekit.check.report import CheckReport
from edgekit.data_check import check_samples, warn_if_few
from edgekit.images import Preprocess
from edgekit.model import Model, load_model
from edgekit.observe import NotObserved, Observed, observe_target
from edgekit.plain import to_plain
from edgekit.prepare import Fix, fix_model
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.external import place_weights, refuse_inline
from edgekit.prepare.reface import InterfaceChanges, reface_model, remaining_preprocess
from edgekit.progress import Progress, say_nothing
from edgekit.quantize import Candidate, FloatNode, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.ranges import AUTO_METHODS
from edgekit.recipe import Data, Recipe, choose_precision, load_targets
from edgekit.report.text import describe_recommendation
from edgekit.samples import limit_samples, load_samples
from edgekit.target import Precision


class CheckSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A model checked against several targets, what their real providers did with it, what ORT's checker says."""

    model: str
    sha256: str
    targets: dict[str, CheckReport]
    observed: dict[str, Observed | NotObserved] = {}
    ort: OrtOpinions | None = None

    @property
    def is_refused(self) -> bool:
        """True if a target's verdict is "no", or the vendor's own code made no session."""
        refused = any(isinstance(seen, Observed) and seen.refused for seen in self.observed.values())
        return refused or any(report.verdict == "no" for report in self.targets.values())


class PrepareOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to prepare a model; see `prepare_model`, `reface_model` and `fix_model`.

    `external` puts the weights beside the model or into it; None decides by size.
    """

    dims: dict[str, int] = {}
    opset: int | None = None
    outputs: tuple[str, ...] = ()
    constants: dict[str, float] = {}
    changes: InterfaceChanges = InterfaceChanges()
    fix: bool = True
    external: bool | None = None


class PrepareReport(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared model and the rewrites that were applied; `preprocess` is what an app still does to an image."""

    model: Model
    fixes: tuple[Fix, ...]
    is_refaced: bool
    preprocess: Preprocess | None


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
        if options.fix:
            fixed = fix_model(prepared, staged)
            prepared, fixes = fixed.model, fixed.fixes
        if options.external is not None:
            prepared = place_weights(prepared, external=options.external)
        for name in (*prepared.external_files, out.name):
            move_file(work / name, out.with_name(name))
    prepared = msgspec.structs.replace(prepared, path=out)
    left = None if changes.preprocess is None else remaining_preprocess(changes.preprocess)
    return PrepareReport(model=prepared, fixes=fixes, is_refaced=not changes.is_empty, preprocess=left)


def check_targets(
    model: Path, recipe: Recipe, progress: Progress | None = None, *, observe: bool = False, compare_ort: bool = False
) -> CheckSummary:
    """Prepares a model and returns what each target of the recipe would take of it.

    With `observe` the real provider of each target is asked as well, where one can run here; the evidence of such a
    report is that of the device. With `compare_ort` ONNX Runtime's own checker is asked about the model as it is given.

    Raises:
        EdgekitError: the model or the recipe is wrong.
    """
    progress = progress or say_nothing
    targets, source = load_targets(recipe), load_model(model)
    reports: dict[str, CheckReport] = {}
    observed: dict[str, Observed | NotObserved] = {}
    with work_folder() as work:
        progress("prepare the model")
        prepared = prepare_model(source, work / f"{source.name}.onnx", recipe.dims)
        for target in targets:
            progress(f"check {target.name}")
            report = check_model(prepared, target)
            if observe:
                progress(f"observe {target.name}")
                seen = observed[target.name] = observe_target(prepared, target)
                if isinstance(seen, Observed):
                    report = msgspec.structs.replace(report, evidence=seen.evidence.value)
            reports[target.name] = report
    opinions = ask_ort_checker(model) if compare_ort else None
    return CheckSummary(model=source.name, sha256=source.sha256, targets=reports, observed=observed, ort=opinions)


def describe_checks(summary: CheckSummary) -> dict[str, Any]:
    """Returns a check as its JSON document: what was observed stands in the target's own object."""
    targets = to_plain(summary.targets)
    for name, seen in summary.observed.items():
        targets[name]["observed"] = to_plain(seen) if isinstance(seen, Observed) else None
        if isinstance(seen, NotObserved):
            targets[name]["not_observed"] = seen.reason
    document = {
        "model": summary.model,
        "sha256": summary.sha256,
        "targets": targets,
        "recommendation": describe_recommendation(summary.targets, summary.observed),
    }
    return document if summary.ort is None else {**document, "ort_checker": to_plain(summary.ort)}


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
