"""A search for settings as an HTML page: what was chosen and why, and the Pareto front of latency, memory, accuracy."""

import math
from collections.abc import Callable, Mapping

import msgspec

from edgekit.report import timing
from edgekit.report.pages.pages import make_page
from edgekit.report.tables import format_bytes
from edgekit.tune.report import TuneReport

_LEFT, _RIGHT, _TOP, _BOTTOM = 70.0, 985.0, 16.0, 280.0


class ParetoDot(msgspec.Struct, frozen=True, kw_only=True):
    """A setting in the chart: its position, whether it is on the Pareto front or chosen, and its label.

    `loss` gives its colour: from 0 (outputs equal to the reference) to 1 (30 dB and less).
    """

    x: float
    y: float
    front: bool
    chosen: bool
    loss: float
    title: str


class ParetoChart(msgspec.Struct, frozen=True, kw_only=True):
    """Settings by latency (across) and memory (up), the Pareto front as a line, and the figures at both axes."""

    dots: tuple[ParetoDot, ...]
    front: str
    columns: tuple[tuple[float, str], ...]
    rows: tuple[tuple[float, str], ...]


def draw_front(report: TuneReport) -> ParetoChart | None:
    """Returns the chart, None if fewer than two settings ran."""
    sound = [one for one in report.tried if one.fault is None and one.median_ms > 0 and one.peak_rss_bytes > 0]
    if len(sound) < 2:
        return None
    across = _Scale.fit([one.median_ms for one in sound], _LEFT, _RIGHT)
    up = _Scale.fit([float(one.peak_rss_bytes) for one in sound], _BOTTOM, _TOP)
    dots = tuple(
        ParetoDot(
            x=across.place(one.median_ms),
            y=up.place(one.peak_rss_bytes),
            front=one.pareto,
            chosen=one.entrant == report.chosen,
            loss=0.0 if one.sqnr_db is None else min(1.0, max(0.0, (100.0 - one.sqnr_db) / 70.0)),
            title=f"{one.entrant.name}: {one.median_ms:.3g} ms, {format_bytes(one.peak_rss_bytes)},"
            f" outputs {timing.describe_nearness(one)}",
        )
        for one in sound
    )
    line = sorted((dot for dot in dots if dot.front), key=lambda dot: dot.x)
    return ParetoChart(
        dots=dots,
        front=" ".join(f"{dot.x},{dot.y}" for dot in line),
        columns=tuple((across.place(value), f"{value:.3g} ms") for value in across.list_marks()),
        rows=tuple((up.place(value), format_bytes(int(value))) for value in up.list_marks()),
    )


class _Scale(msgspec.Struct, frozen=True):
    """A logarithmic axis: maps values to positions between two ends."""

    low: float
    high: float
    begin: float
    end: float

    @classmethod
    def fit(cls, values: list[float], begin: float, end: float) -> "_Scale":
        # A margin at both ends; without it equal values would divide by zero.
        return cls(math.log(min(values)) - 0.03, math.log(max(values)) + 0.03, begin, end)

    def place(self, value: float) -> float:
        share = (math.log(value) - self.low) / (self.high - self.low)
        return round(self.begin + share * (self.end - self.begin), 1)

    def list_marks(self) -> list[float]:
        return [math.exp(self.low + (self.high - self.low) * step / 4) for step in range(5)]


_FILTERS: Mapping[str, Callable[..., object]] = {
    "bytes": format_bytes,
    "front": draw_front,
    "fused": timing.describe_fused,
    "nearness": timing.describe_nearness,
    "ratio": timing.describe_ratio,
    "setting": timing.describe_setting,
}


def render_tuning(report: TuneReport) -> str:
    """Returns a search as an HTML page."""
    return make_page(
        "tune",
        _FILTERS,
        report=report,
        headline=timing.headline_tuning(report),
        remarks=list(timing.list_tuning_remarks(report)),
    )
