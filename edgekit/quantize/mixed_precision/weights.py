"""Mixed precision of weights, which are ranked by the noise that each alone adds to the outputs.

In plans with 4-bit weights those that lose most for their size keep 8 bits, as few as are needed. In other plans those
that cause much of the noise are tried in 16 bits.
"""

from collections.abc import Sequence

import msgspec
import onnx

from edgekit.check.macs import count_macs
from edgekit.progress import Budget
from edgekit.quantize.calibration.calibrate import makes_images
from edgekit.quantize.calibration.held_out import MOST_SAMPLES
from edgekit.quantize.finer_weights import SPLIT_BITS
from edgekit.quantize.graph.float_graph import folded_activations
from edgekit.quantize.graph.layers import read_layers
from edgekit.quantize.mixed_precision import candidates, relief
from edgekit.quantize.mixed_precision.candidates import Draft, Subject, WeightError
from edgekit.quantize.mixed_precision.score import list_rounded, strip_weights, switch_weights
from edgekit.quantize.mixed_precision.sensitivity import Switched
from edgekit.quantize.objective import FAITHFUL_DB
from edgekit.quantize.plan import Candidate, QuantPlan, is_relievable
from edgekit.quantize.qdq import round_weights

# The largest share of weight values that keep 8 bits, which gives up half of what 4 bits save: a choice.
_MOST_KEPT = 0.5
_SAMPLES = 4
# If the sum of the single errors was too optimistic, the next round keeps more weights in 8 bits.
_ROUNDS, _MARGIN_DB = 3, 2.0


def keep_more(subject: Subject, plan: QuantPlan, rise: float) -> QuantPlan | None:
    """Returns a plan with more weights in 8 bits, None if they gain nothing: the ratio is to rise by `rise` dB.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = subject.open_draft(plan)
    lead = candidates.judge_plan(draft)
    kept, tried = keep_eight(draft, lead, subject.memo.budget, lead.sqnr_db + rise)
    judged = candidates.sort_candidates([*plan.judged, *tried])
    return msgspec.structs.replace(kept, judged=judged) if kept.bits != plan.bits else None


def keep_eight(
    draft: Draft, lead: Candidate, budget: Budget, enough: float | None = None
) -> tuple[QuantPlan, tuple[Candidate, ...]]:
    """Returns the plan with 8 bits for the weights that lose most for their size, and the tried candidates.

    As few weights keep 8 bits as are needed for a ratio of `enough` dB, and no more than half of those with 4 bits. By
    default that is COLLAPSED_DB (FAITHFUL_DB if the outputs are images, which do not tolerate an error of a tenth).
    `lead` is the judged candidate of the draft's own plan.

    Raises:
        UsageError: the statistics are gone.
    """
    if enough is None:
        enough = FAITHFUL_DB if makes_images(draft.graph, draft.calibration.outputs) else relief.COLLAPSED_DB
    if not draft.plan.bits or lead.sqnr_db >= enough or not budget.allows("weights of 8 bits"):
        return draft.plan, ()
    placed = candidates.place_draft(draft)
    # Rounding layer by layer (qronos) is too slow to repeat: the search for the weights with 8 bits uses gptq instead.
    quick = draft.choose(draft.plan.method, "gptq") if draft.plan.rounding == "qronos" else draft
    bits, aim, tried = quick.plan.bits, enough, list[tuple[QuantPlan, Candidate]]()
    least = _judge(quick, placed, msgspec.structs.replace(quick.plan, bits={}))
    reached = _judge(quick, placed, quick.plan)
    errors = scale_errors(rank_weights(quick, placed), 10 ** (-reached / 10) - 10 ** (-least / 10))
    # More and more weights keep 8 bits, until a plan is good enough or more cannot help.
    for _ in range(_ROUNDS):
        kept = choose_kept(errors, 10 ** (-min(aim, least - 0.5) / 10), 10 ** (-least / 10))
        before, bits = bits, {name: count for name, count in quick.plan.bits.items() if name not in kept}
        if bits == before:
            break
        plan = msgspec.structs.replace(quick.plan, bits=bits)
        ratio = _judge(quick, placed, plan)
        share = sum(error.size for error in errors if error.name in kept) / sum(error.size for error in errors)
        tried.append((plan, _describe(lead, plan, ratio, share)))
        if ratio >= min(enough, least - 1):
            break
        aim += max(enough - ratio, _MARGIN_DB)
    if tried and quick is not draft:
        plan, found = max(tried, key=lambda trial: trial[1].sqnr_db)
        plan = msgspec.structs.replace(plan, rounding=draft.plan.rounding)
        tried.append((plan, _describe(lead, plan, _judge(draft, placed, plan), found.eight_bit_share)))
    plan, _ = max(((draft.plan, lead), *tried), key=lambda trial: trial[1].sqnr_db)
    return plan, tuple(candidate for _, candidate in tried)


def _describe(lead: Candidate, plan: QuantPlan, ratio: float, share: float) -> Candidate:
    return msgspec.structs.replace(
        lead, rounding=plan.rounding, sqnr_db=round(ratio, 3), eight_bit_share=round(share, 4)
    )


def _judge(draft: Draft, placed: onnx.ModelProto, plan: QuantPlan, most: int = MOST_SAMPLES) -> float:
    """Returns the ratio in dB of a plan over the first `most` held-out samples, by default all."""
    qdq = round_weights(placed, draft.graph, plan, draft.statistics)
    return draft.open_judge(qdq, keep_float_weights=False, most=most)()


def scale_errors(errors: Sequence[WeightError], noise: float) -> tuple[WeightError, ...]:
    """Returns errors scaled so that their sum is `noise`, that of all together: single errors are not independent."""
    factor = max(noise, 0.0) / max(sum(error.noise for error in errors), 1e-12)
    return tuple(msgspec.structs.replace(error, noise=factor * error.noise) for error in errors)


def choose_kept(errors: Sequence[WeightError], most_noise: float, least_noise: float) -> set[str]:
    """Returns the weights to keep in 8 bits, so that the noise is at most `most_noise`.

    Errors are taken as independent, so their powers add up, together with `least_noise`, the noise with all weights in
    8 bits. Weights that cost most for their size come first; at most half of all weight values are kept.
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
    """Returns the weight of each layer with the noise that it alone causes at the outputs, in graph order.

    If the plan has weights of 4 bits, only these are ranked. One session measures all: its graph has a switch for each
    weight and its bias.

    Raises:
        UsageError: the statistics are gone.
    """
    # A switch works only for weights with a DQ; with scales for blocks the order of the weights would be the same.
    graph, plan = draft.graph, msgspec.structs.replace(draft.plan, block=0)
    rounded = list_rounded(round_weights(placed, graph, plan, draft.statistics), graph)
    layers = [layer for layer in read_layers(graph) if layer.node in rounded]
    layers = [layer for layer in layers if not plan.bits or layer.weight in plan.bits]
    proto = switch_weights(graph, {layer.node: rounded[layer.node] for layer in layers})
    made = {node.name: node.output[0] for node in graph.nodes}
    switched = Switched(draft, proto, {made[layer.node]: made[layer.node] for layer in layers}, _SAMPLES)
    ratios = switched.judge([range(index, index + 1) for index in range(len(layers))], switched.count)
    return tuple(
        WeightError(name=layer.weight, size=layer.groups * layer.outputs * layer.inputs, noise=10 ** (-ratio / 10))
        for layer, ratio in zip(layers, ratios, strict=True)
    )


def widen_weights(subject: Subject, plan: QuantPlan, most_macs: float) -> QuantPlan | None:
    """Returns a plan whose worst layers have weights of 16 bits, None if they would not gain a decibel.

    Each weight is the sum of two of 8 bits (`residual`), and its layer computes twice as much: no more is added than a
    share `most_macs` of the model's work. First all weights in float must gain a decibel, which takes two judgements.
    Then each is measured by itself. Worst come first, until all others together would gain less than a decibel.
    Inputs and outputs of these layers get 16 bits too. There is no such search for models whose runs take long.

    Example: behind an LSTM with a state in 16 bits, a last Gemm with 8-bit weights has 41 dB where the state has 71.

    Raises:
        UsageError: the statistics are gone.
    """
    draft = subject.open_draft(plan).use_unsigned()
    graph, nodes = draft.graph, {node.name: node for node in draft.graph.nodes}
    if plan.bits or not draft.effort.is_short:
        return None
    placed = candidates.place_draft(draft)
    floats = draft.open_judge(strip_weights(placed, graph), most=_SAMPLES)()
    least = 10 ** (-floats / 10)
    noise = 10 ** (-_judge(draft, placed, draft.plan, _SAMPLES) / 10)
    if relief.rise_db(1 - least / noise) < relief.LEAST_GAIN_DB:
        return None
    # Plans that differ in the activations of 16 bits share the ranking of weights.
    ranked = subject.open_draft(msgspec.structs.replace(plan, wide={}, judged=())).use_unsigned()
    key, known = candidates.digest_draft(ranked), subject.memo.weights
    known[key] = known.get(key) or rank_weights(ranked, candidates.place_draft(ranked))
    errors = sorted(scale_errors(known[key], noise - least), key=lambda error: -error.noise)
    layers = {layer.weight: layer for layer in read_layers(graph)}
    macs = {node.name: count_macs(graph, node) for node in graph.nodes}
    fitting, left = list[WeightError](), most_macs * sum(macs.values())
    for error in errors:
        added = macs[layers[error.name].node]
        if added <= left:
            fitting, left = [*fitting, error], left - added
    gone, chosen = sum(error.noise for error in fitting), list[WeightError]()
    while relief.rise_db(gone / noise) >= relief.LEAST_GAIN_DB:
        chosen.append(fitting[len(chosen)])
        gone, noise = gone - chosen[-1].noise, noise - chosen[-1].noise
    if not chosen:
        return None
    folded, bits = folded_activations(graph), dict.fromkeys([error.name for error in chosen], SPLIT_BITS)
    made = [nodes[layers[name].node].output[0] for name in bits]
    touched = [*(layers[name].source for name in bits), *(folded.get(name, name) for name in made)]
    names = [name for name in dict.fromkeys(touched) if name not in plan.wide] if is_relievable(plan) else []
    relieved = relief.relieve_tensors(graph, plan, names, draft.calibration, widens=True) if names else plan
    return msgspec.structs.replace(relieved, bits=bits)
