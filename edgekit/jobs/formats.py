"""Quantization formats side by side: what each costs in accuracy, and what it brings in time and size, in one table."""

import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from statistics import median

import msgspec

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bench.latency import compare_rounds
from edgekit.convert.equality import choose_samples
from edgekit.convert.levels import LevelModel, write_level
from edgekit.convert.ort_form import Cpu
from edgekit.data.samples import Samples, limit_samples, load_samples, select_samples
from edgekit.errors import EdgekitError, ModelError, RuntimeRefusal
from edgekit.model.model import Model, load_model, read_proto, save_proto
from edgekit.model.tensors import Tensors
from edgekit.prepare.clean import freeze_model, prepare_model
from edgekit.progress import Progress
from edgekit.quantize._ort_quantizer import quantize_dynamically
from edgekit.quantize.apply import quantize_model
from edgekit.quantize.calibration.calibrate import calibrate_model, open_float_graph
from edgekit.quantize.plan import draft_plan
from edgekit.quantize.qdq import write_qoperator
from edgekit.recipe import Data, Recipe
from edgekit.target import load_target
from edgekit.verify.metrics.compare import compare_outputs

# Seven degrees of freedom: Student's quantile is then 2.36, against 12.7 for two rounds.
_ROUNDS = 8
# A round of a session is that long, and has a run at least.
_ROUND_S = 0.02
MOST_TIMED_BYTES = 300_000_000
"""All files are held at once, to be timed in turns."""


class TimedFile(msgspec.Struct, frozen=True, kw_only=True):
    """What loading a file and a run of it take in ms, and the time of a run over that of the first file, with 95 %."""

    load_ms: float
    median_ms: float
    ratio: float | None
    interval: tuple[float, float] | None


def optimize_levels(
    model: Model, levels: Sequence[Level], cpu: Cpu, out: Path, work: Path, samples: Samples | None, *, checked: bool
) -> tuple[LevelModel, ...]:
    """Returns a model at the levels asked for, written to `out`, behind the one without optimization.

    Raises:
        ModelError: the model is too large, or a file gives other results than the model.
        RuntimeRefusal: ONNX Runtime refuses the model.
    """
    # The file without optimization is what the others are compared with.
    wanted = tuple(dict.fromkeys((Level.DISABLED, *levels)))
    folders = {level: out if level in levels else work for level in wanted}
    rows = [write_level(model, level, cpu, folders[level], samples, checked=checked) for level in wanted]
    chosen = choose_samples(model, samples)
    if chosen is None or model.size_bytes > MOST_TIMED_BYTES:
        return tuple(rows)
    # The files are what they are: a session must not optimize them further.
    settings = SessionSettings(level=Level.DISABLED, threads=1, libraries=model.custom_ops)
    paths = {row.level.value: folders[row.level] / row.file for row in rows}
    try:
        times = time_in_turns(paths, settings, next(iter(chosen)))
    except RuntimeRefusal:
        # A model may refuse inputs that were drawn at random.
        return tuple(rows)
    return tuple(msgspec.structs.replace(row, **msgspec.structs.asdict(times[row.level.value])) for row in rows)


def time_in_turns(paths: Mapping[str, Path], settings: SessionSettings, sample: Tensors) -> dict[str, TimedFile]:
    """Returns load and run times of each file, in rounds of alternating order, so that disturbances hit all alike.

    Raises:
        RuntimeRefusal: ONNX Runtime does not load or run a file.
    """
    sessions, load_ms, counts = dict[str, CpuSession](), dict[str, float](), dict[str, int]()
    for name, path in paths.items():
        began = time.perf_counter()
        sessions[name] = CpuSession(path, settings)
        load_ms[name] = 1e3 * (time.perf_counter() - began)
        sessions[name].run(sample)
        counts[name] = max(1, int(_ROUND_S / max(1e-6, _time_runs(sessions[name], sample, 1))))
    rounds: list[dict[str, float]] = []
    for number in range(_ROUNDS):
        order = list(sessions)[:: -1 if number % 2 else 1]
        rounds.append({name: _time_runs(sessions[name], sample, counts[name]) for name in order})
    first, *others = paths
    ratios = {name: compare_rounds([(times[first], times[name]) for times in rounds]) for name in others}
    return {
        name: TimedFile(
            load_ms=load_ms[name],
            median_ms=1e3 * median(times[name] for times in rounds),
            ratio=ratios[name].value if name in ratios else None,
            interval=ratios[name].interval if name in ratios else None,
        )
        for name in paths
    }


def _time_runs(session: CpuSession, sample: Tensors, count: int) -> float:
    """Returns the seconds that a run takes, the median of so many."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        session.run(sample)
        times.append(time.perf_counter() - began)
    return median(times)


# From so many samples on those that judge are others than those that calibrate.
_FEW = 8
_FLOAT = "float"


class FormatRow(msgspec.Struct, frozen=True, kw_only=True):
    """A format: its size, what it loses beside the float model, and what a run takes on this machine with one thread.

    `sqnr_db` is that of the output that lies farthest, `agreement` the least share of samples on which the largest
    entry of an output stays where it was, None where no output lists classes. `ratio` is the time over the float
    model's, with 95 % confidence. `note` says why there is no such format of the model, "" where there is.
    """

    name: str
    size_bytes: int = 0
    sqnr_db: float | None = None
    agreement: float | None = None
    load_ms: float | None = None
    median_ms: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None
    note: str = ""


class FormatReport(msgspec.Struct, frozen=True, kw_only=True):
    """The formats of a model, the float one first; `judged` samples say what is lost, `calibrated` set the ranges.

    They are `apart` where there are enough: what judges has set no range.
    """

    model: str
    cpu: Cpu
    calibrated: int
    judged: int
    apart: bool
    rows: tuple[FormatRow, ...]


def compare_formats(model: Path, data: Data, recipe: Recipe, cpu: Cpu, progress: Progress) -> FormatReport:
    """Quantizes a float model in each format and compares the results.

    The formats are QDQ and QOperator, static and dynamic, per tensor and per channel. All use min-max ranges, so that
    they differ in nothing else.

    Raises:
        EdgekitError: the model or the data is wrong, or ONNX Runtime refuses the float model.
    """
    with work_folder() as work:
        source = freeze_model(load_model(model), work / "frozen", recipe.freeze)
        prepared = prepare_model(source, work / "prepared.onnx", recipe.dims, may_stay_open=True)
        given = load_samples(data.source, prepared.inputs, data.preprocess, idle=recipe.freeze)
        every = limit_samples(given, recipe.samples)
        # Where there are enough, each second one judges, and the others calibrate.
        apart = every.count >= _FEW
        calibrating = select_samples(every, range(0, every.count, 2)) if apart else every
        judging = select_samples(every, range(1, every.count, 2)) if apart else every
        progress("calibrate")
        calibration = calibrate_model(prepared, calibrating, work=work / "calibration", methods=("minmax",))
        target = load_target("cpu")
        plan = draft_plan(prepared, open_float_graph(prepared, calibration), calibration, target, "int8")
        files, notes = {_FLOAT: prepared.path}, dict[str, str]()

        def attempt(name: str, write: Callable[[Path], object]) -> Path:
            """Writes a format; one that there is not of this model is a note."""
            progress(f"write {name}")
            path = work / f"{name.replace(', ', '-').replace(' ', '-')}.onnx"
            try:
                write(path)
                files[name] = path
            except EdgekitError as error:
                notes[name] = error.message
            return path

        for grain, chosen in (("per channel", plan), ("per tensor", msgspec.structs.replace(plan, axes={}, bits={}))):
            qdq = attempt(f"QDQ, static, {grain}", partial(quantize_model, prepared, chosen, calibration))
            attempt(f"QOperator, static, {grain}", partial(_write_operators, qdq, cpu))
            dynamic = partial(_write_dynamic, prepared, per_channel=chosen is plan)
            attempt(f"QOperator, dynamic, {grain}", dynamic)
        progress("run and time each")
        rows = _measure(files, prepared, judging)
    return FormatReport(
        model=prepared.name,
        cpu=cpu,
        calibrated=calibrating.count,
        judged=judging.count,
        apart=apart,
        rows=(*rows, *(FormatRow(name=name, note=note) for name, note in notes.items())),
    )


def _write_operators(qdq: Path, cpu: Cpu, out: Path) -> None:
    write_qoperator(load_model(qdq), out, cpu)


def _write_dynamic(model: Model, out: Path, *, per_channel: bool) -> None:
    proto = read_proto(model)
    written = save_proto(quantize_dynamically(proto, (), model.path.name, per_channel=per_channel), out)
    if len(read_proto(written, weights=False).graph.node) == len(proto.graph.node):
        raise ModelError(
            f"'{model.name}' has no MatMul, LSTM, Attention or Gather with weights, and ONNX Runtime's CPU provider"
            " runs no other operator with int8 weights dynamically",
            hint="the static formats, QDQ and QOperator, take it",
        )


def _measure(files: Mapping[str, Path], model: Model, samples: Samples) -> list[FormatRow]:
    # As an app would run them: Q and DQ nodes become integer kernels.
    settings = SessionSettings(threads=1, libraries=model.custom_ops)
    rows: list[FormatRow] = []
    wanted: Samples | None = None
    for name, path in files.items():
        outputs = list(map(CpuSession(path, settings).run, samples))
        got = Samples(source=path.name, count=len(outputs), read=partial(iter, outputs))
        wanted = wanted or got
        reports = compare_outputs(wanted, got)
        ratios = [report.sqnr_db for report in reports if report.sqnr_db is not None]
        shares = [report.top1_agreement for report in reports if report.top1_agreement is not None]
        sqnr_db, agreement = min(ratios, default=None), min(shares, default=None)
        rows.append(FormatRow(name=name, size_bytes=path.stat().st_size, sqnr_db=sqnr_db, agreement=agreement))
    if model.size_bytes > MOST_TIMED_BYTES:
        return rows
    times = time_in_turns(files, settings, next(iter(samples)))
    return [msgspec.structs.replace(row, **msgspec.structs.asdict(times[row.name])) for row in rows]
