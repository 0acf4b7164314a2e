"""Judging the layers of a comparison: which of them does what rounding and clipping do not explain."""

from collections.abc import Mapping, Sequence

from edgekit.verify.layers.comparison import LayerReport
from edgekit.verify.layers.weights import FAR_STEPS
from edgekit.verify.matching.regions import Arithmetic

FAR_CHANNEL: Mapping[Arithmetic, float] = {"float": 0.5, "half": 1.0, "int8": 2.5, "int4": 16.0}
FAR_OFFSET: Mapping[Arithmetic, float] = {"float": 0.25, "half": 0.5, "int8": 0.5, "int4": 4.0}
"""How many steps of 8 bits the worst channel of a layer's own result, and all of it, may be off. Measured by
tools/bench/seeded_faults.py: CLEAN; a zero point off by one is 1.0, two swapped channels are 28 and more."""
# Of a normal distribution 6 values in 100,000 lie beyond four deviations: a model has some thousand channels.
_SIGMAS = 4.0
# An overflow inside that costs less than a tenth of the end's amplitude was meant: masks and saturated gates.
_LEAST_END_DB = 20.0


def judge_layers(layers: Sequence[LayerReport]) -> tuple[str, ...]:
    """Returns the reason why a model whose layers were compared is not the float model, nothing where there is none."""
    bad = find_first_bad(layers)
    if bad is None:
        return ()
    kinds = "weights, scales and attributes" if bad.op != "Input" else "scale and zero point"
    reason = _describe(bad) or bad.unfit
    words = f"layer '{bad.name}' ({bad.op}) does not compute what the float model does: {reason}"
    return (f"{words}; compare its {kinds} with the float model's, or build again",)


def find_first_bad(layers: Sequence[LayerReport]) -> LayerReport | None:
    """Returns the first layer that stands out, None if none does.

    A layer stands out if its operator is not the float model's, or if its own result is not finite, or if one weight is
    far from where it was rounded, or if a channel of its own result lies farther from the float values, rounded to its
    grid, than `FAR_CHANNEL`, or all of it farther than `FAR_OFFSET`: rounding and clipping are then no excuse. Where Q
    nodes inside the layer could not be told apart, each is granted as much again. An overflow of half precision does
    not count where the float model's values lie beyond it and the end of the model does not suffer, because a tanh or a
    softmax makes the same of infinity, or where another layer stands out. Where none does, it is one with a scale that
    does not fit the biases behind it.
    """
    end = layers[-1].sqnr_db if layers else None
    suffers = end is None or end < _LEAST_END_DB
    bad = [layer for layer in layers if _describe(layer)]
    found = [layer for layer in bad if not layer.overflows] or (bad if suffers else [])
    return next(iter(found), None) or next((layer for layer in layers if layer.unfit), None)


def name_first_bad(layers: Sequence[LayerReport]) -> str | None:
    """Returns the name of the first layer that stands out, None if none does."""
    layer = find_first_bad(layers)
    return None if layer is None else layer.name


def _describe(layer: LayerReport) -> str:
    """Returns in words how a layer stands out, "" if it does not."""
    known = layer.altered or _describe_values(layer)
    if known or layer.arithmetic is None or layer.jumps or layer.channel_steps is None or layer.offset_steps is None:
        return known
    granted, (worst, middle) = 1 + layer.roundings, layer.channel_steps
    of_channel, of_all = layer.rounding_steps or (0.0, 0.0)
    if worst > granted * FAR_CHANNEL[layer.arithmetic] + _SIGMAS * of_channel:
        return f"given the same values, a channel of its result is {worst:.1f} steps off (the middle one {middle:.2f})"
    if layer.offset_steps > granted * FAR_OFFSET[layer.arithmetic] + of_all:
        return f"given the same values, its result is {layer.offset_steps:.2f} steps off on the whole"
    return ""


def _describe_values(layer: LayerReport) -> str:
    if layer.own_sqnr_db is None:
        return "its result is not finite, although what it was given is"
    if (layer.weight_steps or 0.0) > FAR_STEPS:
        return "its weights are not the float model's, beyond what rounding explains"
    return ""
