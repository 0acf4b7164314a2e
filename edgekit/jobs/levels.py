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
    # Without optimization nothing is hoped for: the file is what the others are held against.
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
    """Returns what loading and a run of each file take, in rounds that are turned round, so that all are hit alike.

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
        order = list(sessions) if number % 2 == 0 else list(sessions)[::-1]
        rounds.append({name: _time_runs(sessions[name], sample, counts[name]) for name in order})
    first = next(iter(paths))
    found: dict[str, TimedFile] = {}
    for name in paths:
        ratio = None if name == first else compare_rounds([(times[first], times[name]) for times in rounds])
        found[name] = TimedFile(
            load_ms=load_ms[name],
            median_ms=1e3 * median(times[name] for times in rounds),
            ratio=None if ratio is None else ratio.value,
            interval=None if ratio is None else ratio.interval,
        )
    return found


def _time_runs(session: CpuSession, sample: Tensors, count: int) -> float:
    """Returns the seconds that a run takes, the median of so many."""
    times: list[float] = []
    for _ in range(count):
        began = time.perf_counter()
        session.run(sample)
        times.append(time.perf_counter() - began)
    return median(times)
