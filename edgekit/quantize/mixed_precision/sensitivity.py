"""Sensitivity: what each activation does to the outputs when it alone is quantized."""

import time
from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order
from edgekit.model.model import Model
from edgekit.model.tensors import Tensors
from edgekit.progress import NO_LIMIT, Budget
from edgekit.quantize.accuracy.sqnr import join_ratios, ratio_db
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.graph.compared_tensors import ComparedTensor, find_compared_tensors
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.mixed_precision.score import has_held_out, powers_of
from edgekit.quantize.mixed_precision.variants import SWITCHES, switch_activations
from edgekit.quantize.plan import QuantPlan
from edgekit.quantize.qdq.build import build_qdq, plan_graph

_SAMPLES, _FEW_SAMPLES = 6, 2
"""By how many held-out samples activations are ranked, and how many tell which are worth it: a choice, for the time."""
_RANKING = "the ranking of some activations"


class TensorError(msgspec.Struct, frozen=True, kw_only=True):
    """An activation, the operator that makes it, and the output's signal-to-noise ratio when it alone is quantized."""

    name: str
    op: str
    sqnr_db: float


def rank_plan(model: Model, plan: QuantPlan, calibration: Calibration) -> tuple[TensorError, ...]:
    """Returns each activation that a plan quantizes with what it alone does to the outputs, the most harmful first.

    None where too few samples were there to hold some out.

    Raises:
        UsageError: the statistics are gone.
    """
    graph, statistics = plan_graph(model, plan), Path(calibration.statistics)
    compared = find_compared_tensors(graph, calibration.outputs)
    if not has_held_out(statistics) or not compared:
        return ()
    return rank_activations(graph, build_qdq(graph, plan, statistics, model.path.name), compared, statistics)


def rank_activations(
    graph: Graph,
    qdq: onnx.ModelProto,
    compared: Sequence[ComparedTensor],
    statistics: Path,
    budget: Budget = NO_LIMIT,
    *,
    closely: int | None = None,
) -> tuple[TensorError, ...]:
    """Returns each quantized activation with what it alone does to the outputs, the most harmful first.

    One session serves all: it holds a switch for each activation. With `closely` two samples tell which so many are
    the worst, and only these are judged by all that are used here. What the budget leaves no time for comes last.

    Raises:
        UsageError: the statistics are gone.
    """
    proto, names = switch_activations(qdq, graph)
    switched = {name: f"{name}.edgekit.switched" for name in names}
    shown = {each: switched.get(each.tensor, each.tensor) for each in compared}
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in dict.fromkeys(shown.values()))
    session = open_graph(proto, statistics / "switched.onnx", keep_float_weights=False)
    held = [pair for _, pair in zip(range(_SAMPLES), read_held_out(statistics), strict=False)]

    def measure(task: tuple[int, Sequence[tuple[Tensors, Tensors]]]) -> float:
        index, pairs = task
        powers = np.zeros((len(compared), 2))
        for inputs, expected in pairs:
            found = session.run({**inputs, SWITCHES: np.arange(len(names)) == index})
            powers += [powers_of(each, expected[each.tensor], found[shown[each]]) for each in compared]
        return round(join_ratios([ratio_db(*power) for power in powers]), 2)

    ratios, began = [np.inf] * len(names), time.monotonic()
    few = held if closely is None else held[:_FEW_SAMPLES]
    tasks = takewhile(lambda _: budget.allows(_RANKING), ((index, few) for index in range(len(names))))
    for done, ((index, _), ratio) in enumerate(map_in_order(measure, tasks)):
        budget.tell("rank activations by what they cost", done, len(names), began)
        ratios[index] = ratio
    if closely is not None:
        worst = sorted(range(len(names)), key=lambda index: ratios[index])[:closely]
        tasks = takewhile(lambda _: budget.allows(_RANKING), ((index, held) for index in worst))
        for (index, _), ratio in map_in_order(measure, tasks):
            ratios[index] = ratio
    ops = {name: graph.producers[name].op_type if name in graph.producers else "input" for name in names}
    errors = (TensorError(name=name, op=ops[name], sqnr_db=ratio) for name, ratio in zip(names, ratios, strict=True))
    return tuple(sorted(errors, key=lambda error: error.sqnr_db))
