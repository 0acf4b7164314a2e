"""Blocks of weights that look wrong: those of zeros alone, and those whose values are cut off."""

from collections.abc import Iterator

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.tensors import Array

# Of weights that are spread as usual a few per cent lie at an end: a choice.
_CLIPPED_SHARE = 0.25


def lint_blocks(graph: onnx.GraphProto) -> Iterator[str]:
    """Yields a line for each MatMulNBits with symmetric 4-bit weights that has blocks of zeros or clipped ones.

    A block is clipped where more than a quarter of its values lie at an end of the range.
    """
    stored = {tensor.name: tensor for tensor in graph.initializer}
    for node in graph.node:
        known = all(name in stored for name in node.input[1:3])
        bits = next((helper.get_attribute_value(item) for item in node.attribute if item.name == "bits"), 4)
        if node.op_type != "MatMulNBits" or not known or bits != 4 or any(node.input[3:4]):
            continue
        packed, scales = (numpy_helper.to_array(stored[name]) for name in node.input[1:3])
        yield from _lint(node.name, np.stack([packed & 15, packed >> 4], axis=-1), scales)


def _lint(name: str, values: Array, scales: Array) -> Iterator[str]:
    columns, blocks = values.shape[:2]
    flat = values.reshape(columns, blocks, -1)
    empty = (flat == 8).all(axis=2) | (scales.reshape(columns, blocks) == 0)
    clipped = ~empty & (((flat == 0) | (flat == 15)).mean(axis=2) > _CLIPPED_SHARE)
    for what, found in (("hold zeros alone", empty), ("are clipped", clipped)):
        if found.any():
            column, block = np.argwhere(found)[0]
            first = f"the first is block {block} of column {column}"
            yield f"node '{name}': {np.count_nonzero(found)} of {found.size} blocks {what}; {first}"
