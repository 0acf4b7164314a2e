"""Attention in heads as products and a Softmax: what fused operators of ONNX Runtime stand for."""

from collections.abc import Sequence

import msgspec
import numpy as np

from edgekit.graph.graph import Graph, Node
from edgekit.graph.rewrite import FLOATS, Writer

OPSET_SINCE = 13
"""The opset from which on the sizes of Split and the axes of Unsqueeze are inputs."""
MASKED = -1e4
"""What is added to scores that do not count: a Softmax makes 0 of it, and float16 holds it."""


_MOST_ROWS = 1 << 20


class Heads(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of attention: `tokens` ask and `rows` are asked, each key head serves `heads` / `keys` queries."""

    batch: int
    tokens: int
    rows: int
    heads: int
    keys: int
    size: int
    value_size: int
    dtype: str

    @property
    def is_sound(self) -> bool:
        """True if these are sizes: a file may say anything."""
        sizes = (self.batch, self.tokens, self.rows, self.heads, self.keys, self.size, self.value_size)
        return min(sizes) > 0 and self.heads % self.keys == 0 and max(self.rows, self.tokens) <= _MOST_ROWS


class Parts(msgspec.Struct, kw_only=True):
    """Writes what stands for one node of attention; a constant that several parts read is written once."""

    writer: Writer
    heads: Heads
    made: dict[str, str] = {}

    @property
    def node(self) -> Node:
        """The node that is written."""
        return self.writer.node

    def rows(self, count: int, shape: Sequence[int]) -> str:
        """Returns the numbers 0 to `count` - 1 as a constant of this shape."""
        name = f"rows_{'x'.join(map(str, shape))}"
        if name not in self.made:
            self.made[name] = self.writer.constant(name, np.arange(count).reshape(shape), "int32")
        return self.made[name]

    def reshape(self, x: str, part: str, shape: Sequence[int]) -> str:
        """Adds a Reshape."""
        return self.writer.add("Reshape", [x, self.writer.constant(f"{part}_shape", list(shape), "int64")], part)

    def cut(self, x: str, part: str, sizes: Sequence[int], axis: int) -> tuple[str, ...]:
        """Adds a Split."""
        first = self.writer.add(
            "Split", [x, self.writer.constant(f"{part}_sizes", list(sizes), "int64")], part, axis=axis
        )
        names = [first, *(f"{first}_{place}" for place in range(1, len(sizes)))]
        del self.writer.nodes[-1].output[:]
        self.writer.nodes[-1].output.extend(names)
        return tuple(names)

    def to_heads(self, x: str, part: str, sizes: Sequence[int]) -> str:
        """Adds what makes [heads, rows, size] of [rows, heads * size] in each text; `sizes` are those three."""
        heads, rows, size = sizes
        apart = self.reshape(x, f"{part}_apart", [self.heads.batch, rows, heads, size])
        return self.writer.add("Transpose", [apart], f"{part}_heads", perm=[0, 2, 1, 3])

    def hide(self, part: str, counts: str, value: float = MASKED) -> str:
        """Adds what makes a bias of a value that is True where a row counts."""
        numbers = [
            self.writer.constant(f"{part}_{name}", number, self.heads.dtype)
            for name, number in (("kept", 0), ("away", max(value, MASKED)))
        ]
        return self.writer.add("Where", [counts, *numbers], part)

    def publish(self, name: str, position: int) -> str:
        """Gives a value the name of an output of the node, where it has that, and returns its name."""
        output = self.node.output[position] if position < len(self.node.output) else ""
        if not output:
            return name
        maker = next(node for node in self.writer.nodes if name in node.output)
        maker.output[list(maker.output).index(name)] = output
        return output

    def attend(self, parts: tuple[str, str, str], scale: float, biases: Sequence[str]) -> None:
        """Adds Softmax(scale * query * key + biases) * value, and what joins the heads as the last node.

        `parts` are query [batch, heads, tokens, size], key [batch, keys, rows, size] and value; each of `biases` is
        broadcast to [batch, heads, tokens, rows].
        """
        (query, key, value), of, add = parts, self.heads, self.writer.add
        # Where heads share keys their queries are rows of one product, so that no key is repeated.
        together = (of.batch, of.keys, of.heads // of.keys * of.tokens)
        asked = add("Mul", [query, self.writer.constant("scale", scale or of.size**-0.5, of.dtype)], "scaled")
        asked = self._regroup(asked, "query", (*together, of.size))
        scores = add("MatMul", [asked, add("Transpose", [key], "turned", perm=[0, 1, 3, 2])], "scores")
        scores = self._regroup(scores, "each", (of.batch, of.heads, of.tokens, of.rows))
        for place, bias in enumerate(biases):
            scores = add("Add", [scores, bias], f"masked{place}")
        chances = add("Softmax", [scores], "chances", axis=-1)
        mixed = add("MatMul", [self._regroup(chances, "all", (*together, of.rows)), value], "mixed")
        mixed = self._regroup(mixed, "apart", (of.batch, of.heads, of.tokens, of.value_size))
        beside = add("Transpose", [mixed], "beside", perm=[0, 2, 1, 3])
        joined = [of.batch, of.tokens, of.heads * of.value_size]
        add("Reshape", [beside, self.writer.constant("joined", joined, "int64")])

    def _regroup(self, x: str, part: str, shape: Sequence[int]) -> str:
        return x if self.heads.heads == self.heads.keys else self.reshape(x, f"{part}_rows", shape)


def static_float(graph: Graph, name: str, rank: int) -> tuple[int, ...] | None:
    """Returns the shape of a float value of so many axes, None where it is something else or not known."""
    value = graph.value(name)
    shape = value.static_shape
    return shape if shape is not None and len(shape) == rank and value.dtype in FLOATS else None


def input_of(node: Node, position: int) -> str:
    """Returns the name of an input, "" where there is none."""
    return node.input[position] if node.has_input(position) else ""


def real(node: Node, name: str, default: float = 0.0) -> float:
    """Returns an attribute that is a number; the default if it is absent or something else."""
    value = node.attributes.get(name)
    return float(value) if isinstance(value, int | float) else default
