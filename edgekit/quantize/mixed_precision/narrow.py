"""Large constants of nodes that stay float: stored in 8 or 16 bits where the outputs do not notice."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx

from edgekit.graph.constants import bring_in
from edgekit.graph.graph import Graph
from edgekit.model.model import Model
from edgekit.prepare.weights.narrow_constants import narrow_constants
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.effort import find_effort
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.mixed_precision.candidates import FAITHFUL_DB
from edgekit.quantize.mixed_precision.score import FEW_SAMPLES, has_held_out, judge_candidate
from edgekit.quantize.plan import NarrowConstants, QuantPlan
from edgekit.quantize.qdq.build import plan_graph

LEAST_BYTES = 1 << 14
"""What is smaller is no part of a size that anybody counts: a choice."""
MOST_LOST_DB = 0.1
"""How much of the plan's own ratio may be lost, 2 % of its noise: a choice."""
# So many are tried one after another where all together are too far off.
_MOST_TRIED = 8
_Bits = Literal[8, 16]
_BITS: tuple[_Bits, ...] = (16, 8)


def store_narrow(model: Model, plan: QuantPlan, calibration: Calibration, reached_db: float | None = None) -> QuantPlan:
    """Returns the plan with the large constants of float nodes in 16 or 8 bits, as far as that does no harm.

    A session widens them when it loads the model: placement, memory and time of a run are those of float32. What they
    cost is judged in the float model, over a few held-out samples, since beside the rounding of activations it is lost
    in chance: it must be so little that MOST_LOST_DB is taken from the ratio `reached_db` of the plan (that of the best
    candidate by default). Without held-out samples nothing is changed.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    graph = plan_graph(model, plan, calibration)
    sizes = dict(sorted(find_float_constants(graph, plan), key=lambda item: -item[1]))
    compared, statistics = find_compared_tensors(graph, calibration.outputs), Path(calibration.statistics)
    if not (sizes and compared and calibration.statistics and has_held_out(statistics)):
        return plan
    reached = max([candidate.sqnr_db for candidate in plan.judged], default=FAITHFUL_DB)
    least = max(reached, reached_db or -math.inf) - 10 * math.log10(10 ** (MOST_LOST_DB / 10) - 1)

    most = find_effort(graph, calibration.samples).limit(FEW_SAMPLES)

    def judge(bits: Mapping[str, int]) -> float:
        proto = onnx.ModelProto()
        proto.CopyFrom(graph.model)
        bring_in(proto.graph, graph.folder, bits.keys())
        narrow_constants(proto.graph, bits)
        return judge_candidate(proto, compared, statistics, keep_float_weights=True, most=most)

    chosen: dict[str, _Bits] = {}
    ratio = math.inf
    every, singles = tuple(sizes), tuple((name,) for name in list(sizes)[:_MOST_TRIED])
    for bits in _BITS:
        for names in (every, *singles) if len(sizes) > 1 else (every,):
            trial = chosen.copy()
            for name in names:
                trial[name] = bits
            found = judge(trial)
            if found >= least:
                chosen, ratio = trial, found
                if names == every:
                    break
    if not chosen:
        return plan
    saved = sum(sizes[name] * (32 - bits) // 32 for name, bits in chosen.items())
    return msgspec.structs.replace(
        plan, narrow=NarrowConstants(bits=chosen, saved_bytes=saved, ratio_db=round(ratio, 2))
    )


def find_float_constants(graph: Graph, plan: QuantPlan) -> Iterator[tuple[str, int]]:
    """Yields the large float constants that only nodes kept float read, and the bytes of each."""
    floats = {node.name for node in plan.float_nodes}
    for name, tensor in graph.constants.items():
        readers, size = graph.readers(name), 4 * math.prod(tensor.dims)
        if size < LEAST_BYTES or not graph.is_float_constant(name) or name in graph.captured | graph.outputs:
            continue
        is_apart = bool(readers) and all(node.name in floats for node in readers)
        if is_apart and np.isfinite(graph.weight(name)).all():
            yield name, size
