"""The operations of an ML Program.

Formulas follow coremltools' mil/ops/defs, which document MIL. Parameters are passed by name, with the defaults
documented there. What numpy lacks is computed by the equivalent ONNX operator in ONNX Runtime's CPU provider.
"""

import functools
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import helper

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.errors import RuntimeRefusal
from edgekit.model.tensors import Array

_OPSET = 20


class Arguments(msgspec.Struct, frozen=True):
    """The parameters of one operation; half-precision tensors were converted to float32 for computing."""

    values: Mapping[str, tuple[Array | str, ...]]

    def tensor(self, name: str) -> Array:
        """Returns a tensor.

        Raises:
            ValueError: there is no tensor of that name.
        """
        found = self.values.get(name, ())
        if len(found) != 1 or isinstance(found[0], str):
            raise ValueError(f"its parameter {name} is missing")
        return found[0]

    def tensors(self, name: str) -> tuple[Array, ...]:
        """Returns a list of tensors."""
        return tuple(value for value in self.values.get(name, ()) if not isinstance(value, str))

    def find(self, name: str) -> Array | None:
        """Returns a tensor that may be absent."""
        return self.tensor(name) if name in self.values else None

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a scalar.

        Raises:
            ValueError: it is missing, and MIL has no default for it.
        """
        if default is not None and name not in self.values:
            return default
        return float(self.tensor(name).reshape(-1)[0])

    def whole(self, name: str, default: int) -> int:
        """Returns an integer scalar."""
        return int(self.number(name, default))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns a boolean scalar."""
        return bool(self.number(name, default))

    def wholes(self, name: str) -> tuple[int, ...] | None:
        """Returns a list of integers, None if it is absent."""
        found = self.find(name)
        return None if found is None else tuple(int(value) for value in found.reshape(-1))

    def text(self, name: str, default: str) -> str:
        """Returns a string."""
        (found,) = self.values.get(name, (default,))
        return found if isinstance(found, str) else default


@functools.cache
def _open_operator(op: str, kinds: tuple[int, ...], attributes: tuple[tuple[str, Any], ...]) -> CpuSession:
    """Returns a session of a single ONNX operator, for inputs of these element types (0: omitted) and of any shape."""
    names = [f"i{index}" if kind else "" for index, kind in enumerate(kinds)]
    node = helper.make_node(op, names, ["y"], **dict(attributes))
    given = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True) if kind]
    graph = helper.make_graph([node], "operator", given, [onnx.ValueInfoProto(name="y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", _OPSET)], ir_version=9)
    # With one thread, the order of sums does not depend on the number of cores.
    return CpuSession(model.SerializeToString(), SessionSettings(level=Level.DISABLED, threads=1))


def run_operator(op: str, *tensors: Array | None, **attributes: object) -> Array:
    """Returns the output of an ONNX operator for some tensors, of which those that are None are omitted."""
    given = {f"i{index}": tensor for index, tensor in enumerate(tensors) if tensor is not None}
    kinds = tuple(0 if it is None else helper.np_dtype_to_tensor_dtype(it.dtype) for it in tensors)
    try:
        return _open_operator(op, kinds, tuple(attributes.items())).run(given)["y"]
    except RuntimeRefusal as error:
        raise ValueError(error.message) from error


Compute = Callable[[Arguments], Array | tuple[Array, ...]]


def _apply(formula: Callable[..., Array], *names: str) -> Compute:
    """Returns the operation that applies a formula to the named tensors."""
    return lambda given: formula(*map(given.tensor, names))


def _divide(x: Array, y: Array) -> Array:
    # Integer division rounds towards zero.
    return np.trunc(x / y) if np.issubdtype(x.dtype, np.integer) else x / y


def _gelu(given: Arguments) -> Array:
    x, mode = given.tensor("x"), given.text("mode", "EXACT")
    if mode == "SIGMOID_APPROXIMATION":
        return np.asarray(x * run_operator("Sigmoid", np.float32(1.702) * x))
    return run_operator("Gelu", x, approximate="tanh" if mode == "TANH_APPROXIMATION" else "none")


def _prelu(given: Arguments) -> Array:
    x, alpha = given.tensor("x"), given.tensor("alpha")
    return np.where(x >= 0, x, x * (alpha.reshape(-1, *[1] * (x.ndim - 2)) if alpha.ndim == 1 else alpha))


_UNARY: Mapping[str, Callable[[Array], Array]] = {
    "ceil": np.ceil, "cos": np.cos, "exp": np.exp, "identity": np.array, "logical_not": np.logical_not,
    "relu": lambda x: np.maximum(x, 0), "relu6": lambda x: np.clip(x, 0, 6), "round": np.rint, "sin": np.sin,
    "softplus": lambda x: np.logaddexp(x, 0), "sqrt": np.sqrt, "tanh": np.tanh,
}  # fmt: skip
_BINARY: Mapping[str, Callable[[Array, Array], Array]] = {
    "add": np.add, "equal": np.equal, "floor_div": np.floor_divide, "logical_and": np.logical_and,
    "maximum": np.maximum, "mod": np.mod, "mul": np.multiply, "pow": np.power, "real_div": _divide, "sub": np.subtract,
}  # fmt: skip


def _reshape(given: Arguments) -> Array:
    x, shape = given.tensor("x"), list(given.wholes("shape") or ())
    # A size of 0 copies the input's size on the same axis; for an output of another rank, MIL versions differ in its
    # meaning.
    if 0 in shape and len(shape) != x.ndim:
        raise ValueError(f"its shape {shape} leaves sizes to an input of rank {x.ndim}")
    return x.reshape([x.shape[axis] if size == 0 else size for axis, size in enumerate(shape)])


def _concatenate(given: Arguments) -> Array:
    if given.flag("interleave"):
        raise ValueError("it interleaves its parts")
    return np.concatenate(given.tensors("values"), given.whole("axis", 0))


def _split(given: Arguments) -> tuple[Array, ...]:
    sizes = given.wholes("split_sizes")
    parts = given.whole("num_splits", 1) if sizes is None else np.cumsum(sizes)[:-1]
    return tuple(np.split(given.tensor("x"), parts, given.whole("axis", 0)))


def _slice_by_index(given: Arguments) -> Array:
    x = given.tensor("x")
    rank = x.ndim
    begin, end = given.wholes("begin") or (), given.wholes("end") or ()
    stride = given.wholes("stride") or (1,) * rank
    masks = {name: given.wholes(f"{name}_mask") or (0,) * rank for name in ("begin", "end", "squeeze")}
    cuts: list[int | slice] = []
    for axis in range(rank):
        if masks["squeeze"][axis]:
            cuts.append(begin[axis])
            continue
        first = None if masks["begin"][axis] else begin[axis]
        last = None if masks["end"][axis] else end[axis]
        cuts.append(slice(first, last, stride[axis]))
    return x[tuple(cuts)]


def _slice_by_size(given: Arguments) -> Array:
    x, begin, size = given.tensor("x"), given.wholes("begin") or (), given.wholes("size") or ()
    return x[tuple(slice(at, None if count == -1 else at + count) for at, count in zip(begin, size, strict=True))]


def _pad(given: Arguments) -> Array:
    x, flat = given.tensor("x"), given.wholes("pad") or ()
    pairs = list(zip(flat[::2], flat[1::2], strict=True))
    pairs = [(0, 0)] * (x.ndim - len(pairs)) + pairs
    if (mode := given.text("mode", "constant")) == "constant":
        return np.pad(x, pairs, constant_values=given.number("constant_val", 0.0))
    return np.pad(x, pairs, mode="reflect" if mode == "reflect" else "edge")


def _gather(given: Arguments) -> Array:
    x, axis = given.tensor("x"), given.whole("axis", 0)
    if given.whole("batch_dims", 0):
        raise ValueError("it gathers in batches")
    return np.take(x, given.tensor("indices").astype(np.int64), axis)


def _cast(given: Arguments) -> Array:
    name = given.text("dtype", "fp32")
    # numpy rounds towards zero here, as C does.
    return given.tensor("x").astype(np.dtype({"fp16": "float16", "fp32": "float32"}.get(name, name)))


def _reduce(formula: Callable[..., Array]) -> Compute:
    return lambda given: np.asarray(
        formula(given.tensor("x"), axis=given.wholes("axes"), keepdims=given.flag("keep_dims"))
    )


def _multiply(given: Arguments) -> Array:
    x, y = given.tensor("x"), given.tensor("y")
    x = np.swapaxes(x, -1, -2) if given.flag("transpose_x") else x
    return np.asarray(x @ (np.swapaxes(y, -1, -2) if given.flag("transpose_y") else y))


def _linear(given: Arguments) -> Array:
    out, bias = given.tensor("x") @ given.tensor("weight").T, given.find("bias")
    return np.asarray(out if bias is None else out + bias)


def _normalize(op: str, *names: str) -> Compute:
    """Returns the operation of an ONNX operator that scales and moves each channel."""
    return lambda given: run_operator(op, *map(given.tensor, names), epsilon=given.number("epsilon", 1e-5))


def _normalize_layer(given: Arguments) -> Array:
    x = given.tensor("x")
    first = min(axis % x.ndim for axis in given.wholes("axes") or range(x.ndim))
    if (gamma := given.find("gamma")) is None:
        gamma = np.ones(x.shape[first:], np.float32)
    epsilon = given.number("epsilon", 1e-5)
    return run_operator("LayerNormalization", x, gamma, given.find("beta"), axis=first, epsilon=epsilon)


def _list_sizes(given: Arguments, x: Array) -> Iterator[tuple[int, int, int, float]]:
    """Yields the last two axes, each with its size, its size after resizing, and the scale factor."""
    for axis, name in ((x.ndim - 2, "height"), (x.ndim - 1, "width")):
        old = x.shape[axis]
        size = given.whole(f"target_size_{name}", 0)
        factor = size / old if size else given.number(f"scale_factor_{name}", 1)
        yield axis, old, size or int(old * factor), factor


def _resize_nearest(given: Arguments, *, by_factor: bool) -> Array:
    x = given.tensor("x")
    for axis, old, size, factor in _list_sizes(given, x):
        at = np.arange(size)
        x = np.take(x, np.minimum((at / factor).astype(np.int64), old - 1) if by_factor else at * old // size, axis)
    return x


_SAMPLING = {
    "DEFAULT": "asymmetric", "STRICT_ALIGN_CORNERS": "align_corners", "UNALIGN_CORNERS": "half_pixel",
}  # fmt: skip


def _resize_bilinear(given: Arguments) -> Array:
    if (mode := given.text("sampling_mode", "DEFAULT")) not in _SAMPLING:
        raise ValueError(f"its sampling mode is {mode!r}")
    x = given.tensor("x")
    sizes = np.array([*x.shape[:-2], *(size for _, _, size, _ in _list_sizes(given, x))])
    coordinates = _SAMPLING[mode]
    return run_operator("Resize", x, None, None, sizes, mode="linear", coordinate_transformation_mode=coordinates)


def _upsample_bilinear(given: Arguments) -> Array:
    x = given.tensor("x")
    scales = np.array([*[1.0] * (x.ndim - 2), *(factor for *_, factor in _list_sizes(given, x))], np.float32)
    half = "half_pixel" if given.flag("half_pixel_centers", default=True) else "asymmetric"
    coordinates = "align_corners" if given.flag("align_corners", default=True) else half
    return run_operator("Resize", x, None, scales, mode="linear", coordinate_transformation_mode=coordinates)


def _resample(given: Arguments) -> Array:
    """Computes `resample`: `coordinates` [N, H, W, 2] are x and y, from -1 to 1 across the image."""
    mode = given.text("coordinates_mode", "normalized_minus_one_to_one")
    padding = given.text("padding_mode", "constant")
    if mode != "normalized_minus_one_to_one":
        raise ValueError(f"its coordinates are {mode!r}")
    if padding not in _PADDINGS:
        raise ValueError(f"its padding is {padding!r}")
    # Constant padding in ONNX's operator is always zero. As interpolation weights sum to 1, subtracting the padding
    # value before and adding it afterwards gives the same as padding with that value.
    fill = np.float32(given.number("padding_value", 0.0))

    sampled = run_operator(
        "GridSample",
        given.tensor("x") - fill,
        given.tensor("coordinates"),
        align_corners=int(given.flag("align_corners")),
        mode="nearest" if given.text("sampling_mode", "bilinear") == "nearest" else "linear",
        padding_mode=_PADDINGS[padding],
    )
    return sampled + fill


_PADDINGS = {"constant": "zeros", "border": "border"}


class _Window(msgspec.Struct, frozen=True, kw_only=True):
    """A window along each spatial axis; `pads` are pairs of the padding before and after.

    `spans` are the extents of the window, including dilation.
    """

    strides: tuple[int, ...]
    dilations: tuple[int, ...]
    spans: tuple[int, ...]
    pads: tuple[tuple[int, int], ...]

    @property
    def attributes(self) -> dict[str, tuple[int, ...]]:
        """The attributes of ONNX's operators, whose pads are those before each axis and then those after each."""
        before, after = zip(*self.pads, strict=True)
        return {"strides": self.strides, "dilations": self.dilations, "pads": (*before, *after)}


def _read_window(given: Arguments, sizes: tuple[int, ...], extents: tuple[int, ...]) -> _Window:
    """Returns the window of an operation over spatial sizes `extents`, with its padding computed.

    Raises:
        ValueError: MIL has no such kind of padding.
    """
    ones, kind = (1,) * len(sizes), given.text("pad_type", "valid")
    strides, dilations = given.wholes("strides") or ones, given.wholes("dilations") or ones
    spans = tuple((size - 1) * dilation + 1 for size, dilation in zip(sizes, dilations, strict=True))
    pads = [(0, 0)] * len(sizes)
    if kind == "custom":
        flat = given.wholes("pad") or (0,) * (2 * len(sizes))
        pads = list(zip(flat[::2], flat[1::2], strict=True))
    elif kind in {"same", "same_lower"}:
        for axis, (extent, stride, span) in enumerate(zip(extents, strides, spans, strict=True)):
            total = max((math.ceil(extent / stride) - 1) * stride + span - extent, 0)
            smaller, larger = total // 2, total - total // 2
            pads[axis] = (larger, smaller) if kind == "same_lower" else (smaller, larger)
    elif kind != "valid":
        raise ValueError(f"its padding is of kind {kind!r}")
    return _Window(strides=strides, dilations=dilations, spans=spans, pads=tuple(pads))


def _convolve(given: Arguments) -> Array:
    """Computes `conv`: `x` [N, C, ...], `weight` [K, C/groups, ...]."""
    x, weight = given.tensor("x"), given.tensor("weight")
    window = _read_window(given, weight.shape[2:], x.shape[2:])
    return run_operator("Conv", x, weight, given.find("bias"), group=given.whole("groups", 1), **window.attributes)


def _convolve_transposed(given: Arguments) -> Array:
    """Computes `conv_transpose`: `x` [N, C, ...], `weight` [C, K/groups, ...]; padding crops the result."""
    x, weight = given.tensor("x"), given.tensor("weight")
    window = _read_window(given, weight.shape[2:], x.shape[2:])
    wanted = given.wholes("output_shape")
    pads, more = list(window.pads), [0] * len(window.pads)
    for axis, (count, stride, span) in enumerate(zip(x.shape[2:], window.strides, window.spans, strict=True)):
        if wanted is not None:
            before = pads[axis][0]
            after = (count - 1) * stride + span - before - wanted[2 + axis]
            pads[axis], more[axis] = (before, max(after, 0)), max(-after, 0)
    return run_operator(
        "ConvTranspose",
        x,
        weight,
        given.find("bias"),
        group=given.whole("groups", 1),
        output_padding=tuple(more),
        **msgspec.structs.replace(window, pads=tuple(pads)).attributes,
    )


def _pool(given: Arguments, op: str, **attributes: int) -> Array:
    x, sizes = given.tensor("x"), given.wholes("kernel_sizes") or ()
    window = _read_window(given, sizes, x.shape[2:]).attributes
    return run_operator(op, x, kernel_shape=sizes, ceil_mode=int(given.flag("ceil_mode")), **window, **attributes)


OPERATIONS: Mapping[str, Compute] = {
    **{name: _apply(formula, "x") for name, formula in _UNARY.items()},
    **{name: _apply(formula, "x", "y") for name, formula in _BINARY.items()},
    **{f"reduce_{name}": _reduce(getattr(np, name)) for name in ("max", "mean", "min", "prod", "sum")},
    "avg_pool": lambda given: _pool(
        given, "AveragePool", count_include_pad=int(not given.flag("exclude_padding_from_average"))
    ),
    "batch_norm": _normalize("BatchNormalization", "x", "gamma", "beta", "mean", "variance"),
    "cast": _cast,
    "clip": lambda given: np.clip(
        given.tensor("x"), given.number("alpha", -np.inf), given.number("beta", np.inf)
    ).astype(given.tensor("x").dtype),
    "concat": _concatenate,
    "conv": _convolve,
    "conv_transpose": _convolve_transposed,
    "depth_to_space": lambda given: run_operator(
        "DepthToSpace", given.tensor("x"), blocksize=given.whole("block_size", 1)
    ),
    "elu": lambda given: run_operator("Elu", given.tensor("x"), alpha=given.number("alpha")),
    "erf": lambda given: run_operator("Erf", given.tensor("x")),
    "expand_dims": lambda given: np.expand_dims(given.tensor("x"), given.wholes("axes") or ()),
    "gather": _gather,
    "gather_nd": lambda given: run_operator(
        "GatherND", given.tensor("x"), given.tensor("indices").astype(np.int64), batch_dims=given.whole("batch_dims", 0)
    ),
    "gelu": _gelu,
    "instance_norm": _normalize("InstanceNormalization", "x", "gamma", "beta"),
    "inverse": lambda given: 1 / (given.tensor("x") + np.float32(given.number("epsilon", 1e-4))),
    "layer_norm": _normalize_layer,
    "leaky_relu": lambda given: run_operator("LeakyRelu", given.tensor("x"), alpha=given.number("alpha")),
    "linear": _linear,
    "matmul": _multiply,
    "max_pool": lambda given: _pool(given, "MaxPool"),
    "pad": _pad,
    "prelu": _prelu,
    "reduce_argmax": lambda given: np.argmax(
        given.tensor("x"), axis=given.whole("axis", -1), keepdims=given.flag("keep_dims")
    ),
    "resample": _resample,
    "reshape": _reshape,
    "resize_bilinear": _resize_bilinear,
    "resize_nearest_neighbor": lambda given: _resize_nearest(given, by_factor=False),
    "select": lambda given: np.where(given.tensor("cond").astype(np.bool_), given.tensor("a"), given.tensor("b")),
    "shape": lambda given: np.array(given.tensor("x").shape, np.int32),
    "sigmoid": lambda given: run_operator("Sigmoid", given.tensor("x")),
    "sigmoid_hard": lambda given: run_operator(
        "HardSigmoid", given.tensor("x"), alpha=given.number("alpha"), beta=given.number("beta")
    ),
    "slice_by_index": _slice_by_index,
    "slice_by_size": _slice_by_size,
    "softmax": lambda given: run_operator("Softmax", given.tensor("x"), axis=given.whole("axis", -1)),
    "split": _split,
    "squeeze": lambda given: np.squeeze(given.tensor("x"), given.wholes("axes")),
    "tile": lambda given: np.tile(given.tensor("x"), given.wholes("reps") or ()),
    "transpose": lambda given: np.transpose(given.tensor("x"), given.wholes("perm")),
    "upsample_bilinear": _upsample_bilinear,
    "upsample_nearest_neighbor": lambda given: _resize_nearest(given, by_factor=True),
}
"""The supported operations by their names in MIL."""
