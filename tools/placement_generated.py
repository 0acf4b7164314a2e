"""Random networks for measuring placement: chains and branches of many operators, seeded, with static shapes."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

OPSETS = (13, 15, 17, 18)
Shape = tuple[int, ...]


class Net:
    """A network that is built node by node from one float input."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.opset = int(self.rng.choice(OPSETS))
        shape = [(1, 8, 12, 12), (1, 3, 16, 16), (2, 6, 16), (4, 24), (1, 4, 6, 8, 8)][int(self.rng.integers(5))]
        self.inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, shape)]
        self.nodes: list[onnx.NodeProto] = []
        self.constants: list[onnx.TensorProto] = []
        self.known: list[tuple[str, Shape]] = [("x", shape)]

    def weight(self, *shape: int) -> str:
        """Returns the name of a new float constant."""
        return self.constant(self.rng.normal(size=shape).astype(np.float32))

    def constant(self, array: Any) -> str:
        """Returns the name of a new constant."""
        name = f"c{len(self.constants)}"
        self.constants.append(numpy_helper.from_array(np.asarray(array), name))
        return name

    def add(self, op: str, inputs: list[str], shape: Shape, **attributes: Any) -> None:
        """Adds a node with one output of this shape."""
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [f"{name}_y"], name, **attributes))
        self.known.append((f"{name}_y", shape))

    def proto(self) -> onnx.ModelProto:
        """Returns the model; every value without a reader is an output."""
        read = {name for node in self.nodes for name in node.input}
        outputs = [helper.make_tensor_value_info(n, TensorProto.FLOAT, s) for n, s in self.known if n not in read]
        graph = helper.make_graph(self.nodes, "generated", self.inputs, outputs, self.constants)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def generate_models(seeds: range, *, size: int = 14) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yields a model of up to `size` nodes for each seed."""
    for seed in seeds:
        net = Net(seed)
        for _ in range(size):
            at = len(net.known) - 1 - min(int(net.rng.integers(4)), len(net.known) - 1)
            name, shape = net.known[at]
            _GROWERS[int(net.rng.integers(len(_GROWERS)))](net, name, shape)
        yield f"generated_{seed:03}", net.proto()


_UNARY = (
    "Relu", "Sigmoid", "Tanh", "Abs", "Neg", "Exp", "Ceil", "Floor", "Round", "Sin", "Cos", "Elu", "LeakyRelu",
    "Softplus", "HardSigmoid", "Softsign", "Selu", "Erf", "Sign", "Reciprocal", "HardSwish", "Atan", "Cosh",
    "ThresholdedRelu",
)  # fmt: skip


def _unary(net: Net, name: str, shape: Shape) -> None:
    op = str(net.rng.choice(_UNARY))
    if op != "HardSwish" or net.opset >= 14:
        net.add(op, [name], shape)


def _clip(net: Net, name: str, shape: Shape) -> None:
    low, high = [(0, 6), (-1, 1), (0, 1)][int(net.rng.integers(3))]
    net.add("Clip", [name, net.constant(np.float32(low)), net.constant(np.float32(high))], shape)


def _binary(net: Net, name: str, shape: Shape) -> None:
    op = str(net.rng.choice(["Add", "Mul", "Sub", "Div", "Max", "Min", "Sum", "Mean"]))
    same = [other for other, its in net.known if its == shape]
    other = str(net.rng.choice(same)) if net.rng.random() < 0.5 else net.weight(*([1] * (len(shape) - 1)), shape[-1])
    net.add(op, [name, other], shape)


def _conv(net: Net, name: str, shape: Shape) -> None:
    if len(shape) not in {3, 4, 5}:
        return
    spatial, channels = len(shape) - 2, shape[1]
    group = channels if net.rng.random() < 0.3 else 1
    made = channels if group > 1 else int(net.rng.integers(2, 9))
    weight = net.weight(made, channels // group, *[3] * spatial)
    inputs = [name, weight, net.weight(made)] if net.rng.random() < 0.7 else [name, weight]
    dilation = int(net.rng.choice([1, 1, 2]))
    pads = [dilation] * 2 * spatial
    net.add("Conv", inputs, (shape[0], made, *shape[2:]), pads=pads, group=group, dilations=[dilation] * spatial)


def _conv_transpose(net: Net, name: str, shape: Shape) -> None:
    if len(shape) == 4 and max(shape) < 64:
        made = int(net.rng.integers(2, 6))
        weight = net.weight(shape[1], made, 2, 2)
        net.add("ConvTranspose", [name, weight], (shape[0], made, 2 * shape[2], 2 * shape[3]), strides=[2, 2])


def _pool(net: Net, name: str, shape: Shape) -> None:
    if len(shape) not in {3, 4, 5} or min(shape[2:]) < 4:
        return
    spatial = len(shape) - 2
    op = str(net.rng.choice(["MaxPool", "AveragePool", "GlobalAveragePool", "GlobalMaxPool"]))
    if op.startswith("Global"):
        net.add(op, [name], (*shape[:2], *[1] * spatial))
    else:
        made = (*shape[:2], *(dim // 2 for dim in shape[2:]))
        net.add(op, [name], made, kernel_shape=[2] * spatial, strides=[2] * spatial)


def _reshape(net: Net, name: str, shape: Shape) -> None:
    made = [(shape[0], int(np.prod(shape[1:]))), (*shape[:-1], shape[-1], 1), (int(np.prod(shape)),)][
        int(net.rng.integers(3))
    ]
    if len(made) <= 6:
        net.add("Reshape", [name, net.constant(np.array(made, np.int64))], made)


def _transpose(net: Net, name: str, shape: Shape) -> None:
    perm = [int(axis) for axis in net.rng.permutation(len(shape))]
    net.add("Transpose", [name], tuple(shape[axis] for axis in perm), perm=perm)


def _concat(net: Net, name: str, shape: Shape) -> None:
    same = [other for other, its in net.known if its == shape]
    axis = int(net.rng.integers(len(shape)))
    made = tuple(2 * dim if at == axis else dim for at, dim in enumerate(shape))
    if max(made) < 400:
        net.add("Concat", [name, str(net.rng.choice(same))], made, axis=axis)


def _slice(net: Net, name: str, shape: Shape) -> None:
    axis = int(net.rng.integers(len(shape)))
    if shape[axis] > 2:
        made = tuple(dim - 1 if at == axis else dim for at, dim in enumerate(shape))
        entries = [net.constant(np.array([value], np.int64)) for value in (1, shape[axis], axis)]
        net.add("Slice", [name, *entries], made)


def _softmax(net: Net, name: str, shape: Shape) -> None:
    net.add(str(net.rng.choice(["Softmax", "LogSoftmax"])), [name], shape, axis=int(net.rng.integers(len(shape))))


def _reduce(net: Net, name: str, shape: Shape) -> None:
    axis = int(net.rng.integers(len(shape)))
    made = tuple(1 if at == axis else dim for at, dim in enumerate(shape))
    op = str(net.rng.choice(["ReduceMean", "ReduceMax", "ReduceMin", "ReduceSum", "ReduceL2", "ReduceProd"]))
    if net.opset >= 18 or op == "ReduceSum":
        net.add(op, [name, net.constant(np.array([axis], np.int64))], made, keepdims=1)
    else:
        net.add(op, [name], made, axes=[axis], keepdims=1)


def _matmul(net: Net, name: str, shape: Shape) -> None:
    made = int(net.rng.integers(2, 16))
    net.add("MatMul", [name, net.weight(shape[-1], made)], (*shape[:-1], made))


def _gemm(net: Net, name: str, shape: Shape) -> None:
    if len(shape) == 2:
        made = int(net.rng.integers(2, 16))
        weight, bias = net.weight(made, shape[1]), net.weight(made)
        net.add("Gemm", [name, weight, bias], (shape[0], made), transB=1)


def _norm(net: Net, name: str, shape: Shape) -> None:
    channels = shape[1] if len(shape) > 1 else 0
    if len(shape) >= 3 and net.rng.random() < 0.5:
        net.add("InstanceNormalization", [name, net.weight(channels), net.weight(channels)], shape)
    elif net.opset >= 17:
        net.add("LayerNormalization", [name, net.weight(shape[-1]), net.weight(shape[-1])], shape, axis=-1)


def _pad(net: Net, name: str, shape: Shape) -> None:
    mode = str(net.rng.choice(["constant", "reflect", "edge"]))
    if shape[-1] > 2:
        pads = [0] * (2 * len(shape))
        pads[len(shape) - 1] = pads[-1] = 1
        net.add("Pad", [name, net.constant(np.array(pads, np.int64))], (*shape[:-1], shape[-1] + 2), mode=mode)


def _resize(net: Net, name: str, shape: Shape) -> None:
    if len(shape) == 4 and max(shape) < 64:
        mode = str(net.rng.choice(["nearest", "linear"]))
        form = str(net.rng.choice(["half_pixel", "asymmetric", "align_corners"]))
        scales = net.constant(np.array([1, 1, 2, 2], np.float32))
        made = (*shape[:2], 2 * shape[2], 2 * shape[3])
        nearest = str(net.rng.choice(["floor", "round_prefer_floor"]))
        net.add(
            "Resize", [name, "", scales], made, mode=mode, coordinate_transformation_mode=form, nearest_mode=nearest
        )


def _gather(net: Net, name: str, shape: Shape) -> None:
    axis = int(net.rng.integers(len(shape)))
    made = tuple(2 if at == axis else dim for at, dim in enumerate(shape))
    net.add("Gather", [name, net.constant(np.array([0, shape[axis] - 1], np.int64))], made, axis=axis)


_GROWERS: tuple[Callable[[Net, str, Shape], None], ...] = (
    _unary, _unary, _unary, _clip, _binary, _binary, _conv, _conv, _conv_transpose, _pool, _reshape, _transpose,
    _concat, _slice, _softmax, _reduce, _matmul, _gemm, _norm, _pad, _resize, _gather,
)  # fmt: skip
