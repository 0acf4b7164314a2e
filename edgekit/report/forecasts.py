"""A forecast as text and as an HTML page: times with intervals, the fastest precision, the source of the figures."""

import math
from collections.abc import Iterator
from itertools import groupby

from rich.table import Table

from edgekit.check.report import count_of
from edgekit.forecasts.forecast import BITS, DeviceForecast, ForecastReport
from edgekit.forecasts.model import Bits
from edgekit.report.pages import Chart, LogAxis, Mark
from edgekit.report.tables import format_bytes, format_count, make_table

# Forecasts that differ by less than this factor count as equal, as measured pairs do in the table's `faster`.
_EQUAL_FACTOR = 1.1


def headline_forecast(report: ForecastReport) -> str:
    """Returns what was forecast and how good the forecast is, in one line."""
    work = f"{format_count(report.macs)} multiply-accumulates, {format_count(report.weights)} weights"
    ground = f"{report.evidence}: estimated from other networks, nothing ran"
    return f"{report.model}: {work}, {report.nodes} operators; {ground}"


def table_forecast(report: ForecastReport) -> Table:
    """Returns the devices as a table: time with 80 % interval, nodes left to the CPU, memory, similar networks."""
    columns = ("device", "SoC", "precision", "ms", "80 % between", "on the CPU", "memory MB", "most like it (ms)")
    table = make_table(*columns)
    before = ""
    for row in report.rows:
        name = "" if row.device == before else row.device
        before = row.device
        soc = "" if row.soc_model is None or not name else f"{row.soc_model} v{row.htp}"
        table.add_row(
            name, soc, row.precision, describe_time(row), describe_interval(row), describe_cpu(row),
            "-" if row.memory_mb is None else f"{row.memory_mb:.0f} ({row.low_mb:.0f} to {row.high_mb:.0f})",
            ", ".join(f"{near.network} {near.ms:.3g}" for near in row.nearest[:2]),
        )  # fmt: skip
    return table


def describe_time(row: DeviceForecast) -> str:
    """Returns the milliseconds with the basis of the figure, or why there is no forecast."""
    if row.ms is None:
        return row.note
    words = {"compiled": " (compiled)", "measured": " (given)", "recalibrated": " (moved)", "scaled": " (scaled)"}
    return f"{row.ms:.3g}{words.get(row.basis, '')}"


def describe_interval(row: DeviceForecast) -> str:
    """Returns the 80 % interval."""
    return "-" if row.low_ms is None or row.high_ms is None else f"{row.low_ms:.3g} to {row.high_ms:.3g}"


def describe_cpu(row: DeviceForecast) -> str:
    """Returns the number of nodes that the rules leave to the CPU, their operators, and the bytes that cross over."""
    if (placing := row.placing) is None:
        return "all"
    if not placing.left:
        return "none, in one partition" if placing.partitions == 1 else f"none, in {placing.partitions} partitions"
    ops = ", ".join(f"{count} {op}" for op, count in list(placing.cpu_ops.items())[:3])
    crossing = f"{format_bytes(placing.crossing_bytes)} between"
    return f"{placing.left} of {placing.nodes} in {count_of(placing.partitions, 'partition')}, {crossing}: {ops}"


def describe_forecast(report: ForecastReport) -> str:
    """Returns the forecast of each device in one line, and which devices miss the limit."""
    texts: list[str] = []
    for row in report.rows:
        time = "" if row.ms is None else f"{row.precision} {row.ms:.3g} ms ({describe_interval(row)})"
        texts.append(f"{row.device} {time or row.note}")
    limit = "" if report.max_ms is None else f"; at most {report.max_ms:g} ms: {report.verdict}"
    return f"forecast, nothing ran there: {'; '.join(texts)}{limit}"


def list_forecast_remarks(report: ForecastReport) -> Iterator[str]:
    """Yields a line for each remark: the fastest precision, why nodes stay on the CPU, the source of the figures."""
    found: dict[str, list[str]] = {}
    for device in dict.fromkeys(row.device for row in report.rows):
        forecast = (row for row in report.rows if row.device == device and row.ms is not None)
        rows: dict[Bits, DeviceForecast] = {row.precision: row for row in forecast}
        if len(rows) > 1:
            # Forecasts of two precisions are too uncertain to compare, unless they come from times of this network.
            is_measured = all(row.basis in {"measured", "recalibrated"} for row in rows.values())
            times = {bits: row.ms for bits, row in rows.items() if row.ms is not None}
            fastest_ms = min(times.values())
            # The fastest precision, with those that are slower by less than a tenth.
            same = [bits for bits in BITS if bits in times and times[bits] <= fastest_ms * _EQUAL_FACTOR]
            if not is_measured:
                # The precision that was the fastest for most networks that were measured in several precisions.
                faster = {bits: {other: report.faster[bits][other] for other in rows if other != bits} for bits in rows}
                best = max(rows, key=lambda bits: min(faster[bits].values()))
                shares = ", ".join(f"{share:.0%} against {other}" for other, share in faster[best].items())
                answer = f"{best} forecast to be the fastest, as it was in most measured pairs ({shares})"
                if fastest_ms < times[best]:
                    answer += ", although the uncertain times above say otherwise"
            elif same == ["float"]:
                answer = "float is forecast to be the fastest, so quantizing would cost time"
            elif "float" in same:
                answer = "quantizing is forecast to gain less than a tenth"
            else:
                answer = f"{' and '.join(same)} forecast to be the fastest"
            found.setdefault(answer, []).append(device)
    yield from (f"{answer}: {', '.join(devices)}" for answer, devices in found.items())
    reasons = dict.fromkeys(reason for row in report.rows if row.placing for reason in row.placing.reasons)
    yield from (f"left to the CPU: {reason}" for reason in list(reasons)[:5])
    yield from report.remarks
    if report.max_ms is not None:
        if report.too_slow:
            yield f"slower than {report.max_ms:g} ms: {', '.join(report.too_slow)}"
        if report.unproven:
            yield f"not proven to keep {report.max_ms:g} ms: {', '.join(report.unproven)}"
    yield f"the figures come from {report.ground}"


_LEFT, _RIGHT, _TOP, _ROW, _GAP = 250.0, 985.0, 30.0, 15.0, 9.0


def draw_devices(report: ForecastReport) -> Chart | None:
    """Returns the chart of a forecast, None if nothing was forecast; the time axis is logarithmic.

    Each device has, for each precision, a bar for the interval and a dot for the time.
    """
    shown = [row for row in report.rows if row.ms is not None and row.low_ms is not None and row.high_ms is not None]
    if not shown:
        return None
    axis = LogAxis.fit([end for row in shown for end in (row.low_ms, row.high_ms) if end], _LEFT, _RIGHT)
    marks: list[Mark] = []
    y = _TOP
    for device, rows in groupby(shown, key=lambda row: row.device):
        begin = y
        for row in rows:
            ms = row.ms or 0.0
            low, high = axis.place(row.low_ms or ms), axis.place(row.high_ms or ms)
            title = f"{device}, {row.precision}: {describe_time(row)} ms, 80 % between {describe_interval(row)} ms"
            marks.append(Mark(x=low, y=y, width=round(high - low, 1), kind=f"bar {row.precision}", title=title))
            marks.append(Mark(x=axis.place(ms), y=y, radius=5, kind=row.precision, title=title))
            y += _ROW
        marks.append(Mark(x=_LEFT - 10, y=round((begin + y - _ROW) / 2 + 4, 1), label=device))
        y += _GAP
    limit = report.max_ms
    if limit and axis.low <= math.log10(limit) <= axis.high:
        title = f"{limit} ms at most"
        marks.append(Mark(x=axis.place(limit), y=12, height=y - 10, kind="limit", title=title))
    return Chart(marks=tuple(marks), columns=axis.ticks, edges=(0, 1000, 18, y + 2), height=y + 26)
