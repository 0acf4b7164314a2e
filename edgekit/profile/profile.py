"""Profiles a subject on devices, and explains why one of two sessions of the same model is slower."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._files import work_folder
from edgekit.bench.bench import Effort, compare_on
from edgekit.bench.latency import Ratio
from edgekit.bench.subject import Opening, open_pair, open_subject
from edgekit.devices.device import find_present
from edgekit.devices.find import DeviceChoice, choose_devices
from edgekit.devices.parallel import run_each
from edgekit.graph.graph import Graph
from edgekit.profile import report as reports
from edgekit.profile.measure import Profiled, ProfileOptions, profile_subject
from edgekit.profile.report import Cause, DeviceProfile, LayerPair, NodeTime
from edgekit.progress import Progress
from edgekit.verify.layers.matching import DEQUANTIZE, QUANTIZE, match_tensors, sort_nodes


class ProfileRun(msgspec.Struct, frozen=True, kw_only=True):
    """A report, and the profiles that it was made from."""

    report: reports.ProfileReport
    profiled: tuple[Profiled, ...]


def profile_on(
    path: Path, choice: DeviceChoice, how: ProfileOptions, opening: Opening, *, against: Path | None, progress: Progress
) -> ProfileRun:
    """Profiles a bundle or a model on devices.

    With `against` the other one is profiled on the first device too, and the two are compared. Profiles of two devices
    are compared as well. A failure of a device is reported in its profile.

    Raises:
        EdgekitError: the bundle, the model, the data, the target or the name of a device is wrong.
    """
    with work_folder() as work:
        if against is None:
            subject, other = open_subject(path, work / "a", opening), None
        else:
            subject, other = open_pair(path, against, work, opening)
        devices = choose_devices(choice, subject.target_for, default=(subject.default_device,))
        present, skipped = find_present(devices)
        found = run_each(present, lambda device: profile_subject(subject, device, how, progress), timed=True)
        ratio = None
        if other is not None and present:
            found = (found[0], profile_subject(other, present[0], how, progress))
            effort = Effort(runs=how.runs, seconds=min(how.limit_s, Effort().seconds), threads=how.threads)
            ratio = compare_on(subject, other, present[0], effort, progress).ratio
    profiles, compared = tuple(one.profile for one in found), _compare(found, ratio) if len(found) == 2 else None
    report = reports.ProfileReport(profiles=profiles, comparison=compared, skipped=skipped, notes=subject.notes)
    return ProfileRun(report=report, profiled=found)


def _compare(found: Sequence[Profiled], ratio: Ratio | None) -> reports.ProfileComparison | None:
    """Returns the comparison of two profiles, None if one of them failed."""
    a, b = found
    first, second = a.profile, b.profile
    if first.failure is not None or second.failure is not None:
        return None
    pairs: tuple[LayerPair, ...] = ()
    if a.graph is not None and b.graph is not None:
        pairs = pair_layers(first.nodes, a.graph, second.nodes, b.graph)
    # On one device the interleaved rounds decide; for two devices there are only the medians of their profiles.
    is_a_slower = ratio.value < 1 if ratio is not None else first.plain_ms > second.plain_ms
    is_known = ratio is None or ratio.verdict != "no difference can be told"
    has_integers = [any(node.integers and node.macs for node in one.profile.nodes) for one in (a, b)]
    if not is_known and has_integers[0] != has_integers[1]:
        # A quantized model that is not faster needs an explanation too.
        is_a_slower = has_integers[0]
    slow, fast = (a, b) if is_a_slower else (b, a)
    causes = find_causes(slow.profile, fast.profile, slow.graph, pairs, slow_is_a=is_a_slower)
    one_device = first.device == second.device
    return reports.ProfileComparison(
        a=first.subject if one_device else f"{first.subject} on {first.device}",
        b=second.subject if one_device else f"{second.subject} on {second.device}",
        a_ms=first.plain_ms,
        b_ms=second.plain_ms,
        ratio=ratio,
        slower=("a" if is_a_slower else "b") if is_known else "",
        pairs=pairs,
        causes=causes if is_known or has_integers[0] != has_integers[1] else (),
    )


# Why one session is slower than another of the same model: kernels that compute the same value are compared.

Kernels = Sequence[NodeTime]


def pair_layers(a: Kernels, graph_a: Graph, b: Kernels, graph_b: Graph) -> tuple[LayerPair, ...]:
    """Returns the values that both sessions compute, in graph order, with the time of the kernels that lead to each.

    The graphs are those that the sessions were made from. A kernel counts for the first matched value after it. Fused
    kernels end at different values on the two sides, so values are merged until both sides have a kernel for them.
    """
    matched = match_tensors(graph_a, graph_b)
    ends_a = {name: item.tensor for item in matched for name in (item.tensor, item.in_a)}
    ends_b = {name: item.tensor for item in matched for name in (item.raw_b, item.in_b, *item.copies_in_b)}
    keys = [item.tensor for item in matched]
    return tuple(_join(keys, _assign_kernels(a, graph_a, ends_a), _assign_kernels(b, graph_b, ends_b)))


def _join(keys: Sequence[str], a: Mapping[str, list[NodeTime]], b: Mapping[str, list[NodeTime]]) -> Iterator[LayerPair]:
    groups: list[tuple[str, list[NodeTime], list[NodeTime]]] = [("", [], [])]
    # Kernels after the last matched value come last.
    for key in (*keys, ""):
        _, first, second = groups[-1]
        if _computes(first) and _computes(second) and key:
            groups.append((key, [], []))
        _, first, second = groups[-1]
        groups[-1] = (key or groups[-1][0], first, second)
        first += a.get(key, [])
        second += b.get(key, [])
    if len(groups) > 1 and not all(map(_computes, groups[-1][1:])):
        # One side computes nothing for the last values: they belong to the group before.
        key, first, second = groups.pop()
        groups[-1] = (key, groups[-1][1] + first, groups[-1][2] + second)
    for tensor, first, second in groups:
        yield LayerPair(
            tensor=tensor,
            a_ms=sum(node.self_ms for node in first),
            b_ms=sum(node.self_ms for node in second),
            a_ops=tuple(dict.fromkeys(node.op for node in first)),
            b_ops=tuple(dict.fromkeys(node.op for node in second)),
        )


def _computes(nodes: Iterable[NodeTime]) -> bool:
    # A kernel that only moves or rounds data belongs to the next kernel that computes.
    return any(not node.kind for node in nodes)


def _assign_kernels(kernels: Kernels, graph: Graph, ends: Mapping[str, str]) -> dict[str, list[NodeTime]]:
    """Returns the kernels that lead to each matched value; those after the last one have the key ""."""
    # The matched value that each node computes, or the first one after it.
    owners: dict[str, str] = {}
    for node in reversed(sort_nodes(graph)):
        matched = next((ends[name] for name in node.output if name in ends), None)
        readers = (reader.name for name in node.output for reader in graph.consumers.get(name, ()))
        owners[node.name] = matched or next((owners[name] for name in readers if owners.get(name)), "")
    by_value: dict[str, list[NodeTime]] = {}
    waiting: list[NodeTime] = []
    key = ""
    for kernel in kernels:
        waiting.append(kernel)
        # Nodes that ONNX Runtime inserted (a Reorder, a Transpose, a Q node) mostly serve the kernel that follows.
        if kernel.source in owners:
            key = owners[kernel.source]
            by_value.setdefault(key, []).extend(waiting)
            waiting = []
    by_value.setdefault(key, []).extend(waiting)
    return by_value


# Causes below this share of a run are not reported. Integer multiplication must be this many times faster than float,
# or Q and DQ nodes cost more than it saves. Both chosen by hand.
_MIN_SHARE = 0.02
_MIN_INTEGER_SPEEDUP = 1.5
_MAX_NAMED = 5

_REMEDIES: dict[reports.Kind, str] = {
    "quantize and dequantize": "quantize whole stretches: edgekit check MODEL --target NAME says what stays float",
    "casts": "keep one type from end to end: edgekit prepare MODEL --fix --out FILE drops casts that change nothing",
    "reorders": "ONNX Runtime reorders to blocks of channels around each Conv: fewer other operators between them",
    "transposes": "export in one layout, or change that of the input: edgekit prepare MODEL --layout INPUT=nhwc",
    "copies between providers": "fewer pieces: edgekit check MODEL --target NAME names the nodes that split the graph",
}


class SlowAndFast(msgspec.Struct, frozen=True, kw_only=True):
    """The slower and the faster session, with their profiles; layers of both, with times as (slow, fast)."""

    slow: DeviceProfile
    fast: DeviceProfile
    graph: Graph | None
    layers: tuple[tuple[LayerPair, float, float], ...] = ()


def find_causes(
    slow: DeviceProfile, fast: DeviceProfile, graph: Graph | None, pairs: Iterable[LayerPair], *, slow_is_a: bool
) -> tuple[Cause, ...]:
    """Returns why the slower session is slower, the largest cause first; causes may overlap.

    `graph` is that of the slower session. Causes of less than 2 % of a run are left out.
    """
    layers = tuple((pair, *((pair.a_ms, pair.b_ms) if slow_is_a else (pair.b_ms, pair.a_ms))) for pair in pairs)
    sides = SlowAndFast(slow=slow, fast=fast, graph=graph, layers=layers)
    min_ms = _MIN_SHARE * slow.run_ms
    finders = (_extra_work, _float_islands, _slow_integers, _one_thread, _between, _layers)
    found = [cause for finder in finders for cause in finder(sides) if cause.milliseconds >= min_ms]
    return tuple(sorted(found, key=lambda cause: -cause.milliseconds))


def _extra_work(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the conversions and copies of the slower session, with the time that they take more than in the faster."""
    fast_by_kind = {one.kind: one.self_ms for one in sides.fast.unasked}
    for one in sides.slow.unasked:
        fast_ms = fast_by_kind.get(one.kind, 0.0)
        inserted = f", {one.inserted} of them put in by ONNX Runtime" if one.inserted else ""
        yield Cause(
            id=one.kind.replace(" ", "-"),
            message=f"{one.kind} take {one.self_ms:.3g} ms in {one.nodes} kernels{inserted}, against {fast_ms:.3g} ms",
            milliseconds=one.self_ms - fast_ms,
            advice=_REMEDIES.get(one.kind, ""),
            nodes=_name(node for node in sides.slow.nodes if node.kind == one.kind),
        )


def _float_islands(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the kernels of a quantized graph that compute in float between DQ and Q nodes."""
    if (graph := sides.graph) is None:
        return
    by_name = {node.name: node for node in graph.nodes}
    islands: list[NodeTime] = []
    for node in sides.slow.nodes:
        graph_node = by_name.get(node.source)
        is_float = bool(node.inputs) and node.inputs[0].startswith("float[") and not node.integers
        if graph_node is None or node.kind or not is_float:
            continue
        maker = graph.producers.get(graph_node.input[0]) if graph_node.input else None
        follows_dq = maker is not None and maker.op_type == DEQUANTIZE
        readers = [reader.op_type for name in graph_node.output for reader in graph.consumers.get(name, ())]
        if follows_dq and readers and all(op == QUANTIZE for op in readers):
            islands.append(node)
    total_ms = sum(node.self_ms for node in islands)
    if not islands:
        return
    ops = ", ".join(f"{sum(node.op == op for node in islands)} {op}" for op in dict.fromkeys(n.op for n in islands))
    yield Cause(
        id="float-islands",
        message=f"{ops} compute in float between DequantizeLinear and QuantizeLinear: {total_ms:.3g} ms",
        milliseconds=total_ms,
        advice="quantize the float model for this provider: edgekit quantize FLOAT --target cpu places Q and DQ for it",
        nodes=_name(islands),
    )


def _slow_integers(sides: SlowAndFast) -> Iterator[Cause]:
    """If only the slower session is quantized: yields a lack of fast integer instructions, and the slower layers."""
    integers = [node for node in sides.slow.nodes if node.integers and node.macs]
    if not integers or any(node.integers and node.macs for node in sides.fast.nodes):
        return
    if (roof := sides.slow.roof) is not None and roof.integer_gmacs < _MIN_INTEGER_SPEEDUP * roof.float_gmacs:
        words = f"this machine multiplies integers {roof.integer_gmacs / roof.float_gmacs:.2g} times as fast as floats"
        yield Cause(
            id="no-fast-integers",
            message=f"{words}: it has no instruction for products of 8 bits (VNNI, dot product)",
            milliseconds=sum(node.self_ms for node in integers),
            advice="INT8 saves memory here, not time: keep float where time counts, or measure on the device itself",
            nodes=_name(integers),
        )
    ops = {node.op for node in integers}
    concerned = (layer for layer in sides.layers if ops & {*layer[0].a_ops, *layer[0].b_ops})
    if slower := [(pair, slow, fast) for pair, slow, fast in concerned if slow > fast > 0]:
        pair, slow, fast = max(slower, key=lambda one: one[1] - one[2])
        words = f"{len(slower)} layers take longer in integers, with the Q and DQ nodes around them"
        yield Cause(
            id="slow-integer-layers",
            message=f"{words}, most of all '{pair.tensor}': {slow:.3g} ms, against {fast:.3g} ms",
            milliseconds=sum(slow - fast for _, slow, fast in slower),
            advice="small layers gain little: leave them in float with a plan (edgekit quantize --plan-only, --plan)",
            nodes=tuple(pair.tensor for pair, *_ in sorted(slower, key=lambda one: one[2] - one[1])[:_MAX_NAMED]),
        )


def _one_thread(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the kernels that use one thread although other kernels of the session use several."""
    if sides.slow.threads == 1 or not any(node.spread for node in sides.slow.nodes):
        return
    single = [node for node in sides.slow.nodes if not node.spread]
    fast_ms = sum(node.self_ms for node in sides.fast.nodes if not node.spread)
    slow_ms = sum(node.self_ms for node in single)
    words = f"{len(single)} kernels keep to one thread: {slow_ms:.3g} ms, against {fast_ms:.3g} ms"
    yield Cause(id="one-thread", message=words, milliseconds=slow_ms - fast_ms, nodes=_name(single))


def _between(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the time between kernels, which grows with their number, unless the profiler itself causes it."""
    slow, fast = sides.slow, sides.fast
    if any(one.overhead is None or one.overhead.value > reports.DISTURBED for one in (slow, fast)):
        return
    gap = (slow.run_ms - slow.nodes_ms) - (fast.run_ms - fast.nodes_ms)
    words = f"{gap:.3g} ms more pass between kernels: {len(slow.nodes)} of them, against {len(fast.nodes)}"
    advice = "fewer, larger nodes: edgekit prepare MODEL --fix --out FILE"
    yield Cause(id="between-kernels", message=words, milliseconds=gap, advice=advice)


def _layers(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the three layers that lose most time to the other side; other causes may explain them too."""
    for pair, slow, fast in sorted(sides.layers, key=lambda one: one[2] - one[1])[:3]:
        ops = " and ".join(" ".join(side) or "nothing" for side in (pair.a_ops, pair.b_ops))
        words = f"'{pair.tensor}' takes {slow:.3g} ms, against {fast:.3g} ms ({ops})"
        yield Cause(id="layer", message=words, milliseconds=slow - fast, nodes=(pair.tensor,))


def _name(nodes: Iterable[NodeTime]) -> tuple[str, ...]:
    return tuple(node.name for node in sorted(nodes, key=lambda node: -node.self_ms)[:_MAX_NAMED])
