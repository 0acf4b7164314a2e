"""Where the error of a quantized model comes from: weights or activations, and which layers."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx

from edgekit.model.model import Model
from edgekit.model.tensors import Tensors
from edgekit.quantize.accuracy.sqnr import join_ratios, ratio_db
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.equalization.equalize import equalize_calibration
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.graph.graph import Graph, read_graph
from edgekit.quantize.mixed_precision.score import has_held_out, judge_candidate, open_graph, powers_of
from edgekit.quantize.mixed_precision.variants import SWITCHES, strip_weights, swap_weights, switch_activations
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.qdq.build import build_qdq, plan_graph

Cause = Literal["nothing", "weights", "activations", "arithmetic"]

_NEAR_DB = 3.0
_GOOD_DB = 30.0
_SAMPLES, _FEW_SAMPLES = 6, 2
"""By how many held-out samples activations are ranked, and how many tell which are worth it."""


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """An activation, the operator that makes it, and the output's signal-to-noise ratio when it alone is quantized."""

    name: str
    op: str
    sqnr_db: float


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Signal-to-noise ratios of the outputs in dB on held-out samples, with only some things quantized.

    `w8_db`: weights only. `a8_db`: activations only. `w8a8_db`: both, as planned. `a16w8_db`: both, activations with
    16 bits. `tensors` lists the activations, the most harmful first.
    """

    w8_db: float
    a8_db: float
    w8a8_db: float
    a16w8_db: float
    tensors: tuple[TensorError, ...]

    @property
    def cause(self) -> Cause:
        """What limits the accuracy; "arithmetic" means that 16-bit activations do not help either."""
        if self.w8a8_db >= _GOOD_DB:
            return "nothing"
        if self.w8_db <= self.w8a8_db + _NEAR_DB:
            return "weights"
        return "activations" if self.a16w8_db > self.w8a8_db + _NEAR_DB else "arithmetic"


def diagnose_quantization(model: Model, calibration: Calibration, plan: QuantPlan) -> Diagnosis:
    """Returns what limits the accuracy of a plan, measured on the samples that its calibration held out.

    Raises:
        UsageError: the statistics are gone.
    """
    graph, statistics = plan_graph(model, plan), Path(plan.statistics)
    points = find_compared_tensors(graph)
    qdq = build_qdq(graph, plan, model.path.name)
    ranges = equalize_calibration(read_graph(model), calibration, plan.factors).ranges["minmax"]
    wide = msgspec.structs.replace(plan, activation="uint16", ranges=ranges, grids={}, wide={})
    return Diagnosis(
        w8_db=judge_candidate(swap_weights(qdq, graph), points, statistics),
        a8_db=judge_candidate(strip_weights(qdq, graph), points, statistics, keep_float_weights=True),
        w8a8_db=judge_candidate(qdq, points, statistics),
        a16w8_db=judge_candidate(build_qdq(graph, wide, model.path.name), points, statistics),
        tensors=rank_activations(graph, qdq, statistics),
    )


def rank_plan(model: Model, plan: QuantPlan) -> tuple[TensorError, ...]:
    """Returns each activation that a plan quantizes with what it alone does to the outputs, the most harmful first.

    None where too few samples were there to hold some out.

    Raises:
        UsageError: the statistics are gone.
    """
    graph, statistics = plan_graph(model, plan), Path(plan.statistics)
    if not has_held_out(statistics) or not find_compared_tensors(graph):
        return ()
    return rank_activations(graph, build_qdq(graph, plan, model.path.name), statistics)


def rank_activations(
    graph: Graph, qdq: onnx.ModelProto, statistics: Path, *, closely: int | None = None
) -> tuple[TensorError, ...]:
    """Returns each quantized activation with what it alone does to the outputs, the most harmful first.

    One session serves all: it holds a switch for each activation. With `closely` two samples tell which so many are
    the worst, and only these are judged by all that are used here.

    Raises:
        UsageError: the statistics are gone.
    """
    proto, names = switch_activations(qdq, graph)
    points = find_compared_tensors(graph)
    switched = {name: f"{name}.edgekit.switched" for name in names}
    shown = {point: switched.get(point.tensor, point.tensor) for point in points}
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(shown.values()))
    session = open_graph(proto, statistics / "switched.onnx")
    held = [pair for _, pair in zip(range(_SAMPLES), read_held_out(statistics), strict=False)]

    def measure(index: int, pairs: Sequence[tuple[Tensors, Tensors]]) -> float:
        powers = np.zeros((len(points), 2))
        for inputs, expected in pairs:
            found = session.run({**inputs, SWITCHES: np.arange(len(names)) == index})
            powers += [powers_of(point, expected[point.tensor], found[shown[point]]) for point in points]
        return round(join_ratios([ratio_db(*power) for power in powers]), 2)

    ratios = [measure(index, held if closely is None else held[:_FEW_SAMPLES]) for index in range(len(names))]
    if closely is not None:
        for index in sorted(range(len(names)), key=lambda index: ratios[index])[:closely]:
            ratios[index] = measure(index, held)
    ops = {name: graph.producers[name].op_type if name in graph.producers else "input" for name in names}
    errors = (TensorError(name=name, op=ops[name], sqnr_db=ratio) for name, ratio in zip(names, ratios, strict=True))
    return tuple(sorted(errors, key=lambda error: error.sqnr_db))
