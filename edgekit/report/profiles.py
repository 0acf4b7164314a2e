"""Profiles as text and as an HTML page: timeline and roofline of each, and why two of them differ."""

import math
from collections.abc import Iterator, Sequence
from typing import Any

from rich.table import Table

from edgekit._ort import CPU_PROVIDER
from edgekit.profile.measure import Profiled
from edgekit.profile.report import Cause, DeviceProfile, NodeTime, ProfileComparison, ProfileReport
from edgekit.report.pages import Chart, LogAxis, Mark
from edgekit.report.tables import format_bytes, format_count, make_table

_MAX_NAME = 60
# Smaller shares of a run are not mentioned.
_MIN_SHARE = 0.005


def headline_profile(profile: DeviceProfile) -> str:
    """Returns the result of a profile in one line."""
    if profile.failure is not None:
        return f"{profile.subject} on {profile.device} failed: {profile.failure}"
    cost = ""
    if profile.overhead is not None:
        times, (low, high) = profile.overhead.value, profile.overhead.interval
        cost = f"; with the profiler a run takes {times:.2f} times that (95 %: {low:.2f} to {high:.2f})"
    time = f"{profile.subject} on {profile.device}: {profile.plain_ms:.3g} ms a run{cost}"
    share = f"{profile.covered:.1%} of {profile.run_ms:.3g} ms in {profile.runs} runs"
    share += f", the profiler between them {profile.recording:.1%}" if profile.recording >= _MIN_SHARE else ""
    return f"{time}; {len(profile.nodes)} kernels make {share}"


def list_tables(profile: DeviceProfile, most: int) -> Iterator[Table]:
    """Yields tables of at most `most` rows: the operators and the kernels, the most expensive first.

    If they were measured, two more follow: the memory of the process after each phase, with and without the arena; and
    the most expensive operations of the graph that an NPU ran.
    """
    columns = ("operator", "provider", "nodes", "calls", "total", "average", "maximum", "share", "GMAC/s", "GB/s")
    table = make_table(*columns)
    for one in profile.operators[:most]:
        times = (f"{one.self_ms:.3g} ms", f"{one.average_ms:.3g} ms", f"{one.max_ms:.3g} ms", f"{one.share:.1%}")
        rates = (_rate(one.macs, one.self_ms), _rate(one.bytes, one.self_ms))
        table.add_row(one.op, short_provider(one.provider), str(one.nodes), f"{one.calls:g}", *times, *rates)
    yield table
    columns = ("node", "operator", "self", "share", "MACs", "bytes", "GMAC/s", "GB/s", "of the roof", "shapes")
    table = make_table(*columns)
    for node in rank_nodes(profile)[:most]:
        work = (format_count(node.macs) if node.macs else "-", format_bytes(node.bytes))
        rates = (f"{node.gmacs_per_s:.3g}" if node.macs else "-", f"{node.gbytes_per_s:.3g}")
        roof = "-" if node.roof_share is None else f"{min(node.roof_share, 1):.0%} {node.bound}"
        shapes = f"{describe_shapes(node.inputs)} -> {describe_shapes(node.outputs)}"
        spent = (f"{node.self_ms:.3g} ms", f"{node.share:.1%}")
        table.add_row(shorten(node.source or node.name), node.op, *spent, *work, *rates, roof, shapes)
    yield table
    if profile.memory:
        table = make_table("memory behind", "held", "peak", "held without arena", "peak without arena")
        for phase in profile.memory:
            known = ("-" if size is None else format_bytes(size) for size in (phase.bare_bytes, phase.bare_peak_bytes))
            table.add_row(phase.phase, format_bytes(phase.resident_bytes), format_bytes(phase.peak_bytes), *known)
        yield table
    if profile.npu:
        table = make_table("inside the NPU's graph", "node", "cycles", "share", "runs apart by")
        for part in profile.npu[:most]:
            names = shorten(part.name), shorten(part.source) or "-"
            table.add_row(*names, f"{part.cycles:.0f}", f"{part.share:.1%}", f"{part.spread:.0%}")
        yield table


def rank_nodes(profile: DeviceProfile) -> list[NodeTime]:
    """Returns the kernels, the most expensive first."""
    return sorted(profile.nodes, key=lambda node: -node.self_ms)


def list_profile_remarks(profile: DeviceProfile) -> Iterator[str]:
    """Yields the cost of conversions and copies, the machine's peak rates, advice, and warnings about the figures."""
    copies = "copies between providers"
    if profile.provider != CPU_PROVIDER and all(one.kind != copies for one in profile.unasked):
        yield f"{copies}: none (no Memcpy kernel ran)"
    for one in profile.unasked:
        inserted = f", {one.inserted} of them put in by ONNX Runtime" if one.inserted else ""
        yield f"{one.kind}: {one.self_ms:.3g} ms ({one.share:.1%}) in {one.nodes} kernels{inserted}"
    if profile.roof is not None:
        roof = profile.roof
        rates = f"{roof.float_gmacs:.3g} GMAC/s in float32, {roof.integer_gmacs:.3g} in 8 bits"
        reads = f"{roof.gbytes:.3g} GB/s from memory and {roof.cache_gbytes:.3g} GB/s from a cache"
        yield f"{profile.device} reaches {rates}, {reads} (a probe, measured once)"
    yield from (f"would help: {describe_cause(cause)}" for cause in profile.advice)
    yield from profile.warnings


def describe_profiles(found: ProfileComparison) -> str:
    """Returns in one line which of two profiles is slower, and how certain that is."""
    times = f"A ({found.a}) {found.a_ms:.3g} ms, B ({found.b}) {found.b_ms:.3g} ms"
    if found.ratio is not None:
        low, high = found.ratio.interval
        times += f"; B takes {found.ratio.value:.3f} times as long, 95 % between {low:.3f} and {high:.3f}"
    if not found.slower:
        return f"no difference can be told: {times}" + ("; what costs the integers:" if found.causes else "")
    slow = found.a if found.slower == "a" else found.b
    return f"{slow} is slower: {times}{'; because' if found.causes else ''}"


def describe_cause(cause: Cause) -> str:
    """Returns a cause with its milliseconds and its remedy."""
    return f"{cause.message} [{cause.milliseconds:+.3g} ms]" + (f"; {cause.advice}" if cause.advice else "")


def table_pairs(found: ProfileComparison, most: int) -> Table:
    """Returns the layers whose times differ most as a table."""
    table = make_table("value", "A", "B", "B - A", "kernels of A", "kernels of B")
    for pair in sorted(found.pairs, key=lambda pair: -abs(pair.b_ms - pair.a_ms))[:most]:
        times = (f"{pair.a_ms:.3g} ms", f"{pair.b_ms:.3g} ms", f"{pair.b_ms - pair.a_ms:+.3g} ms")
        table.add_row(shorten(pair.tensor), *times, *(", ".join(side) or "-" for side in (pair.a_ops, pair.b_ops)))
    return table


def list_report_remarks(report: ProfileReport) -> Iterator[str]:
    """Yields the assumptions, and each device that was skipped."""
    yield from report.notes
    yield from map(str, report.skipped)


def describe_shapes(shapes: Sequence[str]) -> str:
    """Returns the shapes of a kernel's data without those of scalars, such as scales and zero points."""
    return " ".join(shape for shape in shapes if not shape.endswith("[]")) or "-"


def short_provider(provider: str) -> str:
    """Returns a provider's name without `ExecutionProvider`."""
    return provider.removesuffix("ExecutionProvider")


def shorten(name: str) -> str:
    """Returns the end of a long name: exporters put the module path first, and the part that differs last."""
    return name if len(name) <= _MAX_NAME else f"...{name[-_MAX_NAME:]}"


def _rate(count: int, milliseconds: float) -> str:
    return f"{count / milliseconds / 1e6:.3g}" if count and milliseconds > 0 else "-"


MAX_SPANS = 100_000
"""The largest number of kernels in the timeline: with more the page would load slowly."""

# White text stands on them: 4.5:1 or more.
HUES = (
    "#2f6fde", "#b85c00", "#14804a", "#8f4fd1", "#c22f3d", "#0d7f91", "#8a7100", "#c83b87", "#6b7a2f", "#5b6b9b",
    "#9b5b3b", "#6b7682",
)  # fmt: skip
_LEFT, _RIGHT, _TOP, _BOTTOM = 60.0, 985.0, 14.0, 290.0


def number_hues(profile: DeviceProfile) -> dict[str, int]:
    """Returns by operator an index into `HUES`: the slowest operators have their own, the others share the last."""
    ops = dict.fromkeys(one.op for one in profile.operators)
    return {op: min(index, len(HUES) - 1) for index, op in enumerate(ops)}


def describe_node(node: NodeTime) -> str:
    """Returns the tooltip of a kernel in the charts."""
    rate = f", {node.gmacs_per_s:.3g} GMAC/s" if node.macs else ""
    roof = "" if node.roof_share is None else f", {min(node.roof_share, 1):.0%} of the roof"
    name = f"{node.op} {node.source or node.name} ({short_provider(node.provider)})"
    cost = f"{node.self_ms:.3g} ms, {node.share:.1%}{rate}, {node.gbytes_per_s:.3g} GB/s{roof}"
    return f"{name}: {cost}; {describe_shapes(node.inputs)} -> {describe_shapes(node.outputs)}"


def draw_roof(profile: DeviceProfile) -> Chart | None:
    """Returns the roofline chart of the nodes that multiply, None if there are no peak rates or no such nodes.

    The x axis is the arithmetic intensity (multiply-accumulates per byte), the y axis the speed in GMAC/s.
    """
    roof = profile.roof
    nodes = [node for node in profile.nodes if node.macs and node.bytes and node.gmacs_per_s > 0]
    if roof is None or not nodes:
        return None
    intensities = [node.macs / node.bytes for node in nodes]
    ridges = [roof.float_gmacs / roof.gbytes, roof.integer_gmacs / roof.gbytes]
    across = LogAxis.fit([*intensities, *ridges], _LEFT, _RIGHT)
    up = LogAxis.fit([*(node.gmacs_per_s for node in nodes), roof.float_gmacs, roof.integer_gmacs], _BOTTOM, _TOP)

    def line(peak: float) -> str:
        start = max(10.0**across.low, 10.0**up.low / roof.gbytes)
        points = [(start, start * roof.gbytes), (peak / roof.gbytes, peak), (10.0**across.high, peak)]
        return " ".join(f"{across.place(x)},{up.place(y)}" for x, y in points)

    dots = tuple(
        Mark(
            x=across.place(intensity),
            y=up.place(node.gmacs_per_s),
            radius=round(3 + 14 * math.sqrt(node.share), 1),
            kind="integers" if node.integers else "",
            title=describe_node(node),
        )
        for node, intensity in zip(nodes, intensities, strict=True)
    )
    lines = {"": line(roof.float_gmacs), "integers": line(roof.integer_gmacs)}
    return Chart(marks=dots, lines=lines, columns=across.ticks, rows=up.ticks, edges=(_LEFT, _RIGHT, _TOP, _BOTTOM))


def list_spans(profiled: Profiled) -> dict[str, Any]:
    """Returns the data of the timeline for the page's script.

    `spans` has four numbers for each kernel: the index in `names`, start and length in microseconds, and the row. A
    thread has a row for each level of nesting of its kernels.
    """
    hues = number_hues(profiled.profile)
    places: dict[tuple[str, str], int] = {}
    rows: dict[tuple[int, int], int] = {}
    spans: list[int] = []
    start, runs = 0, 0
    for run in profiled.executions:
        if len(spans) // 4 + len(run.steps) > MAX_SPANS and runs:
            break
        # Each session has threads of its own: threads with the same position in their session share a row.
        threads: dict[int, int] = {}
        for step in run.steps[:MAX_SPANS]:
            thread = threads.setdefault(step.thread, len(threads))
            row = rows.setdefault((thread, step.depth), len(rows))
            name = places.setdefault((step.op, step.name), len(places))
            spans += (name, step.start_us - run.start_us + start, step.duration_us, row)
        start, runs = start + run.duration_us, runs + 1
    return {
        "names": [f"{op} {name}" for op, name in places],
        "hues": [HUES[hues.get(op, -1)] for op, _ in places],
        "spans": spans,
        "rows": max(1, len(rows)),
        "end": max(1, start),
        "runs": runs,
    }
