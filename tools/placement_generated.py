"""Random networks of more than a hundred operators, seeded; the same on one version of ONNX Runtime.

A proposal takes a value and adds nodes that read it. Each node is tried in ONNX Runtime before it is added: the arrays
that come out are the shapes and types that later proposals see, and a node that is refused is dropped. So a proposal
need not know which shapes, types and opsets its operator takes.
"""

from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper, numpy_helper

ort: Any = onnxruntime
OPSETS = (11, 13, 15, 17, 18, 19, 20, 21, 22, 23)
MICROSOFT = "com.microsoft"
MAX_ELEMENTS = 100_000
SHAPES = ((3, 16, 16), (8, 12, 12), (1, 32, 32), (12, 12, 3), (6, 20), (24, 8), (4, 6, 6, 6), (16,), ())
"""Shapes of an input, without the batch."""


class Network(msgspec.Struct, frozen=True, kw_only=True):
    """A model, and a value of each input, from which its static shape and type can be read."""

    name: str
    proto: onnx.ModelProto
    inputs: dict[str, Any]


class RefusedError(Exception):
    """ONNX Runtime does not take a node, or its output is of no use."""


def generate_models(seeds: range, *, size: int = 14, plain: bool = True) -> Iterator[Network]:
    """Yields a network of up to `size` nodes for each seed; with `plain`, of static shapes and one float32 input."""
    for seed in seeds:
        net = Net(seed, plain=plain)
        for _ in range(4 * size):
            if len(net.nodes) < size:
                net.grow()
        made = Network(name=f"generated_{seed:03}", proto=net.proto(), inputs=net.inputs)
        # The shape inference of a whole graph refuses a few, such as a LpPool whose shapes it computes otherwise.
        if net.nodes and try_model(made.proto, net.inputs) is not None:
            yield made


class Net:
    """A network that grows by proposals; `values` has an example of each input and each node's output."""

    def __init__(self, seed: int, *, plain: bool) -> None:
        self.rng, self.plain = np.random.default_rng(seed), plain
        self.opset: int = self.pick(*OPSETS)
        self.float: Any = np.dtype(np.float16 if not plain and self.chance(0.1) else np.float32)
        batch = self.pick(1, 1, 1, 2)
        shape = (batch, *self.pick(*SHAPES))
        self.inputs: dict[str, Any] = {"x": self.rng.normal(size=shape).astype(self.float)}
        extra = {
            "x2": self.rng.normal(size=shape).astype(self.float),
            "ids": self.rng.integers(0, 5, size=(batch, 7)),
            "mask": self.rng.random(size=(batch, 7)) > 0.5,
        }
        self.inputs |= {name: value for name, value in extra.items() if not plain and self.chance(0.15)}
        self.values: dict[str, Any] = dict(self.inputs)
        self.constants: dict[str, Any] = {}
        self.nodes: list[onnx.NodeProto] = []
        self.names = 0

    def chance(self, share: float) -> bool:
        """Returns True in this share of calls."""
        return bool(self.rng.random() < share)

    def pick(self, *choices: Any) -> Any:
        """Returns one of the choices."""
        return choices[int(self.rng.integers(len(choices)))]

    def value(self, kinds: str = "f") -> str:
        """Returns the name of a value, mostly a recent one, whose type is of one of NumPy's kinds."""
        fit = [name for name, value in self.values.items() if value.dtype.kind in kinds]
        if not fit:
            raise RefusedError
        return str(self.pick(*(fit[-5:] if self.chance(0.8) else fit)))

    def shape(self, name: str) -> tuple[int, ...]:
        """Returns the shape of a value."""
        return tuple(self.values[name].shape)

    def constant(self, array: Any, dtype: Any = None) -> str:
        """Returns the name of a constant, sometimes that of an equal one; floats have the network's type."""
        array = np.asarray(array, dtype)
        array = array.astype(self.float) if array.dtype.kind == "f" and dtype is None else array
        for name, other in self.constants.items():
            if other.dtype == array.dtype and np.array_equal(other, array) and self.chance(0.3):
                return name
        name = f"c{len(self.constants)}"
        self.constants[name] = array
        return name

    def weight(self, *shape: int) -> str:
        """Returns the name of a weight: some are zero, tiny, huge, of equal elements, or have a dead channel."""
        drawn = self.rng.normal(size=shape) / max(1.0, float(np.prod(shape[1:]))) ** 0.5
        if self.chance(0.2):
            drawn *= self.pick(0, 1e-6, 1e3)
        elif self.chance(0.1):
            drawn = np.full(shape, self.pick(-1, 0.5, 1, 2), float)
        elif self.chance(0.1) and len(shape) > 1:
            drawn[0] = 0
        return self.constant(drawn)

    def add(self, op: str, *inputs: str, outputs: int = 1, reads: tuple[str, ...] = (), **attributes: Any) -> str:
        """Adds a node and returns its first output; `reads` are the outer values of its bodies.

        Raises:
            RefusedError: ONNX Runtime does not take it, or an output is empty, large or not finite.
        """
        domain, _, kind = op.rpartition(":")
        label = f"n{self.names}"
        self.names += 1
        made = [f"{label}_{at}" for at in range(outputs)]
        # Not every node has a name.
        node = helper.make_node(kind, inputs, made, label if self.chance(0.9) else "", domain=domain, **attributes)
        feeds = {name: {**self.constants, **self.values}[name] for name in (*inputs, *reads) if name}
        values = [_declare(name, value, value.shape) for name, value in feeds.items()]
        graph = helper.make_graph([node], "node", values, [helper.make_empty_tensor_value_info(name) for name in made])
        arrays = try_model(self._model(graph), feeds)
        if arrays is None or not all(0 < array.size <= MAX_ELEMENTS and np.isfinite(array).all() for array in arrays):
            raise RefusedError
        self.nodes.append(node)
        self.values.update(zip(made, arrays, strict=True))
        return made[0]

    def grow(self) -> None:
        """Tries one proposal; what it added before a refusal stays."""
        proposals, weights = zip(*_PROPOSALS.items(), strict=True)
        at = self.rng.choice(len(proposals), p=np.array(weights) / sum(weights))
        try:
            x = self.value()
            proposals[int(at)](self, x, self.shape(x))
        except (RefusedError, IndexError, ValueError):
            # An IndexError is of a shape with fewer axes than the operator reads.
            return

    def proto(self) -> onnx.ModelProto:
        """Returns the model; its outputs are the values without a reader, and sometimes one that has readers."""
        read = {name for node in self.nodes for name in _reads(node)}
        made = [name for name in self.values if name not in self.inputs]
        outputs = [name for name in made if name not in read]
        if self.chance(0.2):
            outputs = outputs[-3:]
        if self.chance(0.25):
            outputs += [name for name in made if name in read][-1:]
        tensors = [numpy_helper.from_array(value, name) for name, value in self.constants.items() if name in read]
        nodes = list(self.nodes)
        if not self.plain and self.chance(0.2):
            nodes = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors] + nodes
            tensors = []
        opened = not self.plain and self.chance(0.25)
        inputs = [_declare(n, v, ("N", *v.shape[1:]) if opened else v.shape) for n, v in self.inputs.items()]
        # With an open batch, no sizes of outputs are known here.
        ends = [_declare(n, v, None if opened else v.shape) for n, v in self.values.items() if n in outputs]
        return self._model(helper.make_graph(nodes, "generated", inputs, ends, tensors))

    def _model(self, graph: onnx.GraphProto) -> onnx.ModelProto:
        opsets = [helper.make_opsetid("", self.opset), helper.make_opsetid(MICROSOFT, 1)]
        version = helper.find_min_ir_version_for(opsets, ignore_unknown=True)
        return helper.make_model(graph, opset_imports=opsets, ir_version=version)


def try_model(proto: onnx.ModelProto, feeds: dict[str, Any]) -> list[Any] | None:
    """Returns the outputs of a model; None if ONNX Runtime refuses it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return [np.asarray(array) for array in session.run(None, feeds)]
    except Exception:  # noqa: BLE001 - ONNX Runtime's exceptions share no base, and each is a refusal
        return None


def _declare(name: str, value: Any, shape: Any) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(value.dtype), shape)


def _reads(node: onnx.NodeProto) -> list[str]:
    bodies = [attribute.g for attribute in node.attribute if attribute.type == onnx.AttributeProto.GRAPH]
    return [*node.input, *(name for body in bodies for inner in body.node for name in inner.input)]


Shape = tuple[int, ...]
Proposal = Callable[[Net, str, Shape], object]
_PLAIN = """
    Abs Acos Asin Asinh Atan Atanh Ceil Celu Cos Cosh Dropout Erf Exp Floor GlobalAveragePool GlobalMaxPool
    HardSigmoid HardSwish Identity IsInf IsNaN Log MeanVarianceNormalization Mish Neg Reciprocal Relu Round Selu
    Shape Sigmoid Sign Sin Sinh Size Softplus Softsign Sqrt Tan Tanh Trilu com.microsoft:Gelu
    com.microsoft:QuickGelu
"""
_UNARY: dict[str, dict[str, tuple[Any, ...]]] = {op: {} for op in _PLAIN.split()} | {
    "ArgMax": {"axis": (-1, 0, 1), "keepdims": (0, 1)},
    "Cast": {"to": (TensorProto.FLOAT, TensorProto.INT32, TensorProto.INT64, TensorProto.BOOL, TensorProto.UINT8)},
    "DepthToSpace": {"blocksize": (2,), "mode": ("DCR", "CRD")},
    "Elu": {"alpha": (0.5, 1.0)},
    "Flatten": {"axis": (0, 1, 2)},
    "Gelu": {"approximate": ("none", "tanh")},
    "GlobalLpPool": {"p": (1, 2)},
    "Hardmax": {"axis": (-1, 0, 1)},
    "LRN": {"size": (3,)},
    "LeakyRelu": {"alpha": (0.01, 0.3)},
    "LogSoftmax": {"axis": (-1, 0, 1, 2)},
    "LpNormalization": {"axis": (-1, 1), "p": (1, 2)},
    "Softmax": {"axis": (-1, 0, 1, 2)},
    "SpaceToDepth": {"blocksize": (2,)},
    "Swish": {"alpha": (1.0, 1.5)},
    "ThresholdedRelu": {"alpha": (0.5, 1.0)},
}
"""Operators of one input, with the values that their attributes may have."""

_WITH_CONSTANTS: dict[str, Callable[[Net, Shape], list[Any]]] = {
    "Clip": lambda n, _: n.pick([0.0, 6.0], [-1.0, 1.0], [0.0], [None, 1.0]),
    "CumSum": lambda n, _: [n.pick(-1, 0)],
    "Expand": lambda n, s: [n.pick([2, *s], [1, *s])],
    "Gather": lambda n, _: [n.pick(0, -1, [0], [0, 0], [[0]], [0, -1])],
    "GatherElements": lambda n, s: [n.rng.integers(0, max(1, s[0]), size=s)],
    "GatherND": lambda n, _: [n.pick([[0]], [[0], [0]])],
    "Pad": lambda n, s: [n.rng.integers(0, 2, size=2 * len(s)), n.pick(0.0, 1.0, -5.0)],
    "Reshape": lambda n, s: [n.pick([s[0], -1], [0, -1], [-1], [1, -1], [s[0], -1, 2], [0, 0, -1], [*s, 1])],
    "ScatterElements": lambda n, s: [np.zeros(s, np.int64), n.rng.normal(size=s)],
    "ScatterND": lambda n, s: [[[0]], n.rng.normal(size=(1, *s[1:]))],
    "Tile": lambda n, s: [[n.pick(1, 1, 2) for _ in s]],
}
"""Operators of one value and constants of these values; None leaves an input out."""


def _only(needed: bool, /, **attributes: Any) -> dict[str, Any]:  # noqa: FBT001 - a condition, not a switch
    """Returns attributes that a node has on a condition."""
    return attributes if needed else {}


def _unary(net: Net, x: str, _shape: Shape) -> None:
    op, choices = net.pick(*_UNARY.items())
    net.add(op, x, **{name: net.pick(*values) for name, values in choices.items()})


def _with_constants(net: Net, x: str, shape: Shape) -> None:
    op, make = net.pick(*_WITH_CONSTANTS.items())
    modes = _only(op == "Pad", mode=net.pick("constant", "reflect", "edge"))
    net.add(op, x, *("" if array is None else net.constant(array) for array in make(net, shape)), **modes)


def _binary(net: Net, x: str, shape: Shape) -> None:
    op = net.pick("Add", "Add", "Sub", "Mul", "Mul", "Div", "Max", "Min", "Pow", "PRelu", "Sum", "Mean", "Mod")
    other = net.pick(
        net.value(),
        net.weight(*shape[1:2], *[1] * (len(shape) - 2)),
        net.constant(net.pick(0.0, 1.0, 2.0, -1.0, 0.5, 6.0, 255.0, 1e-5)),
    )
    ends = [other, x] if op != "PRelu" and net.chance(0.25) else [x, other]
    net.add(op, *ends, **_only(op == "Mod", fmod=1))


def _compare(net: Net, x: str, _shape: Shape) -> None:
    other = net.pick(net.value(), net.constant(0.0))
    truth = net.add(net.pick("Greater", "Less", "GreaterOrEqual", "LessOrEqual", "Equal"), x, other)
    truth = net.add("Not", truth) if net.chance(0.2) else truth
    truth = net.add(net.pick("And", "Or", "Xor"), truth, net.value("b")) if net.chance(0.2) else truth
    net.add("Where", truth, x, net.pick(other, net.constant(0.0), net.constant(-1e4)))


def _where(net: Net, x: str, _shape: Shape) -> None:
    net.add("Where", net.value("b"), x, net.pick(net.value(), net.constant(0.0)))


def _activate(net: Net, x: str, _shape: Shape) -> None:
    net.add("Mul", x, net.add(net.pick("Sigmoid", "Tanh", "HardSigmoid", "Softplus"), x))


def _slide(net: Net, axes: int, kernel: int, strides: tuple[int, ...]) -> dict[str, Any]:
    """Returns the attributes of a window that slides along axes."""
    chosen: dict[str, Any] = {"strides": [net.pick(*strides)] * axes}
    if net.chance(0.5):
        chosen["pads"] = [kernel // 2] * (2 * axes)
    elif net.chance(0.3):
        chosen["auto_pad"] = net.pick("SAME_UPPER", "SAME_LOWER", "VALID")
    return chosen


def _conv(net: Net, x: str, shape: Shape) -> None:
    channels, axes, kernel = shape[1], len(shape) - 2, net.pick(1, 2, 3, 3, 5)
    group = net.pick(1, 1, channels)
    made = net.pick(3, 4, 8, channels) if group == 1 else channels * net.pick(1, 1, 2)
    bias = [net.weight(made)] if net.chance(0.7) else []
    window = _slide(net, axes, kernel, (1, 1, 2)) | _only(net.chance(0.15), dilations=[2] * axes)
    net.add("Conv", x, net.weight(made, channels // group, *[kernel] * axes), *bias, group=group, **window)


def _conv_transpose(net: Net, x: str, shape: Shape) -> None:
    channels, axes, kernel = shape[1], len(shape) - 2, net.pick(2, 3, 4)
    group = net.pick(1, 1, channels)
    made = net.pick(2, 4, channels) if group == 1 else 1
    window = _slide(net, axes, kernel, (2,)) | _only(net.chance(0.2), output_padding=[1] * axes)
    bias = [net.weight(made * group)] if net.chance(0.5) else []
    net.add("ConvTranspose", x, net.weight(channels, made, *[kernel] * axes), *bias, group=group, **window)


def _pool(net: Net, x: str, shape: Shape) -> None:
    op, axes, kernel = net.pick("MaxPool", "AveragePool", "LpPool"), len(shape) - 2, net.pick(2, 2, 3)
    more = _only(op != "LpPool" and net.chance(0.2), ceil_mode=1)
    more |= _only(op == "AveragePool" and net.chance(0.3), count_include_pad=1)
    outputs = 2 if op == "MaxPool" and net.chance(0.1) else 1
    net.add(op, x, outputs=outputs, kernel_shape=[kernel] * axes, **_slide(net, axes, kernel, (1, 2)), **more)


def _gemm(net: Net, x: str, shape: Shape) -> None:
    made, swap = net.pick(4, 10, shape[1]), net.pick(0, 1)
    bias = [net.weight(made)] if net.chance(0.7) else []
    scales: dict[str, Any] = {name: net.pick(0.5, 2.0) for name in ("alpha", "beta") if net.chance(0.15)}
    net.add("Gemm", x, net.weight(*((made, shape[1]) if swap else (shape[1], made))), *bias, transB=swap, **scales)


def _matmul(net: Net, x: str, shape: Shape) -> None:
    form = net.pick("weight", "weight", "left", "scores", "fused", "einsum", "einsum scores")
    made = net.pick(4, 10, shape[-1])
    if form == "weight":
        net.add("MatMul", x, net.weight(shape[-1], made))
    elif form == "left":
        net.add("MatMul", net.weight(made, shape[-2]), x)
    elif form == "fused":
        net.add(f"{MICROSOFT}:FusedMatMul", x, net.weight(5, shape[-1]), transB=1, alpha=0.3)
    elif form == "einsum":
        net.add("Einsum", x, net.weight(shape[-1], made), equation="...d,de->...e")
    elif form == "einsum scores":
        net.add("Einsum", x, x, equation=net.pick("...id,...jd->...ij", "...id,...id->...i", "bij,bkj->bik"))
    else:
        turned = net.add("Transpose", net.value(), perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
        net.add("MatMul", x, turned)


def _normalize(net: Net, x: str, shape: Shape) -> None:
    kind = net.pick("Batch", "Instance", "Layer", "Group", "RMS", "Skip")
    channels, last = shape[1], shape[-1]
    if kind == "Batch":
        variance = net.constant(net.rng.random(channels) + 0.1)
        net.add("BatchNormalization", x, *(net.weight(channels) for _ in range(3)), variance)
    elif kind == "Instance":
        net.add("InstanceNormalization", x, net.weight(channels), net.weight(channels))
    elif kind == "Group":
        sizes = channels if net.opset > 20 else 2
        net.add("GroupNormalization", x, net.weight(sizes), net.weight(sizes), num_groups=2)
    elif kind == "Skip":
        net.add(f"{MICROSOFT}:SkipLayerNormalization", x, net.value(), net.weight(last))
    else:
        bias = [net.weight(last)] if kind == "Layer" and net.chance(0.6) else []
        net.add(f"{kind}Normalization", x, net.weight(last), *bias, axis=-1)


def _reduce(net: Net, x: str, shape: Shape) -> None:
    op = "Reduce" + net.pick("Mean", "Mean", "Sum", "Max", "Min", "L1", "L2", "Prod", "LogSumExp", "SumSquare")
    _with_axes(net, op, x, net.rng.integers(-len(shape), len(shape), size=1), keepdims=net.pick(0, 1))


def _squeeze(net: Net, x: str, shape: Shape) -> None:
    _with_axes(net, net.pick("Squeeze", "Unsqueeze"), x, net.rng.integers(0, len(shape) + 1, size=1))


def _with_axes(net: Net, op: str, x: str, axes: Any, **attributes: Any) -> None:
    try:
        net.add(op, x, net.constant(axes), **attributes)
    except RefusedError:
        # Up to opset 12 or 17, axes are an attribute.
        net.add(op, x, axes=axes.tolist(), **attributes)


def _transpose(net: Net, x: str, shape: Shape) -> None:
    net.add("Transpose", x, perm=net.rng.permutation(len(shape)).tolist())


def _join(net: Net, x: str, shape: Shape) -> None:
    other = net.value()
    ends = net.pick([x, other], [x, x], [x, other, x], [x, net.weight(*shape)])
    net.add("Concat", *ends, axis=int(net.rng.integers(-len(shape), len(shape))))


def _cut(net: Net, x: str, shape: Shape) -> None:
    axis = int(net.rng.integers(len(shape)))
    half, step = shape[axis] // 2, net.pick(1, 1, 2, -1)
    if net.chance(0.5):
        # The number of outputs of an equal split is an attribute since opset 18.
        sizes = [net.constant([half, shape[axis] - half])] if net.opset >= 13 else []
        net.add("Split", x, *sizes, outputs=2, axis=axis)
    else:
        bounds = ([0], [max(1, half)]) if step > 0 else ([-1], [-(2**31)])
        net.add("Slice", x, *(net.constant(array) for array in (*bounds, [axis], [step])))


def _resize(net: Net, x: str, shape: Shape) -> None:
    scale = net.pick(2.0, 2.0, 0.5, 1.5, 1.0)
    net.add(
        "Resize", x, "", net.constant([1, 1, *[scale] * (len(shape) - 2)], np.float32),
        mode=net.pick("nearest", "linear", "cubic"), nearest_mode=net.pick("floor", "round_prefer_floor", "ceil"),
        coordinate_transformation_mode=net.pick("asymmetric", "half_pixel", "align_corners", "pytorch_half_pixel"),
    )  # fmt: skip


def _recur(net: Net, x: str, shape: Shape) -> None:
    op, gates = net.pick(("LSTM", 4), ("GRU", 3), ("RNN", 1))
    direction, hidden = net.pick("forward", "forward", "reverse", "bidirectional"), 6
    ways = 2 if direction == "bidirectional" else 1
    bias = [net.weight(ways, 2 * gates * hidden)] if net.chance(0.7) else []
    more = _only(op == "GRU" and net.chance(0.6), linear_before_reset=1)
    weights = [net.weight(ways, gates * hidden, shape[2]), net.weight(ways, gates * hidden, hidden)]
    net.add(op, x, *weights, *bias, outputs=net.pick(1, 2), hidden_size=hidden, direction=direction, **more)


def _embed(net: Net, _x: str, _shape: Shape) -> None:
    ids = net.value("i")
    if net.chance(0.7):
        net.add("Gather", net.weight(net.pick(8, 20), 6), ids)
    else:
        net.add("OneHot", ids, net.constant(8), net.constant([0.0, 1.0]))


def _top(net: Net, x: str, _shape: Shape) -> None:
    net.add("TopK", x, net.constant([net.pick(1, 2)]), outputs=2, axis=-1)


def _attend(net: Net, x: str, shape: Shape) -> None:
    form = net.pick("Attention", "RotaryEmbedding", "nodes")
    if form == "Attention":
        net.add(form, x, x, x, **_only(len(shape) == 3, q_num_heads=2, kv_num_heads=2))
    elif form == "RotaryEmbedding":
        angles = net.rng.random(size=(*shape[:1], shape[2], shape[3] // 2))
        net.add(form, x, net.constant(np.cos(angles)), net.constant(np.sin(angles)))
    else:
        query, key, value = (net.add("MatMul", x, net.weight(shape[-1], 8)) for _ in range(3))
        turned = net.add("Transpose", key, perm=[*range(len(shape) - 2), len(shape) - 1, len(shape) - 2])
        scores = net.add("Mul", net.add("MatMul", query, turned), net.constant(8**-0.5))
        net.add("MatMul", net.add("Softmax", scores, axis=-1), value)


def _quantized(net: Net, x: str, shape: Shape) -> None:
    """A piece of a model that somebody quantized before."""
    grid = [net.constant(0.05), net.constant(128, np.uint8)]
    read = net.add("QuantizeLinear", x, *grid)
    form = net.pick("copy", "QDQ", "QLinearConv", "QLinearMatMul", "integer")
    kernel = [3] * (len(shape) - 2)
    filters = net.rng.integers(-127, 128, size=(4, shape[1], *kernel)).astype(np.int8)
    table = net.constant(net.rng.integers(-127, 128, size=(shape[-1], 5)).astype(np.int8))
    small = [net.constant(0.01), net.constant(0, np.int8)]
    if form == "copy":
        net.add("DequantizeLinear", read, *grid)
    elif form == "QDQ":
        weight = net.add("DequantizeLinear", net.constant(filters), *small)
        made = net.add("QuantizeLinear", net.add("Conv", net.add("DequantizeLinear", read, *grid), weight), *grid)
        net.add("DequantizeLinear", made, *grid)
    elif form == "QLinearConv":
        made = net.add(form, read, *grid, net.constant(filters), *small, *grid)
        net.add("DequantizeLinear", made, *grid)
    elif form == "QLinearMatMul":
        net.add("DequantizeLinear", net.add(form, read, *grid, table, *small, *grid), *grid)
    else:
        codes = net.add("DynamicQuantizeLinear", x, outputs=3)
        scale, zero = (f"{codes[:-1]}{at}" for at in (1, 2))
        sums = net.add("MatMulInteger", codes, table, zero)
        net.add("Mul", net.add("Cast", sums, to=TensorProto.FLOAT), net.add("Mul", scale, small[0]))


def _branch(net: Net, x: str, _shape: Shape) -> None:
    sign = net.add("Greater", net.add("ReduceSum", x, keepdims=0), net.constant(0.0))
    condition = net.pick(sign, net.constant(array=True))
    net.add("If", condition, reads=(x,), then_branch=_body(net, ["Relu"], x), else_branch=_body(net, ["Neg"], x))


def _loop(net: Net, x: str, _shape: Shape) -> None:
    body = _body(net, ["Tanh", "Neg"], "state", inputs=("state",))
    body.input.insert(0, helper.make_tensor_value_info("at", TensorProto.INT64, []))
    body.input.insert(1, helper.make_tensor_value_info("on", TensorProto.BOOL, []))
    body.node.append(helper.make_node("Identity", ["on"], ["still"]))
    body.output.insert(0, helper.make_tensor_value_info("still", TensorProto.BOOL, []))
    net.add("Loop", net.constant(net.pick(1, 3)), net.pick("", net.constant(array=True)), x, body=body)


def _scan(net: Net, x: str, shape: Shape) -> None:
    body = _body(net, ["Tanh"], "sum", inputs=("state", "row"))
    body.node.insert(0, helper.make_node("Add", ["state", "row"], ["sum"]))
    body.output.insert(0, helper.make_tensor_value_info("sum", body.output[0].type.tensor_type.elem_type, None))
    net.add("Scan", net.weight(*shape[1:]), x, outputs=2, body=body, num_scan_inputs=1)


def _body(net: Net, ops: list[str], value: str, *, inputs: tuple[str, ...] = ()) -> onnx.GraphProto:
    """Returns the body of a control flow operator: a chain of operators of one input."""
    names = [value, *(f"{op}_{net.names}_{at}" for at, op in enumerate(ops))]
    nodes = [helper.make_node(op, [names[at]], [names[at + 1]]) for at, op in enumerate(ops)]
    kind = helper.np_dtype_to_tensor_dtype(net.float)
    starts, ends = (
        [helper.make_tensor_value_info(name, kind, None) for name in group] for group in (inputs, names[-1:])
    )
    return helper.make_graph(nodes, "body", starts, ends)


def _suppress(net: Net, x: str, _shape: Shape) -> None:
    if net.plain:
        raise RefusedError  # the number of boxes is not known
    boxes = net.add("Reshape", x, net.constant([1, -1, 4]))
    scores = net.constant(net.rng.random(size=(1, 1, net.shape(boxes)[1])))
    net.add("NonMaxSuppression", boxes, scores, net.constant([5]), net.constant(0.5, np.float32))


_PROPOSALS: dict[Proposal, float] = {
    _unary: 9, _with_constants: 6, _binary: 6, _conv: 6, _normalize: 4, _gemm: 3, _matmul: 4, _reduce: 3, _join: 2,
    _compare: 2, _where: 1, _activate: 2, _conv_transpose: 2, _pool: 3, _squeeze: 1, _transpose: 2, _cut: 2, _resize: 1,
    _recur: 2, _embed: 2, _top: 0.5, _attend: 1, _quantized: 1.5, _branch: 0.4, _loop: 0.4, _scan: 0.4, _suppress: 0.3,
}  # fmt: skip
"""How often each proposal is made, relative to the others."""
