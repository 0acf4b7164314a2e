"""Comparing two models layer by layer: the accumulated error of each, and the error that each makes itself."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edgekit.data.samples import Samples
from edgekit.errors import ModelError
from edgekit.graph.graph import Graph
from edgekit.model.model import Model
from edgekit.model.scaling import read_scaling, scale_channels
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.layers.attributes import find_altered
from edgekit.verify.layers.biases import find_mismatched_scales
from edgekit.verify.layers.isolate import IsolatedLayers, isolate_layers
from edgekit.verify.layers.overflows import HALF_MAX, Size, measure_size, settle_infinities
from edgekit.verify.layers.subgraphs import InnerNode, find_inner_differences
from edgekit.verify.layers.weights import Initializers, WeightFacts, measure_weights
from edgekit.verify.matching.grids import Grid, StepErrors, add_steps, find_grids, follow_moves, measure_steps
from edgekit.verify.matching.match import MatchedTensor, match_tensors
from edgekit.verify.matching.regions import ROUNDING, Arithmetic, Region, find_regions
from edgekit.verify.matching.trace import adapt_sample, open_traced
from edgekit.verify.metrics import tensor_metrics as metrics
from edgekit.verify.metrics.tensor_metrics import ErrorSums


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the output of a layer of model B lies from the tensor of the same name in model A.

    `sqnr_db` and `max_abs` measure the error that has accumulated there; `own_sqnr_db` that of this layer alone, run on
    A's values. `own_bias` is the share of that error's energy that is a constant offset, which a wrong zero point
    makes large. `weight_steps` is the distance in steps of the worst single weight from its float weight, None where
    the layer has none; otherwise None stands for values that are not finite. `offset_steps` (the mean) and
    `channel_steps` (the root of the mean square of the worst channel and of the middle one) tell how many steps the
    layer's own result lies from the float values rounded to its grid, where it has one; a step is that of an 8-bit
    grid, or a 255th of the range of the values. `arithmetic` is the coarsest that computes the layer,
    `roundings` counts those inside it, `jumps` tells that a small change may make it jump, and `overflows` that A's
    values lie beyond half precision there, where that is what B computes in. `name` and `op` are those of B's node,
    `tensor` is the name in A.
    `rounding_steps` is what rounding weights and result may be expected to cost a channel of it, and all of it.
    `altered` says in words how the operator is not A's, whatever its result, and `unfit` which scale of B does not fit
    the others; "" where nothing is known against it.
    """

    name: str
    op: str
    tensor: str
    sqnr_db: float | None
    max_abs: float | None
    own_sqnr_db: float | None
    own_bias: float | None
    weight_steps: float | None = None
    offset_steps: float | None = None
    channel_steps: tuple[float, float] | None = None
    arithmetic: Arithmetic | None = None
    roundings: int = 0
    jumps: bool = False
    overflows: bool = False
    rounding_steps: tuple[float, float] | None = None
    non_finite: int = 0
    altered: str = ""
    unfit: str = ""


class _Sums(msgspec.Struct):
    """What is known of a layer so far: its errors, and the largest value and the largest RMS it read."""

    found: ErrorSums | None = None
    own: ErrorSums | None = None
    steps: StepErrors | None = None
    reach: float = 0.0
    size: float = 0.0


class _Seen(msgspec.Struct, kw_only=True):
    """What the samples showed: the tensors that both models compute, and of these the floats that can be compared."""

    every: tuple[MatchedTensor, ...]
    matched: tuple[MatchedTensor, ...]
    regions: dict[str, Region] = {}
    altered: dict[str, str] = {}
    sums: dict[str, _Sums] = {}


def compare_layers(a: Model, b: Model, samples: Samples) -> tuple[LayerReport, ...]:
    """Returns every float tensor that both models compute, in the order of computation, with its errors.

    Both models run with every optimisation off, so that no tensor is fused away. Memory holds the tensors of one
    sample.

    Raises:
        ModelError: no float tensor of `b` bears the name of one of `a`.
        UsageError: the samples do not fit a model.
    """
    floats, stored = Initializers(a), Initializers(b)
    grids = find_grids(b)
    # Sessions and tensors are gone before the weights are read.
    seen = _run_samples(floats, stored, samples, grids)
    every, sums, altered = seen.every, seen.sums, seen.altered
    inner = find_inner_differences(floats, stored, every)
    if not sums and not altered:
        raise ModelError(f"'{b.path}' and '{a.path}' have no layer in common", hint="compare models of one origin")
    weights, unfit = measure_weights(floats, stored, seen.matched, seen.regions), find_mismatched_scales(stored)
    layers = (
        msgspec.structs.replace(
            _report(item, sums.get(item.tensor, _Sums()), seen.regions.get(item.tensor, Region()), grids, weights),
            altered=altered.get(item.tensor, ""),
            unfit=unfit.get(item.raw_b) or unfit.get(item.layer, ""),
        )
        for item in every
        if item.tensor in sums or item.tensor in altered or item.tensor in inner
    )
    return tuple(_look_inside(layer, inner.get(layer.tensor)) for layer in layers)


def _run_samples(
    floats: Initializers, stored: Initializers, samples: Samples, grids: Mapping[str, Grid | None]
) -> _Seen:
    """Runs both models, and each layer alone, on every sample."""
    a, b = floats.model, stored.model
    graphs, scaling = (floats.graph, stored.graph), read_scaling(stored.proto)
    every = match_tensors(*graphs)
    seen = _Seen(every=every, matched=every)
    traced_a = open_traced(a, [tensor.in_a for tensor in every])
    traced_b = open_traced(b, [tensor.in_b for tensor in every])
    isolated: IsolatedLayers | None = None

    def add(sample: Tensors) -> None:
        nonlocal isolated
        wanted, found = traced_a.run(adapt_sample(sample, a)), traced_b.run(adapt_sample(sample, b))
        scaled = {item.in_a: scaling[item.raw_b] for item in seen.matched if item.raw_b in scaling}
        wanted = {**wanted, **{name: scale_channels(wanted[name], factors) for name, factors in scaled.items()}}
        if isolated is None:
            # A sequence or a map came back as its parts, under other names.
            seen.every = tuple(item for item in every if item.in_a in wanted and item.in_b in found)
            seen.matched = _keep_comparable(seen.every, wanted, found)
            seen.altered = find_altered(floats, stored, seen.every, sample) | _find_resized(
                seen.every, seen.matched, graphs, (wanted, found)
            )
            seen.regions = find_regions(*graphs, seen.matched)
            isolated = isolate_layers(
                (a, b), seen.matched, (wanted, found), seen.regions, (follow_moves(grids, graphs[1]), scaling)
            )
        reference, own = isolated.run(sample, wanted, found)
        _add_results(seen.sums, seen.matched, seen.regions, grids, (wanted, found, reference, own))

    # A call each: the tensors of a sample are gone before those of the next are computed.
    for sample in samples:
        add(sample)
    return seen


def _look_inside(layer: LayerReport, inner: InnerNode | None) -> LayerReport:
    """Returns the layer, or where one of its subgraphs holds a node that is not A's that node in its place."""
    if inner is None:
        return layer
    words = f"{inner.words} (inside '{layer.name}')"
    return msgspec.structs.replace(layer, name=inner.name, op=inner.op, altered=words)


def _add_results(
    sums: dict[str, _Sums],
    matched: Sequence[MatchedTensor],
    regions: Mapping[str, Region],
    grids: Mapping[str, Grid | None],
    values: tuple[Tensors, Tensors, Tensors, Tensors],
) -> None:
    """Adds what one sample says of every layer: the values of A, those of B, and what each makes of A's."""
    wanted, found, reference, own = values
    sizes = {item.tensor: measure_size(wanted[item.in_a]) for item in matched}
    for item in matched:
        known, size = sums.setdefault(item.tensor, _Sums()), sizes[item.tensor]
        reads = [sizes[name] for name in regions[item.tensor].reads]
        known.reach = max(known.reach, *(each.largest for each in (size, *reads)))
        known.size = max(known.size, *(each.rms for each in reads), 0.0)
        copies = [_widen(own[name]) for name in sorted(item.copies_in_b)]
        # Widened once: each of the sums is taken in float64.
        exact, same = _widen(wanted[item.in_a]), reference[item.in_a] is wanted[item.in_a]
        accumulated = metrics.sum_errors(*settle_infinities(exact, _widen(found[item.in_b]), size))
        known.found = accumulated if known.found is None else metrics.add_sums(known.found, accumulated)
        given = (exact, size) if same else (_widen(reference[item.in_a]), None)
        _add_own(known, given, copies, grids.get(item.raw_b))


def _add_own(known: _Sums, given: tuple[Array, Size | None], own: Sequence[Array], grid: Grid | None) -> None:
    """Adds a layer's own results of one sample; where several nodes round it, the worst counts."""
    wanted, size = given
    pairs = [settle_infinities(wanted, value, size) for value in own]
    measured = [metrics.sum_errors(*pair) for pair in pairs]
    worst = max(range(len(own)), key=lambda place: (measured[place].non_finite, measured[place].error_energy))
    known.own = measured[worst] if known.own is None else metrics.add_sums(known.own, measured[worst])
    if not measured[worst].non_finite:
        known.steps = add_steps(known.steps, measure_steps(grid, *pairs[worst]))


def _widen(value: Array) -> Array:
    return value.astype(np.float64, copy=False)


def _keep_comparable(matched: Sequence[MatchedTensor], wanted: Tensors, found: Tensors) -> tuple[MatchedTensor, ...]:
    return tuple(
        item
        for item in matched
        if wanted[item.in_a].dtype.kind == found[item.in_b].dtype.kind == "f"
        and wanted[item.in_a].shape == found[item.in_b].shape
        and wanted[item.in_a].size
    )


def _find_resized(
    every: Sequence[MatchedTensor],
    comparable: Sequence[MatchedTensor],
    graphs: tuple[Graph, Graph],
    values: tuple[Tensors, Tensors],
) -> dict[str, str]:
    """Returns, in words, the first tensor that has another number of elements than in A, if that is no accident.

    A layout may change the shape. Where operators decide by values how much they give, rounding may change the size.
    """
    for item in every:
        wanted, found = values[0][item.in_a], values[1][item.in_b]
        if wanted.size == found.size or not wanted.size or not found.size:
            continue
        region = find_regions(*graphs, [*comparable, item])[item.tensor]
        if region.reads and not region.jumps:
            return {item.tensor: f"its result has the shape {found.shape}, in the float model {wanted.shape}"}
        return {}
    return {}


def _report(
    item: MatchedTensor,
    sums: _Sums,
    region: Region,
    grids: Mapping[str, Grid | None],
    weights: Mapping[str, WeightFacts],
) -> LayerReport:
    facts = weights.get(item.tensor, WeightFacts())
    found, own, moved, grid = sums.found, sums.own, sums.steps, grids.get(item.raw_b)
    is_whole = own is not None and not own.non_finite
    layer = LayerReport(
        name=item.layer,
        op=item.op,
        tensor=item.tensor,
        sqnr_db=None if found is None or found.non_finite else metrics.sqnr_db([found]),
        max_abs=None if found is None or found.non_finite else found.max_abs,
        own_sqnr_db=metrics.sqnr_db([own]) if own is not None and is_whole else None,
        own_bias=metrics.bias_share([own]) if own is not None and is_whole else None,
        weight_steps=facts.steps,
        arithmetic=region.arithmetic,
        roundings=region.roundings,
        jumps=region.jumps,
        overflows=region.arithmetic == "half" and sums.reach > HALF_MAX,
        non_finite=0 if found is None else found.non_finite,
    )
    is_untold = grid is None and item.raw_b in grids
    step = 0.0 if moved is None or is_untold else moved.find_step(grid, ROUNDING[region.arithmetic] * sums.reach)
    if moved is None or not is_whole or step <= 0.0:
        return layer
    return msgspec.structs.replace(
        layer,
        offset_steps=moved.measure_offset(step),
        channel_steps=moved.measure_channels(step),
        rounding_steps=moved.expect_rounding(step, facts.noise * sums.size),
    )
