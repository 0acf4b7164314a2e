"""Which tensor of one graph is which of another where their names say nothing: by the order of the operators."""

from collections.abc import Mapping, Sequence
from difflib import SequenceMatcher

from edgekit.graph.graph import Graph, Node
from edgekit.verify.matching.order import DEQUANTIZE, QUANTIZE, list_computing

# Exporters and quantizers add or remove these between operators that compute.
_PASSED_OVER = frozenset({QUANTIZE, DEQUANTIZE, "Cast", "Identity", "Dropout"})


def align_tensors(a: Graph, b: Graph) -> list[tuple[str, str]]:
    """Returns pairs of tensors that both graphs compute, inputs included, in the order of computation of `a`.

    The operators of both graphs, with the shapes of their weights, are aligned as two texts are by `difflib`. Operators
    that only one graph has, such as a BatchNormalization or Relu that the other folded, belong to the one before.
    """
    first, second = _Sequence(a), _Sequence(b)
    blocks = SequenceMatcher(None, first.keys, second.keys, autojunk=False).get_matching_blocks()
    pairs = [(block.a + step, block.b + step) for block in blocks for step in range(block.size)]
    alone_a = frozenset(range(len(first.nodes))) - {pair[0] for pair in pairs}
    alone_b = frozenset(range(len(second.nodes))) - {pair[1] for pair in pairs}
    aligned = list(zip(a.fed, b.fed, strict=False))
    for place_a, place_b in pairs:
        ends = zip(first.find_ends(place_a, alone_a), second.find_ends(place_b, alone_b), strict=False)
        aligned.extend(pair for pair in ends if all(pair))
    return aligned


class _Sequence:
    """The computing nodes of a graph in order, with what each is known by and who reads it."""

    def __init__(self, graph: Graph) -> None:
        computing = list_computing(graph)
        self.nodes = [node for node in computing if node.op_type not in _PASSED_OVER]
        self._passed = {name: node.input[0] for node in graph.nodes if node.op_type in _PASSED_OVER and node.input[0]
                        for name in node.output}  # fmt: skip
        shapes = {name: tuple(tensor.dims) for name, tensor in graph.constants.items()}
        self.keys = [self._describe(node, shapes) for node in self.nodes]
        self._given = {self._resolve(name) for name in graph.outputs} | graph.outputs
        self._readers: dict[str, list[int]] = {}
        for place, node in enumerate(self.nodes):
            for name in dict.fromkeys(self._resolve(name) for name in node.input if name):
                self._readers.setdefault(name, []).append(place)

    def find_ends(self, place: int, alone: frozenset[int]) -> Sequence[str]:
        """Returns the outputs of a node, or that of the last of the nodes behind it that only this graph has."""
        node = self.nodes[place]
        while len(node.output) == 1 and node.output[0] not in self._given:
            readers = self._readers.get(node.output[0], [])
            if len(readers) != 1 or readers[0] not in alone:
                break
            node = self.nodes[readers[0]]
        return tuple(node.output)

    def _resolve(self, name: str) -> str:
        while name in self._passed:
            name = self._passed[name]
        return name

    def _describe(self, node: Node, shapes: Mapping[str, tuple[int, ...]]) -> tuple[str, ...]:
        sizes = [shapes.get(self._resolve(name), ()) for name in node.input[1:]]
        return (node.op_type, *(str(sorted(size)) for size in sizes if len(size) > 1))
