"""A forecast as an HTML page: a row for each device, milliseconds across, intervals as bars."""

import math
from collections.abc import Callable, Mapping

import msgspec

from edgekit.forecasts.forecast import DeviceForecast, ForecastReport
from edgekit.report import forecasts
from edgekit.report.pages.pages import make_page

_LEFT, _RIGHT, _TOP, _ROW, _GAP = 250.0, 985.0, 30.0, 15.0, 9.0
# Steps of a logarithmic axis that people read easily.
_STEPS = (1, 2, 5)


class Span(msgspec.Struct, frozen=True, kw_only=True):
    """A forecast in the chart: its bar from `left` to `right`, its mark, and its label."""

    y: float
    left: float
    right: float
    mark: float
    precision: str
    note: str


class Lane(msgspec.Struct, frozen=True, kw_only=True):
    """A device in the chart: the position of its name, and its forecasts."""

    name: str
    y: float
    spans: tuple[Span, ...]


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """The chart, 1000 units wide; `ticks` are positions and their milliseconds, `limit` is the position of --max-ms."""

    height: float
    lanes: tuple[Lane, ...]
    ticks: tuple[tuple[float, str], ...]
    limit: float | None


def draw_devices(report: ForecastReport) -> Picture | None:
    """Returns the chart of a forecast, None if nothing was forecast; the time axis is logarithmic."""
    shown = [row for row in report.rows if row.ms is not None and row.low_ms is not None and row.high_ms is not None]
    if not shown:
        return None
    low = min(row.low_ms for row in shown if row.low_ms)
    high = max(row.high_ms for row in shown if row.high_ms)
    # At least a tenth of a decade, so that a single exact time has an axis too.
    start, end = math.log10(low) - 0.05, math.log10(high) + 0.05

    def across(ms: float) -> float:
        return round(_LEFT + (_RIGHT - _LEFT) * (math.log10(ms) - start) / (end - start), 1)

    lanes: list[Lane] = []
    y = _TOP
    for device in dict.fromkeys(row.device for row in shown):
        rows = [row for row in shown if row.device == device]
        spans = tuple(_draw(row, y + _ROW * at, across) for at, row in enumerate(rows))
        lanes.append(Lane(name=device, y=round(y + _ROW * (len(rows) - 1) / 2 + 4, 1), spans=spans))
        y += _ROW * len(rows) + _GAP
    decades = range(math.floor(start), math.ceil(end) + 1)
    steps = [step * 10.0**power for power in decades for step in _STEPS]
    ticks = tuple((across(ms), f"{ms:g}") for ms in steps if start <= math.log10(ms) <= end)
    limit = report.max_ms
    inside = limit is not None and limit > 0 and start <= math.log10(limit) <= end
    return Picture(height=y + 26, lanes=tuple(lanes), ticks=ticks, limit=across(limit) if inside and limit else None)


def _draw(row: DeviceForecast, y: float, across: Callable[[float], float]) -> Span:
    ms, interval = row.ms or 0.0, forecasts.describe_interval(row)
    return Span(
        y=y,
        left=across(row.low_ms or ms),
        right=across(row.high_ms or ms),
        mark=across(ms),
        precision=row.precision,
        note=f"{row.device}, {row.precision}: {forecasts.describe_time(row)} ms, 80 % between {interval} ms",
    )


_FILTERS: Mapping[str, Callable[..., object]] = {
    "time": forecasts.describe_time,
    "interval": forecasts.describe_interval,
    "cpu": forecasts.describe_cpu,
}


def render_forecast(report: ForecastReport) -> str:
    """Returns a forecast as an HTML page."""
    return make_page(
        "forecast",
        _FILTERS,
        report=report,
        headline=forecasts.headline_forecast(report),
        remarks=list(forecasts.list_forecast_remarks(report)),
        picture=draw_devices(report),
    )
