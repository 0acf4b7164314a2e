"""A quantized net on NNAPI, as Android's ONNX Runtime builds it, against LiteRT on the same net.

The model is cut to what lies between the first Q and the last DQ node, and run twice: on the device `android:x86_64`,
and as a TFLite model that is written here from the Q and DQ nodes and shares nothing with what stands behind NNAPI.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.data.samples import Samples
from edgekit.devices.device import Job
from edgekit.devices.find import find_device
from edgekit.graph.graph import Graph, Node, read_graph
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.target import load_target

_MIDDLE = "middle.onnx"
_PLAIN = SessionSettings(level=Level.DISABLED)
_NHWC, _NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
# TFLite's s8 kernels for weights per channel came with these versions of the operators.
_VERSIONS = {"CONV_2D": 5, "DEPTHWISE_CONV_2D": 6, "FULLY_CONNECTED": 7, "RESHAPE": 1}


class Outcome(NamedTuple):
    """How far two runs lie apart, in steps of the output's grid, and what NNAPI left to the CPU, by operator."""

    values: int
    different: int
    steps: int
    left: tuple[str, ...]


class _Grid(NamedTuple):
    scales: tuple[float, ...]
    zero: int
    axis: int = 0


class _Writer:
    """A TFLite model as far as it is written; images lie in NHWC, activations and weights are s8."""

    def __init__(self, graph: Graph) -> None:
        from ai_edge_litert import schema_py_generated  # noqa: PLC0415 - an optional extra

        self.schema: Any = schema_py_generated
        self.graph = graph
        full = onnx.load(graph.folder / _MIDDLE).graph.initializer
        self.constants = {tensor.name: numpy_helper.to_array(tensor) for tensor in full}
        self.places: dict[str, int] = {}
        self.shapes: dict[int, tuple[int, ...]] = {}
        self.model, self.part = self.schema.ModelT(), self.schema.SubGraphT()
        self.model.version, self.model.buffers, self.model.operatorCodes = 3, [self.schema.BufferT()], []
        self.part.tensors, self.part.operators = [], []

    def tensor(self, shape: Sequence[int], grid: _Grid | None, value: Array | None = None, kind: str = "INT8") -> int:
        """Adds a tensor, with its value where it is constant, and returns its place."""
        made = self.schema.TensorT()
        made.shape, made.name = list(shape), f"t{len(self.part.tensors)}".encode()
        made.type = getattr(self.schema.TensorType, kind)
        if value is not None:
            buffer = self.schema.BufferT()
            buffer.data = np.frombuffer(np.ascontiguousarray(value).tobytes(), np.uint8)
            self.model.buffers.append(buffer)
            made.buffer = len(self.model.buffers) - 1
        if grid is not None:
            made.quantization = self.schema.QuantizationParametersT()
            made.quantization.scale, made.quantization.zeroPoint = list(grid.scales), [grid.zero] * len(grid.scales)
            made.quantization.quantizedDimension = grid.axis
        self.part.tensors.append(made)
        self.shapes[len(self.part.tensors) - 1] = tuple(shape)
        return len(self.part.tensors) - 1

    def add(self, name: str, inputs: Sequence[int], output: int, options: str = "", **fields: object) -> int:
        """Adds an operator and returns the place of what it gives."""
        code, operator = self.schema.OperatorCodeT(), self.schema.OperatorT()
        code.builtinCode = getattr(self.schema.BuiltinOperator, name)
        code.deprecatedBuiltinCode, code.version = min(code.builtinCode, 127), _VERSIONS.get(name, 2)
        self.model.operatorCodes.append(code)
        operator.opcodeIndex = len(self.model.operatorCodes) - 1
        operator.inputs, operator.outputs = list(inputs), [output]
        if options:
            operator.builtinOptionsType = getattr(self.schema.BuiltinOptions, options)
            operator.builtinOptions = getattr(self.schema, f"{options}T")()
            for key, value in fields.items():
                setattr(operator.builtinOptions, key, value)
        self.part.operators.append(operator)
        return output

    def integers(self, values: Sequence[int]) -> int:
        """Adds a constant list of int32."""
        return self.tensor((len(values),), None, np.array(values, np.int32), "INT32")

    def grid(self, node: Node) -> _Grid:
        """Returns the grid of a Q or DQ node, as s8 where it is u8."""
        scale, zero = self.constants[node.input[1]], self.constants[node.input[2]]
        shift = 128 if zero.dtype == np.uint8 else 0
        scales = tuple(float(entry) for entry in scale.reshape(-1))
        return _Grid(scales, int(zero.reshape(-1)[0]) - shift, node.integer("axis", 1))

    def finish(self, first: int, last: int) -> bytes:
        """Returns the whole model."""
        import flatbuffers  # noqa: PLC0415 - beside ai-edge-litert

        self.part.inputs, self.part.outputs = [first], [last]
        self.model.subgraphs = [self.part]
        builder: Any = flatbuffers.Builder(1 << 20)
        builder.Finish(self.model.Pack(builder), b"TFL3")
        return bytes(builder.Output())


def compare_net(path: Path, rows: Sequence[Tensors], work: Path) -> Outcome:
    """Runs the middle of a quantized model on NNAPI and on LiteRT, and compares what comes out."""
    middle, inputs = cut_middle(path, rows, work)
    graph = read_graph(load_model(middle))
    last = graph.producers[next(iter(graph.outputs))]
    scale, zero = (cast("Array", graph.constant(name)) for name in last.input[1:3])
    got, left = run_on_nnapi(middle, inputs, work)
    steps = [np.round(row / scale).astype(np.int64) + int(zero) for row in got]
    wanted = run_on_litert(graph, inputs, is_signed=zero.dtype == np.int8)
    apart = np.abs(np.stack(steps) - np.stack([row.reshape(got[0].shape) for row in wanted]))
    return Outcome(apart.size, int(np.count_nonzero(apart)), int(apart.max()), left)


def cut_middle(path: Path, rows: Sequence[Tensors], work: Path) -> tuple[Path, list[Array]]:
    """Writes the model from the first Q to the last DQ, and returns it with what the samples are before that Q."""
    graph = read_graph(load_model(path))
    quantizers = [node for node in graph.nodes if node.op_type == "QuantizeLinear"]
    first, end = quantizers[0].input[0], quantizers[-1].output[0]
    last = graph.readers(end)[0].output[0]
    extractor = onnx.utils.Extractor(onnx.shape_inference.infer_shapes(onnx.load(path)))
    onnx.save(extractor.extract_model([first], [last]), work / _MIDDLE)
    fed = [{name: _fit(row[name], graph.value(name).static_shape) for name in graph.fed} for row in rows]
    if first in graph.inputs:
        return work / _MIDDLE, [row[first] for row in fed]
    onnx.save(extractor.extract_model(list(graph.fed), [first]), work / "head.onnx")
    head = CpuSession(work / "head.onnx", _PLAIN)
    return work / _MIDDLE, [head.run(row)[first] for row in fed]


def _fit(value: Array, shape: Sequence[int] | None) -> Array:
    return value.reshape(shape) if shape is not None else value


def run_on_nnapi(path: Path, inputs: Sequence[Array], work: Path) -> tuple[list[Array], tuple[str, ...]]:
    """Returns what Android's ONNX Runtime gives, and which operators of the net its CPU provider ran."""
    target, model = load_target("nnapi"), load_model(path)
    name = model.inputs[0].name
    rows: list[Mapping[str, Array]] = [{name: value} for value in inputs]
    job = Job(
        model=path, target=target, precision="int8", outputs=model.outputs, check=check_model(model, target),
        samples=Samples(source="rows", count=len(rows), read=lambda: iter(rows)), timeout_s=600.0, budget_s=600.0,
    )  # fmt: skip
    folder = work / "device"
    folder.mkdir()
    run = find_device("android:x86_64", target).run_job(job, folder)
    if run.failure is not None:
        raise SystemExit(f"{path.name}: {run.failure}")
    quantizers = {"QuantizeLinear", "DequantizeLinear"}
    left = {node.op for node in run.placement if node.provider == CPU_PROVIDER} - quantizers
    return [row[model.outputs[0].name] for row in run.outputs], tuple(sorted(left))


def run_on_litert(graph: Graph, inputs: Sequence[Array], *, is_signed: bool) -> list[Array]:
    """Returns the integers that LiteRT's reference kernels give for the net, as the model stores them."""
    from ai_edge_litert.interpreter import Interpreter, OpResolverType  # noqa: PLC0415 - an optional extra

    content, grid, turn = write_net(graph)
    run: Any = Interpreter(model_content=content, experimental_op_resolver_type=OpResolverType.BUILTIN_REF)
    run.allocate_tensors()
    found: list[Array] = []
    for value in inputs:
        # Halves go to the even neighbour, as ONNX says of Q.
        integers = np.clip(np.rint(value / np.float32(grid.scales[0])) + grid.zero, -128, 127).astype(np.int8)
        run.set_tensor(run.get_input_details()[0]["index"], integers.transpose(turn) if turn else integers)
        run.invoke()
        given = run.get_tensor(run.get_output_details()[0]["index"]).astype(np.int64) + (0 if is_signed else 128)
        found.append(given.transpose(_NCHW) if given.ndim == 4 else given)
    return found


def write_net(graph: Graph) -> tuple[bytes, _Grid, tuple[int, ...]]:
    """Returns the TFLite model of a net between its first Q and last DQ, the grid of its input, and how that turns."""
    writer = _Writer(graph)
    (start,) = graph.fed
    quantizer = next(node for node in graph.nodes if node.op_type == "QuantizeLinear" and node.input[0] == start)
    shape = graph.static_shape(start)
    if shape is None:
        raise ValueError(f"the shape of '{start}' is not known")
    grid, turn = writer.grid(quantizer), _NHWC if len(shape) == 4 else ()
    place = writer.tensor([shape[axis] for axis in turn] if turn else shape, grid)
    writer.places[quantizer.output[0]] = place
    for node in graph.nodes:
        if node.op_type == "QuantizeLinear" and node is not quantizer:
            _write_unit(writer, node)
    (end,) = graph.outputs
    return writer.finish(place, writer.places[graph.producers[end].input[0]]), grid, turn


def _write_unit(writer: _Writer, quantizer: Node) -> None:
    """Writes the operator before a Q; a Relu in between is what the Q's grid cuts off."""
    graph = writer.graph
    node = graph.producers[quantizer.input[0]]
    if node.op_type in {"Relu", "Clip"}:
        node = graph.producers[node.input[0]]
    read = [graph.producers[name] for name in node.input if name in graph.producers]
    data = [writer.places[dq.input[0]] for dq in read if dq.input[0] in writer.places]
    grid = writer.grid(quantizer)
    shape = graph.static_shape(quantizer.output[0])
    if shape is None:
        raise ValueError(f"the shape of '{quantizer.output[0]}' is not known")
    made = writer.tensor([shape[axis] for axis in _NHWC] if len(shape) == 4 else shape, grid)
    writer.places[quantizer.output[0]] = made
    _UNITS[node.op_type](writer, node, data, made)


def _write_conv(writer: _Writer, node: Node, data: list[int], made: int) -> None:
    weight, grid = _read_weight(writer, node)
    channels = writer.shapes[data[0]][3]
    groups = node.integer("group", 1)
    source = _pad(writer, node, data[0], writer.part.tensors[data[0]].quantization)
    strides, dilations = node.entries("strides") or (1, 1), node.entries("dilations") or (1, 1)
    # TFLite's SAME puts the odd pad at the end, as SAME_UPPER does.
    scheme = 0 if node.attributes.get("auto_pad") == "SAME_UPPER" else 1
    fields = {"padding": scheme, "strideH": strides[0], "strideW": strides[1]}
    fields |= {"dilationHFactor": dilations[0], "dilationWFactor": dilations[1]}
    is_depthwise = groups == channels and groups > 1
    if groups != 1 and not is_depthwise:
        raise ValueError(f"'{node.name}' has groups")
    turned = weight.transpose(1, 2, 3, 0) if is_depthwise else weight.transpose(0, 2, 3, 1)
    held = writer.tensor(turned.shape, _Grid(grid.scales, grid.zero, 3 if is_depthwise else 0), turned)
    inputs = [source, held, _write_bias(writer, node, len(weight))]
    if is_depthwise:
        more = {**fields, "depthMultiplier": len(weight) // channels}
        writer.add("DEPTHWISE_CONV_2D", inputs, made, "DepthwiseConv2DOptions", **more)
    else:
        writer.add("CONV_2D", inputs, made, "Conv2DOptions", **fields)


def _read_weight(writer: _Writer, node: Node) -> tuple[Array, _Grid]:
    """Returns the s8 weights of a node and their grid."""
    dq = writer.graph.producers[node.input[1]]
    value = writer.constants[dq.input[0]]
    held = (value.astype(np.int16) - 128).astype(np.int8) if value.dtype == np.uint8 else value
    return held, writer.grid(dq)


def _write_bias(writer: _Writer, node: Node, count: int) -> int:
    if not node.has_input(2):
        return writer.tensor((count,), None, np.zeros(count, np.int32), "INT32")
    dq = writer.graph.producers[node.input[2]]
    scales = tuple(float(entry) for entry in writer.constants[dq.input[1]].reshape(-1))
    return writer.tensor((count,), _Grid(scales, 0), writer.constants[dq.input[0]].reshape(-1), "INT32")


def _pad(writer: _Writer, node: Node, source: int, quantization: Any) -> int:
    """Adds pads of the zero point, which TFLite's windows only know in two sizes."""
    top, left, bottom, right = node.entries("pads") or (0, 0, 0, 0)
    if not any((top, left, bottom, right)):
        return source
    batch, height, width, channels = writer.shapes[source]
    grid = _Grid(tuple(quantization.scale), quantization.zeroPoint[0])
    padded = writer.tensor((batch, height + top + bottom, width + left + right, channels), grid)
    amounts = writer.tensor((4, 2), None, np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32), "INT32")
    return writer.add("PAD", [source, amounts], padded, "PadOptions")


def _write_pool(writer: _Writer, node: Node, data: list[int], made: int) -> None:
    height, width = node.entries("kernel_shape") or writer.shapes[data[0]][1:3]
    strides = node.entries("strides") or (1, 1)
    if any(node.entries("pads") or ()):
        raise ValueError(f"'{node.name}' pads what it pools")
    name = "MAX_POOL_2D" if node.op_type == "MaxPool" else "AVERAGE_POOL_2D"
    fields = {"padding": 1, "strideH": strides[0], "strideW": strides[1], "filterHeight": height, "filterWidth": width}
    if node.op_type == "AveragePool":
        writer.add(name, data, made, "Pool2DOptions", **fields)
        return
    # ONNX Runtime has no quantized form of these for NNAPI: they run in float between DQ and Q.
    source, target = (writer.tensor(writer.shapes[place], None, kind="FLOAT32") for place in (data[0], made))
    writer.add("DEQUANTIZE", data, source, "DequantizeOptions")
    writer.add(name, [source], target, "Pool2DOptions", **fields)
    writer.add("QUANTIZE", [target], made, "QuantizeOptions")


def _write_concat(writer: _Writer, node: Node, data: list[int], made: int) -> None:
    axis = node.integer("axis", 1)
    axis = _NHWC.index(axis) if len(writer.shapes[made]) == 4 else axis
    wanted = writer.part.tensors[made].quantization
    grid = _Grid(tuple(wanted.scale), wanted.zeroPoint[0])
    inputs = [writer.add("QUANTIZE", [place], writer.tensor(writer.shapes[place], grid), "") for place in data]
    writer.add("CONCATENATION", inputs, made, "ConcatenationOptions", axis=axis)


def _write_reshape(writer: _Writer, _node: Node, data: list[int], made: int) -> None:
    source, shape = data[0], writer.shapes[data[0]]
    if len(shape) == 4 and shape[1] * shape[2] > 1:
        held = writer.part.tensors[source].quantization
        turned = writer.tensor([shape[axis] for axis in _NCHW], _Grid(tuple(held.scale), held.zeroPoint[0]))
        source = writer.add("TRANSPOSE", [source, writer.integers(_NCHW)], turned, "TransposeOptions")
    writer.add("RESHAPE", [source, writer.integers(writer.shapes[made])], made, "ReshapeOptions")


def _write_gemm(writer: _Writer, node: Node, data: list[int], made: int) -> None:
    weight, grid = _read_weight(writer, node)
    turned = weight if node.integer("transB", 0) else weight.T
    held = writer.tensor(turned.shape, grid, turned)
    inputs = [data[0], held, _write_bias(writer, node, len(turned))]
    writer.add("FULLY_CONNECTED", inputs, made, "FullyConnectedOptions")


def _write_add(writer: _Writer, _node: Node, data: list[int], made: int) -> None:
    writer.add("ADD", data, made, "AddOptions")


def _write_softmax(writer: _Writer, _node: Node, data: list[int], made: int) -> None:
    writer.add("SOFTMAX", data, made, "SoftmaxOptions", beta=1.0)


_UNITS = {
    "Add": _write_add, "AveragePool": _write_pool, "Concat": _write_concat, "Conv": _write_conv,
    "Gemm": _write_gemm, "GlobalAveragePool": _write_pool, "MaxPool": _write_pool, "Reshape": _write_reshape,
    "Softmax": _write_softmax,
}  # fmt: skip
