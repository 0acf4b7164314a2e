"""NNAPI's integers against TFLite's kernels called directly: what ONNX Runtime's builder made of an operation is that.

The direct models are written here anew, from TFLite's schema, and share nothing with what stands behind NNAPI.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from devices_models import present, text_model
from test_devices_android_nnapi import declare_shapes, run_on_nnapi

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.devices.android.android import NNAPI
from edgekit.model.tensors import Array

pytestmark = pytest.mark.slow

X_SCALE, X_ZERO = 1 / 32, 120
Y_SCALE, Y_ZERO = 1 / 16, 131
RNG = np.random.default_rng(8)
CONV_U8 = RNG.integers(0, 256, (4, 4, 3, 3)).astype(np.uint8)
CONV_S8 = RNG.integers(-127, 128, (4, 4, 3, 3)).astype(np.int8)
DEPTHWISE = RNG.integers(-127, 128, (4, 1, 3, 3)).astype(np.int8)
DENSE = RNG.integers(0, 256, (5, 256)).astype(np.uint8)
BIAS = RNG.integers(-4000, 4000, 5).astype(np.int32)
CHANNEL_SCALES = np.array([0.004, 0.01, 0.002, 0.007], np.float32)
WEIGHT_SCALE, WEIGHT_ZERO = 0.004, 127


class Part(msgspec.Struct, frozen=True):
    """A tensor of a direct model: its shape, type, scales, zero point, and value where it is constant."""

    shape: tuple[int, ...]
    kind: str
    scales: tuple[float, ...] = ()
    zero: int = 0
    value: Array | None = None
    axis: int = 0


def call_directly(
    name: str, options: str, fields: dict[str, Any], parts: Sequence[Part], values: Sequence[Array]
) -> Array:
    """Runs one operator of TFLite whose last part is its output; `values` are those of the parts without a value."""
    flatbuffers = pytest.importorskip("flatbuffers")
    schema: Any = pytest.importorskip("ai_edge_litert.schema_py_generated")
    interpreters: Any = pytest.importorskip("ai_edge_litert.interpreter")
    model, graph, code, operator = schema.ModelT(), schema.SubGraphT(), schema.OperatorCodeT(), schema.OperatorT()
    model.version, model.buffers, graph.tensors = 3, [schema.BufferT()], []
    for at, part in enumerate(parts):
        tensor = schema.TensorT()
        tensor.shape, tensor.name, tensor.type = (
            list(part.shape),
            f"p{at}".encode(),
            getattr(schema.TensorType, part.kind),
        )
        if part.value is not None:
            buffer = schema.BufferT()
            buffer.data = np.frombuffer(part.value.tobytes(), np.uint8)
            model.buffers.append(buffer)
            tensor.buffer = len(model.buffers) - 1
        if part.scales:
            grid = schema.QuantizationParametersT()
            grid.scale, grid.zeroPoint = list(part.scales), [part.zero] * len(part.scales)
            grid.quantizedDimension = part.axis
            tensor.quantization = grid
        graph.tensors.append(tensor)
    code.builtinCode = code.deprecatedBuiltinCode = getattr(schema.BuiltinOperator, name)
    code.version = {"CONV_2D": 3, "DEPTHWISE_CONV_2D": 3}.get(name, 1)
    if options:
        operator.builtinOptionsType = getattr(schema.BuiltinOptions, options)
        operator.builtinOptions = getattr(schema, f"{options}T")()
        for key, value in fields.items():
            setattr(operator.builtinOptions, key, value)
    operator.inputs, operator.outputs = list(range(len(parts) - 1)), [len(parts) - 1]
    graph.inputs = [at for at, part in enumerate(parts[:-1]) if part.value is None]
    graph.outputs, graph.operators = operator.outputs, [operator]
    model.operatorCodes, model.subgraphs = [code], [graph]
    builder = flatbuffers.Builder(1024)
    builder.Finish(model.Pack(builder), b"TFL3")
    kernels = interpreters.OpResolverType.BUILTIN_REF
    run = interpreters.Interpreter(model_content=bytes(builder.Output()), experimental_op_resolver_type=kernels)
    run.allocate_tensors()
    for detail, value in zip(run.get_input_details(), values, strict=True):
        run.set_tensor(detail["index"], value)
    run.invoke()
    return np.asarray(run.get_tensor(run.get_output_details()[0]["index"]))


def numbers(values: Array) -> str:
    return ", ".join(str(value) for value in values.reshape(-1).tolist())


CONSTANTS = (
    f"float xs = {{{X_SCALE}}}, uint8 xz = {{{X_ZERO}}}, float ys = {{{Y_SCALE}}}, uint8 yz = {{{Y_ZERO}}},"
    f"float unit = {{0.00390625}}, uint8 low = {{0}}, float ws = {{{WEIGHT_SCALE}}}, uint8 wz = {{{WEIGHT_ZERO}}},"
    f"uint8[4,4,3,3] wu = {{{numbers(CONV_U8)}}}, int8[4,4,3,3] wc = {{{numbers(CONV_S8)}}},"
    f"int8[4,1,3,3] wd = {{{numbers(DEPTHWISE)}}}, uint8[5,256] wg = {{{numbers(DENSE)}}},"
    f"float[4] cs = {{{numbers(CHANNEL_SCALES)}}}, int8[4] cz = {{0,0,0,0}}, int32[4] b = {{{numbers(BIAS[:4])}}},"
    f"int32[5] bg = {{{numbers(BIAS)}}}, float[4] bc = {{{numbers(CHANNEL_SCALES * np.float32(X_SCALE))}}},"
    f"float bs = {{{np.float32(WEIGHT_SCALE) * np.float32(X_SCALE)}}}, int32 bz = {{0}}, int32[4] bz4 = {{0,0,0,0}}"
)
LEFT = "xq = QuantizeLinear(x, xs, xz) a = DequantizeLinear(xq, xs, xz)"
RIGHT = "uq = QuantizeLinear(u, ys, yz) c = DequantizeLinear(uq, ys, yz)"
CHANNELS = "w = DequantizeLinear<axis=0>(%s, cs, cz) v = DequantizeLinear<axis=0>(b, bc, bz4)"
TENSOR = "w = DequantizeLinear(%s, ws, wz) v = DequantizeLinear(%s, bs, bz)"
ON_GRID, ON_UNIT = (
    "yq = QuantizeLinear(r, ys, yz) y = DequantizeLinear(yq, ys, yz)",
    ("yq = QuantizeLinear(r, unit, low) y = DequantizeLinear(yq, unit, low)"),
)
ON_INPUT = "yq = QuantizeLinear(r, xs, xz) y = DequantizeLinear(yq, xs, xz)"
BODIES = {
    "add": f"{RIGHT} r = Add(a, c) {ON_GRID}",
    "mul": f"{RIGHT} r = Mul(a, c) {ON_GRID}",
    "softmax": f"r = Softmax<axis=3>(a) {ON_UNIT}",
    "average": f"r = AveragePool<kernel_shape=[2,2], strides=[2,2]>(a) {ON_INPUT}",
    "conv": f"{TENSOR % ('wu', 'b')} r = Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(a, w, v) {ON_GRID}",
    "channels": f"{CHANNELS % 'wc'} r = Conv<kernel_shape=[3,3]>(a, w, v) {ON_GRID}",
    "depthwise": f"{CHANNELS % 'wd'} r = Conv<kernel_shape=[3,3], group=4>(a, w, v) {ON_GRID}",
}  # fmt: skip
OPERATORS = {"add": "Add", "mul": "Mul", "softmax": "Softmax", "average": "AveragePool"}


def nhwc(value: Array) -> Array:
    return np.ascontiguousarray(value.transpose(0, 2, 3, 1))


def direct(name: str, x: Array, u: Array) -> Array:
    """What TFLite's own kernel gives for the operation of that name, in NCHW and as u8."""
    kind = "INT8" if name in {"channels", "depthwise"} else "UINT8"
    shift = 128 if kind == "INT8" else 0
    source = nhwc(x) if shift == 0 else (nhwc(x).astype(np.int16) - 128).astype(np.int8)
    shape = source.shape
    left = Part(shape, kind, (X_SCALE,), X_ZERO - shift)
    grid: dict[str, Any] = {"scales": (Y_SCALE,), "zero": Y_ZERO - shift}
    if name in {"add", "mul"}:
        parts = [left, Part(shape, kind, **grid), Part(shape, kind, **grid)]
        got = call_directly(name.upper(), f"{name.title()}Options", {}, parts, [source, nhwc(u)])
    elif name == "softmax":
        # Over the width, which is the last axis of NCHW.
        turned = Part(x.shape, kind, (X_SCALE,), X_ZERO)
        return call_directly("SOFTMAX", "SoftmaxOptions", {"beta": 1.0}, [turned, Part(x.shape, kind, (1 / 256,))], [x])
    elif name == "average":
        fields = {"padding": 1, "strideW": 2, "strideH": 2, "filterWidth": 2, "filterHeight": 2}
        out = Part((1, 4, 4, 4), kind, (X_SCALE,), X_ZERO)
        got = call_directly("AVERAGE_POOL_2D", "Pool2DOptions", fields, [left, out], [source])
    else:
        got = _convolve(name, left, source, grid)
    turned_back = got.transpose(0, 3, 1, 2)
    return (turned_back.astype(np.int16) + shift).astype(np.uint8)


def _convolve(name: str, left: Part, source: Array, grid: dict[str, Any]) -> Array:
    fields: dict[str, Any] = {"padding": 0 if name == "conv" else 1, "strideW": 1, "strideH": 1}
    fields |= {"dilationWFactor": 1, "dilationHFactor": 1}
    size = 8 if name == "conv" else 6
    out = Part((1, size, size, 4), left.kind, **grid)
    scales = tuple(float(scale) for scale in CHANNEL_SCALES)
    products = tuple(float(scale * np.float32(X_SCALE)) for scale in CHANNEL_SCALES)
    if name == "depthwise":
        weight: Array = DEPTHWISE.transpose(1, 2, 3, 0)
        filter_part = Part(weight.shape, "INT8", scales, 0, np.ascontiguousarray(weight), 3)
        bias = Part((4,), "INT32", products, 0, BIAS[:4])
        fields["depthMultiplier"] = 1
        return call_directly(
            "DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions", fields, [left, filter_part, bias, out], [source]
        )
    if name == "channels":
        weight = CONV_S8.transpose(0, 2, 3, 1)
        filter_part = Part(weight.shape, "INT8", scales, 0, np.ascontiguousarray(weight))
        bias = Part((4,), "INT32", products, 0, BIAS[:4])
    else:
        weight = CONV_U8.transpose(0, 2, 3, 1)
        filter_part = Part(weight.shape, "UINT8", (WEIGHT_SCALE,), WEIGHT_ZERO, np.ascontiguousarray(weight))
        bias = Part((4,), "INT32", (float(np.float32(WEIGHT_SCALE) * np.float32(X_SCALE)),), 0, BIAS[:4])
    return call_directly("CONV_2D", "Conv2DOptions", fields, [left, filter_part, bias, out], [source])


@pytest.mark.parametrize("name", BODIES)
def test_an_integer_operation_is_tflite_s_to_the_bit(name: str, tmp_path: Path, work: Path) -> None:
    present("android:x86_64", "nnapi")
    inputs = "float[1,4,8,8] x" + (", float[1,4,8,8] u" if name in {"add", "mul"} else "")
    path = text_model(tmp_path / "q.onnx", f"({inputs}) => (float y) <{CONSTANTS}> {{ {LEFT} {BODIES[name]} }}")
    rng = np.random.default_rng(9)
    x, u = (rng.integers(0, 256, (1, 4, 8, 8)).astype(np.uint8) for _ in range(2))
    row = {"x": (x.astype(np.float32) - X_ZERO) * np.float32(X_SCALE)}
    if name in {"add", "mul"}:
        row["u"] = (u.astype(np.float32) - Y_ZERO) * np.float32(Y_SCALE)
    run = run_on_nnapi(declare_shapes(path, row), [row], work)
    assert run.failure is None
    assert {node.provider for node in run.placement if node.op == OPERATORS.get(name, "Conv")} == {NNAPI}
    (got,) = run.outputs
    scale, zero = {"softmax": (1 / 256, 0), "average": (X_SCALE, X_ZERO)}.get(name, (Y_SCALE, Y_ZERO))
    steps = np.round(got["y"] / np.float32(scale)).astype(np.int32) + zero
    assert np.array_equal(steps, direct(name, x, u).astype(np.int32))


def test_a_net_lies_within_a_step_of_onnx_runtime_s_own(tmp_path: Path, work: Path) -> None:
    """Convolutions, an addition, pooling and a dense layer, one behind the other, each in integers."""
    body = (
        f"{CHANNELS % 'wc'} k = Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(a, w, v) kq = QuantizeLinear(k, ys, yz)"
        " kd = DequantizeLinear(kq, ys, yz) s = Add(kd, a) sq = QuantizeLinear(s, ys, yz)"
        " sd = DequantizeLinear(sq, ys, yz) f = Flatten(sd) wq = DequantizeLinear(wg, ws, wz)"
        " vq = DequantizeLinear(bg, bs2, bz)"
        " r = Gemm<transB=1>(f, wq, vq) yq = QuantizeLinear(r, big, yz) y = DequantizeLinear(yq, big, yz)"
    )
    more = f", float big = {{0.5}}, float bs2 = {{{np.float32(WEIGHT_SCALE) * np.float32(Y_SCALE)}}}"
    text = f"(float[1,4,8,8] x) => (float y) <{CONSTANTS}{more}> {{ {LEFT} {body} }}"
    rng = np.random.default_rng(10)
    rows = [{"x": rng.normal(0, 1, (1, 4, 8, 8)).astype(np.float32)} for _ in range(4)]
    path = declare_shapes(text_model(tmp_path / "n.onnx", text), rows[0])
    run = run_on_nnapi(path, rows, work)
    assert run.failure is None
    assert {node.provider for node in run.placement if node.op in {"Conv", "Add", "Gemm"}} == {NNAPI}
    session = CpuSession(path, SessionSettings(level=Level.DISABLED))
    for row, got in zip(rows, run.outputs, strict=True):
        assert np.abs(session.run(row)["y"] - got["y"]).max() <= 0.5 + 1e-6
