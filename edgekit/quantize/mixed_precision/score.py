"""How near a quantized candidate comes to the float model on samples that were held out from fitting."""

from pathlib import Path

import numpy as np
import onnx

from edgekit.machine import map_in_order
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.accuracy.sqnr import join_ratios, ratio_db
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.graph.compared_tensors import ComparedTensor
from edgekit.quantize.graph.raw_scores import FLOOR, are_raw_scores
from edgekit.quantize.graph.sessions import open_graph


def judge_candidate(
    qdq: onnx.ModelProto, compared: tuple[ComparedTensor, ...], statistics: Path, *, keep_float_weights: bool = False
) -> float:
    """Returns the signal-to-noise ratio in dB of a candidate over all held-out samples.

    Of several tensors it is that of their mean noise. It runs on the CPU provider, without saturation. With
    `keep_float_weights` ONNX Runtime may not quantize float weights between Q and DQ nodes, as it does by default.

    Raises:
        UsageError: the statistics are gone.
    """
    proto = onnx.ModelProto()
    proto.CopyFrom(qdq)
    nodes = {node.name: node for node in proto.graph.node}
    names = {each: nodes[each.reader].input[0] if each.reader else each.tensor for each in compared}
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(names.values()))
    session = open_graph(proto, statistics / "candidate.onnx", keep_float_weights=keep_float_weights)
    powers = {each: np.zeros(2) for each in compared}

    def run(held: tuple[Tensors, Tensors]) -> Tensors:
        return session.run(held[0])

    for (_, expected), found in map_in_order(run, read_held_out(statistics)):
        for each, name in names.items():
            powers[each] += powers_of(each, expected[each.tensor], found[name])
    return join_ratios([ratio_db(*power) for power in powers.values()])


def powers_of(compared: ComparedTensor, expected: Array, found: Array) -> Array:
    """Returns the power of a tensor of the float model and that of the difference, float64 [2].

    Where the values decide how many there are and quantizing changed that, the difference is infinite.
    """
    if expected.size != found.size:
        return np.array([1.0, np.inf])
    one, two = expected.astype(np.float64), found.astype(np.float64).reshape(expected.shape)
    if compared.part is not None:
        axis, start, stop = compared.part
        one, two = (np.take(value, range(start, stop), axis) for value in (one, two))
    if compared.is_raw_score and (compared.is_stated or are_raw_scores(one)):
        one, two = np.maximum(one, FLOOR), np.maximum(two, FLOOR)
    if compared.centred:
        one, two = one - one.mean(axis=-1, keepdims=True), two - two.mean(axis=-1, keepdims=True)
    return np.array([(one**2).sum(), ((one - two) ** 2).sum()])


def has_held_out(statistics: Path) -> bool:
    """Returns True if a calibration held samples out.

    Raises:
        UsageError: the statistics are gone.
    """
    return next(read_held_out(statistics), None) is not None
