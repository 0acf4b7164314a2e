"""A writer of ONNX graphs with random weights."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.tensors import Array


class Net:
    """Collects nodes and constants in execution order; the first axis of every tensor is the batch."""

    def __init__(self, name: str, opset: int, seed: int) -> None:
        self.name, self.opset = name, opset
        self.nodes: list[onnx.NodeProto] = []
        self.arrays: dict[str, Array] = {}
        self.inputs: dict[str, tuple[int, ...]] = {}
        self.outputs: dict[str, tuple[int, ...]] = {}
        self.rng = np.random.default_rng(seed)

    def constant(self, value: Any, name: str = "") -> str:
        """Adds a constant and returns its name; float64 becomes float32."""
        array = np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = name or f"c{len(self.arrays)}"
        self.arrays[name] = array
        return name

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        """Adds a node with one output and returns the name of that."""
        name = output or f"{op.lower()}{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"{name}.node", **attributes))
        return name

    def conv(self, x: str, sizes: tuple[int, int], kernel: int = 3, *, stride: int = 1, gain: float = 2.0) -> str:
        """Adds a padded convolution from sizes[0] to sizes[1] channels."""
        shape, name = (sizes[1], sizes[0], kernel, kernel), f"w{len(self.arrays)}"
        weight = self.constant(self.rng.normal(0, np.sqrt(gain / np.prod(shape[1:])), shape), name)
        bias, pads = self.constant(np.zeros(sizes[1]), f"{name}.bias"), [kernel // 2] * 4
        return self.add("Conv", [x, weight, bias], kernel_shape=[kernel] * 2, strides=[stride] * 2, pads=pads)

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        """Adds MatMul and Add over the last axis."""
        name = f"w{len(self.arrays)}"
        weight = self.constant(self.rng.normal(0, np.sqrt(1 / inputs), (inputs, outputs)), name)
        bias = self.constant(np.zeros(outputs), f"{name}.bias")
        return self.add("Add", [self.add("MatMul", [x, weight]), bias])

    def to_onnx(self, batch: int | str | None = 1, ir_version: int = 7) -> onnx.ModelProto:
        """Returns the checked model; with `batch` None, shapes hold their first axis themselves."""
        tensors = [numpy_helper.from_array(np.ascontiguousarray(value), name) for name, value in self.arrays.items()]
        axis = () if batch is None else (batch,)
        given, made = (
            [
                helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [*axis, *shape])
                for name, shape in shapes.items()
            ]
            for shapes in (self.inputs, self.outputs)
        )
        graph = helper.make_graph(self.nodes, self.name, given, made, tensors)
        model = helper.make_model(graph, ir_version=ir_version, opset_imports=[helper.make_opsetid("", self.opset)])
        onnx.checker.check_model(model)
        return model
