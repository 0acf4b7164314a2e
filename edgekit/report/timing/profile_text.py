"""Profiles as tables for a terminal."""

from collections.abc import Iterator, Sequence

from rich.table import Table

from edgekit._ort import CPU_PROVIDER
from edgekit.profile.report import Cause, DeviceProfile, NodeTime, ProfileComparison, ProfileReport
from edgekit.report.tables import format_bytes, format_count, make_table

_MOST_TEXT = 60
# Less of a run is not worth a word.
_TELLING = 0.005


def headline_profile(profile: DeviceProfile) -> str:
    """Returns what a profile says in one line."""
    if profile.failure is not None:
        return f"{profile.subject} on {profile.device} failed: {profile.failure}"
    cost = ""
    if profile.overhead is not None:
        low, high = profile.overhead.interval
        cost = (
            f"; with the profiler a run takes {profile.overhead.value:.2f} times that (95 %: {low:.2f} to {high:.2f})"
        )
    return (
        f"{profile.subject} on {profile.device}: {profile.plain_ms:.3g} ms a run{cost}; {len(profile.nodes)} kernels"
        f" make {profile.covered:.1%} of {profile.run_ms:.3g} ms in {profile.runs} runs"
        + (f", the profiler between them {profile.recording:.1%}" if profile.recording >= _TELLING else "")
    )


def table_operators(profile: DeviceProfile, most: int) -> Table:
    """Returns the operators as a table, the most expensive first."""
    table = make_table(
        "operator", "provider", "nodes", "calls", "total", "average", "maximum", "share", "GMAC/s", "GB/s"
    )
    for one in profile.operators[:most]:
        table.add_row(
            one.op,
            short_provider(one.provider),
            str(one.nodes),
            f"{one.calls:g}",
            f"{one.self_ms:.3g} ms",
            f"{one.average_ms:.3g} ms",
            f"{one.max_ms:.3g} ms",
            f"{one.share:.1%}",
            _rate(one.macs, one.self_ms),
            _rate(one.bytes, one.self_ms),
        )
    return table


def table_memory(profile: DeviceProfile) -> Table:
    """Returns what the process holds behind each phase, with the arena and without it."""
    table = make_table("memory behind", "held", "peak", "held without arena", "peak without arena")
    for one in profile.memory:
        bare = (one.bare_bytes, one.bare_peak_bytes)
        table.add_row(
            one.phase,
            format_bytes(one.resident_bytes),
            format_bytes(one.peak_bytes),
            *("-" if size is None else format_bytes(size) for size in bare),
        )
    return table


def table_npu(profile: DeviceProfile, most: int) -> Table:
    """Returns the most expensive operations of the graph that an NPU was given."""
    table = make_table("inside the NPU's graph", "node", "cycles", "share", "runs apart by")
    for one in profile.npu[:most]:
        table.add_row(
            shorten(one.name), shorten(one.source) or "-", f"{one.cycles:.0f}", f"{one.share:.1%}", f"{one.spread:.0%}"
        )
    return table


def table_nodes(profile: DeviceProfile, most: int) -> Table:
    """Returns the most expensive kernels as a table."""
    table = make_table("node", "operator", "self", "share", "MACs", "bytes", "GMAC/s", "GB/s", "of the roof", "shapes")
    for node in rank_nodes(profile)[:most]:
        table.add_row(
            shorten(node.source or node.name),
            node.op,
            f"{node.self_ms:.3g} ms",
            f"{node.share:.1%}",
            format_count(node.macs) if node.macs else "-",
            format_bytes(node.bytes),
            f"{node.gmacs_per_s:.3g}" if node.macs else "-",
            f"{node.gbytes_per_s:.3g}",
            "-" if node.roof_share is None else f"{min(node.roof_share, 1):.0%} {node.bound}",
            f"{describe_shapes(node.inputs)} -> {describe_shapes(node.outputs)}",
        )
    return table


def rank_nodes(profile: DeviceProfile) -> list[NodeTime]:
    """Returns the kernels, the most expensive first."""
    return sorted(profile.nodes, key=lambda node: -node.self_ms)


def list_profile_remarks(profile: DeviceProfile) -> Iterator[str]:
    """Yields what no one asked for, what the machine reaches, what would help, and what the figures are worth."""
    yield from describe_unasked(profile)
    if profile.roof is not None:
        roof = profile.roof
        yield (
            f"{profile.device} reaches {roof.float_gmacs:.3g} GMAC/s in float32, {roof.integer_gmacs:.3g} in 8 bits,"
            f" {roof.gbytes:.3g} GB/s from memory and {roof.cache_gbytes:.3g} GB/s from a cache"
            " (a probe, measured once)"
        )
    yield from (f"would help: {describe_cause(cause)}" for cause in profile.advice)
    yield from profile.warnings


def describe_unasked(profile: DeviceProfile) -> Iterator[str]:
    """Yields what kernels cost that no formula of the model asks for, a line a kind."""
    copies = "copies between providers"
    if profile.provider != CPU_PROVIDER and all(one.kind != copies for one in profile.unasked):
        yield f"{copies}: none (no Memcpy kernel ran)"
    for one in profile.unasked:
        inserted = f", {one.inserted} of them put in by ONNX Runtime" if one.inserted else ""
        yield f"{one.kind}: {one.self_ms:.3g} ms ({one.share:.1%}) in {one.nodes} kernels{inserted}"


def describe_comparison(found: ProfileComparison) -> str:
    """Returns which of two is slower, and how sure that is, in one line."""
    times = f"A ({found.a}) {found.a_ms:.3g} ms, B ({found.b}) {found.b_ms:.3g} ms"
    if found.ratio is not None:
        low, high = found.ratio.interval
        times += f"; B takes {found.ratio.value:.3f} times as long, 95 % between {low:.3f} and {high:.3f}"
    if not found.slower:
        return f"no difference can be told: {times}" + ("; what costs the integers:" if found.causes else "")
    slow = found.a if found.slower == "a" else found.b
    return f"{slow} is slower: {times}{'; because' if found.causes else ''}"


def describe_cause(cause: Cause) -> str:
    """Returns a reason with its part and the way out."""
    return f"{cause.message} [{cause.milliseconds:+.3g} ms]" + (f"; {cause.advice}" if cause.advice else "")


def table_pairs(found: ProfileComparison, most: int) -> Table:
    """Returns the layers whose times differ most as a table."""
    table = make_table("value", "A", "B", "B - A", "kernels of A", "kernels of B")
    for pair in sorted(found.pairs, key=lambda pair: -abs(pair.b_ms - pair.a_ms))[:most]:
        change = pair.b_ms - pair.a_ms
        ops = (", ".join(side) or "-" for side in (pair.a_ops, pair.b_ops))
        table.add_row(shorten(pair.tensor), f"{pair.a_ms:.3g} ms", f"{pair.b_ms:.3g} ms", f"{change:+.3g} ms", *ops)
    return table


def list_report_remarks(report: ProfileReport) -> Iterator[str]:
    """Yields what was assumed, and each device that is not there."""
    yield from report.notes
    yield from map(str, report.skipped)


def describe_shapes(shapes: Sequence[str]) -> str:
    """Returns the shapes of a kernel's data; scales and zero points, which are single numbers, are left out."""
    return " ".join(shape for shape in shapes if not shape.endswith("[]")) or "-"


def short_provider(provider: str) -> str:
    """Returns a provider's name without what all of them have."""
    return provider.removesuffix("ExecutionProvider")


def shorten(name: str) -> str:
    """Returns the end of a long name: exporters put the path before what tells nodes apart."""
    return name if len(name) <= _MOST_TEXT else f"...{name[-_MOST_TEXT:]}"


def _rate(count: int, milliseconds: float) -> str:
    return f"{count / milliseconds / 1e6:.3g}" if count and milliseconds > 0 else "-"
