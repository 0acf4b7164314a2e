"""Blocks of 4-bit weights that err least at the output of their layer, by what samples show of its input."""

from collections.abc import Callable, Generator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.quantize.calibration.calibrate import calibrate_model
from edgekit.quantize.calibration.moments import InputMoments, open_moments
from edgekit.quantize.graph.float_graph import read_float_graph, refuse_huge
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.ranges.methods import PLAIN_METHODS
from edgekit.quantize.rounding.comq import round_comq
from edgekit.quantize.rounding.gptq import add_spread, join_pieces, shrink_moment, split_pieces
from edgekit.quantize.weight_only.blocks import BlockForm, Blocks, quantize_blocks, snap_scales

# Shares of the scale that keeps a block's largest weight whole. Chosen by hand.
_SHARES = np.linspace(1.0, 0.6, 9)
_MIDDLE, _MOST = 8, 15


@contextmanager
def learn_blocks(
    model: Model, samples: Samples, work: Path, form: BlockForm
) -> Generator[Callable[[str, bool], Blocks | None]]:
    """Yields a function that returns the blocks of a node's weight, rounded for what reaches the node.

    It is told whether the weight is a table of words too.

    None for a node whose weight others read too, or whose input has no known size.

    Raises:
        EdgekitError: the model cannot be calibrated with the samples.
    """
    hint = "leave --data out: weights are rounded to the nearest"
    refuse_huge(model.path.name, model.size_bytes, "weights are rounded by samples", hint)
    graph = read_float_graph(model)
    layers = {layer.node: layer for layer in read_layers(graph) if layer.op != "Conv"}
    calibrate_model(model, samples, work=work, methods=PLAIN_METHODS)
    with open_moments(work / "moments.npz") as stored:

        def learn(node: str, is_table: bool) -> Blocks | None:  # noqa: FBT001 - a callback
            layer, moments = layers.get(node), stored(node)
            if layer is None or moments is None:
                return None
            matrix = layer.to_matrix(graph.weight(layer.weight))
            return round_blocks(matrix[0].T, moments, form, is_table=is_table)

        yield learn


def round_blocks(weight: Array, moments: InputMoments, form: BlockForm, *, is_table: bool = False) -> Blocks:
    """Returns unsigned values [N, blocks, block] and scales [N, blocks] of a weight [K, N] in 4 bits.

    Each block's scale is searched for, then the integers of all blocks are found by coordinate descent (`round_comq`),
    so that one block makes up for what another errs. Where the weight `is_table` too, as a head tied to its embedding
    is, the error of each number counts beside that of the output, as much as an input of mean energy makes it count.
    """
    depth, block = weight.shape[0], form.block
    scales = _search_scales(weight, moments.energy().reshape(-1), form)
    each = np.repeat(scales, block, axis=1)[:, :depth]
    # Blocks of zeros have a scale of 0, by which nothing is divided: what they hold is worth nothing.
    each = np.where(each, each, np.float32(1e-30))
    size = moments.size
    kept = shrink_moment(moments.second_moment(), moments.count)
    kept = add_spread(kept, moments.spread.reshape(-1, size), moments.count)
    if is_table:
        kept = kept + np.eye(size) * np.diagonal(kept, axis1=1, axis2=2).mean()
    matrix, scale = (split_pieces(part[None], 1, size) for part in (weight.T, each))
    found = join_pieces(round_comq(matrix, kept, scale, fits_scale=False).integers, 1)[0]
    values = np.full((scales.shape[0], scales.shape[1] * block), _MIDDLE, np.uint8)
    values[:, :depth] = (found.astype(np.int16) + _MIDDLE).astype(np.uint8)
    values = values.reshape(*scales.shape, block)
    values[scales == 0] = _MIDDLE
    return values, scales


def _search_scales(weight: Array, energy: Array, form: BlockForm) -> Array:
    """Returns for each block the scale with which rounding to the nearest errs least, [N, blocks]."""
    block = form.block
    _, whole = quantize_blocks(weight, 4, block, lpbq=form.lpbq)
    columns, blocks = whole.shape
    parts = np.zeros((columns, blocks * block), np.float32)
    parts[:, : len(weight)] = weight.T
    parts = parts.reshape(columns, blocks, block)
    counted = np.zeros(blocks * block)
    counted[: len(weight)] = energy
    best, least = whole, np.full(whole.shape, np.inf)
    for share in _SHARES:
        scale = (whole * np.float32(share)).astype(np.float32)
        steps = np.divide(parts, scale[..., None], out=np.zeros_like(parts), where=scale[..., None] != 0)
        rounded = np.clip(np.rint(steps), -_MIDDLE, _MOST - _MIDDLE) * scale[..., None]
        cost = ((parts - rounded) ** 2 * counted.reshape(blocks, block)).sum(axis=2)
        best, least = np.where(cost < least, scale, best), np.minimum(cost, least)
    return snap_scales(best) if form.lpbq else np.asarray(best, np.float32)
