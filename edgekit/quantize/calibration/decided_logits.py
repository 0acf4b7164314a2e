"""Logits of maps and sequences, and scores of maps: what wins or ranks first there is cut by no range method."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

from edgekit.graph.graph import Graph, Node
from edgekit.model.tensors import Tensors
from edgekit.quantize.accuracy.output_kinds import read_output_kinds
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.ranges import TensorRange, snap_range

# What may lie between logits and the output without another value being first.
_ORDERLY = frozenset({"Flatten", "Identity", "Reshape", "Resize", "Squeeze", "Transpose", "Unsqueeze", "Upsample"})
# What decides between classes, and along which axis by default (ONNX operators, opset 13).
_DECIDING = {"ArgMax": 0, "LogSoftmax": -1, "Softmax": -1}
# So many samples tell what an output is: a choice, for the time.
_LOOKED_AT = 2


def keep_winners(graph: Graph, calibration: Calibration) -> Calibration:
    """Returns a calibration in which each range of logits that decide places or steps reaches as high as minmax.

    A percentile cuts the highest of all values, which of a map are those of the surest places, often of one rare class.
    Cut values are alike, and of those that are alike the first wins. Below, where nothing wins, a method may cut.
    The same holds for the scores of many places that a Sigmoid makes: detections are ranked by them, and of a map of
    middles whose highest are alike neighbours are peaks too.
    """
    logits = frozenset((*_find_logits(graph, calibration), *_find_scores(graph, calibration)))
    if not logits:
        return calibration
    exact = calibration.ranges["minmax"]

    def reach(name: str, its: TensorRange) -> TensorRange:
        return snap_range(TensorRange(low=its.low, high=max(its.high, exact[name].high))) if name in logits else its

    return calibration.map_ranges(reach)


def find_enlarged(graph: Graph, calibration: Calibration) -> tuple[str, ...]:
    """Returns what decides between many classes and is interpolated by a Resize, and what lies between the two.

    Rounded to 8 bits once more, what is interpolated between two classes is often as high for both, and of those that
    are alike the first wins. tools/bench/collapse's dilated_prelu lost 0.41 points on qnn, and 0.21 without that.
    """
    found = dict[str, None]()
    for name in find_decisions(graph, calibration):
        path = list(_trace_orderly(graph, name))
        makers = [graph.producers.get(each) for each in path]
        enlarged = [index for index, maker in enumerate(makers) if maker is not None and _interpolates(maker)]
        found |= dict.fromkeys(path[: enlarged[-1] + 1] if enlarged else [])
    return tuple(found)


def _interpolates(node: Node) -> bool:
    return node.op_type in {"Resize", "Upsample"} and node.attributes.get("mode", "nearest") != "nearest"


def find_decisions(graph: Graph, calibration: Calibration) -> dict[str, int]:
    """Returns the tensors that are compared and hold logits of many decisions, and the axis of the classes of each."""
    shown = {each.tensor: each.reader for each in find_compared_tensors(graph, calibration.outputs) if not each.part}
    readers = {node.name: node for node in graph.nodes}
    rows = [{name: row[name] for name in shown.keys() & graph.outputs} for row in _read_few(calibration)]
    readings = read_output_kinds(graph, rows, calibration.outputs) if rows else {}
    found: dict[str, int] = {}
    for name, reader in shown.items():
        if reader:
            node = readers[reader]
            if node.op_type in _DECIDING and len(graph.dims(name)) > 2:
                found[name] = node.integer("axis", _DECIDING[node.op_type])
            continue
        reading = readings.get(name)
        if reading is not None and reading.kind in {"map", "sequence"} and not reading.squash:
            found[name] = reading.axis
    return found


def _find_logits(graph: Graph, calibration: Calibration) -> Iterator[str]:
    """Yields the tensors with ranges that hold logits of many decisions, of which the first counts."""
    for name in find_decisions(graph, calibration):
        yield from _trace_sums(graph, name)


def _find_scores(graph: Graph, calibration: Calibration) -> Iterator[str]:
    """Yields the outputs of many places that a Sigmoid makes, unless stated to be values, and what it makes them of."""
    for name in graph.outputs:
        stated = calibration.outputs.get(name)
        if stated is not None and stated.kind == "values":
            continue
        *_, source = _trace_orderly(graph, name)
        maker = graph.producers.get(source)
        if maker is not None and maker.op_type == "Sigmoid" and len(graph.dims(name)) > 2:
            yield from _trace_orderly(graph, name)
            yield from _trace_sums(graph, maker.input[0])


def _read_few(calibration: Calibration) -> list[Tensors]:
    if not calibration.statistics:
        return []
    return [expected for _, expected in islice(read_held_out(Path(calibration.statistics)), _LOOKED_AT)]


def _trace_orderly(graph: Graph, name: str) -> Iterator[str]:
    yield name
    while name in graph.producers and graph.producers[name].op_type in _ORDERLY:
        name = graph.producers[name].input[0]
        yield name


def _trace_sums(graph: Graph, name: str) -> Iterator[str]:
    """Yields what `_trace_orderly` does, and goes on before the addition of a bias: what is cut there is alike too."""
    waiting = [name]
    while waiting:
        path = list(_trace_orderly(graph, waiting.pop()))
        yield from path
        maker = graph.producers.get(path[-1])
        if maker is not None and maker.op_type == "Add":
            terms = [each for each in maker.input if each not in graph.constants]
            waiting = terms if len(terms) == 1 else []
