"""Two models compared layer by layer: the error accumulated up to each layer, and the error of the layer alone.

A layer's own error is measured on the inputs that it would have if all layers before it were exact. A build compares
the layers with the float model's and stores the figures in the bundle, because the bundle does not contain the float
model. For the first layer that stands out, its nodes and its result are examined for the cause, such as a wrong weight.
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, Literal

import msgspec
import numpy as np
import onnx

from edgekit._ort import CpuSession
from edgekit.bundle.folder import LAYERS, Bundle, read_fact
from edgekit.bundle.golden import Golden, read_inputs
from edgekit.data.samples import Samples, limit_samples, select_samples, spread_indices
from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.graph.constants import read_dequantized
from edgekit.graph.graph import Graph, Node, view_model
from edgekit.model.model import Model, read_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.channel_pairs import read_scaling, scale_channels
from edgekit.serialize import fill
from edgekit.verify.layers import grids, matching
from edgekit.verify.layers.matching import DEQUANTIZE
from edgekit.verify.layers.overflows import HALF_MAX, align_infinities, measure_size
from edgekit.verify.metrics import tensor_metrics as metrics
from edgekit.verify.metrics.changes import describe_change, describe_pairs
from edgekit.verify.metrics.tensor_metrics import Floats, SampleErrors, measure_errors, sqnr_db

# A weight that is rounded to 8 bits has a higher SQNR than this, and so has one on the worst grid of 4 bits.
_LEAST_WEIGHT_DB = 12.0
_MOST_CAUSES = 3


def _compare_nodes(wanted: Node, node: Node, a: Graph, b: Graph, *, scaled: bool) -> Iterator[str]:
    """Yields how a node of `b` differs from that of `a`; weights with channels `scaled` in `b` are not compared."""
    if node.op_type != wanted.op_type:
        yield f"its operator is {node.op_type}, in the reference {wanted.op_type}"
        return
    ours, theirs = _read_attributes(node), _read_attributes(wanted)
    for name in sorted(ours.keys() & theirs.keys()):
        is_float = isinstance(ours[name], float) and isinstance(theirs[name], float)
        is_same = math.isclose(ours[name], theirs[name], rel_tol=1e-5) if is_float else ours[name] == theirs[name]
        if not is_same:
            yield f"its attribute '{name}' is {_show(ours[name])}, in the reference {_show(theirs[name])}"
    for place, (its, mine) in enumerate(zip(wanted.input, node.input, strict=False)):
        expected, stored = _read_weight(its, a), _read_weight(mine, b)
        if expected is None or stored is None or scaled or expected.shape != stored.shape or not expected.size:
            continue
        lost = sqnr_db([measure_errors(expected.astype(np.float64), stored.astype(np.float64))])
        if lost < _LEAST_WEIGHT_DB:
            change = describe_change(expected[np.newaxis], stored[np.newaxis])
            yield f"its input {place}, '{mine}', {change or f'lies {lost:.1f} dB from that of the reference'}"


def _read_attributes(node: Node) -> dict[str, Any]:
    """Returns the attributes of a node, those that it leaves out with the defaults of the operator."""
    try:
        schema = onnx.defs.get_schema(node.op_type, node.since, node.domain)
    except onnx.defs.SchemaError:
        return node.attributes
    known = {name: item.default_value for name, item in schema.attributes.items() if item.default_value.type}
    values = {name: onnx.helper.get_attribute_value(value) for name, value in known.items()}
    defaults = {name: value.decode() if isinstance(value, bytes) else value for name, value in values.items()}
    return defaults | node.attributes


def _show(value: Any) -> str:
    return f"{value:.6g}" if isinstance(value, float) else str(list(value) if isinstance(value, tuple) else value)


def _read_weight(name: str, graph: Graph) -> Array | None:
    """Returns a constant of numbers, dequantized if it is rounded; None for anything else."""
    node = graph.producers.get(name)
    try:
        if node is None:
            value = graph.constant(name)
        elif node.op_type == DEQUANTIZE and all(part in graph.constants for part in node.reads):
            value = read_dequantized(node.proto, graph.weight)
        else:
            value = None
    except ValueError:
        return None
    return value if value is not None and value.dtype.kind in "fiu" else None


_MOST_CHANNEL_STEPS: Mapping[grids.Arithmetic, float] = {"float": 0.5, "half": 1.0, "int8": 2.5, "int4": 16.0}
_MOST_OFFSET_STEPS: Mapping[grids.Arithmetic, float] = {"float": 0.25, "half": 0.5, "int8": 0.5, "int4": 4.0}
"""How many 8-bit steps the worst channel of a layer's own result, and all of it, may be off before the layer stands
out. Measured by tools/bench/seeded_faults.py: a zero point off by one is 1.0, two swapped channels are 28 and more."""
# In a normal distribution 6 values in 100,000 are beyond four deviations: a model has about a thousand channels.
_SIGMAS = 4.0


class LayerReport(msgspec.Struct, frozen=True, kw_only=True):
    """How far the output of a layer of model B is from the tensor of the same name in model A.

    `sqnr_db` and `max_abs` measure the error accumulated up to there; `own_sqnr_db` that of this layer alone, run on
    A's values. `own_bias` is the share of that error's energy that is a constant offset, which a wrong zero point makes
    large. None stands for values that are not finite. `offset_steps` (the mean) and `channel_steps` (the root of the
    mean square of the worst channel and of the middle one) tell how many steps the layer's own result is from the float
    values rounded to its grid, if it has one; a step is that of an 8-bit grid, or a 255th of the range of the values.
    `arithmetic` is the coarsest that the layer computes in, and `roundings` counts the Q nodes inside it. `jumps` means
    that a small change of input may change its result abruptly, `overflows` that B computes here in half precision, and
    that A's values exceed its range. `name` and `op` are those of B's node, `tensor` is the name in A. `rounding_steps`
    is the error expected from rounding weights and result, of one channel and of all. `causes` say how the result
    differs (for example, it has another scale), and how the layer's nodes and weights differ from those of A.
    """

    name: str
    op: str
    tensor: str
    sqnr_db: float | None
    max_abs: float | None
    own_sqnr_db: float | None
    own_bias: float | None
    offset_steps: float | None = None
    channel_steps: tuple[float, float] | None = None
    arithmetic: grids.Arithmetic | None = None
    roundings: int = 0
    jumps: bool = False
    overflows: bool = False
    rounding_steps: tuple[float, float] | None = None
    non_finite: int = 0
    # UNSET is left out of files: only the first layer that stands out has causes.
    causes: tuple[str, ...] | msgspec.UnsetType = msgspec.UNSET

    @property
    def explained(self) -> str:
        """What is known about the causes, to follow a sentence about the layer; "" if nothing is."""
        return "".join(f"; {cause}" for cause in self.causes or ())


class Located(msgspec.Struct, frozen=True, kw_only=True):
    """The first layer that a device computes differently, None if there is none; and how many runs it took to find.

    `found_by` says whether the device returned the tensors inside, which `layers` then measures, or the model was cut
    at one of `cuts` places. `notes` say what was done differently, and why.
    """

    layer: str | None
    runs: int
    cuts: int
    found_by: Literal["tensors", "cuts"] = "cuts"
    layers: tuple[LayerReport, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def bad(self) -> LayerReport | None:
        """The report of the layer; of its result before and after rounding, the worse one."""
        named = [layer for layer in self.layers if layer.name == self.layer]
        return min(named, key=lambda layer: -math.inf if layer.own_sqnr_db is None else layer.own_sqnr_db, default=None)


class LayerErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The errors of a layer in one sample: accumulated (`found`), of the layer alone (`own`), and these in `steps`.

    `steps` are those of the grid to which the layer's result is rounded, None without a grid.

    `reach` is the largest value of the tensor and of the layer's inputs, `size` the largest RMS of these inputs.
    """

    found: SampleErrors
    own: SampleErrors
    steps: grids.StepErrors | None
    reach: float = 0.0
    size: float = 0.0


INPUT = "Input"
"""What stands for the operator of an input of the model, which no node computes."""
UNSTEADY = "when the device runs the same samples again"
_Pair = tuple[Array, Array]
"""What is expected, and what came instead."""


def measure_layer(
    grid: grids.Grid | None, found: _Pair, own: Iterable[_Pair], *, reach: float = 0.0, size: float = 0.0
) -> LayerErrors:
    """Returns the errors of a layer in one sample; of several of its `own`, if several nodes round it, the worst."""
    measured = [(metrics.measure_errors(*pair), pair) for pair in map(_align, own)]
    worst, pair = max(measured, key=lambda one: (one[0].non_finite, one[0].error_energy))
    steps = None if worst.non_finite or not pair[0].size else grids.measure_steps(grid, *pair)
    return LayerErrors(found=metrics.measure_errors(*_align(found)), own=worst, steps=steps, reach=reach, size=size)


def _align(pair: _Pair) -> _Pair:
    # Integers have no infinity to compare with, and numpy finds the extremes of halves 20 times as slowly.
    wanted, got = (side if side.dtype.char in "fd" else side.astype(np.float64) for side in pair)
    return align_infinities(wanted, got) if wanted.shape == got.shape else (wanted, got)


def report_layer(name: str, op: str, tensor: str, errors: Sequence[LayerErrors], step: float) -> LayerReport:
    """Returns the figures of a layer over all samples; without a step above zero none of them is in steps."""
    found, own = [each.found for each in errors], [each.own for each in errors]
    lost, is_finite = sum(each.non_finite for each in found), not any(each.non_finite for each in own)
    steps = grids.add_steps(each.steps for each in errors) if step > 0.0 and is_finite else None
    return LayerReport(
        name=name,
        op=op,
        tensor=tensor,
        sqnr_db=None if lost else metrics.sqnr_db(found),
        max_abs=None if lost else max(each.max_abs for each in found),
        own_sqnr_db=metrics.sqnr_db(own) if is_finite else None,
        own_bias=metrics.bias_share(own) if is_finite else None,
        # The absolute mean distance: a zero point off by one makes it 1.
        offset_steps=None if steps is None else abs(steps.total) / max(1, steps.count) / step,
        channel_steps=None if steps is None else steps.measure_channels(step),
        non_finite=lost,
    )


_GIVEN = matching.ISOLATED_PREFIX


class _Comparison:
    """The float tensors that two models compute, and how far these are apart over the samples that were added."""

    def __init__(self, a: Model, b: Model, kept: Collection[str] | None = None) -> None:
        protos = read_proto(a, weights=False), read_proto(b, weights=False)
        self._models = a, b
        self._graphs = view_model(protos[0], a.path.parent), view_model(protos[1], b.path.parent)
        self._scaling = read_scaling(protos[1])
        self._grids, self._moved_grids = grids.find_grids(self._graphs[1])
        matched = matching.match_tensors(*self._graphs)
        self._matched = tuple(item for item in matched if kept is None or item.tensor in kept)
        self._traced_a = matching.open_part(a, [tensor.in_a for tensor in self._matched])
        self._traced_b = matching.open_part(b, [tensor.in_b for tensor in self._matched])
        self._isolated: tuple[CpuSession | None, CpuSession] | None = None
        self._regions: dict[str, grids.Region] = {}
        self._errors: dict[str, list[LayerErrors]] = {}

    def add(self, sample: Tensors) -> None:
        """Runs both models, and each layer alone, on one sample."""
        wanted, found, reference, own = self._run(sample)
        sizes = {item.tensor: measure_size(wanted[item.in_a]) for item in self._matched}
        for item in self._matched:
            reads = [sizes[name] for name in self._regions[item.tensor].reads]
            errors = measure_layer(
                self._grids.get(item.in_b),
                (wanted[item.in_a], found[item.in_b]),
                ((reference[item.in_a], own[name]) for name in sorted(item.copies_in_b)),
                reach=max(largest for largest, _ in (sizes[item.tensor], *reads)),
                size=max((rms for _, rms in reads), default=0.0),
            )
            self._errors.setdefault(item.tensor, []).append(errors)

    def _run(self, sample: Tensors) -> tuple[Tensors, Tensors, Tensors, Tensors]:
        """Returns the tensors of both models, and what each layer of A and of B alone makes of A's, scaled as in B.

        If a layer of B rounds tensors that A does not have, both models read A's values rounded to B's grid, so that
        this rounding does not count as the layer's error.
        """
        given_a, given_b = (matching.adapt_sample(sample, model) for model in self._models)
        wanted, found = self._scale(self._traced_a.run(given_a)), self._traced_b.run(given_b)
        if self._isolated is None:
            self._isolated = self._open_isolated(wanted, found)
        (of_a, of_b), reference = self._isolated, wanted
        values = {item.in_a: wanted[item.in_a] for item in self._matched}
        if of_a is not None:
            for item in self._matched:
                value, grid = values[item.in_a], self._moved_grids.get(item.raw_b)
                values[item.in_a] = value if grid is None else grid.round_values(value).astype(value.dtype)
            scaled = self._scale(values, -1)
            feed = {_GIVEN + one.tensor: np.asarray(scaled[one.in_a], wanted[one.in_a].dtype) for one in self._matched}
            reference = self._scale(of_a.run({**given_a, **feed}))
        with np.errstate(over="ignore"):
            feed = {_GIVEN + one.tensor: np.asarray(values[one.in_a], found[one.in_b].dtype) for one in self._matched}
        return wanted, found, reference, of_b.run({**given_b, **feed})

    def explain(self, layer: LayerReport, samples: Samples) -> tuple[str, ...]:
        """Returns at most three causes why a layer stands out: how its result, its nodes and its weights differ.

        Only what it needs is computed again, for a few samples.
        """
        region = self._regions[layer.tensor]
        part = _Comparison(*self._models, {layer.tensor, *region.reads})
        item = next(item for item in self._matched if item.tensor == layer.tensor)
        grid, pairs = self._grids.get(item.in_b), list[_Pair]()
        for sample in limit_samples(samples, LAYER_SAMPLES):
            *_, reference, own = part._run(sample)
            wanted = reference[item.in_a]
            pairs.append((wanted if grid is None else grid.round_values(wanted), own[item.in_b]))
        scaled, (a, b) = any(each.raw_b in self._scaling for each in part._matched), self._graphs
        causes = [f"its result {change}"] if (change := describe_pairs(pairs)) else []
        nodes = {node.name: node for node in a.nodes if node.name}
        for node in dict.fromkeys(b.producers[name] for name in region.results):
            other = nodes.get(node.name)
            if other is not None and node.op_type not in matching.ROUNDING:
                causes.extend(_compare_nodes(other, node, a, b, scaled=scaled))
        return tuple(causes[:_MOST_CAUSES])

    def report(self) -> tuple[LayerReport, ...]:
        """Returns every tensor that was compared, in the order of computation."""
        reports: list[LayerReport] = []
        for item in self._matched if self._errors else ():
            region, errors = self._regions[item.tensor], self._errors[item.tensor]
            grid, moved = self._grids.get(item.in_b), grids.add_steps(each.steps for each in errors)
            reach, size = max(each.reach for each in errors), max(each.size for each in errors)
            is_unknown = grid is None and item.in_b in self._grids
            allowed = grids.allow_rounding(region.arithmetic, reach)
            step = 0.0 if moved is None or is_unknown else moved.find_step(grid, allowed)
            layer = report_layer(item.layer, item.op, item.tensor, errors, step)
            rounding = None
            if moved is not None and layer.offset_steps is not None:
                rounding = moved.expect_rounding(step, _measure_noise(self._graphs[1], region) * size, _SIGMAS)
            overflows = region.arithmetic == "half" and reach > HALF_MAX
            reports.append(fill(LayerReport, region, layer, overflows=overflows, rounding_steps=rounding))
        return tuple(reports)

    def _scale(self, values: Tensors, sign: int = 1) -> dict[str, Array]:
        """Returns A's tensors by name, with their channels scaled as B's are; with `sign` -1, scaled back."""
        scaled = (item for item in self._matched if item.raw_b in self._scaling)
        factors = {item.in_a: self._scaling[item.raw_b] ** sign for item in scaled}
        return {name: scale_channels(value, factors[name]) if name in factors else value
                for name, value in values.items()}  # fmt: skip

    def _open_isolated(self, wanted: Tensors, found: Tensors) -> tuple[CpuSession | None, CpuSession]:
        """Opens both models with every matched tensor as an input; model A only if B rounds inside a layer.

        Compared are the tensors that are floats of the same shape on both sides; sequences and maps are split into
        parts. The values are those of one sample.
        """
        known = (item for item in self._matched if item.in_a in wanted and item.in_b in found)
        sides = ((item, wanted[item.in_a], found[item.in_b]) for item in known)
        self._matched = kept = tuple(
            item for item, a, b in sides if a.dtype.kind == b.dtype.kind == "f" and a.shape == b.shape and a.size
        )
        (a, b), of_a = self._models, None
        self._regions = grids.find_regions(*self._graphs, kept)
        if any(region.roundings for region in self._regions.values()):
            in_a = {item.in_a: (item.tensor, wanted[item.in_a].dtype) for item in kept}
            of_a = matching.open_part(a, in_a, in_a, {item.tensor for item in kept if item.in_a != item.tensor})
        in_b = {name: (item.tensor, found[item.in_b].dtype) for item in kept for name in item.copies_in_b}
        return of_a, matching.open_part(b, in_b, in_b, {item.raw_b for item in kept if item.in_b != item.raw_b})


def compare_layers(a: Model, b: Model, samples: Samples) -> tuple[LayerReport, ...]:
    """Returns every float tensor that both models compute, in the order of computation, with its errors.

    Both models run with every optimisation off, so that no tensor is fused away. Only the tensors of one sample are in
    memory.

    Raises:
        ModelError: no float tensor of `b` bears the name of one of `a`.
        UsageError: the samples do not fit a model.
    """
    compared = _Comparison(a, b)
    # One call per sample, so that its tensors are freed before those of the next are computed.
    for sample in samples:
        compared.add(sample)
    if not (layers := compared.report()):
        raise ModelError(f"'{b.path}' and '{a.path}' have no layer in common", hint="compare models of one origin")
    if (bad := find_first_bad(layers)) is None:
        return layers
    explained = msgspec.structs.replace(bad, causes=compared.explain(bad, samples))
    return tuple(explained if layer is bad else layer for layer in layers)


def find_first_bad(layers: Sequence[LayerReport]) -> LayerReport | None:
    """Returns the first layer that stands out, or None.

    A layer stands out if its own result is not finite, or if it is farther from the float values, rounded to its grid,
    than rounding and clipping can explain: a channel by more than `_MOST_CHANNEL_STEPS`, or the mean of all by more
    than `_MOST_OFFSET_STEPS`. If Q nodes inside the layer could not be separated from it, each of them adds the same
    tolerance again. A layer that overflows because the float model's own values exceed half precision counts only if no
    other layer stands out.
    """
    bad = [layer for layer in layers if describe_layer(layer)]
    return next((layer for layer in bad if not layer.overflows), next(iter(bad), None))


def explain_layers(layers: Sequence[LayerReport]) -> tuple[str, ...]:
    """Returns a sentence about the first layer that stands out, or nothing."""
    if (bad := find_first_bad(layers)) is None:
        return ()
    words = f"layer '{bad.name}' ({bad.op}) is the first whose result is not the float model's: {describe_layer(bad)}"
    return (words + bad.explained,)


def name_first_bad(layers: Sequence[LayerReport]) -> str | None:
    """Returns the name of the first layer that stands out, or None."""
    layer = find_first_bad(layers)
    return None if layer is None else layer.name


def describe_layer(layer: LayerReport) -> str:
    """Returns, in words, how a layer stands out, or "" if it does not."""
    if layer.own_sqnr_db is None:
        return "its result is not finite, although what it was given is"
    if layer.arithmetic is None or layer.jumps or layer.channel_steps is None or layer.offset_steps is None:
        return ""
    granted, (worst, middle) = 1 + layer.roundings, layer.channel_steps
    of_channel, of_all = layer.rounding_steps or (0.0, 0.0)
    if worst > granted * _MOST_CHANNEL_STEPS[layer.arithmetic] + _SIGMAS * of_channel:
        return f"given the same values, a channel of its result is {worst:.1f} steps off (the middle one {middle:.2f})"
    if layer.offset_steps > granted * _MOST_OFFSET_STEPS[layer.arithmetic] + of_all:
        return f"given the same values, its result is {layer.offset_steps:.2f} steps off on the whole"
    return ""


def _measure_noise(graph: Graph, region: grids.Region) -> Floats:
    """Returns the expected RMS error that rounding of weights adds to each channel of a region, for inputs of RMS 1.

    It is scale * sqrt(terms / 12), for independent errors that are uniform within a step (Widrow and Kollar 2008).
    """
    squares = np.zeros(1)
    for node in (graph.producers[name] for name in region.results):
        by_row = node.op_type == "Conv" or bool(node.integer("transB", 0))
        for weight in (graph.producers.get(name) for name in node.input):
            if weight is None or weight.op_type != matching.DEQUANTIZE or weight.input[0] not in graph.constants:
                continue
            dims, scale = graph.constants[weight.input[0]].dims, graph.array(weight.input[1])
            terms = math.prod(dims) / max(1, dims[0 if by_row else -1]) if len(dims) > 1 else 0.0
            if scale is None or not scale.size:
                continue
            added = np.square(scale.reshape(-1).astype(np.float64)) * (terms / 12.0)
            if 1 not in {squares.size, added.size} and squares.size != added.size:
                # Of layers with other numbers of channels the largest of each counts.
                squares, added = np.array([squares.max()]), np.array([added.max()])
            squares = squares + added
    return np.asarray(np.sqrt(squares))


LAYER_SAMPLES = 4
"""How many samples, spread evenly, are compared layer by layer."""


class LayerEvidence(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The layers of a bundle's model compared with the float model's; `note` says why they were not compared."""

    layers: tuple[LayerReport, ...] = ()
    note: str = ""


def compare_with_float(prepared: Model, deployed: Model | None, golden: Golden) -> LayerEvidence:
    """Returns how the layers of the model that goes into a bundle compare with those of the float model.

    `deployed` is None for a bundle without an ONNX file.
    """
    if deployed is None:
        return LayerEvidence(note="the layers were not compared: the bundle holds no ONNX file")
    try:
        return LayerEvidence(layers=compare_layers(prepared, deployed, choose_layer_samples(golden)))
    except (ModelError, RuntimeRefusal) as error:
        reason = error.message
        for model in (prepared, deployed):
            reason = reason.replace(f"{model.path.parent}/", "")
        return LayerEvidence(note=f"the layers were not compared with the float model's: {reason}")


def choose_layer_samples(golden: Golden, count: int = LAYER_SAMPLES) -> Samples:
    """Returns the few samples, evenly spread, on which the tensors inside a model are compared."""
    return select_samples(read_inputs(golden), spread_indices(golden.samples, count))


def read_evidence(bundle: Bundle) -> LayerEvidence:
    """Returns the layers as they were compared when the bundle was built, or a note why there are none.

    Raises:
        BundleError: the file is malformed.
    """
    if LAYERS not in bundle.manifest.files:
        return LayerEvidence(note=f"the layers were not compared with the float model's: the bundle has no {LAYERS}")
    return read_fact(bundle, LAYERS, LayerEvidence)
