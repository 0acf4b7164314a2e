"""Mixed precision: the tensors that lose most in 8 bits get 16 bits or stay float, a few more at each step.

Tensors that even 16 bits cannot represent stay float.

A tensor that gets 16 bits or float instead of 8 bits is called relieved.
"""

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise

import msgspec
import numpy as np

from edgekit.graph.graph import Graph
from edgekit.quantize._ort_quantizer import find_plan_grids
from edgekit.quantize.accuracy.loss import GOOD_DB
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.calibration.held_out import read_held_out
from edgekit.quantize.effort import RANKED_SHARE
from edgekit.quantize.graph.float_graph import float_activations, folded_activations, range_source
from edgekit.quantize.mixed_precision import candidates
from edgekit.quantize.mixed_precision.sensitivity import Bound, measure_float16, rank_activations
from edgekit.quantize.objective import set_range
from edgekit.quantize.plan import FloatNode, QuantPlan, add_headroom, is_relievable, quantizes_any, read_constant_range
from edgekit.quantize.qdq import build_qdq
from edgekit.quantize.ranges import TensorRange
from edgekit.target import Target

COLLAPSED_DB = 20.0
"""Below this ratio, where the amplitude of the error is a tenth of the signal's, a model has collapsed: a choice."""
# With more than this number of tensors out of 8 bits the ranges of inputs are no longer fitted: a choice.
_FEW_RELIEVED = 8
# With more than this number the noise of weights counts, which that of activations hid: a choice.
_MANY_RELIEVED = 80
# How many tensors a ranking looks for: first few, which are enough for most models, then as many as later steps take.
_RANKED = (_FEW_RELIEVED, _MANY_RELIEVED, 160)
_STEPS, _STEPS_16, _MOST_VALUES = 255, 65535, "percentile-99.9"
_TINY = 1e-30
_WITH_CONSTANTS = frozenset({"Add", "Sub", "Mul", "Div", "Pad"})
# Activation functions that ONNX Runtime's providers fuse into the layer before, and similar ones.
_ACTIVATIONS = frozenset({"Clip", "HardSwish", "LeakyRelu", "PRelu", "Relu"})


LEAST_GAIN_DB = 1.0
"""What tensors out of 8 bits must gain, a fifth of the power of the noise: a choice."""


def find_least_saving(drop: float, floor: float) -> float:
    """Returns how much less than `drop` another plan must lose to be worth it: `floor`, or a decibel's part of it.

    A decibel (LEAST_GAIN_DB) is 12 % of the noise amplitude, to which drops are about proportional.
    """
    return max(floor, drop * (10 ** (LEAST_GAIN_DB / 20) - 1))


def relieve_step(subject: candidates.Subject, plan: QuantPlan, count: int, *, before: QuantPlan) -> QuantPlan | None:
    """Returns a plan with its `count` most harmful tensors out of 8 bits.

    None if it has less than half as many tensors, or if nothing would be quantized.

    They get 16 bits if the target supports them, and stay float otherwise. `before` is the plan with the next smaller
    number of them, whose ranges and rounding are used again.

    Raises:
        UsageError: the statistics are gone.
    """
    draft, memo = subject.open_draft(plan), subject.memo
    graph, calibration = draft.graph, draft.calibration
    noise = rank_tensors(draft, memo, count)
    if count > 2 * len(noise):
        return None
    relieved = relieve_tensors(graph, plan, (*noise,)[:count], calibration, widens=subject.widens)
    if not quantizes_any(graph, relieved):
        return None
    wide = {name: before.wide.get(name, span) for name, span in relieved.wide.items()}
    relieved = msgspec.structs.replace(
        relieved, method=before.method, rounding=before.rounding, ranges=before.ranges, wide=wide
    )
    if count > _MANY_RELIEVED and not plan.bits:
        rounding = candidates.choose_rounding(msgspec.structs.replace(draft, plan=relieved))
        return msgspec.structs.replace(relieved, rounding=rounding)
    if count > _FEW_RELIEVED:
        return relieved
    fitted = memo.budget.attempt("ranges of inputs", fit_inputs, msgspec.structs.replace(draft, plan=relieved))
    return fitted or relieved


def fit_inputs(draft: candidates.Draft, reached_db: float | None = None) -> QuantPlan:
    """Returns a plan in which long-tailed inputs have shorter ranges, as long as the outputs gain from that.

    Range methods clip rare values without regard to the outputs, and with 16 bits the only method is minmax. But the
    tail of an input, such as the powers of a spectrum, may be too long for any step size, while the layer that reads it
    is saturated there. Each end with such a tail is halved, which gives all other values one more bit, as long as that
    gains NOTABLE_DB. `reached_db` is the ratio of the draft with float weights, if it was judged before.
    """
    plan, ends = draft.plan, _find_tails(draft)
    if not ends:
        return plan
    draft = draft.use_unsigned()
    graph, fed = candidates.plans_to_inputs(draft, {"": draft.plan}, candidates.place_draft(draft))
    judge = draft.open_judge(graph)
    reached = judge(fed[""]) if reached_db is None else reached_db
    for name, end in ends if reached < GOOD_DB else ():
        while True:
            span = plan.wide.get(name, plan.ranges[name])
            shorter = msgspec.structs.replace(span, **{end: getattr(span, end) / 2})
            ranges, wide = (set_range(draft.graph, own, name, shorter) for own in (plan.ranges, plan.wide))
            tried = msgspec.structs.replace(plan, ranges=ranges, wide=wide)
            unsigned = msgspec.structs.replace(draft, plan=tried).use_unsigned().plan
            grids = find_plan_grids(draft.graph, unsigned)
            found = judge({name: grids[name] for name in fed[""]}, reached + candidates.NOTABLE_DB)
            if found <= reached + candidates.NOTABLE_DB:
                break
            plan, reached = tried, found
    return plan


def _find_tails(draft: candidates.Draft) -> list[tuple[str, str]]:
    """Returns the ends of input ranges that may be worth halving, judging by the held-out samples.

    A range of half the width gives each value inside it one bit more, and takes all 8 bits from each value outside, so
    fewer than a ninth of the values may lie there. An image has no such end, so no session is made to try it.
    """
    ranges = {name: draft.plan.ranges[name] for name in draft.graph.inputs if name in draft.plan.ranges}
    ends = {(name, end): sign * getattr(ranges[name], end) for name in ranges for end, sign in _SIGNS.items()}
    beyond, size = Counter[tuple[str, str]](), Counter[str]()
    for sample, _ in read_held_out(draft.statistics):
        size.update({name: sample[name].size for name in ranges})
        beyond.update({each: int((_SIGNS[each[1]] * sample[each[0]] > end / 2).sum()) for each, end in ends.items()})
    return [each for each, end in ends.items() if end > 0 and beyond[each] * 9 < size[each[0]]]


_SIGNS = {"low": -1, "high": 1}


def bound_relief_by_count(subject: candidates.Subject, plan: QuantPlan, counts: Sequence[int]) -> dict[int, float]:
    """Returns, for each count, an upper bound of the noise share that the `count` worst tensors cause (`bound_relief`).

    Raises:
        UsageError: the statistics are gone.
    """
    noise = list(rank_tensors(subject.open_draft(plan), subject.memo, max(counts)).values())
    return {count: bound_relief(noise, count) for count in counts}


def bound_relief(noise: Sequence[float], count: int) -> float:
    """Returns an upper bound of the noise share that is removed once the `count` worst tensors leave 8 bits.

    `noise` holds n_1, n_2, ..., the noise power at the outputs if one tensor alone has 8 bits, worst first. These add
    up, together with w >= 0, the noise of rounded weights. A step removes n_1 + ... + n_count of the total. Since w is
    not known, the result leaves it out: (n_1 + ... + n_count) / (n_1 + n_2 + ...), which is never too small. It bounds
    how much the ratio rises (`rise_db`), and how much the drop falls: no faster than the power of the noise. A step
    that cannot gain enough is not tried, since trying it takes four sessions.
    """
    return sum(noise[:count]) / max(sum(noise), _TINY)


def rise_db(share: float) -> float:
    """Returns by how much a signal-to-noise ratio rises, in dB, once a share of the noise is gone."""
    return -10 * math.log10(max(1 - share, _TINY))


def relieve_tensors(
    graph: Graph, plan: QuantPlan, names: Sequence[str], calibration: Calibration, *, widens: bool
) -> QuantPlan:
    """Returns the plan with some activations out of 8 bits: in 16 bits with headroom, or float.

    Tensors between a layer and its activation function leave 8 bits too: otherwise a value is rounded, and clipped to
    the range after the activation function, before it gets its 16 bits. Outputs of nodes that only move values get 16
    bits as well: otherwise a Squeeze would round them to 8. If a tensor stays float, so do its producer and its
    readers, so that no Q or DQ touches it.
    """
    every = dict[str, None]()
    for name in names:
        every[name], maker = None, graph.producers.get(name)
        # For y = Relu(x) that is x, and further back if an activation function makes x too.
        while maker is not None and maker.op_type in _ACTIVATIONS:
            source = range_source(graph, maker.input[0])
            every |= dict.fromkeys(before for before in (maker.input[0], source) if before in graph.producers)
            maker = graph.producers.get(source)
    if widens:
        roomy = add_headroom(graph, calibration.ranges["minmax"])
        seen = {name: its for name, its in roomy.items() if range_source(graph, name) in every}
        # Rows that a Gather takes from a table have its grid: the table is stored in 16 bits too.
        constants = [name for name in every if graph.is_float_constant(name)]
        constants += _find_operands(graph, (*every, *seen))
        wide = {**plan.wide, **seen, **{name: read_constant_range(graph, name, plan.ranges) for name in constants}}
        if plan.scheme == "qnn":
            wide = _widen_joined(graph, wide, plan.ranges, roomy)
        return msgspec.structs.replace(plan, wide=wide)
    return keep_float(graph, plan, tuple(every))


def _find_operands(graph: Graph, names: Collection[str]) -> list[str]:
    """Returns the constants of the additions, products and Pads that make or read these tensors.

    Example: scikit-learn subtracts a mean of its own from each column. In 8 bits the means of all columns have the
    steps of the largest, and the tensor is off by a constant that its own 16 bits do not mend. A product with the
    frequencies of an encoding of places has no low ones then.
    """
    nodes = [graph.producers[name] for name in names if name in graph.producers]
    nodes += [node for name in names for node in graph.readers(name)]
    readers = {node.name: node for node in nodes if node.op_type in _WITH_CONSTANTS}
    constants = dict.fromkeys(name for node in readers.values() for name in node.input if graph.is_float_constant(name))
    # A constant has one grid for all its readers, and a node that computes in 8 bits would not be taken with one in 16.
    shared = {name for name in constants if any(node.name not in readers for node in graph.readers(name))}
    return [name for name in constants if name not in shared]


def _widen_joined(
    graph: Graph, wide: Mapping[str, TensorRange], narrow: Mapping[str, TensorRange], roomy: Mapping[str, TensorRange]
) -> dict[str, TensorRange]:
    """Returns `wide` with those inputs of its Concats added whose steps are finer even in 8 bits, for QNN.

    `narrow` holds the ranges of tensors in 8 bits, `roomy` those in 16.

    Example: a network returns the states of its LSTM in one tensor. The hidden state lies within 1 and has 8 bits, the
    cell state reaches 300, so the Concat got 16 bits. QNN's HTP requantizes the hidden state from 8 bits to the steps
    of the Concat, which are coarser, and is off by a constant (targets/qnn/NOTES.md). From 16 bits it is right.
    """
    found, steps = dict(wide), {name: (span.high - span.low) / _STEPS_16 for name, span in wide.items()}
    # From the outputs on: one Concat may join what another made, and the coarser of their steps counts.
    for node in reversed(graph.nodes):
        if node.op_type != "Concat" or node.output[0] not in steps:
            continue
        step, joined = steps[node.output[0]], [name for name in node.input if name in narrow and name not in found]
        finer = {range_source(graph, name) for name in joined if (narrow[name].high - narrow[name].low) / _STEPS < step}
        moved = {name: span for name, span in roomy.items() if range_source(graph, name) in finer}
        found, steps = moved | found, dict.fromkeys(moved, step) | steps
    return found


def keep_float(graph: Graph, plan: QuantPlan, names: Sequence[str]) -> QuantPlan:
    """Returns the plan with the nodes in float that make or read some activations."""
    kept = {node.name: node for node in plan.float_nodes}
    for name in names:
        maker = graph.producers.get(name)
        width = 16 if name in plan.wide or not is_relievable(plan) else 8
        for node in (*([maker] if maker is not None else []), *graph.readers(name)):
            reason = f"it makes or reads '{name}', which {width} bits do not hold"
            kept.setdefault(node.name, FloatNode(name=node.name, op=node.op_type, reason=reason))
    return msgspec.structs.replace(plan, float_nodes=tuple(kept.values()))


def rank_tensors(draft: candidates.Draft, memo: candidates.Memo, count: int = 1) -> dict[str, float]:
    """Returns the noise power of each tensor in 8 bits, as a share of the signal's, worst first.

    At least the first `count` are measured by themselves. The memo keeps the result for later steps.
    """
    unsigned, effort = draft.use_unsigned(), draft.effort
    worst = next(each for each in _RANKED if each >= count)
    key = f"{candidates.digest_draft(unsigned)}.{worst}"
    if key in memo.ranked:
        return memo.ranked[key]
    # A choice, to save time. With two samples a line recognizer kept 7.6 dB without its 20 worst tensors in 8 bits,
    # with four 13.7 dB.
    samples, guesses = 4 if effort.is_short else 1, dict[str, float]()
    # A guess of the relative noise of an activation: the step over the range of 99.9 % of its values.
    plan, ranges = draft.plan, draft.calibration.ranges
    for name, span in ranges.get(_MOST_VALUES, ranges["minmax"]).items():
        step = (plan.ranges[name].high - plan.ranges[name].low) / _STEPS
        scale = plan.grids[name].scale if name in plan.grids else step
        guesses[name] = min(1.0, scale / max(span.high - span.low, _TINY))
    bound = Bound(worst=worst, most=int(effort.runs * RANKED_SHARE), samples=samples, guesses=guesses)
    errors = rank_activations(draft, candidates.place_draft(unsigned), memo.budget, bound=bound, known=memo.noises)
    # A tensor that only a Relu or Clip reads leaves 8 bits together with the output of that node: they count as one.
    folded = folded_activations(draft.graph)
    noise: dict[str, float] = {}
    for error in errors:
        source = range_source(draft.graph, error.name)
        noise.setdefault(folded.get(source, source), 10 ** (-error.sqnr_db / 10))
    if not memo.budget.left_out:
        memo.ranked[key] = noise
    return noise


# How many tensors of 16 bits become float at each step: each takes its neighbours with it.
_FLOAT_COUNTS = (1, 3, 8)


class WideRange(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors whose values 16 bits cannot represent well.

    Each of `steps` names tensors to try in float, worst first. `beyond_float` names those that the target's float16
    represents no better.
    """

    steps: tuple[tuple[str, ...], ...] = ()
    beyond_float: tuple[str, ...] = ()


def find_wide_range(subject: candidates.Subject, first: QuantPlan, plan: QuantPlan) -> WideRange:
    """Returns the 16-bit tensors that cause much of the noise of `plan`; `first` is the plan with no added 16 bits.

    The step of 16 bits is 257 times finer than that of 8, which usually lowers the noise by 48 dB. Not so for values
    that span many decades, as the powers of a spectrum do: a step that the largest value needs hides most of the
    others, in 16 bits too. Floats have steps in proportion to each value, down to the smallest that their type holds:
    6e-8 in float16, in which some providers compute all floats (`Target.float_bits`).

    Only tensors that ruin the outputs by themselves in 8 bits qualify: from all others 16 bits remove the noise. So if
    there is none, the ranking with 16 bits is not made.

    Raises:
        UsageError: the statistics are gone.
    """
    if is_relievable(first):
        ranked = rank_tensors(subject.open_draft(first), subject.memo)
        ruinous = {name for name, noise in ranked.items() if noise > 10 ** (-COLLAPSED_DB / 10)}
        if not (ruinous & plan.wide.keys() if is_relievable(plan) else ruinous):
            return WideRange()
    draft = subject.open_draft(plan)
    noise = rank_tensors(draft, subject.memo)
    # The largest step, of tensors with less noise than this, would not gain enough.
    least = sum(noise.values()) * (1 - 10 ** (-LEAST_GAIN_DB / 10)) / _FLOAT_COUNTS[-1]
    wide = [name for name in noise if noise[name] >= least and (name in plan.wide or not is_relievable(plan))]
    wide = wide[: _FLOAT_COUNTS[-1]]

    def gains(names: Sequence[str], before: Sequence[str] = ()) -> bool:
        left, gone = (sum(noise[name] for name in each) for each in (noise.keys() - {*before}, {*names} - {*before}))
        return gone > 0 and rise_db(gone / left) >= LEAST_GAIN_DB

    if not gains(wide):
        return WideRange()
    float16_db = dict[str, float]()
    if subject.target.float_bits == 16:
        qdq = build_qdq(draft.graph, draft.use_unsigned().plan, draft.statistics, "the candidate")
        float16_db = measure_float16(draft, qdq, wide)

    # Where float16 was not measured, floats are those of 32 bits.
    floats = [n for n in wide if float16_db.get(n, math.inf) >= -10 * math.log10(noise[n]) + LEAST_GAIN_DB]
    steps = [tuple(floats[:count]) for count in (0, *_FLOAT_COUNTS)]
    return WideRange(
        steps=tuple(names for before, names in pairwise(steps) if gains(names, before)),
        beyond_float=tuple(name for name in wide if name not in floats and gains([name])),
    )


def keep_tensors_float(subject: candidates.Subject, plan: QuantPlan, names: tuple[str, ...]) -> QuantPlan | None:
    """Returns a plan with some 16-bit tensors in float, None if nothing would be quantized.

    Tensors with the same values in other positions, such as behind a Reshape, are kept float too: else the next
    operator would read them in 16 bits.
    """
    graph = subject.open_draft(plan).graph
    moved = [name for name in float_activations(graph) if range_source(graph, name) in names]
    kept = keep_float(graph, plan, tuple(dict.fromkeys((*names, *moved))))
    return kept if quantizes_any(graph, kept) else None


# Operators that scale and shift an input, if they read constants beside it.
_SCALING_OPS = frozenset({"Add", "BatchNormalization", "Div", "Mul", "Sub"})


def explain_wide_range(graph: Graph, name: str, target: Target) -> str:
    """Returns a line that says why neither 16 bits nor float16 represent a tensor, and what to do.

    An app can compute in float32 what scales an input, such as a table's columns of thousands and of thousandths.
    """
    half = np.finfo(np.float16)
    holds = f"fp16, in which {target.name} computes floats: it holds {half.smallest_subnormal:.0e} to {half.max:.0f}"
    advice, behind = "scale it, or take its logarithm before the model", name
    while name in graph.inputs and len(readers := graph.readers(behind)) == 1:
        if readers[0].op_type not in _SCALING_OPS or not {*readers[0].reads} - {behind} <= graph.constants.keys():
            break
        behind = readers[0].output[0]
    if behind != name:
        advice = f"let the app compute '{behind}' from it: edgekit prepare MODEL --inputs '{behind}' --out FILE"
    return f"'{name}' loses most, in 16 bits as in {holds}; {advice}"
