"""Rounds the weights of a QDQ graph with second moments of layer inputs, and corrects biases.

With the rounding qronos, layers are rounded one after another, each for the inputs that reach it through the layers
rounded before. Results are stored beside the statistics that they depend on.
"""

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import writing
from edgekit.errors import UsageError
from edgekit.graph.constants import read_dequantized
from edgekit.graph.graph import Graph
from edgekit.machine import map_in_order, single_blas_thread
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize import gptq
from edgekit.quantize.calibration.held_out import read_fitted
from edgekit.quantize.calibration.moments import InputMoments, StoredMoments, block_sizes, patches_per_sample
from edgekit.quantize.calibration.store import StoredArrays, save_arrays
from edgekit.quantize.graph.layers import LAYER_OPS, Layer, expand_channel_factors, locate_patches, read_layers
from edgekit.quantize.graph.sessions import open_graph


def recall_rounded(
    statistics: Path, key: str, compute: Callable[[], dict[str, Array] | None]
) -> dict[str, Array] | None:
    """Returns the arrays that are stored under a key, or computes and stores them if there are none.

    A damaged file counts as none. The key is a digest of everything that the arrays depend on except the statistics.

    Raises:
        OutputError: the folder of statistics cannot be written.
    """
    path = statistics / "rounded" / f"{key}.bin"
    with contextlib.suppress(UsageError):
        return {**StoredArrays(path)}
    if (arrays := compute()) is not None:
        # Not through a temporary file, which takes longer: one that was cut off is found when it is read.
        with writing(path):
            path.parent.mkdir(exist_ok=True)
            save_arrays(path, arrays.items())
    return arrays


class Placed:
    """The nodes and constants of a QDQ graph by name; `rounders` are its QuantizeLinear nodes by what they round."""

    def __init__(self, qdq: onnx.GraphProto) -> None:
        self.stored = {tensor.name: tensor for tensor in qdq.initializer}
        self.makers = {name: node for node in qdq.node for name in node.output}
        self.nodes = {node.name: node for node in qdq.node}
        self.rounders = {node.input[0]: node for node in qdq.node if node.op_type == "QuantizeLinear"}

    def read(self, name: str) -> Array:
        """Returns a constant."""
        return numpy_helper.to_array(self.stored[name])

    def find_dequantizer(self, name: str) -> onnx.NodeProto | None:
        """Returns the DequantizeLinear that makes a tensor, None if there is none."""
        maker = self.makers.get(name)
        return maker if maker is not None and maker.op_type == "DequantizeLinear" else None

    def dequantize(self, node: onnx.NodeProto, index: int) -> Array | None:
        """Returns the rounded values of a node's constant input, float32, None if it is not rounded."""
        maker = self.find_dequantizer(node.input[index])
        return read_dequantized(maker, self.read) if maker is not None and maker.input[0] in self.stored else None


# The scale of an int32 bias is that of the input times that of the weight, which must be large enough for the bias to
# fit. ONNX Runtime's _adjust_weight_scale_for_int32_bias (qdq_quantizer.py) ensures that before weights are corrected,
# not after.
_INT32_MARGIN = 1.001 / (2**31 - 1)


class Rounder(msgspec.Struct, frozen=True, kw_only=True):
    """How the weights of a float graph are rounded.

    Attributes:
        graph: the float graph.
        statistics: the folder of a calibration's statistics. Results are stored there, for other targets that quantize
            the same layers in the same way.
        rounding: the method.
        factors: for each layer, the factors by which its input channels were scaled since the calibration.
        limit: the largest magnitude of the integers.
        bits: the bits of weights that do not have 8.
    """

    graph: Graph
    statistics: Path
    rounding: gptq.Rounding
    factors: Mapping[str, tuple[float, ...]] = {}
    limit: int = gptq.LIMIT
    bits: Mapping[str, int] = {}

    def read_moments(self, stored: StoredMoments, layer: Layer) -> InputMoments | None:
        """Returns the moments of a layer's input, scaled as the input was since the calibration; None without any."""
        moments = stored(layer.node)
        if moments is None or layer.node not in self.factors:
            return moments
        factors = np.asarray(self.factors[layer.node])
        scale = expand_channel_factors(layer, factors)[:, 0].astype(np.float32)
        pieces = scale.reshape(-1, moments.size)
        return msgspec.structs.replace(
            moments,
            mean=moments.mean * scale,
            spread=moments.spread * scale,
            low=moments.low * factors.astype(np.float32),
            high=moments.high * factors.astype(np.float32),
            covariance=moments.covariance * pieces[:, :, None] * pieces[:, None, :],
        )


class QdqLayer(msgspec.Struct, frozen=True, kw_only=True):
    """A layer of the float graph, the names of its initializers in the QDQ form, and the step of its quantized input.

    `limit` is the largest magnitude of the weight's integers. `source` is the tensor that the layer reads in the graph.
    The integers of the bias stay below the limit of int32 by the factor `spare`. With a scale of the weight below
    `least` the provider computes wrong results.
    """

    layer: Layer
    source: str
    weight: str
    weight_scale: str
    weight_zero: str
    bias: str | None
    bias_scale: str | None
    step: float
    per_channel: bool
    limit: int
    spare: float
    least: float

    @property
    def has_four_bits(self) -> bool:
        """True if its weight gets 4 bits."""
        return self.limit == gptq.FOUR_LIMIT

    @property
    def is_wide(self) -> bool:
        """True if its input and its output have 16 bits."""
        return self.least > 0


def find_places(qdq: onnx.GraphProto, how: Rounder) -> list[QdqLayer]:
    """Returns the layers with a symmetric int8 weight whose input, weight and bias (if any) come from DQ nodes.

    They are in the order of the float graph.
    """
    placed, layers = Placed(qdq), {layer.node: layer for layer in read_layers(how.graph)}
    places: dict[str, QdqLayer] = {}

    def read_grid(node: onnx.NodeProto) -> tuple[float, int]:
        """Returns the step and the type of the integers that a Q or DQ node writes or reads."""
        return float(placed.read(node.input[1])), placed.stored[node.input[2]].data_type

    for node in (node for node in qdq.node if node.op_type in LAYER_OPS and node.name in layers):
        layer = layers[node.name]
        source, weight, bias, *_ = (*map(placed.find_dequantizer, node.input), None)
        if source is None or weight is None or (layer.bias is None) != (bias is None):
            continue
        stored = placed.stored.get(weight.input[0])
        if stored is None or weight.input[2] not in placed.stored or stored.data_type != onnx.TensorProto.INT8:
            continue
        scale = placed.read(weight.input[1])
        if placed.read(weight.input[2]).any() or scale.dtype != np.float32:
            continue
        step, kind = read_grid(source)
        rounder = placed.rounders.get(node.output[0])
        made_step, made_kind = (0.0, 0) if rounder is None else read_grid(rounder)
        places[node.name] = QdqLayer(
            layer=layer,
            source=node.input[0],
            weight=weight.input[0],
            weight_scale=weight.input[1],
            weight_zero=weight.input[2],
            bias=bias.input[0] if bias is not None else None,
            bias_scale=bias.input[1] if bias is not None else None,
            step=step,
            per_channel=scale.ndim > 0,
            limit=gptq.FOUR_LIMIT if how.bits.get(layer.weight) == 4 and scale.ndim else how.limit,
            spare=gptq.spare_for_bias(kind),
            least=gptq.least_multiplier(kind, made_kind) * made_step / step,
        )
    return [places[name] for name in layers if name in places]


def write_layer(
    initializers: Mapping[str, onnx.TensorProto], place: QdqLayer, *, integers: Array, scale: Array, bias: Array
) -> None:
    """Writes integers, scale [channels] and bias [channels] of a layer into its QDQ graph."""

    def store(name: str, value: Array) -> None:
        initializers[name].CopyFrom(numpy_helper.from_array(value, name))

    if place.has_four_bits:
        initializers[place.weight].CopyFrom(gptq.pack_int4(integers, place.weight))
        initializers[place.weight_zero].CopyFrom(gptq.pack_int4(np.zeros(scale.shape, np.int8), place.weight_zero))
    else:
        store(place.weight, np.ascontiguousarray(integers))
    store(place.weight_scale, np.asarray(scale if place.per_channel else scale[0]))
    if place.bias is not None and place.bias_scale is not None:
        # Integer kernels have no input for the scale of the bias (ONNX operator QLinearConv): it is the product of the
        # scales of input and weight.
        step = (np.float32(place.step) * scale).astype(np.float32)
        counts = np.clip(np.rint(bias / step.astype(np.float64)), -(2**31), 2**31 - 1).astype(np.int32)
        store(place.bias, counts)
        store(place.bias_scale, step if place.per_channel else step[:1])


def round_in_order(qdq: onnx.ModelProto, how: Rounder, places: Sequence[QdqLayer]) -> None:
    """Rounds layers in graph order, so that each compensates for the errors that reach it.

    As Qronos does (S. Zhang et al., arXiv:2505.11695): with X the inputs of a layer in the float graph and Y those
    after the layers rounded before, W' = W X'Y (Y'Y)^-1 comes nearest to W X, and W' is rounded with the moment Y'Y.
    Unlike there, both moments are shrunk (`shrink_moment`), or W' would overfit the samples.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    graph, statistics = how.graph, how.statistics
    initializers = {tensor.name: tensor for tensor in qdq.graph.initializer}
    digest = hashlib.sha256(repr([(place.layer.node, place.limit) for place in places]).encode())
    digest.update(qdq.SerializeToString(deterministic=True))

    def compute() -> dict[str, Array]:
        samples = list(read_fitted(statistics))
        layers = [place.layer for place in places]
        sizes = block_sizes(layers)
        true = _gather(graph.model, {layer.source: layer.source for layer in layers}, graph, layers, samples)
        kept: dict[str, Array] = {}
        seen: dict[str, Array] = {}
        for index, (layer, place) in enumerate(zip(layers, places, strict=True)):
            # Layers that read the same tensor get the same inputs: the model runs once for all of them.
            if layer.node not in seen:
                siblings = [other.layer for other in places if other.source == place.source]
                seen = _gather(qdq, {layer.source: place.source}, graph, siblings, samples)
            # Without samples, or where its size is unknown, a layer is rounded for an input of zeros.
            zeros = np.zeros((1, layer.groups, layer.inputs))
            inputs, rounded = (each.get(layer.node, zeros) for each in (true, seen))
            own = _round_for_inputs(graph, place, inputs, rounded, sizes[layer.node])
            # Later layers are rounded for the inputs that this one gives them.
            write_layer(initializers, place, **own)
            kept |= {f"{index}.{name}": value for name, value in own.items()}
        return kept

    known = recall_rounded(statistics, digest.hexdigest(), compute) or {}
    for index, place in enumerate(places):
        write_layer(initializers, place, **{name: known[f"{index}.{name}"] for name in ("integers", "scale", "bias")})


def _gather(
    proto: onnx.ModelProto,
    names: Mapping[str, str],
    graph: Graph,
    layers: Sequence[Layer],
    samples: Sequence[Tensors],
) -> dict[str, Array]:
    """Returns patches [P, groups, inputs] of each layer's input, computed by `proto`, the float graph or its QDQ form.

    `names` maps the layers' input tensors to their names in `proto`.

    Layers whose input size is unknown are omitted; without samples, all are.
    """
    places = {each.node: locate_patches(graph, each, patches_per_sample(each, len(samples))) for each in layers}
    where = {each.node: (names[each.source], place) for each in layers if (place := places[each.node]) is not None}
    if not where or not samples:
        return {}
    seen = deepcopy(proto)
    del seen.graph.output[:]
    seen.graph.output.extend(
        onnx.ValueInfoProto(name=name) for name in dict.fromkeys(name for name, _ in where.values())
    )
    session = open_graph(seen, graph.folder, keep_float_weights=True)

    def cut(sample: Tensors) -> dict[str, Array]:
        values = session.run(sample)
        return {node: place.cut(values[name]) for node, (name, place) in where.items()}

    rows = [patches for _, patches in map_in_order(cut, samples)]
    sizes = {each.node: (each.groups, each.inputs) for each in layers}
    patches = {node: np.concatenate([row[node] for row in rows]) for node in where}
    return {node: found.astype(np.float64).reshape(-1, *sizes[node]) for node, found in patches.items()}


def read_bias(graph: Graph, place: QdqLayer) -> tuple[Array, Array]:
    """Returns a layer's bias [channels], and the smallest scale of each output [groups, outputs, 1]."""
    layer = place.layer
    stored = None if layer.bias is None else graph.constant(layer.bias)
    bias = np.zeros(layer.groups * layer.outputs) if stored is None else stored.astype(np.float64)
    floor = np.maximum(np.abs(bias) * _INT32_MARGIN * place.spare / place.step, place.least)
    floor = floor if place.per_channel else np.full_like(floor, floor.max())
    return bias, floor.reshape(layer.groups, layer.outputs, 1)


def _read_layer(graph: Graph, place: QdqLayer) -> tuple[Array, Array, Array, Array]:
    """Returns a layer's weight, its bias [channels], its matrix, and the smallest scale of each output."""
    weight, (bias, floor) = graph.weight(place.layer.weight), read_bias(graph, place)
    return weight, bias, place.layer.to_matrix(weight), floor


def _find_scale(matrix: Array, place: QdqLayer, floor: Array, energy: Array) -> Array:
    """Returns the scale [groups, outputs, 1]; `energy` [groups, inputs] is the mean square of each input."""
    if place.has_four_bits:
        return gptq.search_scale(matrix, energy=energy, floor=floor)
    return gptq.weight_scale(matrix, per_channel=place.per_channel, floor=floor, limit=place.limit)


def _round_for_inputs(graph: Graph, place: QdqLayer, true: Array, seen: Array, size: int) -> dict[str, Array]:
    """Returns integers, scale [channels] and bias [channels] of a layer, as Qronos rounds it (`round_in_order`).

    `true` and `seen` are patches [P, groups, inputs] of its input: X in the float graph, and Y after the layers
    rounded so far. `size` is the number of inputs in a block of the second moment.
    """
    layer, (weight, bias, matrix, floor) = place.layer, _read_layer(graph, place)
    matrix, true_mean, mean = matrix.astype(np.float64), true.mean(axis=0), seen.mean(axis=0)
    if layer.bias is not None:
        # The bias corrects the mean error, so only deviations from the mean matter.
        true, seen = true - true_mean, seen - mean
    ones, twos = (np.swapaxes(each.reshape(len(each), -1, size), 0, 1) for each in (true, seen))
    moment, both = (np.swapaxes(each, 1, 2) @ twos / len(true) for each in (twos, ones))
    share = len(true) / 4 / (size + len(true) / 4)
    left = gptq.shrink_moment(moment, len(true))
    split = gptq.split_pieces(matrix, layer.groups, size)
    # W' = W (S + share (X'Y - Y'Y)) S^-1, with S the shrunk Y'Y: if no errors reach the layer, W' is W.
    change = np.swapaxes(
        np.linalg.solve(gptq.damp_moment(left), np.swapaxes(share * split @ (both - moment), 1, 2)), 1, 2
    )
    fitted = gptq.join_pieces(split + change, layer.groups)
    energy = np.diagonal(left, axis1=1, axis2=2).reshape(layer.groups, layer.inputs)
    scale = _find_scale(fitted, place, floor, energy)
    rounded = _round_pieces(fitted, left, place, scale)
    corrected = (matrix * true_mean[:, None]).sum(axis=2) - (rounded.values * mean[:, None]).sum(axis=2)
    return {
        "integers": layer.from_matrix(rounded.integers, weight.shape),
        "scale": rounded.scale.reshape(-1),
        "bias": bias + corrected.reshape(-1),
    }


def _round_pieces(matrix: Array, moment: Array, place: QdqLayer, scale: Array, noise: float = 0.0) -> gptq.Rounded:
    """Rounds weights [groups, outputs, inputs] with the moments of blocks of their inputs."""
    size = moment.shape[-1]
    groups, scales = place.layer.groups, np.repeat(scale, matrix.shape[2] // size, axis=0)
    found = gptq.round_gptq(gptq.split_pieces(matrix, groups, size), moment, scales, noise, place.limit)
    return gptq.Rounded(integers=gptq.join_pieces(found.integers, groups), scale=scale)


_ERRORS_AT_ONCE = 1 << 20
# An input whose spread is below this share of the widest spread in its layer stays within half a step of 8 bits.
_INACTIVE = 1 / 512
# The second moments of so many inputs are prepared at a time; each is in memory about ten times over, in double
# precision. A choice.
_MOMENT_BYTES = 4 << 20


def round_qdq_weights(qdq: onnx.ModelProto, how: Rounder) -> None:
    """Rewrites the weights, scales and biases of `qdq`, the QDQ form of a graph, in place.

    Raises:
        UsageError: the calibration's statistics are gone.
    """
    initializers = {tensor.name: tensor for tensor in qdq.graph.initializer}
    graph, places = how.graph, find_places(qdq.graph, how)
    if how.rounding == "nearest":
        for place in places:
            layer, (bias, floor) = place.layer, read_bias(graph, place)
            scale = numpy_helper.to_array(initializers[place.weight_scale])
            if place.has_four_bits or (scale < floor.reshape(-1)).any():
                weight = graph.weight(layer.weight)
                matrix = layer.to_matrix(weight)
                scale = _find_scale(matrix, place, floor, np.ones((layer.groups, layer.inputs)))
                integers = layer.from_matrix(gptq.round_nearest(matrix, scale, place.limit).integers, weight.shape)
                write_layer(initializers, place, integers=integers, scale=scale.reshape(-1), bias=bias)
        return
    if how.rounding == "qronos":
        round_in_order(qdq, how, places)
        return
    stored = StoredMoments(how.statistics)
    with single_blas_thread():
        for place, corrected in map_in_order(lambda place: _correct_layer(how, place, stored), places):
            if corrected is not None:
                write_layer(initializers, place, **corrected)


def _correct_layer(how: Rounder, place: QdqLayer, stored: StoredMoments) -> dict[str, Array] | None:
    """Returns integers, scale [channels] and corrected bias of a layer, stored once; None without moments."""
    layer, rounding, (weight, bias, matrix, floor) = place.layer, how.rounding, _read_layer(how.graph, place)
    step = place.step.hex() if rounding == "refit" else ""
    key = hashlib.sha256(f"{layer.node}:{rounding}:{place.per_channel}:{place.limit}:{step};".encode())
    for part in (floor, np.ascontiguousarray(weight), bias):
        key.update(part.tobytes())

    def compute() -> dict[str, Array] | None:
        if (moments := how.read_moments(stored, layer)) is None:
            return None
        if rounding == "bias":
            rounded = gptq.round_nearest(matrix, _find_scale(matrix, place, floor, moments.energy()), place.limit)
        else:
            rounded = _round_with_moments(matrix, moments, place, floor, rounding)
        errors, rows = np.empty(matrix.shape[:2]), max(1, _ERRORS_AT_ONCE // matrix.shape[2])
        # The mean error E[W x] - E[Wq x] of each output channel, in parts: in double precision each step over a whole
        # large layer would take twice its memory.
        mean = moments.mean[:, :, None].astype(np.float64)
        for start in range(0, matrix.shape[1], rows):
            span = slice(start, start + rows)
            values = gptq.Rounded(integers=rounded.integers[:, span], scale=rounded.scale[:, span]).values
            errors[:, span] = ((matrix[:, span].astype(np.float64) - values) @ mean)[:, :, 0]
        return {
            "integers": layer.from_matrix(rounded.integers, weight.shape),
            "scale": rounded.scale.reshape(-1),
            "bias": bias + errors.reshape(-1),
        }

    return recall_rounded(how.statistics, key.hexdigest(), compute)


def _round_with_moments(
    matrix: Array, moments: InputMoments, place: QdqLayer, floor: Array, rounding: gptq.Rounding
) -> gptq.Rounded:
    layer, parts, most = place.layer, [*moments.split(_MOMENT_BYTES)], _INACTIVE * float(moments.spread.max())

    def prepare(own: InputMoments) -> tuple[Array, Array]:
        """Returns a second moment that can be inverted, and which inputs are inactive, bool [groups, inputs].

        These were zero in every sample at the resolution of 8 bits. The samples say nothing about such an input when it
        is nonzero, so its weights must stay those of the float model.
        """
        # The bias corrects the mean error, so only deviations from the mean matter.
        blocks, spread = own.second_moment(centred=layer.bias is not None), own.spread.reshape(-1, own.size)
        # The mean square counts too: a constant nonzero input acts as a bias, and its effect is known.
        inactive = (spread <= most) & (np.diagonal(blocks, axis1=1, axis2=2) <= most**2)
        moment = gptq.add_spread(gptq.shrink_moment(blocks, own.count), spread, own.count)
        # The product with the mask would copy a matrix of a gigabyte for a wide layer.
        if inactive.any():
            # Inactive inputs are correlated with no other, so that they absorb no error of others.
            active = ~inactive
            together = active[:, :, None] & active[:, None, :]
            moment = moment * (together | np.eye(moment.shape[-1], dtype=bool))
        return moment, inactive

    # Prepared once where all inputs are one part, as in most layers.
    known = [prepare(own) for _, own in parts[:1] if len(parts) == 1]
    noise = place.step**2 / 12 if rounding == "refit" else 0.0

    if rounding == "refit":
        fitted = list[Array]()
        for span, own in parts:
            moment, inactive = known[0] if known else prepare(own)
            split = gptq.split_pieces(matrix[..., span], layer.groups, moments.size)
            # Least squares would set the weights of inputs that were always zero to zero.
            refitted = np.where(inactive[:, None], split, gptq.refit_weights(split, moment, noise))
            fitted.append(gptq.join_pieces(refitted, layer.groups))
        matrix = np.concatenate(fitted, axis=2)
    scale = _find_scale(matrix, place, floor, moments.energy())
    rounded = [
        _round_pieces(matrix[..., span], (known[0] if known else prepare(own))[0], place, scale, noise)
        for span, own in parts
    ]
    return gptq.Rounded(integers=np.concatenate([each.integers for each in rounded], axis=2), scale=scale)
