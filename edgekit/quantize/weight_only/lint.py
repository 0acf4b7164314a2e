"""Blocks of weights that look wrong: those of zeros alone, and those whose values are cut off."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.tensors import Array

# Of weights that are spread as usual a few per cent lie at an end: a choice.
_CLIPPED_SHARE = 0.25
# Which input holds the weights.
_WEIGHTS = {"MatMulNBits": 1, "GatherBlockQuantized": 0}


def lint_blocks(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields a line for each node with symmetric 4-bit weights that has blocks of zeros or clipped ones.

    A block is clipped where more than a quarter of its values lie at an end of the range. A table is told of by the
    MatMulNBits that reads it too, if there is one.
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        place = _WEIGHTS.get(node.op_type)
        bits = next((helper.get_attribute_value(item) for item in node.attribute if item.name == "bits"), 4)
        if place is None or bits != 4 or any(node.input[3:4]):
            continue
        names = (node.input[place], node.input[2])
        if any(name not in stored for name in names):
            continue
        packed, scales = (numpy_helper.to_array(stored[name]) for name in names)
        flat = np.stack([packed & 15, packed >> 4], axis=-1).reshape(len(packed), scales.size // len(packed), -1)
        yield from _lint(node.name, flat, scales.reshape(flat.shape[:2]), "column" if place else "row")


def _lint(name: str, flat: Array, scales: Array, line: str) -> Iterator[str]:
    empty = (flat == 8).all(axis=2) | (scales == 0)
    clipped = ~empty & (((flat == 0) | (flat == 15)).mean(axis=2) > _CLIPPED_SHARE)
    for what, found in (("hold zeros alone", empty), ("are clipped", clipped)):
        if found.any():
            column, block = np.argwhere(found)[0]
            first = f"the first is block {block} of {line} {column}"
            yield f"node '{name}': {np.count_nonzero(found)} of {found.size} blocks {what}; {first}"
