"""Keeps tensors in float that even 16 bits cannot represent.

The step of 16 bits is 257 times finer than that of 8, which usually lowers the noise by 48 dB. Not so for values that
span many decades, as the powers of a spectrum do: a step that the largest value needs hides most of the others, in 16
bits too. Floats have steps in proportion to each value, down to the smallest that their type holds: 6e-8 in float16, in
which some providers compute all floats (`Target.float_bits`).
"""

import math
from collections.abc import Sequence
from itertools import pairwise

import msgspec
import numpy as np

from edgekit.model.model import Model
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.graph.float_graph import float_activations, range_source
from edgekit.quantize.mixed_precision import relief
from edgekit.quantize.mixed_precision.candidates import Draft, Memo
from edgekit.quantize.mixed_precision.sensitivity import measure_float16
from edgekit.quantize.plan import QuantPlan, is_relievable, quantizes_any
from edgekit.quantize.qdq import build_qdq
from edgekit.target import Target

# How many tensors of 16 bits become float at each step: each takes its neighbours with it.
_COUNTS = (1, 3, 8)


class WideRange(msgspec.Struct, frozen=True, kw_only=True):
    """Tensors whose values 16 bits cannot represent well.

    Each of `steps` names tensors to try in float, worst first. `beyond_float` names those that the target's float16
    represents no better.
    """

    steps: tuple[tuple[str, ...], ...] = ()
    beyond_float: tuple[str, ...] = ()


def find_wide_range(
    model: Model, calibration: Calibration, target: Target, first: QuantPlan, plan: QuantPlan, memo: Memo
) -> WideRange:
    """Returns the 16-bit tensors that cause much of the noise of `plan`; `first` is the plan with no added 16 bits.

    Only tensors that ruin the outputs by themselves in 8 bits qualify: from all others 16 bits remove the noise. So if
    there is none, the ranking with 16 bits is not made.

    Raises:
        UsageError: the statistics are gone.
    """
    if is_relievable(first):
        ranked = relief.rank_tensors(relief.open_draft(model, calibration, first), memo)
        ruinous = {name for name, noise in ranked.items() if noise > 10 ** (-relief.COLLAPSED_DB / 10)}
        if not ruinous & plan.wide.keys():
            return WideRange()
    draft = relief.open_draft(model, calibration, plan)
    noise = relief.rank_tensors(draft, memo)
    # The largest step, of tensors with less noise than this, would not gain enough.
    least = sum(noise.values()) * (1 - 10 ** (-relief.LEAST_GAIN_DB / 10)) / _COUNTS[-1]
    wide = [name for name in noise if noise[name] >= least and (name in plan.wide or not is_relievable(plan))]
    wide = wide[: _COUNTS[-1]]

    def gains(names: Sequence[str], before: Sequence[str] = ()) -> bool:
        left, gone = (sum(noise[name] for name in each) for each in (noise.keys() - {*before}, {*names} - {*before}))
        return gone > 0 and relief.rise_db(gone / left) >= relief.LEAST_GAIN_DB

    if not gains(wide):
        return WideRange()
    float16_db = dict[str, float]()
    if target.float_bits == 16:
        qdq = build_qdq(draft.graph, draft.use_unsigned().plan, draft.statistics, "the candidate")
        float16_db = measure_float16(draft.graph, qdq, draft.compared, draft.statistics, wide)

    def holds_more(name: str) -> bool:
        return name not in float16_db or float16_db[name] >= -10 * math.log10(noise[name]) + relief.LEAST_GAIN_DB

    floats = [name for name in wide if holds_more(name)]
    steps = [tuple(floats[:count]) for count in (0, *_COUNTS)]
    return WideRange(
        steps=tuple(names for before, names in pairwise(steps) if gains(names, before)),
        beyond_float=tuple(name for name in wide if name not in floats and gains([name])),
    )


def keep_tensors_float(
    model: Model, calibration: Calibration, plan: QuantPlan, names: tuple[str, ...]
) -> QuantPlan | None:
    """Returns a plan with some 16-bit tensors in float, None if nothing would be quantized.

    Tensors with the same values in other positions, such as behind a Reshape, are kept float too: else the next
    operator would read them in 16 bits.
    """
    graph = relief.open_draft(model, calibration, plan).graph
    moved = [name for name in float_activations(graph) if range_source(graph, name) in names]
    kept = relief.keep_float(graph, plan, tuple(dict.fromkeys((*names, *moved))))
    return kept if quantizes_any(graph, kept) else None


def explain_wide_range(name: str, target: Target) -> str:
    """Returns a line that says why neither 16 bits nor float16 represent a tensor, and what to do."""
    half = np.finfo(np.float16)
    holds = f"fp16, in which {target.name} computes floats: it holds {half.smallest_subnormal:.0e} to {half.max:.0f}"
    return f"'{name}' loses most, in 16 bits as in {holds}; scale it, or take its logarithm before the model"


def name_worst(first: Draft, plan: QuantPlan, memo: Memo) -> str:
    """Returns a line that names the 8-bit tensor of a plan that loses most, "" if none is left.

    `first` is the draft with no tensors out of 8 bits, whose ranking is in the memo.
    """
    floats = {node.name for node in plan.float_nodes}
    for name, noise in relief.rank_tensors(first, memo).items() if is_relievable(plan) else ():
        if name not in plan.wide and any(node.name not in floats for node in first.graph.readers(name)):
            return (
                f"of the tensors in 8 bits '{name}' loses most: {-10 * math.log10(noise):.1f} dB are left with it alone"
            )
    return ""
