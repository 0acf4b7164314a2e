"""A writer of ONNX graphs whose float constants can be trained, read back by `collapse_train`."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.tensors import Array

EPSILON = 1e-5


class Net:
    """Collects nodes and constants in the order of execution; every tensor has the batch first."""

    def __init__(self, name: str, opset: int, seed: int) -> None:
        self.name, self.opset = name, opset
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, Array] = {}
        self.trained: set[str] = set()
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.kinds: dict[str, int] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.rng = np.random.default_rng(seed)

    def constant(self, value: Any, name: str = "", *, trained: bool = False) -> str:
        """Adds a constant and returns its name; float64 becomes float32."""
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = name or f"c{len(self.arrays)}"
        self.arrays[name] = array
        if trained:
            self.trained.add(name)
        return name

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns the name of that."""
        name = output or f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"{name}.node", **attributes))
        return name

    def conv(
        self, x: str, sizes: tuple[int, int], kernel: int = 3, *, stride: int = 1, groups: int = 1,
        dilation: int = 1, gain: float = 2.0, bias: bool = True,
    ) -> str:  # fmt: skip
        """Adds a padded convolution from sizes[0] to sizes[1] channels."""
        shape = (sizes[1], sizes[0] // groups, kernel, kernel)
        spread = np.sqrt(gain / np.prod(shape[1:]))
        name = f"w{len(self.arrays)}"
        parameters = [self.constant(self.rng.normal(0, spread, shape), name, trained=True)]
        if bias:
            parameters.append(self.constant(np.zeros(sizes[1]), f"{name}.bias", trained=True))
        pads = [dilation * (kernel // 2)] * 4
        return self.add(
            "Conv", [x, *parameters], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads, group=groups,
            dilations=[dilation] * 2,
        )  # fmt: skip

    def norm(self, x: str, channels: int, spread: float = 0.0) -> str:
        """Adds batch normalisation; with `spread` its factors start log-normal, so that channels differ in size."""
        name = f"bn{len(self.arrays)}"
        factors = np.exp(self.rng.normal(0, spread, channels)) if spread else np.ones(channels)
        roles = {"gamma": factors, "beta": np.zeros(channels), "mean": np.zeros(channels), "var": np.ones(channels)}
        names = [
            self.constant(value, f"{name}.{role}", trained=role in {"gamma", "beta"}) for role, value in roles.items()
        ]
        return self.add("BatchNormalization", [x, *names], epsilon=EPSILON)

    def linear(self, x: str, inputs: int, outputs: int, gain: float = 1.0) -> str:
        """Adds MatMul and Add over the last axis."""
        name = f"w{len(self.arrays)}"
        weight = self.constant(self.rng.normal(0, np.sqrt(gain / inputs), (inputs, outputs)), name, trained=True)
        bias = self.constant(np.zeros(outputs), f"{name}.bias", trained=True)
        return self.add("Add", [self.add("MatMul", [x, weight]), bias])

    def to_onnx(self, batch: int | str = 1, *, constant_nodes: bool = False) -> onnx.ModelProto:
        """Returns the checked model; with `constant_nodes` weights are Constant nodes instead of initializers."""
        tensors = [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in self.arrays.items()]
        held = [helper.make_node("Constant", [], [tensor.name], value=tensor) for tensor in tensors]
        float32 = onnx.TensorProto.FLOAT
        graph = helper.make_graph(
            [*(held if constant_nodes else []), *self.nodes],
            self.name,
            [
                helper.make_tensor_value_info(name, self.kinds.get(name, float32), [batch, *shape])
                for name, shape in self.inputs.items()
            ],
            [helper.make_tensor_value_info(name, float32, [batch, *shape]) for name, shape in self.outputs.items()],
            [] if constant_nodes else tensors,
        )
        model = helper.make_model(graph, ir_version=7, opset_imports=[helper.make_opsetid("", self.opset)])
        onnx.checker.check_model(model)
        return model


def spread_channels(net: Net, decades: float, seed: int, highs: dict[str, Array]) -> int:
    """Makes channels between two convolutions differ by up to `decades` powers of ten, and returns between how many.

    What the net computes stays the same: a channel behind batch normalisation and a positively homogeneous
    activation is scaled down, the weights that read it are scaled up. This is what folded batch normalisation does to
    channels that hardly vary. Before a Clip only channels that never reach its end are scaled, told by `highs`, the
    highest value of each channel of the Clip's output.
    """
    rng = np.random.default_rng(seed)
    makers = {node.output[0]: node for node in net.nodes}
    readers: dict[str, list[onnx.NodeProto]] = {}
    for node in net.nodes:
        for name in node.input:
            readers.setdefault(name, []).append(node)
    count = 0
    for node in net.nodes:
        if node.op_type != "Conv" or len(readers.get(node.input[0], ())) != 1 or node.input[0] not in makers:
            continue
        before = makers[node.input[0]]
        activation = before if before.op_type in {"Relu", "PRelu", "LeakyRelu", "Clip"} else None
        if activation is not None:
            before = makers.get(activation.input[0], before)
        if before.op_type != "BatchNormalization" or len(readers[before.output[0]]) != 1:
            continue
        channels = len(net.arrays[before.input[1]])
        factors = 10 ** rng.uniform(-decades, 0, channels)
        if activation is not None and activation.op_type == "Clip":
            factors = np.where(highs[activation.output[0]] < 5.5, factors, 1.0)
        for role in (1, 2):
            net.arrays[before.input[role]] = (net.arrays[before.input[role]] * factors).astype(np.float32)
        weight = net.arrays[node.input[1]]
        shape = (-1, 1, 1, 1) if weight.shape[1] == 1 and channels > 1 else (1, -1, 1, 1)
        net.arrays[node.input[1]] = (weight / factors.reshape(shape)).astype(np.float32)
        count += 1
    return count
