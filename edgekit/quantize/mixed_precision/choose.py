"""Chooses how to quantize: candidates are built and judged on held-out samples, the best becomes the plan."""

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec
import onnx

from edgekit._files import digest_bytes, write_file
from edgekit.errors import UsageError, suggest_name
from edgekit.model.model import Model
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.image_headroom import add_image_headroom
from edgekit.quantize.equalization.equalize import choose_factors, equalize_calibration, equalize_graph, scales_silu
from edgekit.quantize.equalization.silu import clip_silu_tails
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.graph.graph import Graph, range_source, read_graph
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.mixed_precision.score import has_held_out, judge_candidate
from edgekit.quantize.mixed_precision.sensitivity import rank_activations
from edgekit.quantize.mixed_precision.variants import strip_weights
from edgekit.quantize.plan import Candidate, QuantPlan, draft_plan, quantizes_any, relieve_tensors
from edgekit.quantize.qdq.build import place_plan, plan_graph, round_weights
from edgekit.quantize.ranges.methods import AUTO_METHODS, METHODS
from edgekit.quantize.rounding.weights import Rounding
from edgekit.target import Precision, Target

COLLAPSED_DB = 20.0
"""Below this ratio the worst tensors leave 8 bits even if nobody asked for the best."""
BROKEN_DB = 10.0
"""Below this ratio a model is of no use in 8 bits, wherever it runs."""
GOOD_DB = 30.0
"""From this ratio on nothing more is relieved."""

_METHODS_16 = ("minmax",)
_NOTABLE_DB = 0.3
_QUICK: tuple[Rounding, ...] = ("nearest", "bias")
_LEARNED: tuple[Rounding, ...] = ("bias", "gptq", "refit")
_FEW_RELIEVED = 8
"""More tensors out of 8 bits hardly change which method is best for the others."""
_MOST_RELIEVED = 40
"""So many of the worst activations are ranked with care: more hardly ever leave 8 bits."""
_HOPELESS_DB = 1.0
"""Quickly rounded weights that are worse than this with evened channels are not rounded with more care."""
_FAITHFUL_DB = 40.0
"""From this ratio on nothing dearer than plain rounding is tried."""
_GATE_DB = 1.0
"""What products before sigmoids, which cost some time on a device, must gain."""


class _Subject(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be quantized, as it was given."""

    model: Model
    graph: Graph
    calibration: Calibration
    target: Target
    precision: Precision


class _Way(msgspec.Struct, frozen=True, kw_only=True):
    """A graph to quantize, what calibration says of it, its plan before anything is chosen, and what was judged."""

    graph: Graph
    calibration: Calibration
    plan: QuantPlan
    judged: tuple[Candidate, ...]


class _Relief(msgspec.Struct, frozen=True, kw_only=True):
    """How many tensors leave 8 bits step by step, what a step must gain to be kept, and which ratio is enough."""

    counts: tuple[int, ...]
    least_gain_db: float
    enough_db: float


_THOROUGH = _Relief(counts=(1, 3, 8, 20, 40), least_gain_db=1.0, enough_db=GOOD_DB)
_MENDING = _Relief(counts=(1, 3, 8, 20, 40), least_gain_db=1.0, enough_db=COLLAPSED_DB)
_SPARING = _Relief(counts=(1, 3, 8), least_gain_db=3.0, enough_db=COLLAPSED_DB)
"""For float nodes, which leave the accelerator: a few that help much, unless the model is broken without them."""


def plan_quantization(
    model: Model, calibration: Calibration, target: Target, precision: Precision, *, method: str = "auto"
) -> QuantPlan:
    """Returns the plan of quantizing a prepared float model for a target.

    With the method "auto" several range methods and roundings are built and judged on the samples that the calibration
    held out; what comes nearest to the float model is planned, so it is never worse there than plain minmax. "best"
    then takes the most harmful tensors out of 8 bits, few by few, as long as that helps: to 16 bits where the target
    takes them, else to float; "auto" does so only where the model has collapsed (below 20 dB). Below 40 dB channels of
    unequal size are evened out, if that helps.
    Without held-out samples (fewer than 8 in all) it is minmax with corrected biases. A named range method is taken as
    it is.

    Raises:
        UsageError: the precision is no integer precision, there is no such method, or the statistics are gone.
        DataError: the calibration is of another model.
        ModelError: no node of the model can be quantized.
    """
    graph = read_graph(model)
    plan = draft_plan(model, graph, calibration, target, precision)
    if method not in {"auto", "best"}:
        return _choose(plan, calibration, method, "nearest")
    if not (calibration.statistics and find_compared_tensors(graph) and has_held_out(Path(calibration.statistics))):
        return _choose(plan, calibration, "minmax", "bias" if calibration.statistics else "nearest")
    subject = _Subject(model=model, graph=graph, calibration=calibration, target=target, precision=precision)
    start = _start(subject, {})
    evened = _even_out(subject, start, gated=False, reached=start.judged)
    way = evened if evened is not None and _leads(evened, start, _NOTABLE_DB) else start
    gated = _even_out(subject, start, gated=True, reached=way.judged)
    judged = _best_first(*(candidate for each in (start, evened, gated) if each for candidate in each.judged))
    if gated is not None and _leads(gated, way, _GATE_DB):
        way, gated = gated, None
    best, reached, tried = _finish(way, target, method)
    if gated is not None and tried:
        other, its_reached, more = _finish(gated, target, method)
        tried = (*tried, *more)
        rival = min(its_reached, GOOD_DB) - min(reached, GOOD_DB)
        fewer = len(other.wide) + len(other.float_nodes) < len(best.wide) + len(best.float_nodes)
        best = other if rival > _GATE_DB or (fewer and rival > -_GATE_DB) else best
    return msgspec.structs.replace(best, judged=_best_first(*judged, *tried))


def _leads(way: _Way, other: _Way, gain_db: float) -> bool:
    return way.judged[0].sqnr_db > other.judged[0].sqnr_db + gain_db


def _finish(way: _Way, target: Target, method: str) -> tuple[QuantPlan, float, tuple[Candidate, ...]]:
    """Returns the best plan of a way, its ratio, and what was tried to take tensors out of 8 bits."""
    lead = way.judged[0]
    plan = _choose(way.plan, way.calibration, lead.method, lead.rounding)
    if plan.precision != "int8" or (method != "best" and lead.sqnr_db >= COLLAPSED_DB):
        return plan, lead.sqnr_db, ()
    widens = "int16" in target.precisions
    relief = _THOROUGH if widens or method == "best" else _MENDING if lead.sqnr_db < BROKEN_DB else _SPARING
    best, tried = _relieve(way.graph, plan, way.calibration, lead, widens=widens, relief=relief)
    return best, max(candidate.sqnr_db for candidate in (lead, *tried)), tuple(tried)


def plan_calibration(model: Model, plan: QuantPlan, calibration: Calibration) -> Calibration:
    """Returns what the calibration of a model says of the graph that a plan quantizes.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    return equalize_calibration(read_graph(model), calibration, plan.factors) if plan.factors else calibration


def _start(subject: _Subject, factors: Mapping[str, tuple[float, ...]], floor_db: float = -math.inf) -> _Way:
    """Returns the way with channels scaled by factors, judged."""
    graph = equalize_graph(subject.graph, factors)
    spans = _adapt(graph, equalize_calibration(subject.graph, subject.calibration, factors))
    plan = draft_plan(subject.model, graph, spans, subject.target, subject.precision)
    plan = msgspec.structs.replace(plan, factors=dict(factors))
    return _Way(
        graph=graph, calibration=spans, plan=plan, judged=_judge_once(graph, _unsigned(plan), spans, floor_db=floor_db)
    )


def _adapt(graph: Graph, calibration: Calibration) -> Calibration:
    """Returns a calibration without what no reader notices, and with what other samples may show."""
    return clip_silu_tails(graph, add_image_headroom(graph, calibration))


def _even_out(subject: _Subject, start: _Way, *, gated: bool, reached: tuple[Candidate, ...]) -> _Way | None:
    """Returns the way with channels of unequal size evened out, None where nothing can be or no more is needed."""
    graph, plan = subject.graph, start.plan
    if plan.precision != "int8" or reached[0].sqnr_db >= (GOOD_DB if gated else _FAITHFUL_DB):
        return None
    exact = subject.calibration.ranges["minmax"]
    factors = choose_factors(graph, Path(plan.statistics), plan.axes.keys(), exact, gated=gated)
    if not factors or (gated and not scales_silu(graph, factors)):
        return None
    floor_db = _quickly_rounded(reached) - _HOPELESS_DB
    return _start(subject, factors, floor_db)


def _best_first(*judged: Candidate) -> tuple[Candidate, ...]:
    return tuple(sorted(judged, key=lambda candidate: -candidate.sqnr_db))


def _choose(plan: QuantPlan, calibration: Calibration, method: str, rounding: Rounding) -> QuantPlan:
    if method not in calibration.ranges:
        raise UsageError(f"the calibration has no ranges of method '{method}'", hint=suggest_name(method, METHODS))
    return msgspec.structs.replace(plan, method=method, rounding=rounding, ranges=calibration.ranges[method])


def _unsigned(plan: QuantPlan) -> QuantPlan:
    """Returns the plan with unsigned activations, which x86 computes fast and which lose as much as signed ones."""
    if plan.activation != "int8":
        return plan
    grids = {name: msgspec.structs.replace(grid, zero_point=grid.zero_point + 128) for name, grid in plan.grids.items()}
    return msgspec.structs.replace(plan, activation="uint8", grids=grids)


def _quickly_rounded(judged: tuple[Candidate, ...]) -> float:
    return max(candidate.sqnr_db for candidate in judged if candidate.rounding in _QUICK)


def _judge_once(
    graph: Graph, plan: QuantPlan, calibration: Calibration, *, floor_db: float = -math.inf
) -> tuple[Candidate, ...]:
    """Returns the candidates, best first, remembered for targets that differ little."""
    memory = Path(plan.statistics) / f"judged-{_digest_plan(graph, plan)}.json"
    if memory.is_file():
        return msgspec.json.decode(memory.read_bytes(), type=tuple[Candidate, ...])
    judged = _best_first(*_judge_all(graph, plan, calibration, floor_db))
    write_file(memory, msgspec.json.encode(judged))
    return judged


def _digest_plan(graph: Graph, plan: QuantPlan) -> str:
    """Returns a digest of what a judgement depends on; a Softmax behind the judged logits is not part of it."""
    behind = {point.reader for point in find_compared_tensors(graph) if point.centred}
    facts = {
        "precision": plan.precision,
        "symmetric": (plan.activation_symmetric, plan.weight, plan.weight_symmetric),
        "axes": plan.axes,
        "shared": plan.shared_ops,
        "reduced": plan.reduce_range,
        "float": [node.name for node in plan.float_nodes if node.name not in behind],
        "wide": plan.wide,
        "factors": plan.factors,
    }
    return digest_bytes(msgspec.json.encode(facts))[:16]


def _judge_all(graph: Graph, plan: QuantPlan, calibration: Calibration, floor_db: float) -> Iterator[Candidate]:
    """Yields plain minmax, then the roundings of the range method that is best while weights are float.

    Rounding with second moments takes its time, so it is tried only where rounded weights cost something, or where it
    may make up for what activations cost, and not below `floor_db`.
    """
    methods = _METHODS_16 if plan.precision == "int16" else AUTO_METHODS
    ratios = {method: _judge_ranges(graph, _choose(plan, calibration, method, "nearest")) for method in methods}
    best = max(ratios, key=lambda method: ratios[method])
    if best != "minmax":
        yield from _judge_roundings(graph, _choose(plan, calibration, "minmax", "nearest"), ("nearest",))
    chosen = _choose(plan, calibration, best, "nearest")
    placed = place_plan(graph, chosen, "the candidate")
    quick = _QUICK if read_layers(graph) else _QUICK[:1]
    tried = list(_judge_roundings(graph, chosen, quick, placed))
    yield from tried
    reached = max(entry.sqnr_db for entry in tried)
    if len(quick) > 1 and floor_db <= reached and (reached < ratios[best] - _NOTABLE_DB or reached < _FAITHFUL_DB):
        yield from _judge_roundings(graph, chosen, ("gptq", "refit"), placed)


def _judge_ranges(graph: Graph, plan: QuantPlan) -> float:
    whole = msgspec.structs.replace(plan, axes={})  # quick: the weights are not kept
    placed = strip_weights(place_plan(graph, whole, "the candidate"), graph)
    return judge_candidate(placed, find_compared_tensors(graph), Path(plan.statistics), keep_float_weights=True)


def _judge_roundings(
    graph: Graph, plan: QuantPlan, roundings: tuple[Rounding, ...], placed: onnx.ModelProto | None = None
) -> Iterator[Candidate]:
    """Yields the candidates of a plan, which `placed` holds if it was placed before: that takes half a second."""
    placed = placed or place_plan(graph, plan, "the candidate")
    for rounding in roundings:
        chosen = msgspec.structs.replace(plan, rounding=rounding)
        ratio = judge_candidate(
            round_weights(placed, graph, chosen), find_compared_tensors(graph), Path(plan.statistics)
        )
        yield Candidate(
            method=plan.method,
            rounding=rounding,
            relieved=(),
            sqnr_db=round(ratio, 3),
            equalized=bool(plan.factors),
        )


def relieve_step(
    model: Model, calibration: Calibration, target: Target, plan: QuantPlan, count: int
) -> QuantPlan | None:
    """Returns a plan with its `count` most harmful tensors out of 8 bits, None where so many cannot be taken.

    They get 16 bits where the target takes them, and are float otherwise.

    Raises:
        UsageError: the statistics are gone.
    """
    graph = plan_graph(model, plan)
    calibration = _adapt(graph, plan_calibration(model, plan, calibration))
    order = _rank_once(graph, plan)
    if count > 2 * len(order):
        return None
    relieved = relieve_tensors(graph, plan, tuple(order[:count]), calibration, widens="int16" in target.precisions)
    if not quantizes_any(graph, relieved):
        return None
    memory = Path(plan.statistics) / f"chosen-{digest_bytes(msgspec.json.encode(plan))[:16]}.json"
    if count > _FEW_RELIEVED and memory.is_file():
        again = msgspec.json.decode(memory.read_bytes(), type=tuple[str, Rounding])
        return _choose(relieved, calibration, *again)
    if plan.precision == "int8" and {*AUTO_METHODS, plan.method} <= calibration.ranges.keys():
        relieved, _ = _choose_again(graph, relieved, calibration)
    write_file(memory, msgspec.json.encode((relieved.method, relieved.rounding)))
    return relieved


def _choose_again(graph: Graph, plan: QuantPlan, calibration: Calibration) -> tuple[QuantPlan, Candidate]:
    """Returns a relieved plan with the range method and the rounding that are best for it, and how it was judged.

    Where a few tensors did most of the damage, what was chosen before they left 8 bits was chosen in their noise.
    """
    ratios = {
        name: _judge_ranges(graph, _choose(_unsigned(plan), calibration, name, "nearest")) for name in AUTO_METHODS
    }
    best = max(ratios, key=lambda method: ratios[method])
    if ratios[best] <= ratios.get(plan.method, math.inf) + _NOTABLE_DB:
        best = plan.method
    chosen = _choose(_unsigned(plan), calibration, best, plan.rounding)
    lead = max(_judge_roundings(graph, chosen, _LEARNED), key=lambda candidate: candidate.sqnr_db)
    return _choose(plan, calibration, best, lead.rounding), lead


def _rank_once(graph: Graph, plan: QuantPlan) -> list[str]:
    """Returns the tensors whose 8 bits hurt most, worst first, remembered for the steps that follow."""
    memory = Path(plan.statistics) / f"ranked-{digest_bytes(msgspec.json.encode(plan))[:16]}.json"
    if memory.is_file():
        return msgspec.json.decode(memory.read_bytes(), type=list[str])
    unsigned = _unsigned(plan)
    placed = round_weights(place_plan(graph, unsigned, "the candidate"), graph, unsigned)
    ranked = rank_activations(graph, placed, Path(plan.statistics), closely=_MOST_RELIEVED)
    order = list(dict.fromkeys(range_source(graph, error.name) for error in ranked))
    write_file(memory, msgspec.json.encode(order))
    return order


def _relieve(
    graph: Graph, plan: QuantPlan, calibration: Calibration, start: Candidate, *, widens: bool, relief: _Relief
) -> tuple[QuantPlan, list[Candidate]]:
    """Returns the plan with the worst tensors out of 8 bits, and what was tried.

    More and more are taken out until the ratio is good enough, or two steps in a row gain too little; what gained too
    little is not kept.
    """
    order = _rank_once(graph, plan)
    best, reached, idle = plan, start.sqnr_db, 0
    tried: list[Candidate] = []
    for count in relief.counts:
        names = tuple(order[:count])
        relieved = relieve_tensors(graph, plan, names, calibration, widens=widens)
        if not quantizes_any(graph, relieved):
            break
        relieved, found = _choose_again(graph, relieved, calibration)
        ratio = found.sqnr_db
        tried.append(msgspec.structs.replace(found, relieved=names))
        if ratio >= reached + relief.least_gain_db:
            best, reached, idle = relieved, ratio, 0
        else:
            idle += count > 1
        if idle == 2 or reached >= relief.enough_db or count >= len(order):
            break
    return best, tried
