"""Chooses how to quantize: candidates are built and judged on held-out samples, the best becomes the plan."""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, write_file
from edgekit.errors import UsageError, suggest_name
from edgekit.model import Model
from edgekit.quantize.build import build_qdq
from edgekit.quantize.calibrate import Calibration
from edgekit.quantize.correct import Rounding
from edgekit.quantize.graph import Graph, read_graph
from edgekit.quantize.judge import has_held_out, judge_candidate, judge_points
from edgekit.quantize.layers import read_layers
from edgekit.quantize.plan import Candidate, QuantPlan, draft_plan
from edgekit.target import Precision, Target

_METHODS_16 = ("minmax",)
"""With 65536 levels there is nothing to gain from a narrower range."""


def plan_quantization(
    model: Model, calibration: Calibration, target: Target, precision: Precision, *, method: str = "auto"
) -> QuantPlan:
    """Returns the plan of quantizing a prepared float model for a target.

    With the method "auto" several range methods and roundings are built and judged on the samples that the calibration
    held out; what comes nearest to the float model is planned, so it is never worse there than plain minmax. Without
    held-out samples (fewer than 8 in all) it is minmax with corrected biases. A named method is taken as it is.

    Raises:
        UsageError: the precision is no integer precision, there is no such method, or the statistics are gone.
        DataError: the calibration is of another model.
        ModelError: no node of the model can be quantized.
    """
    graph = read_graph(model)
    plan = draft_plan(model, graph, calibration, target, precision)
    if method != "auto":
        return _with_choice(plan, calibration, method, "nearest")
    if not (calibration.statistics and judge_points(graph) and has_held_out(Path(calibration.statistics))):
        return _with_choice(plan, calibration, "minmax", "bias" if calibration.statistics else "nearest")
    judged = _judge_once(graph, plan, calibration)
    best = _with_choice(plan, calibration, judged[0].method, judged[0].rounding)
    return msgspec.structs.replace(best, judged=judged)


def _with_choice(plan: QuantPlan, calibration: Calibration, method: str, rounding: Rounding) -> QuantPlan:
    if method not in calibration.ranges:
        raise UsageError(
            f"there is no range method '{method}'", hint=suggest_name(method, (*calibration.ranges, "auto"))
        )
    return msgspec.structs.replace(plan, method=method, rounding=rounding, ranges=calibration.ranges[method])


def _judge_once(graph: Graph, plan: QuantPlan, calibration: Calibration) -> tuple[Candidate, ...]:
    """Judges with unsigned activations, which x86 computes fast, and remembers it for targets that differ in sign."""
    if plan.activation == "int8":
        shifted = {
            name: msgspec.structs.replace(grid, zero_point=grid.zero_point + 128) for name, grid in plan.grids.items()
        }
        plan = msgspec.structs.replace(plan, activation="uint8", grids=shifted)
    plain = msgspec.structs.replace(plan, target="", statistics="", scheme="ort", grids={})
    key = digest_bytes(msgspec.json.encode(plain))
    memory = Path(plan.statistics) / f"judged-{key[:16]}.json"
    if memory.is_file():
        return msgspec.json.decode(memory.read_bytes(), type=tuple[Candidate, ...])
    judged = tuple(sorted(_judge_all(graph, plan, calibration), key=lambda candidate: -candidate.sqnr_db))
    write_file(memory, msgspec.json.encode(judged))
    return judged


def _judge_all(graph: Graph, plan: QuantPlan, calibration: Calibration) -> Iterator[Candidate]:
    """Yields range methods with good rounding, then roundings with the best range method, and the plain beginning."""
    points = judge_points(graph)

    def judge(method: str, rounding: Rounding) -> Candidate:
        built = build_qdq(graph, _with_choice(plan, calibration, method, rounding), "the candidate")
        sqnr_db = judge_candidate(built, points, Path(plan.statistics))
        return Candidate(method=method, rounding=rounding, sqnr_db=round(sqnr_db, 3))

    methods = _METHODS_16 if plan.precision == "int16" else tuple(calibration.ranges)
    first: Rounding = "gptq" if read_layers(graph) else "nearest"
    ranged = [judge(method, first) for method in methods]
    yield from ranged
    best = max(ranged, key=lambda candidate: candidate.sqnr_db).method
    others: tuple[Rounding, ...] = ("nearest", "bias", "refit") if first == "gptq" else ()
    yield from (judge(best, rounding) for rounding in others)
    if first == "gptq" and best != "minmax":
        yield judge("minmax", "nearest")
