"""A model at optimization levels: each written as an ONNX file, compared with the model, and timed in turns."""

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bench.latency import compare_rounds
from edgekit.convert.equality import choose_samples
from edgekit.convert.levels import LevelModel, write_level
from edgekit.convert.ort_form import Cpu
from edgekit.data.samples import Samples
from edgekit.errors import RuntimeRefusal
from edgekit.model.model import Model
from edgekit.model.tensors import Tensors

# Seven degrees of freedom: Student's quantile is then 2.36, against 12.7 for two rounds.
_ROUNDS = 8
# A round of a session is that long, and has a run at least.
_ROUND_S = 0.02
# All files are held at once, to be timed in turns.
_MOST_BYTES = 300_000_000


def optimize_levels(
    model: Model, levels: Sequence[Level], cpu: Cpu, out: Path, work: Path, samples: Samples | None, *, checked: bool
) -> tuple[LevelModel, ...]:
    """Returns a model at the levels asked for, written to `out`, behind the one without optimization.

    Raises:
        ModelError: the model is too large, or a file gives other results than the model.
        RuntimeRefusal: ONNX Runtime refuses the model.
    """
    # Without optimization nothing is hoped for: the file is what the others are held against.
    wanted = tuple(dict.fromkeys((Level.DISABLED, *levels)))
    folders = {level: out if level in levels else work for level in wanted}
    rows = [write_level(model, level, cpu, folders[level], samples, checked=checked) for level in wanted]
    chosen = choose_samples(model, samples)
    if chosen is None or model.size_bytes > _MOST_BYTES:
        return tuple(rows)
    paths = {row.level: folders[row.level] / row.file for row in rows}
    return _time_rows(rows, paths, model, next(iter(chosen)))


def _time_rows(
    rows: Sequence[LevelModel], paths: Mapping[Level, Path], model: Model, sample: Tensors
) -> tuple[LevelModel, ...]:
    """Returns rows with what loading and a run take, in rounds that are turned round, so that all are hit alike."""
    # The files are what they are: a session must not optimize them further.
    settings = SessionSettings(level=Level.DISABLED, threads=1, libraries=model.custom_ops)
    sessions, load_ms, counts = dict[Level, CpuSession](), dict[Level, float](), dict[Level, int]()
    try:
        for level, path in paths.items():
            began = time.perf_counter()
            sessions[level] = CpuSession(path, settings)
            load_ms[level] = 1e3 * (time.perf_counter() - began)
            sessions[level].run(sample)
            counts[level] = max(1, int(_ROUND_S / max(1e-6, _time_runs(sessions[level], sample, 1))))
    except RuntimeRefusal:
        # A model may refuse inputs that were drawn at random.
        return tuple(rows)
    rounds: list[dict[Level, float]] = []
    for number in range(_ROUNDS):
        order = list(sessions) if number % 2 == 0 else list(sessions)[::-1]
        rounds.append({level: _time_runs(sessions[level], sample, counts[level]) for level in order})
    return tuple(_add_times(row, rounds, load_ms[row.level]) for row in rows)


def _add_times(row: LevelModel, rounds: Sequence[Mapping[Level, float]], load_ms: float) -> LevelModel:
    timed = msgspec.structs.replace(row, load_ms=load_ms, median_ms=1e3 * median(times[row.level] for times in rounds))
    if row.level == Level.DISABLED:
        return timed
    found = compare_rounds([(times[Level.DISABLED], times[row.level]) for times in rounds])
    return msgspec.structs.replace(timed, ratio=found.value, interval=found.interval)


def _time_runs(session: CpuSession, sample: Tensors, count: int) -> float:
    """Returns the seconds that a run takes, the median of so many."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        session.run(sample)
        times.append(time.perf_counter() - began)
    return median(times)
