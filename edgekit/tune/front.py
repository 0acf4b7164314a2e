"""What was measured, summed up: each setting, the front of those that no other one beats, and each level's graph."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

import msgspec

from edgekit._ort import CPU_PROVIDER, Level, SessionSettings, optimize_graph
from edgekit.convert.levels import describe_level
from edgekit.devices.device import Job
from edgekit.errors import EdgekitError
from edgekit.model.model import load_model
from edgekit.tune.race import Round
from edgekit.tune.report import Entrant, LevelRow, Measured, TriedSetting

# A level is written to be counted: gigabytes of weights are not written five times for that.
_MOST_BYTES = 500_000_000


def list_levels(job: Job, tried: Mapping[Level, TriedSetting], work: Path) -> Iterator[LevelRow]:
    """Yields a row for each level that was measured; nodes are those that the CPU provider of this machine runs."""
    work.mkdir()
    for level, found in tried.items():
        nodes, fused = _count(job, level, work / f"{level.value}.onnx")
        yield LevelRow(
            level=level.value,
            nodes=nodes,
            fused=fused,
            load_ms=None if found.fault else found.load_ms,
            median_ms=None if found.fault else found.median_ms,
        )


def _count(job: Job, level: Level, out: Path) -> tuple[int | None, dict[str, int]]:
    small = job.model.suffix == ".onnx" and job.model.stat().st_size < _MOST_BYTES
    if job.target.provider != CPU_PROVIDER or not small:
        return None, {}
    try:
        optimize_graph(job.model, out, SessionSettings(level=level, config=dict(job.target.session.config)))
        row = describe_level(load_model(job.model), out, level)
    except EdgekitError:
        return None, {}
    return row.nodes, row.inserted


# Outputs that are nearer to the reference than that are equal for any use: rounding of float32 lies at 100 dB and more.
_SAME_DB = 90.0


def sum_up(rounds: Iterable[Round]) -> Mapping[str, TriedSetting]:
    """Returns the medians of each setting by its name, in the order in which they were first measured."""
    found: dict[str, tuple[Entrant, list[Measured]]] = {}
    for one in rounds:
        for entrant, measured in zip(one.entrants, one.measured, strict=True):
            found.setdefault(entrant.name, (entrant, []))[1].append(measured)
    return {name: _sum_up(entrant, measured) for name, (entrant, measured) in found.items()}


def mark_front(tried: Sequence[TriedSetting]) -> tuple[TriedSetting, ...]:
    """Returns settings with those marked that no other one beats: in latency, memory and nearness to the reference."""
    sound = [one for one in tried if one.fault is None]
    return tuple(
        msgspec.structs.replace(
            one, pareto=one.fault is None and not any(_beats(other, one) for other in sound if other is not one)
        )
        for one in tried
    )


def _sum_up(entrant: Entrant, measured: Sequence[Measured]) -> TriedSetting:
    sound = [one for one in measured if one.fault is None]
    fault = next((one.fault for one in measured if one.fault is not None), None)
    if not sound:
        return TriedSetting(entrant=entrant, measurements=len(measured), fault=fault)
    return TriedSetting(
        entrant=entrant,
        measurements=len(measured),
        median_ms=median(one.median_ms for one in sound),
        p99_ms=median(one.p99_ms for one in sound),
        throughput_per_s=1e3 / max(1e-9, median(one.pace_ms for one in sound)),
        load_ms=median(one.load_ms for one in sound),
        first_ms=median(one.first_ms for one in sound),
        peak_rss_bytes=int(median(one.peak_rss_bytes for one in sound)),
        sqnr_db=min((one.sqnr_db for one in sound if one.sqnr_db is not None), default=None),
        fault=fault,
    )


def _beats(one: TriedSetting, other: TriedSetting) -> bool:
    pairs = [(_figures(one)[index], _figures(other)[index]) for index in range(3)]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _figures(one: TriedSetting) -> tuple[float, float, float]:
    """Returns what is to be small: milliseconds, bytes, and the negative of decibels."""
    return (
        one.median_ms,
        float(one.peak_rss_bytes),
        -min(_SAME_DB, one.sqnr_db if one.sqnr_db is not None else _SAME_DB),
    )
