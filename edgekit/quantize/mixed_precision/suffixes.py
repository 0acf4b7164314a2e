"""The last parts of a graph, run by themselves where what they read of the parts before is known."""

from collections.abc import Callable, Iterator

import msgspec
import onnx
from onnx import helper

from edgekit.graph.rewrite import copy_fields
from edgekit.model.model import find_reads, iterate_reads

# What is known is held for each sample: no more tensors are read across a cut, and no more bytes. By hand.
_MOST_TENSORS, _MOST_BYTES = 2, 8 << 20


class Suffix(msgspec.Struct, frozen=True, kw_only=True):
    """A graph without its first `start` nodes; `fed` are its additional inputs, which those compute."""

    start: int
    fed: tuple[str, ...]
    proto: onnx.ModelProto


def cut_suffixes(proto: onnx.ModelProto, count: int, measure: Callable[[str], int | None]) -> Iterator[Suffix]:
    """Yields up to `count` suffixes of a graph whose nodes are in order, the longest first, in about equal steps.

    `measure` returns the bytes of a float32 tensor, None of others and of sizes that are not known.
    """
    nodes = proto.graph.node
    crossing = list(_list_crossing(proto.graph))
    before = 0
    for index in range(1, count + 1):
        wanted = index * len(nodes) // (count + 1)
        start = next(
            (at for at in range(max(wanted, before + 1), len(nodes)) if _is_narrow(crossing[at], measure)), None
        )
        if start is None:
            return
        before = start
        yield Suffix(start=start, fed=crossing[start], proto=_cut(proto, start, crossing[start]))


def _list_crossing(graph: onnx.GraphProto) -> Iterator[tuple[str, ...]]:
    """Yields for each node what is computed before it and read by it, behind it, or as an output."""
    last = {name: index for index, node in enumerate(graph.node) for name in iterate_reads(node)}
    last |= {value.name: len(graph.node) for value in graph.output}
    open_: dict[str, int] = {}
    for index, node in enumerate(graph.node):
        open_ = {name: end for name, end in open_.items() if end >= index}
        yield tuple(open_)
        open_ |= {name: last[name] for name in node.output if name in last}


def _is_narrow(names: tuple[str, ...], measure: Callable[[str], int | None]) -> bool:
    sizes = [measure(name) for name in names] if len(names) <= _MOST_TENSORS else [None]
    return all(size is not None for size in sizes) and sum(size or 0 for size in sizes) <= _MOST_BYTES


def _cut(proto: onnx.ModelProto, start: int, fed: tuple[str, ...]) -> onnx.ModelProto:
    cut = onnx.ModelProto()
    copy_fields(proto, cut, {"graph"})
    copy_fields(proto.graph, cut.graph, {"node", "initializer", "value_info"})
    cut.graph.node.extend(proto.graph.node[start:])
    read = find_reads(cut.graph)
    cut.graph.initializer.extend(tensor for tensor in proto.graph.initializer if tensor.name in read)
    for name in fed:
        cut.graph.input.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, None))
    return cut
