"""What the files of a bundle compute on this machine: the reference for a device, the self-test, the task's metric."""

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.expected import EXPECTED
from edgekit.bundle.folder import GOLDEN, Bundle, read_target
from edgekit.bundle.golden import Golden, KnownOutputs, read_inputs, read_labels, read_outputs
from edgekit.check.check import check_model
from edgekit.convert.ort_form import OrtOptions, Style, load_settings
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples, map_samples, order_for_runs, select_samples
from edgekit.devices.device import DeviceRun
from edgekit.errors import EdgekitError, ModelError, RuntimeRefusal, TargetError, UsageError
from edgekit.evidence import Evidence
from edgekit.graph.graph import read_graph
from edgekit.graph.match import list_moved
from edgekit.machine import release_memory
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.constants import DISABLED
from edgekit.target import Form, TaskLimit, load_target, read_version
from edgekit.verify.metrics.compare import read_first
from edgekit.verify.task_metrics import TaskMetric, compare_records, find_metric, read_records
from edgekit.verify.task_scores import TaskReport, Unit

TESTED_FORMS: tuple[Form, ...] = ("onnx", "full", "runtime")
"""Forms of a model that this machine can run."""
# The outputs may differ by 2 % of the largest number, as between kernels of two CPUs, or by twice the error that the
# model had when the bundle was built.
_SHARE, _ERROR_FACTOR = 0.02, 2.0


def list_broken_forms(bundle: Bundle) -> Iterator[str]:
    """Yields, in words, each model file whose outputs for the self-test's samples are beyond the self-test's tolerance.

    Devices run one form, apps may open another. The tolerance is the manifest's (`edgekit.bundle.expected`) without its
    allowance for the arithmetic of other devices: twice the model's error at the build, so that a float32 file beside
    an fp16 one is within it. A form that this machine cannot open, and a bundle without a self-test, are not judged.
    """
    chosen = [choice.row for choice in bundle.manifest.golden.chosen]
    forms: list[Form] = [form for form in TESTED_FORMS if form in bundle.manifest.forms]
    if not chosen or not forms:
        return
    expected = list(read_rows(bundle.folder / GOLDEN / EXPECTED))
    inputs = list(select_samples(read_inputs(bundle.golden), chosen))
    limits = _limit_here(bundle, expected, list(select_samples(read_outputs(bundle.golden), chosen)))
    wanted = [tensor.name for tensor in bundle.manifest.outputs]
    for form in forms:
        path = bundle.find_model(form)
        try:
            settings = choose_settings(bundle, form, path)
            session = CpuSession(path, settings)
            rows = [session.run(sample) for sample in inputs]
        except RuntimeRefusal:
            continue
        if (names := list(rows[0])) != wanted:
            fault = f"its outputs are {', '.join(names)}, those in the manifest {', '.join(wanted)}"
        else:
            fault = _find_fault(limits, expected, rows)
            if fault and form != "onnx" and "onnx" in forms:
                # Fused kernels of integers may round otherwise than the nodes of the ONNX file do one by one.
                with suppress(RuntimeRefusal):
                    fused = CpuSession(bundle.find_model("onnx"), msgspec.structs.replace(settings, level=Level.ALL))
                    fault = _find_fault(limits, [fused.run(sample) for sample in inputs], rows)
        if fault:
            yield f"'{path.name}' does not pass the bundle's self-test on this machine: {fault}; build again"
    # Devices run meanwhile, and need the memory that the sessions occupied.
    release_memory()


def find_other_model(bundle: Bundle) -> tuple[str, ...]:
    """Returns a line that says that the bundle's ONNX file is made for another target than its manifest says, else ().

    On the CPU a model for another provider gives good outputs too. The target's rules predict from the file itself how
    much of its work the provider takes. If that is clearly less than the manifest says (by the limit for work lost on a
    device), the file is another model. The rules are those of edgekit's own targets, because a bundle contains none.
    """
    manifest = bundle.manifest
    if "onnx" not in manifest.forms or manifest.provider == CPU_PROVIDER or not manifest.placement.taken_macs:
        return ()
    path = bundle.find_model("onnx")
    try:
        taken = check_model(load_model(path), load_target(manifest.target, manifest.settings)).taken_macs
    except (TargetError, UsageError):
        return ()
    except ModelError as error:
        return (f"'{path.name}' cannot be read: {error.message}",)
    promised = manifest.placement.taken_macs
    if taken >= promised - manifest.thresholds.max_lost_share:
        return ()
    reason = f"{manifest.provider} takes {taken:.0%} of its work by the rules of '{manifest.target}'"
    return (f"'{path.name}' is another model than promised: {reason}, not {promised:.0%}; build again",)


def list_moved_outputs(bundle: Bundle) -> set[str]:
    """Returns the outputs of the bundle's ONNX file that hold only elements of its inputs; none without such a file."""
    return list_moved(read_graph(load_model(bundle.find_model("onnx")))) if "onnx" in bundle.manifest.forms else set()


def find_self_test_fault(bundle: Bundle, rows: Sequence[int], got: Samples) -> Iterator[str]:
    """Yields why an app's loader on this device would fail the bundle's self-test, at most one line.

    `rows` are the golden samples that ran, in order; only self-test samples among them count. Every number may differ
    from the bundle's expected one by the manifest's tolerance (`edgekit_loader.run_self_test`).
    """
    places = {choice.row: place for place, choice in enumerate(bundle.manifest.golden.chosen)}
    try:
        expected = list(read_rows(bundle.folder / GOLDEN / EXPECTED)) if places else []
        found = {row: sample for row, sample in zip(rows, got, strict=False) if row in places}
        wanted = [expected[places[row]] for row in found]
    except (EdgekitError, IndexError):
        return
    if fault := _find_fault(bundle.manifest.golden.tolerance, wanted, list(found.values())):
        yield f"an app's self-test fails there: {fault}"


def describe_untested(bundle: Bundle) -> str:
    """Returns what cannot be checked for a bundle without a self-test, or "" if it has one."""
    if bundle.manifest.golden.chosen:
        return ""
    return "the bundle has no self-test: whether its files were altered, or the reference replayed, was not looked for"


def choose_settings(bundle: Bundle, form: Form, path: Path) -> SessionSettings:
    """Returns the session settings for a file of the bundle.

    A file of ORT format needs its own; an ONNX file runs without optimisation, as when the self-test was made.
    """
    styles: dict[Form, Style] = {"full": "full", "runtime": "runtime"}
    if form not in styles or path.suffix != ".ort":
        return SessionSettings(level=Level.DISABLED)
    settings = load_settings(OrtOptions(style=styles[form], cpu=read_target(bundle).conversion.cpu))
    stored = bundle.manifest.session_config
    config = settings.config | ({DISABLED: stored[DISABLED]} if DISABLED in stored else {})
    return msgspec.structs.replace(settings, config=config)


def _limit_here(bundle: Bundle, expected: Sequence[Tensors], reference: Sequence[Tensors]) -> dict[str, float]:
    """Returns the tolerance of each output, without the manifest's allowance for other kinds of machines."""
    limits: dict[str, float] = {}
    for name, tolerance in bundle.manifest.golden.tolerance.items():
        pairs = [(own[name], wanted[name]) for own, wanted in zip(expected, reference, strict=False) if name in own]
        off = max((float(np.abs(own - wanted).max(initial=0.0)) for own, wanted in pairs), default=0.0)
        size = max((float(np.abs(own).max(initial=0.0)) for own, _ in pairs), default=0.0)
        limits[name] = min(tolerance, max(_ERROR_FACTOR * off, _SHARE * size)) if off or size else tolerance
    return limits


def _find_fault(limits: Mapping[str, float], expected: Sequence[Tensors], rows: Sequence[Tensors]) -> str:
    """Returns the output that differs from the expected one by more than its tolerance, or "" if none does."""
    if len(expected) != len(rows):
        return f"it expects {len(expected)} samples, the manifest names {len(rows)}"
    for name, tolerance in limits.items():
        for wanted, found in zip(expected, rows, strict=True):
            if name in wanted and not _is_near(wanted[name], found.get(name), tolerance):
                return f"output '{name}' is farther than {tolerance:g} from what the bundle expects"
    return ""


def _is_near(wanted: Array, found: Array | None, tolerance: float) -> bool:
    if found is None or found.shape != wanted.shape:
        return False
    with np.errstate(invalid="ignore"):
        error = np.abs(found.astype(np.float64) - wanted.astype(np.float64))
    # Comparisons with NaN are False, so a NaN on one side only is a fault; infinities of the same sign are equal.
    equal = (wanted == found) | (np.isnan(wanted) & np.isnan(found))
    return bool(((error <= tolerance) | equal).all())


_LOOKED_AT = 8
# A random float32 is exact in half precision once in 2^13 (the bits that half precision lacks); constants such as 0 and
# 1 always are, so a few values prove nothing.
_LEAST_VALUES = 16


def run_own_model(
    bundle: Bundle, form: Form, samples: Samples, known: KnownOutputs
) -> tuple[Samples | None, tuple[str, ...]]:
    """Returns the outputs of the bundle's own model on this machine's CPU, computed when they are read; and notes.

    The ONNX file runs without optimisation, as when the self-test was made. For a bundle in half precision the file
    that the device ran is used instead, because files in ORT format are made from the float32 model there. `known`
    keeps outputs between devices. If no file of the bundle runs here, the outputs are None, and a note says why.
    """
    first = (form,) if bundle.manifest.precision == "fp16" and form in TESTED_FORMS else ()
    reason = "the bundle holds no file that runs on a CPU"
    for each in dict.fromkeys((*first, *TESTED_FORMS)):
        if not bundle.manifest.forms.get(each):
            continue
        path = bundle.find_model(each)
        try:
            session = CpuSession(path, choose_settings(bundle, each, path))
        except EdgekitError as error:
            reason = error.message.replace(f"{path.parent}/", "")
            continue
        return map_samples(samples, partial(known.run, session), source=f"the bundle's '{path.name}' here"), ()
    return None, (f"the device was not compared with the bundle's own model on this machine: {reason}",)


def find_half_values(reference: Samples, got: Samples) -> tuple[str, ...]:
    """Returns a note for each float output whose values are all exact in half precision while the reference's are not.

    The reference is the output of the bundle's own model, if it runs here.

    Values on an integer grid, such as those of a quantized softmax, may be exact in half precision anyway.
    """
    rows: dict[str, list[tuple[Array, Array]]] = {}
    for wanted, found in read_first(_LOOKED_AT, reference, got):
        for name in wanted.keys() & found.keys():
            rows.setdefault(name, []).append((wanted[name], found[name]))
    return tuple(
        f"output '{name}' holds only values of half precision, which the float model's are not: the device computes, or"
        " hands over, in fp16"
        for name, pairs in sorted(rows.items())
        if sum(first.size for first, _ in pairs) >= _LEAST_VALUES
        and all(_is_half(second) for _, second in pairs)
        and not all(_is_half(first) for first, _ in pairs)
        and not _is_on_grid(np.concatenate([second.reshape(-1) for _, second in pairs]))
    )


def find_equal_outputs(reference: Samples) -> tuple[str, ...]:
    """Returns a note if the float model gives the same outputs for all samples: then they test a single case."""
    if reference.count < 2:
        return ()
    first = next(iter(reference))
    if any(not np.array_equal(first[name], row[name]) for row in reference for name in first):
        return ()
    return (f"the float model gives the same outputs for all {reference.count} samples: together they test one case",)


def describe_older(run: DeviceRun, minimum_ort: str) -> str:
    """Returns, in words, that a device ran an older ONNX Runtime than the bundle needs, or "" if it did not.

    On a real device that is a fault, because loaders in apps refuse older ones. On an emulator or simulator, where no
    app runs, it proves nothing: an app's newer ONNX Runtime may take nodes that the old one leaves to the CPU.
    """
    version = run.versions.get("onnxruntime", "")
    if not version or read_version(version) >= read_version(minimum_ort):
        return ""
    if run.evidence is Evidence.DEVICE:
        return f"it ran ONNX Runtime {version}, the bundle asks for {minimum_ort} or newer: loaders refuse older ones"
    asked = f"it runs ONNX Runtime {version}, the bundle asks for {minimum_ort} or newer"
    return f"{asked}: it is too old to show which nodes the provider takes in an app"


def _is_on_grid(values: Array) -> bool:
    """Returns True if values span less than 256 steps of one size; no two of them need be adjacent."""
    levels = np.unique(values.astype(np.float64))
    if levels.size < 3:
        return True
    steps = (levels - levels[0]) / np.diff(levels).min()
    # A few samples hit few of the 256 values of a quantized softmax, and perhaps no two adjacent ones.
    grids = (steps * count for count in range(1, math.ceil(256 / steps[-1])))
    return any(bool(np.all(np.abs(grid - np.rint(grid)) < 1e-3)) for grid in grids)


def _is_half(value: Array) -> bool:
    if value.dtype != np.float32:
        return False
    with np.errstate(over="ignore"):
        return bool(np.array_equal(value.astype(np.float16).astype(np.float32), value))


# The metric of a slow device. An emulator runs too few samples for a narrow interval. So it only has to score each of
# them as the bundle's own model does on this machine; the other samples then show how good that model is.

_SAME_SCORE: Mapping[Unit, tuple[float, float]] = {"share": (0.01, 0.0), "dB": (0.5, 0.0), "value": (0.0, 0.01)}
"""How far apart both may score one sample if they compute the same and only round differently: the absolute distance,
and the distance as a share of the score. They are one point, half a decibel and 1 %, chosen by hand."""
_BUDGET_S = 120.0


def extend_task(
    bundle: Bundle, form: Form, golden: Golden, limit: TaskLimit, rows: Sequence[int], got: Samples, known: KnownOutputs
) -> TaskReport | None:
    """Returns the metric of a device over all labelled samples, of which it ran the `rows`; None if that is unknown.

    The device must score each sample that it ran as the bundle's own model does here. Then that model runs the others,
    for two minutes at most, and its figures are lowered by what the device lost on the samples that both ran.
    """
    labels, metric = read_labels(golden) or (), find_metric(limit)
    # Samples are often sorted by class: what ran when the time ends must be spread.
    order = list(dict.fromkeys((*rows, *order_for_runs(len(labels), len(labels), bundle.manifest.steps))))
    own, _ = run_own_model(bundle, form, select_samples(read_inputs(golden), order), known)
    if own is None:
        return None

    def read(outputs: Samples) -> Iterator[Any]:
        return read_records(limit, outputs, [labels[row] for row in order])

    records, end_s = list[Any](), time.monotonic() + _BUDGET_S
    try:
        theirs = list(read(got))
        for record in read(own):
            if len(records) < len(theirs) and not _agree(metric, theirs[len(records)], record):
                return None
            records.append(record)
            if time.monotonic() > end_s:
                break
        reference = islice(read(select_samples(read_outputs(golden), order)), len(records))
        task = compare_records(limit, list(reference), records)
    except EdgekitError:
        return None
    if task.samples <= len(theirs):
        return None
    here, there = (_score(metric, side) for side in (theirs, records[: len(theirs)]))
    task = _shift(task, 0.0 if here is None or there is None else here - there)
    return msgspec.structs.replace(task, labelled=len(labels), ran=len(rows))


def _agree(metric: TaskMetric, mine: Any, theirs: Any) -> bool:
    here, there = (_score(metric, [record]) for record in (mine, theirs))
    if here is None or there is None:
        # A metric that ranks samples gives no figure for a single one: its record, (score, label), is compared.
        here, there = float(mine[0]), float(theirs[0])
    absolute, relative = (0.0, 0.0) if metric.hits else _SAME_SCORE[metric.unit]
    return abs(here - there) <= absolute + relative * abs(there)


def _score(metric: TaskMetric, records: Sequence[Any]) -> float | None:
    try:
        return metric.prepare(records)(np.ones(len(records), dtype=np.int64))
    except EdgekitError:
        return None


def _shift(task: TaskReport, by: float) -> TaskReport:
    """Returns a metric whose figures are all higher by this amount."""
    if task.got is None:
        return task
    share = by / task.reference if task.reference > 0.0 else 0.0
    interval, shares = task.interval, task.share_interval
    return msgspec.structs.replace(
        task,
        got=task.got + by,
        interval=None if interval is None else (interval[0] + by, interval[1] + by),
        share_interval=None if shares is None else (shares[0] + share, shares[1] + share),
    )
