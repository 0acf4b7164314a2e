"""Weights that 4 bits hurt most for their size keep 8, as few as bring the model near enough."""

from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import onnx

from edgekit.model.tensors import Array
from edgekit.progress import Budget
from edgekit.quantize.accuracy.sqnr import join_ratios, ratio_db
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.calibration.image_headroom import makes_images
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.graph.sessions import open_graph
from edgekit.quantize.mixed_precision.candidates import FAITHFUL_DB, Draft, place_draft
from edgekit.quantize.mixed_precision.score import judge_candidate, powers_of
from edgekit.quantize.mixed_precision.variants import SWITCHES, switch_weights
from edgekit.quantize.plan import Candidate, QuantPlan
from edgekit.quantize.qdq.build import round_weights

ENOUGH_DB, ENOUGH_IMAGE_DB = 20.0, FAITHFUL_DB
"""From this ratio on no more weights get 8 bits: what decides bears an error of a tenth, an image does not."""
# No more of the weights, by their number, keep 8 bits: half of what 4 bits save would be gone. A choice.
_MOST_KEPT = 0.5
_SAMPLES = 4
# Where the sum of what is left was wrong, more are kept.
_ROUNDS, _MARGIN_DB = 3, 2.0


class WeightError(msgspec.Struct, frozen=True, kw_only=True):
    """A weight, how many numbers it has, and the output's noise, as a share of the signal, when it alone has 4 bits."""

    name: str
    size: int
    noise: float


def keep_eight(draft: Draft, lead: Candidate, budget: Budget) -> tuple[QuantPlan, tuple[Candidate, ...]]:
    """Returns the plan of a draft with 8 bits for the weights that 4 hurt most for their size, and what was tried.

    As few keep 8 bits as bring the ratio to ENOUGH_DB, that of images to ENOUGH_IMAGE_DB, and no more than half of
    all. `lead` says how the plan itself was judged.

    Raises:
        UsageError: the statistics are gone.
    """
    enough = ENOUGH_IMAGE_DB if makes_images(draft.graph, draft.calibration.outputs) else ENOUGH_DB
    if not draft.plan.bits or lead.sqnr_db >= enough or not budget.allows("weights of 8 bits"):
        return draft.plan, ()
    placed = place_draft(draft)
    # One layer after another takes too long to be done again and again: which weights keep 8 bits is found without.
    quick = draft.choose(draft.plan.method, "comq") if draft.plan.rounding == "qronos" else draft
    tried = list(_try_kept(quick, placed, lead, enough))
    if tried and quick is not draft:
        plan, found = max(tried, key=lambda trial: trial[1].sqnr_db)
        plan = msgspec.structs.replace(plan, rounding=draft.plan.rounding)
        tried.append((plan, _describe(lead, plan, _judge(draft, placed, plan), found.eight_bit_share)))
    plan, _ = max(((draft.plan, lead), *tried), key=lambda trial: trial[1].sqnr_db)
    return plan, tuple(candidate for _, candidate in tried)


def _try_kept(
    draft: Draft, placed: onnx.ModelProto, lead: Candidate, enough: float
) -> Iterator[tuple[QuantPlan, Candidate]]:
    """Yields plans with more and more weights of 8 bits, until one is near enough or as near as it gets."""
    least = _judge(draft, placed, msgspec.structs.replace(draft.plan, bits={}))
    reached = _judge(draft, placed, draft.plan)
    errors = scale_errors(rank_weights(draft, placed), 10 ** (-reached / 10) - 10 ** (-least / 10))
    aim, before = enough, draft.plan.bits
    for _ in range(_ROUNDS):
        kept = choose_kept(errors, 10 ** (-min(aim, least - 0.5) / 10), 10 ** (-least / 10))
        bits = {name: count for name, count in draft.plan.bits.items() if name not in kept}
        if bits == before:
            return
        plan, before = msgspec.structs.replace(draft.plan, bits=bits), bits
        ratio = _judge(draft, placed, plan)
        share = sum(error.size for error in errors if error.name in kept) / sum(error.size for error in errors)
        yield plan, _describe(lead, plan, ratio, share)
        if ratio >= min(enough, least - 1):
            return
        aim += max(enough - ratio, _MARGIN_DB)


def _describe(lead: Candidate, plan: QuantPlan, ratio: float, share: float) -> Candidate:
    return msgspec.structs.replace(
        lead, rounding=plan.rounding, sqnr_db=round(ratio, 3), eight_bit_share=round(share, 4)
    )


def _judge(draft: Draft, placed: onnx.ModelProto, plan: QuantPlan) -> float:
    qdq = round_weights(placed, draft.graph, plan, draft.statistics)
    return judge_candidate(qdq, draft.compared, draft.statistics)


def scale_errors(errors: Sequence[WeightError], noise: float) -> tuple[WeightError, ...]:
    """Returns errors that add up to what all together were seen to cost: they are not quite independent."""
    factor = max(noise, 0.0) / max(sum(error.noise for error in errors), 1e-12)
    return tuple(msgspec.structs.replace(error, noise=factor * error.noise) for error in errors)


def choose_kept(errors: Sequence[WeightError], most_noise: float, least_noise: float) -> set[str]:
    """Returns the weights to keep in 8 bits, so that what is left of the noise is at most so much.

    Errors count as independent, so their powers add up: to `least_noise`, which is there with all in 8 bits. Weights
    that cost most for their size come first; no more than half of all numbers are kept.
    """
    total, left = sum(error.size for error in errors), least_noise + sum(error.noise for error in errors)
    kept, used = set[str](), 0
    for error in sorted(errors, key=lambda error: -error.noise / error.size):
        if left <= most_noise:
            break
        if used + error.size <= _MOST_KEPT * total:
            kept.add(error.name)
            used, left = used + error.size, left - error.noise
    return kept


def rank_weights(draft: Draft, placed: onnx.ModelProto) -> tuple[WeightError, ...]:
    """Returns each weight of 4 bits with what it alone does to the outputs, in graph order.

    One session serves all: it holds a switch for each weight and its bias.

    Raises:
        UsageError: the statistics are gone.
    """
    # A switch takes weights between Q and DQ alone; which of them hurt most is no other question in blocks.
    graph, plan = draft.graph, msgspec.structs.replace(draft.plan, block=0)
    layers = [layer for layer in read_layers(graph) if layer.weight in plan.bits]
    few, eight = (
        round_weights(placed, graph, msgspec.structs.replace(plan, bits=bits), draft.statistics)
        for bits in (plan.bits, {})
    )
    proto = switch_weights(graph, few, eight, [layer.node for layer in layers])
    del proto.graph.output[:]
    shown = dict.fromkeys(each.tensor for each in draft.compared)
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shown)
    session = open_graph(proto, graph.folder, keep_float_weights=True)
    held = [pair for _, pair in zip(range(_SAMPLES), read_held_out(draft.statistics), strict=False)]

    def run(index: int) -> Iterator[Mapping[str, Array]]:
        switches = np.arange(len(layers)) == index
        yield from (session.run({**inputs, SWITCHES: switches}) for inputs, _ in held)

    plain = list(run(-1))
    found: list[WeightError] = []
    for index, layer in enumerate(layers):
        powers = np.zeros((len(draft.compared), 2))
        for before, after in zip(plain, run(index), strict=True):
            powers += [powers_of(each, before[each.tensor], after[each.tensor]) for each in draft.compared]
        noise = 10 ** (-join_ratios([ratio_db(*power) for power in powers]) / 10)
        size = layer.groups * layer.outputs * layer.inputs
        found.append(WeightError(name=layer.weight, size=size, noise=noise))
    return tuple(found)
