"""Why one session is slower than another of the same model: compares kernels that compute the same value."""

from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec

from edgekit.graph.graph import Graph
from edgekit.profile.report import DISTURBED, Cause, DeviceProfile, Kind, LayerPair, NodeTime
from edgekit.verify.layers.matching import match_tensors, sort_nodes

Kernels = Sequence[NodeTime]


def pair_layers(a: Kernels, graph_a: Graph, b: Kernels, graph_b: Graph) -> tuple[LayerPair, ...]:
    """Returns the values that both sessions compute, in the order of computation, with the kernels that lead to each.

    The graphs are those that the sessions were made from. A kernel counts for the first matched value after it. Fusion
    ends at different values on the two sides, so values are grouped until both sides have a kernel for them.
    """
    matched = match_tensors(graph_a, graph_b)
    ends_a = {name: item.tensor for item in matched for name in (item.tensor, item.in_a)}
    ends_b = {name: item.tensor for item in matched for name in (item.raw_b, item.in_b, *item.copies_in_b)}
    keys = [item.tensor for item in matched]
    return tuple(_join(keys, _assign_kernels(a, graph_a, ends_a), _assign_kernels(b, graph_b, ends_b)))


def _join(
    keys: Sequence[str], of_a: Mapping[str, list[NodeTime]], of_b: Mapping[str, list[NodeTime]]
) -> Iterator[LayerPair]:
    groups: list[tuple[str, list[NodeTime], list[NodeTime]]] = [("", [], [])]
    # Kernels after the last matched value come last.
    for key in (*keys, ""):
        _, first, second = groups[-1]
        if _computes(first) and _computes(second) and key:
            groups.append((key, [], []))
        _, first, second = groups[-1]
        groups[-1] = (key or groups[-1][0], first, second)
        first += of_a.get(key, [])
        second += of_b.get(key, [])
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
        here = next((ends[name] for name in node.output if name in ends), None)
        readers = (reader.name for name in node.output for reader in graph.consumers.get(name, ()))
        owners[node.name] = here or next((owners[name] for name in readers if owners.get(name)), "")
    spent: dict[str, list[NodeTime]] = {}
    waiting: list[NodeTime] = []
    key = ""
    for kernel in kernels:
        waiting.append(kernel)
        # Nodes that ONNX Runtime inserted (a Reorder, a Transpose, a Q node) mostly serve the kernel that follows.
        if kernel.source in owners:
            key = owners[kernel.source]
            spent.setdefault(key, []).extend(waiting)
            waiting = []
    spent.setdefault(key, []).extend(waiting)
    return spent


# Reasons below this share of a run are not reported; and integer multiplication that is not this many times faster than
# float does not pay for the rounding. Both chosen by hand.
_WORTH = 0.02
_FASTER = 1.5
_NAMED = 5
_DEQUANTIZE, _QUANTIZE = "DequantizeLinear", "QuantizeLinear"

_WAYS: dict[Kind, str] = {
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
    least = _WORTH * slow.run_ms
    finders = (_extra_work, _float_islands, _slow_integers, _one_thread, _between, _layers)
    found = [cause for finder in finders for cause in finder(sides) if cause.milliseconds >= least]
    return tuple(sorted(found, key=lambda cause: -cause.milliseconds))


def _extra_work(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields conversions and copies that cost the slower session more; they are no part of the model's formulas."""
    other = {one.kind: one.self_ms for one in sides.fast.unasked}
    for one in sides.slow.unasked:
        before = other.get(one.kind, 0.0)
        inserted = f", {one.inserted} of them put in by ONNX Runtime" if one.inserted else ""
        yield Cause(
            id=one.kind.replace(" ", "-"),
            message=f"{one.kind} take {one.self_ms:.3g} ms in {one.nodes} kernels{inserted}, against {before:.3g} ms",
            milliseconds=one.self_ms - before,
            advice=_WAYS.get(one.kind, ""),
            nodes=_name(node for node in sides.slow.nodes if node.kind == one.kind),
        )


def _float_islands(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the kernels of a quantized graph that compute in float between DQ and Q nodes."""
    graph = sides.graph
    if graph is None:
        return
    by_name = {node.name: node for node in graph.nodes}
    islands: list[NodeTime] = []
    for node in sides.slow.nodes:
        own = by_name.get(node.source)
        is_float = bool(node.inputs) and node.inputs[0].startswith("float[") and not node.integers
        if own is None or node.kind or not is_float:
            continue
        reads = any((maker := graph.producers.get(name)) and maker.op_type == _DEQUANTIZE for name in own.input[:1])
        gives = [reader.op_type for name in own.output for reader in graph.consumers.get(name, ())]
        if reads and gives and all(op == _QUANTIZE for op in gives):
            islands.append(node)
    whole = sum(node.self_ms for node in islands)
    if not islands:
        return
    ops = ", ".join(f"{sum(node.op == op for node in islands)} {op}" for op in dict.fromkeys(n.op for n in islands))
    yield Cause(
        id="float-islands",
        message=f"{ops} compute in float between DequantizeLinear and QuantizeLinear: {whole:.3g} ms",
        milliseconds=whole,
        advice="quantize the float model for this provider: edgekit quantize FLOAT --target cpu places Q and DQ for it",
        nodes=_name(islands),
    )


def _slow_integers(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields that the machine lacks fast integer instructions, and the layers that are slower in integers."""
    integers = [node for node in sides.slow.nodes if node.integers and node.macs]
    if not integers or any(node.integers and node.macs for node in sides.fast.nodes):
        return
    roof = sides.slow.roof
    if roof is not None and roof.integer_gmacs < _FASTER * roof.float_gmacs:
        yield Cause(
            id="no-fast-integers",
            message=(
                f"this machine multiplies integers {roof.integer_gmacs / roof.float_gmacs:.2g} times as fast as floats:"
                " it has no instruction for products of 8 bits (VNNI, dot product)"
            ),
            milliseconds=sum(node.self_ms for node in integers),
            advice="INT8 saves memory here, not time: keep float where time counts, or measure on the device itself",
            nodes=_name(integers),
        )
    ops = {node.op for node in integers}
    worse = [
        (pair, slow, fast)
        for pair, slow, fast in sides.layers
        if fast > 0 and slow > fast and ops & {*pair.a_ops, *pair.b_ops}
    ]
    if worse:
        pair, slow, fast = max(worse, key=lambda one: one[1] - one[2])
        yield Cause(
            id="slow-integer-layers",
            message=(
                f"{len(worse)} layers take longer in integers and what rounds around them, most of all '{pair.tensor}':"
                f" {slow:.3g} ms, against {fast:.3g} ms"
            ),
            milliseconds=sum(slow - fast for _, slow, fast in worse),
            advice="small layers gain little: leave them in float with a plan (edgekit quantize --plan-only, --plan)",
            nodes=tuple(pair.tensor for pair, *_ in sorted(worse, key=lambda one: one[2] - one[1])[:_NAMED]),
        )


def _one_thread(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the kernels that use one thread although the session has several."""
    if sides.slow.threads == 1 or not any(node.spread for node in sides.slow.nodes):
        return
    alone = [node for node in sides.slow.nodes if not node.spread]
    before = sum(node.self_ms for node in sides.fast.nodes if not node.spread)
    whole = sum(node.self_ms for node in alone)
    yield Cause(
        id="one-thread",
        message=f"{len(alone)} kernels keep to one thread: {whole:.3g} ms, against {before:.3g} ms",
        milliseconds=whole - before,
        nodes=_name(alone),
    )


def _between(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the time between kernels, which grows with their number, unless the profiler itself causes it."""
    slow, fast = sides.slow, sides.fast
    if any(one.overhead is None or one.overhead.value > DISTURBED for one in (slow, fast)):
        return
    gap = (slow.run_ms - slow.nodes_ms) - (fast.run_ms - fast.nodes_ms)
    yield Cause(
        id="between-kernels",
        message=f"between {len(slow.nodes)} kernels, against {len(fast.nodes)}, pass {gap:.3g} ms more",
        milliseconds=gap,
        advice="fewer, larger nodes: edgekit prepare MODEL --fix --out FILE",
    )


def _layers(sides: SlowAndFast) -> Iterator[Cause]:
    """Yields the three layers that lose most time to the other side; other causes may explain them too."""
    worse = sorted(sides.layers, key=lambda one: one[2] - one[1])
    for pair, slow, fast in worse[:3]:
        ops = " and ".join(" ".join(side) or "nothing" for side in (pair.a_ops, pair.b_ops))
        yield Cause(
            id="layer",
            message=f"'{pair.tensor}' takes {slow:.3g} ms, against {fast:.3g} ms ({ops})",
            milliseconds=slow - fast,
            nodes=(pair.tensor,),
        )


def _name(nodes: Iterable[NodeTime]) -> tuple[str, ...]:
    return tuple(node.name for node in sorted(nodes, key=lambda node: -node.self_ms)[:_NAMED])
