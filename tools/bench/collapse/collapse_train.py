"""Trains a `Net` with JAX: an interpreter of the few ONNX operators that the nets are written in, and AdamW."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
from collapse_net import EPSILON, Net
from jax import lax

from edgekit.model.tensors import Array

Values = dict[str, Any]
Loss = Callable[[Values, Values], Any]
"""Gives the loss of the tensors of a net and the targets of a batch."""


def run_net(
    net: Net, weights: Values, inputs: Values, *, training: bool, change: Callable[[str, Any], Any] | None = None
) -> Values:
    """Returns every tensor of a net, besides "NODE.mean" and "NODE.var" of what batch normalisation saw.

    `change` may give another value for what a node made, by the name of its output.
    """
    values: Values = {**{name: net.arrays[name] for name in net.arrays}, **weights, **inputs}
    for node in net.nodes:
        attributes = {item.name: onnx.helper.get_attribute_value(item) for item in node.attribute}
        arguments = [values[name] for name in node.input]
        if node.op_type == "BatchNormalization":
            values |= _normalise(node, arguments, training=training)
        else:
            values[node.output[0]] = _OPERATORS[node.op_type](arguments, attributes)
        if change is not None:
            values[node.output[0]] = change(node.output[0], values[node.output[0]])
    return values


def train_net(
    net: Net, data: Mapping[str, Array], loss: Loss, *, steps: int, batch: int = 32, rate: float = 3e-3, seed: int = 0
) -> None:
    """Trains the constants of a net in place; `data` holds inputs and targets by name, sample i at index i."""
    weights = {name: jnp.asarray(net.arrays[name]) for name in sorted(net.trained)}
    optimizer = optax.adam(optax.warmup_cosine_decay_schedule(0.0, rate, steps // 20, steps))
    state = optimizer.init(weights)

    def loss_of(weights: Values, rows: Values) -> Any:
        values = run_net(net, weights, {name: rows[name] for name in net.inputs}, training=True)
        return loss(values, rows)

    def step(weights: Values, state: Any, rows: Values) -> Any:
        value, gradients = jax.value_and_grad(loss_of)(weights, rows)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value

    fast_step = jax.jit(step)
    for number, rows in enumerate(_batches(data, steps, batch, seed)):
        weights, state, value = fast_step(weights, state, rows)
        if (number + 1) % max(1, steps // 5) == 0:
            print(f"  {net.name}: step {number + 1} of {steps}, loss {float(value):.4f}", flush=True)
    net.arrays |= {name: np.asarray(value) for name, value in weights.items()}
    _settle(net, next(_batches({name: data[name] for name in net.inputs}, 1, 256, seed)))


def channel_highs(net: Net, inputs: Values) -> dict[str, Array]:
    """Returns the highest value of each channel of every tensor [N, C, H, W]."""
    values = run_net(net, {}, inputs, training=False)
    made = {node.output[0] for node in net.nodes}
    return {name: np.asarray(values[name]).max((0, 2, 3)) for name in made if values[name].ndim == 4}


def _settle(net: Net, rows: Values) -> None:
    """Sets what batch normalisation takes for mean and variance to those of many samples."""
    values = run_net(net, {}, rows, training=True)
    for node in net.nodes:
        if node.op_type == "BatchNormalization":
            net.arrays[node.input[3]] = np.asarray(values[f"{node.name}.mean"])
            net.arrays[node.input[4]] = np.asarray(values[f"{node.name}.var"])


def _batches(data: Mapping[str, Array], steps: int, batch: int, seed: int) -> Iterator[Values]:
    rng, count = np.random.default_rng(seed), len(next(iter(data.values())))
    for _ in range(steps):
        rows = rng.choice(count, min(batch, count), replace=False)
        yield {name: value[rows] for name, value in data.items()}


def _normalise(node: onnx.NodeProto, arguments: list[Any], *, training: bool) -> Values:
    x, gamma, beta, mean, var = arguments
    if training:
        mean, var = x.mean((0, 2, 3)), x.var((0, 2, 3))
    factor = gamma / jnp.sqrt(var + EPSILON)
    shape = (1, -1, 1, 1)
    y = x * factor.reshape(shape) + (beta - mean * factor).reshape(shape)
    return {node.output[0]: y, f"{node.name}.mean": mean, f"{node.name}.var": var}


def _conv(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    x, weight, *bias = arguments
    rank = weight.ndim - 2
    if attributes.get("group", 1) == len(weight) > 1:
        y = _depthwise(x, weight, attributes)
        return y + bias[0].reshape(1, -1, 1, 1) if bias else y
    pads = attributes.get("pads", [0] * 2 * rank)
    y = lax.conv_general_dilated(
        x, weight, attributes.get("strides", [1] * rank), list(zip(pads[:rank], pads[rank:], strict=True)),
        rhs_dilation=attributes.get("dilations"), feature_group_count=attributes.get("group", 1),
        dimension_numbers=("NCHW", "OIHW", "NCHW") if rank == 2 else ("NCH", "OIH", "NCH"),
    )  # fmt: skip
    return y + bias[0].reshape((1, -1) + (1,) * rank) if bias else y


def _depthwise(x: Any, weight: Any, attributes: dict[str, Any]) -> Any:
    """Convolves each channel by itself, as a sum of shifted images, which XLA differentiates fast on a CPU."""
    pads, (down, right), (apart, aside) = attributes["pads"], attributes["strides"], attributes["dilations"]
    padded = jnp.pad(x, ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3])))
    height = padded.shape[2] - apart * (weight.shape[2] - 1)
    width = padded.shape[3] - aside * (weight.shape[3] - 1)
    return sum(
        padded[:, :, apart * row : apart * row + height : down, aside * column : aside * column + width : right]
        * weight[:, 0, row, column].reshape(1, -1, 1, 1)
        for row in range(weight.shape[2])
        for column in range(weight.shape[3])
    )


def _conv_transpose(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    """Convolves what is spread out by the strides with the flipped weights [inputs, outputs, ...]."""
    x, weight, *bias = arguments
    rank = weight.ndim - 2
    pads, sizes = attributes["pads"], weight.shape[2:]
    around = [(size - 1 - pads[at], size - 1 - pads[rank + at]) for at, size in enumerate(sizes)]
    flipped = jnp.flip(weight, range(2, weight.ndim)).swapaxes(0, 1)
    y = lax.conv_general_dilated(
        x, flipped, [1] * rank, around, lhs_dilation=attributes["strides"],
        dimension_numbers=("NCHW", "OIHW", "NCHW") if rank == 2 else ("NCH", "OIH", "NCH"),
    )  # fmt: skip
    return y + bias[0].reshape((1, -1) + (1,) * rank) if bias else y


def _depth_to_space(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    (x,), size = arguments, attributes["blocksize"]
    n, c, h, w = x.shape
    parts = x.reshape(n, c // size**2, size, size, h, w)
    return parts.transpose(0, 1, 4, 2, 5, 3).reshape(n, c // size**2, h * size, w * size)


def _resize(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    factor, (n, c, h, w) = int(arguments[2][2]), arguments[0].shape
    if attributes["mode"] == b"nearest":
        spread = jnp.broadcast_to(arguments[0][:, :, :, None, :, None], (n, c, h, factor, w, factor))
        return spread.reshape(n, c, h * factor, w * factor)
    kind = "cubic" if attributes["mode"] == b"cubic" else "bilinear"
    return jax.image.resize(arguments[0], (n, c, h * factor, w * factor), kind)


def _max_pool(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    size, stride = (1, 1, *attributes["kernel_shape"]), (1, 1, *attributes["strides"])
    pads = attributes.get("pads", [0] * 4)
    padding = ((0, 0), (0, 0), (pads[0], pads[2]), (pads[1], pads[3]))
    return lax.reduce_window(arguments[0], -jnp.inf, lax.max, size, stride, padding)


def _reshape(arguments: list[Any], _attributes: dict[str, Any]) -> Any:
    x, shape = arguments
    return x.reshape([x.shape[index] if size == 0 else int(size) for index, size in enumerate(shape)])


def _slice(arguments: list[Any], _attributes: dict[str, Any]) -> Any:
    x, start, stop, axis = arguments
    return lax.slice_in_dim(x, int(start[0]), min(int(stop[0]), x.shape[int(axis[0])]), axis=int(axis[0]))


def _mean(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    return arguments[0].mean(tuple(attributes["axes"]), keepdims=bool(attributes.get("keepdims", 1)))


def _layer_norm(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    x, gain, shift = arguments
    centred = x - x.mean(-1, keepdims=True)
    return centred / jnp.sqrt((centred**2).mean(-1, keepdims=True) + attributes["epsilon"]) * gain + shift


def _instance_norm(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    x, gain, shift = arguments
    axes = tuple(range(2, x.ndim))
    shape = (1, -1) + (1,) * len(axes)
    centred = x - x.mean(axes, keepdims=True)
    spread = jnp.sqrt((centred**2).mean(axes, keepdims=True) + attributes["epsilon"])
    return centred / spread * gain.reshape(shape) + shift.reshape(shape)


def _gru(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    """Runs a GRU as PyTorch's over x [T,N,C] from zeros, both ways if asked, to [T,ways,N,H]; the reset comes last."""
    x, weights, states, biases = arguments
    size = attributes["hidden_size"]

    def run(x: Any, weight: Any, state: Any, bias: Any) -> Any:
        read = x @ weight.T + bias[: 3 * size]

        def step(before: Any, now: Any) -> Any:
            kept = before @ state.T + bias[3 * size :]
            update, reset = (jax.nn.sigmoid(part) for part in jnp.split((now + kept)[:, : 2 * size], 2, axis=1))
            found = jnp.tanh(now[:, 2 * size :] + reset * kept[:, 2 * size :])
            after = (1 - update) * found + update * before
            return after, after

        return lax.scan(step, jnp.zeros((x.shape[1], size)), read)[1]

    ways = [run(x if way == 0 else x[::-1], weights[way], states[way], biases[way]) for way in range(len(weights))]
    return jnp.stack([ways[0], *(way[::-1] for way in ways[1:])], axis=1)


def _lstm(arguments: list[Any], attributes: dict[str, Any]) -> Any:
    """Runs an LSTM over x [T,N,C] from zeros to [T,1,N,H]; gates are in ONNX's order: input, output, forget, cell."""
    x, (weight,), (state,), (bias,) = arguments
    size = attributes["hidden_size"]
    read = x @ weight.T + bias[: 4 * size] + bias[4 * size :]

    def step(before: Any, now: Any) -> Any:
        kept, cell = before
        found = now + kept @ state.T
        take, give, keep = (jax.nn.sigmoid(part) for part in jnp.split(found[:, : 3 * size], 3, axis=1))
        cell = keep * cell + take * jnp.tanh(found[:, 3 * size :])
        kept = give * jnp.tanh(cell)
        return (kept, cell), kept

    start = jnp.zeros((x.shape[1], size))
    return lax.scan(step, (start, start), read)[1][:, None]


_OPERATORS: dict[str, Callable[[list[Any], dict[str, Any]], Any]] = {
    "Add": lambda x, _a: x[0] + x[1],
    "Clip": lambda x, _a: jnp.clip(x[0], x[1], x[2]),
    "Concat": lambda x, a: jnp.concatenate(x, a["axis"]),
    "Conv": _conv,
    "ConvTranspose": _conv_transpose,
    "DepthToSpace": _depth_to_space,
    "Div": lambda x, _a: x[0] / x[1],
    "Erf": lambda x, _a: jax.scipy.special.erf(x[0]),
    "Exp": lambda x, _a: jnp.exp(x[0]),
    "Gather": lambda x, a: jnp.take(x[0], x[1], axis=a["axis"]),
    "GRU": _gru,
    "LSTM": _lstm,
    "Gemm": lambda x, _a: x[0] @ x[1].T + x[2],
    "GlobalAveragePool": lambda x, _a: x[0].mean((2, 3), keepdims=True),
    "HardSigmoid": lambda x, a: jnp.clip(a["alpha"] * x[0] + a["beta"], 0, 1),
    "HardSwish": lambda x, _a: x[0] * jnp.clip(x[0] / 6 + 0.5, 0, 1),
    "InstanceNormalization": _instance_norm,
    "LayerNormalization": _layer_norm,
    "LeakyRelu": lambda x, a: jnp.where(x[0] > 0, x[0], x[0] * a["alpha"]),
    "Log": lambda x, _a: jnp.log(x[0]),
    "MatMul": lambda x, _a: x[0] @ x[1],
    "Max": lambda x, _a: jnp.maximum(x[0], x[1]),
    "MaxPool": _max_pool,
    "Mul": lambda x, _a: x[0] * x[1],
    "PRelu": lambda x, _a: jnp.where(x[0] > 0, x[0], x[0] * x[1]),
    "Pow": lambda x, _a: x[0] ** int(x[1]),
    "ReduceMean": _mean,
    "ReduceL2": lambda x, a: jnp.sqrt((x[0] ** 2).sum(tuple(a["axes"]), keepdims=True) + 1e-12),
    "Relu": lambda x, _a: jax.nn.relu(x[0]),
    "Reshape": _reshape,
    "Resize": _resize,
    "Sigmoid": lambda x, _a: jax.nn.sigmoid(x[0]),
    "Slice": _slice,
    "Softmax": lambda x, _a: jax.nn.softmax(x[0], axis=-1),
    "Softplus": lambda x, _a: jax.nn.softplus(x[0]),
    "Sqrt": lambda x, _a: jnp.sqrt(x[0]),
    "Squeeze": lambda x, _a: jnp.squeeze(x[0], tuple(int(axis) for axis in x[1])),
    "Sub": lambda x, _a: x[0] - x[1],
    "Tanh": lambda x, _a: jnp.tanh(x[0]),
    "Transpose": lambda x, a: jnp.transpose(x[0], a["perm"]),
}
