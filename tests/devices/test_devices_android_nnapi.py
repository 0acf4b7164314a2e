"""NNAPI computed: what ONNX Runtime's own builder makes of each operation is held against the float formula."""

import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import Stub, assert_same_as_cpu, make_job, noise_samples, qdq_conv, require_device, text_model

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.devices.android.android import NNAPI, Android
from edgekit.devices.android.compute import Computer
from edgekit.devices.android.installed import LOADER
from edgekit.devices.android.network import Driver, Network, Operand, OperandType, Operation
from edgekit.devices.device import DeviceRun
from edgekit.devices.process.pipes import END, answer_questions
from edgekit.devices.process.run import describe_job, run_program
from edgekit.errors import DeviceError
from edgekit.model.tensors import Array, Tensors
from edgekit.target import Platform, load_target

pytestmark = pytest.mark.slow

FLOAT_OPERATIONS = {
    "conv": "Conv<pads=[1,1,1,1], kernel_shape=[3,3]>(x, w, b)",
    "strided": "Conv<pads=[0,0,1,1], strides=[2,2], kernel_shape=[3,3]>(x, w, b)",
    "odd_pads": "Conv<pads=[2,1,0,1], strides=[2,1], kernel_shape=[3,3]>(x, w, b)",
    "dilated": "Conv<pads=[2,2,2,2], dilations=[2,2], kernel_shape=[3,3]>(x, w, b)",
    "depthwise": "Conv<pads=[1,1,1,1], group=4, kernel_shape=[3,3]>(x, v, b)",
    "average": "AveragePool<kernel_shape=[2,2], strides=[2,2]>(x)",
    "padded_average": "AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], strides=[1,1]>(x)",
    "maximum": "MaxPool<kernel_shape=[3,3], strides=[2,2], pads=[0,0,1,1]>(x)",
    "global": "GlobalAveragePool(x)",
    "add": "Add(x, b4)", "sub": "Sub(x, x2)", "mul": "Mul(x, x2)", "div": "Div(x, positive)",
    "relu": "Relu(x)", "sigmoid": "Sigmoid(x)", "tanh": "Tanh(x)", "softmax": "Softmax<axis=1>(flat)",
    "abs": "Abs(x)", "exp": "Exp(x)", "floor": "Floor(x)", "log": "Log(positive)", "neg": "Neg(x)",
    "sqrt": "Sqrt(positive)", "prelu": "PRelu(x, slope)", "elu": "Elu(x)", "leaky": "LeakyRelu<alpha=0.1>(x)",
    "pow": "Pow(positive, two)", "min": "Min(x, x2)", "max": "Max(x, x2)",
    "concat": "Concat<axis=1>(x, x2)", "transpose": "Transpose<perm=[0,2,3,1]>(x)", "reshape": "Reshape(x, shape)",
    "gemm": "Gemm<transB=1>(flat, g, h)", "matmul": "MatMul(flat, m)", "mean": "ReduceMean<axes=[2,3]>(x)",
    "pad": "Pad(x, border)", "slice": "Slice(x, starts, ends, axes)", "clip": "Clip(x, zero, six)",
    "squeeze": "Squeeze(pooled, last)", "flatten": "Flatten(x)",
    # An axis of size 1 that no Squeeze named stays.
    "kept": "Transpose<perm=[2,1,0]>(narrow)",
    "lrn": "LRN<size=3, alpha=0.1, beta=0.7>(x)",
    "space": "DepthToSpace<blocksize=2, mode=\"DCR\">(x)",
    "resize": "Resize<mode=\"linear\", coordinate_transformation_mode=\"half_pixel\">(x, , twice)",
    "nearest": (
        "Resize<mode=\"nearest\", coordinate_transformation_mode=\"asymmetric\", nearest_mode=\"floor\">(x, , twice)"
    ),
    "gather": "Gather<axis=1>(x, picked)",
    "grouped": "Conv<pads=[1,1,1,1], group=2, kernel_shape=[3,3]>(x, w2, b)",
    "odd_maximum": "MaxPool<kernel_shape=[3,2], strides=[2,1], pads=[1,0,1,1]>(x)",
    "wide_maximum": "MaxPool<kernel_shape=[5,5], strides=[1,1], pads=[1,1,1,1]>(x)",
    "odd_average": "AveragePool<kernel_shape=[3,3], strides=[2,2], pads=[1,0,1,1]>(x)",
    "global_maximum": "GlobalMaxPool(x)", "sine": "Sin(x)", "channels": "Softmax<axis=1>(x)",
    "normalized": "BatchNormalization(x, b, h4, b, one4)", "unsqueezed": "Unsqueeze(flat, first)",
}  # fmt: skip


def run_on_nnapi(
    path: Path, rows: Sequence[Tensors], work: Path, *flags: str, api: str = "33", driver: Driver | None = None
) -> DeviceRun:
    """Runs samples on a phone of an API level whose app sets some flags."""
    target = load_target("nnapi", {"api_level": api})
    if flags:
        android = Platform(minimum_os="27", runtime="", provider_options=dict.fromkeys(flags, "1"))
        session = msgspec.structs.replace(target.session, platforms={"android": android})
        target = msgspec.structs.replace(target, session=session)
    device = require_device("android:x86_64", target)
    assert isinstance(device, Android)
    return msgspec.structs.replace(device, driver=driver).run_job(make_job(path, target, rows), work)


def float_model(path: Path) -> Path:
    """Every operation on its own, each an output."""
    rng = np.random.default_rng(5)

    def numbers(*shape: int) -> str:
        return ", ".join(f"{value:.3f}" for value in rng.normal(0, 0.5, int(np.prod(shape))))

    constants = (
        f"float[4,4,3,3] w = {{{numbers(4, 4, 3, 3)}}}, float[4,1,3,3] v = {{{numbers(4, 1, 3, 3)}}},"
        f"float[4] b = {{{numbers(4)}}}, float[1,4,1,1] b4 = {{{numbers(4)}}}, float[5,256] g = {{{numbers(5, 256)}}},"
        f"float[5] h = {{{numbers(5)}}}, float[256,6] m = {{{numbers(256, 6)}}}, float[4,1,1] slope = {{{numbers(4)}}},"
        "float two = {2.0}, float zero = {0.0}, float six = {6.0}, float[4] twice = {1.0, 1.0, 2.0, 2.0},"
        "int64[2] shape = {1, 256}, int64[8] border = {0,0,1,1,0,0,2,1}, int64[2] starts = {1, 2},"
        f"float[4,2,3,3] w2 = {{{numbers(4, 2, 3, 3)}}}, float[4] h4 = {{{numbers(4)}}},"
        "float[4] one4 = {1.0, 0.5, 2.0, 1.5}, int64[1] first = {0},"
        "int64[2] ends = {7, 8}, int64[2] axes = {2, 3}, int64[2] last = {2, 3}, int64[1] end = {3},"
        "int64[2] picked = {2, 0}"
    )
    first = "flat = Flatten(x) positive = Exp(x2) pooled = GlobalAveragePool(x) narrow = Squeeze(pooled, end)"
    nodes = " ".join(f"y_{name} = {text}" for name, text in FLOAT_OPERATIONS.items())
    outputs = ", ".join(f"float y_{name}" for name in FLOAT_OPERATIONS)
    body = f"(float[1,4,8,8] x, float[1,4,8,8] x2) => ({outputs}) <{constants}> {{ {first} {nodes} }}"
    return declare_shapes(text_model(path, body, opset=13))


def declare_shapes(path: Path, row: Tensors | None = None) -> Path:
    """Gives each output the shape that it has, which NNAPI's builder wants to know."""
    proto = onnx.load(path)
    for output in proto.graph.output:
        output.type.tensor_type.ClearField("shape")
    onnx.save(proto, path)
    inputs = row or {name: np.ones((1, 4, 8, 8), np.float32) for name in ("x", "x2")}
    found = CpuSession(path, SessionSettings(level=Level.DISABLED)).run(inputs)
    for output in proto.graph.output:
        for size in found[output.name].shape:
            output.type.tensor_type.shape.dim.add().dim_value = size
    onnx.save(proto, path)
    return path


def load(network: Network, constants: bytes) -> Computer:
    """Returns a computer that has loaded a network."""
    require_device("android:x86_64", "nnapi")
    computer = Computer()
    computer.load(msgspec.json.encode(network), io.BytesIO(constants).read)
    return computer


def compute(computer: Computer, value: bytes, *more: bytes, size: int | None = None) -> bytes:
    """Returns the output of network 0 for these inputs; it has as many bytes as the first input if no size is given."""
    parts = [{"size": len(part)} for part in (value, *more)]
    outputs = [{"size": len(value) if size is None else size}]
    question = msgspec.json.encode({"id": 0, "inputs": parts, "outputs": outputs})
    return computer.compute(question, io.BytesIO(b"".join((value, *more))).read)


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceRun, list[Tensors], list[Tensors]]:
    """A run of every operation, what came back, and what ONNX Runtime's CPU provider computes in float."""
    folder = tmp_path_factory.mktemp("nnapi")
    path = float_model(folder / "float.onnx")
    rng = np.random.default_rng(6)
    rows = [{name: rng.normal(0, 1, (1, 4, 8, 8)).astype(np.float32) for name in ("x", "x2")} for _ in range(2)]
    (folder / "work").mkdir()
    run = run_on_nnapi(path, rows, folder / "work")
    session = CpuSession(path, SessionSettings(level=Level.DISABLED))
    return run, [dict(row) for row in run.outputs], [session.run(row) for row in rows]


@pytest.mark.parametrize("name", FLOAT_OPERATIONS)
def test_an_operation_is_its_formula(name: str, computed: tuple[DeviceRun, list[Tensors], list[Tensors]]) -> None:
    run, got, wanted = computed
    assert run.failure is None
    assert len(got) == 2
    for row, reference in zip(got, wanted, strict=True):
        np.testing.assert_allclose(row[f"y_{name}"], reference[f"y_{name}"], atol=2e-5, rtol=2e-5)


def test_what_is_compared_ran_on_nnapi(computed: tuple[DeviceRun, list[Tensors], list[Tensors]]) -> None:
    run, _, _ = computed
    left = {node.op for node in run.placement if node.provider == CPU_PROVIDER}
    assert not left & {"Conv", "Add", "MaxPool", "Gemm", "Softmax", "Concat", "Resize", "Pad", "LRN", "Relu"}
    assert sum(node.provider == NNAPI for node in run.placement) > 35
    assert not [note for note in run.notes if "half" in note]


@pytest.mark.parametrize("api", ["29", "30", "31"])
def test_a_quantized_convolution_lies_on_its_grid(api: str, tmp_path: Path, work: Path) -> None:
    path = qdq_conv(tmp_path / "q.onnx", np.uint8)
    run = run_on_nnapi(path, noise_samples(), work, api=api)
    assert_same_as_cpu(run, make_job(path, "nnapi"), 1 / 16 + 1e-6)


def tensor(kind: OperandType, *shape: int, size: int = -1, scale: float = 0.0, zero: int = 0) -> Operand:
    return Operand(
        type=kind, shape=shape, scale=scale, zero_point=zero, size=size, channel_dimension=0, channel_scales=()
    )


def network_of(code: int, operands: tuple[Operand, ...], outputs: int = 1) -> Network:
    places = tuple(range(len(operands)))
    inputs = tuple(place for place in places[:-outputs] if operands[place].size < 0)
    operation = Operation(type=code, inputs=places[:-outputs], outputs=places[-outputs:])
    return Network(
        id=0, relaxed=False, operands=operands, operations=(operation,), inputs=inputs, outputs=places[-outputs:]
    )


def test_a_concat_requantizes_its_inputs_to_the_scale_of_the_output() -> None:
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    operands = (
        tensor(kind, 1, 4, scale=0.5), tensor(kind, 1, 4, scale=0.25, zero=3), tensor(OperandType.INT32, size=4),
        tensor(kind, 1, 8, scale=0.5),
    )  # fmt: skip
    computer = load(network_of(2, operands), np.int32(1).tobytes())
    first, second = np.array([1, 2, 3, 4], np.int8), np.array([3, 5, 7, 11], np.int8)
    got = np.frombuffer(compute(computer, first.tobytes(), second.tobytes(), size=8), np.int8)
    assert got.tolist() == [1, 2, 3, 4, 0, 1, 2, 4]


def test_prelu_with_a_single_version_computes_signed_integers() -> None:
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    operands = (tensor(kind, 1, 4, scale=0.5), tensor(kind, 4, size=4, scale=0.25), tensor(kind, 1, 4, scale=0.5))
    computer = load(network_of(71, operands), np.array([1, 2, 4, 4], np.int8).tobytes())
    got = np.frombuffer(compute(computer, np.array([-8, -8, -8, 8], np.int8).tobytes()), np.int8)
    assert got.tolist() == [-2, -4, -8, 8]


def test_a_tensor_that_is_reshaped_twice_keeps_its_numbers() -> None:
    float32, one, several = OperandType.TENSOR_FLOAT32, OperandType.FLOAT32, OperandType.TENSOR_INT32
    row, column = tensor(float32, 1, 6), tensor(float32, 6, 1)
    constants = (tensor(OperandType.INT32, size=4), tensor(several, 2, size=8), tensor(one, size=4))
    steps = ((14, (0,), 4), (18, (0, 4, 1), 5), (22, (5, 2), 6), (25, (6, 3), 7), (22, (5, 2), 8))
    operations = tuple(Operation(type=code, inputs=inputs, outputs=(output,)) for code, inputs, output in steps)
    network = Network(
        id=0, relaxed=False, operands=(row, *constants, row, row, column, column, column), operations=operations,
        inputs=(0,), outputs=(8,),
    )  # fmt: skip
    value = np.linspace(-2, 2, 6, dtype=np.float32)
    computer = load(network, np.array([0, 6, 1], np.int32).tobytes() + np.float32(1).tobytes())
    got = np.frombuffer(compute(computer, value.tobytes()), np.float32)
    assert got == pytest.approx(value / (1 + np.exp(-value)), rel=1e-5)


@pytest.mark.parametrize(
    ("code", "words"), [(16, "NNAPI's operation LSTM is not computed here"), (1000, "operation of number 1000")]
)
def test_an_operation_that_tflite_lacks_is_named(code: int, words: str) -> None:
    float32 = OperandType.TENSOR_FLOAT32
    with pytest.raises(DeviceError, match=words):
        load(network_of(code, (tensor(float32, 1), tensor(float32, 1))), b"")


def test_an_output_fills_the_buffer_that_is_given_for_it() -> None:
    """Else whoever asks waits for ever: for an axis without elements ONNX Runtime gives a buffer of 4096 bytes."""
    float32 = OperandType.TENSOR_FLOAT32
    none, some = (network_of(19, (tensor(float32, *shape), tensor(float32, *shape))) for shape in ((1, 0), (1, 2)))
    assert compute(load(none, b""), b"", size=4096) == bytes(4096)
    with pytest.raises(DeviceError, match="an output has 8 bytes, and 4096 are asked for"):
        compute(load(some, b""), bytes(8), size=4096)


def test_requests_are_answered_in_order_until_the_end_of_input() -> None:
    require_device("android:x86_64", "nnapi")
    float32 = OperandType.TENSOR_FLOAT32
    network = network_of(19, (tensor(float32, 3), tensor(float32, 3)))
    value = np.array([-1, 0, 2], np.float32)
    model = msgspec.to_builtins(network) | {"ask": "model"}
    part = {"size": 12, "shape": []}
    run = {"ask": "run", "id": 0, "inputs": [part], "outputs": [part]}
    unknown = {"ask": "run", "id": 9, "inputs": [], "outputs": []}
    lines = [msgspec.json.encode(line) + b"\n" for line in (model, run, unknown)]
    answer = io.BytesIO()
    answer_questions(
        Computer(), io.BytesIO(lines[0] + lines[1] + value.tobytes() + lines[2] + END + b"never read"), answer
    )
    assert answer.getvalue() == b"\n\n" + np.maximum(value, 0).tobytes() + b"9\n"


def test_without_tflite_a_network_is_built_and_the_lack_told(tmp_path: Path, work: Path) -> None:
    require_device("android:x86_64", "nnapi")
    path = text_model(tmp_path / "r.onnx", "(float[1,4] x) => (float[1,4] y) { t = Relu(x) y = Sigmoid(t) }")
    job = make_job(path, "nnapi", [{"x": np.ones((1, 4), np.float32)}])
    request = msgspec.structs.replace(describe_job(job, provider=NNAPI), runtime=str(LOADER.find_library("x86_64")))
    argv = ["env", "EDGEKIT_NNAPI_LEVEL=31", "EDGEKIT_ANDROID_API=31", str(LOADER.find_program("x86_64")), "--pipe"]
    run = run_program(Stub(), argv, job, request, work)
    assert run.load_ms > 0
    assert {node.provider for node in run.placement} == {NNAPI}
    assert "OP_FAILED" in str(run.failure)
    assert "NNAPI: nothing here computes its networks: pip install ai-edge-litert==2.3.0" in run.log


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
ON_GRID, ON_UNIT, ON_INPUT = (
    f"yq = QuantizeLinear(r, {grid}) y = DequantizeLinear(yq, {grid})" for grid in ("ys, yz", "unit, low", "xs, xz")
)
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


@pytest.mark.parametrize("name", BODIES)
def test_an_integer_operation_differs_from_onnx_runtime_by_one_step_at_most(
    name: str, tmp_path: Path, work: Path
) -> None:
    inputs = "float[1,4,8,8] x" + (", float[1,4,8,8] u" if name in {"add", "mul"} else "")
    path = text_model(tmp_path / "q.onnx", f"({inputs}) => (float y) <{CONSTANTS}> {{ {LEFT} {BODIES[name]} }}")
    rng = np.random.default_rng(9)
    x, u = (rng.integers(0, 256, (1, 4, 8, 8)).astype(np.uint8) for _ in range(2))
    row = {"x": (x.astype(np.float32) - X_ZERO) * np.float32(X_SCALE)}
    if name in {"add", "mul"}:
        row["u"] = (u.astype(np.float32) - Y_ZERO) * np.float32(Y_SCALE)
    run = run_on_nnapi(declare_shapes(path, row), [row], work)
    assert {node.provider for node in run.placement if node.op == OPERATORS.get(name, "Conv")} == {NNAPI}
    step = {"softmax": 1 / 256, "average": X_SCALE}.get(name, Y_SCALE)
    assert_same_as_cpu(run, make_job(path, "nnapi", [row]), step + 1e-6)


def test_a_network_differs_from_onnx_runtime_by_one_step_at_most(tmp_path: Path, work: Path) -> None:
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
    assert_same_as_cpu(run, make_job(path, "nnapi", rows), 0.5 + 1e-6)
