"""NNAPI computed: what ONNX Runtime's own builder makes of each operation is held against the float formula."""

import io
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import Stub, make_job, present, qdq_conv, text_model

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.devices.android.android import NNAPI, Android
from edgekit.devices.android.installed import LOADER
from edgekit.devices.android.nnapi.compute import Computer
from edgekit.devices.android.nnapi.network import Driver, Network, Operand, OperandType, Operation
from edgekit.devices.device import DeviceRun
from edgekit.devices.process.pipes import END, answer_questions
from edgekit.devices.process.run import describe_job, run_program
from edgekit.errors import DeviceError
from edgekit.model.tensors import Tensors
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
    device = present("android:x86_64", target)
    assert isinstance(device, Android)
    job = msgspec.structs.replace(make_job(path, "nnapi", rows), target=target)
    return msgspec.structs.replace(device, driver=driver).run_job(job, work)


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
    nodes = [f"y_{name} = {text}" for name, text in FLOAT_OPERATIONS.items()]
    nodes = [
        "flat = Flatten(x)",
        "positive = Exp(x2)",
        "pooled = GlobalAveragePool(x)",
        "narrow = Squeeze(pooled, end)",
        *nodes,
    ]
    outputs = ", ".join(f"float y_{name}" for name in FLOAT_OPERATIONS)
    body = f"(float[1,4,8,8] x, float[1,4,8,8] x2) => ({outputs}) <{constants}> {{ {' '.join(nodes)} }}"
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


@pytest.fixture(scope="module")
def computed(tmp_path_factory: pytest.TempPathFactory) -> tuple[DeviceRun, list[Tensors], list[Tensors]]:
    """A run of every operation, what came back, and what ONNX Runtime's CPU provider computes in float."""
    present("android:x86_64", "nnapi")
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


def test_nnapi_took_what_was_computed(computed: tuple[DeviceRun, list[Tensors], list[Tensors]]) -> None:
    run, _, _ = computed
    left = {node.op for node in run.placement if node.provider == CPU_PROVIDER}
    assert not left & {"Conv", "Add", "MaxPool", "Gemm", "Softmax", "Concat", "Resize", "Pad", "LRN", "Relu"}
    assert sum(node.provider == NNAPI for node in run.placement) > 35
    assert not [note for note in run.notes if "half" in note]


@pytest.mark.parametrize("api", ["29", "30", "31"])
def test_a_quantized_convolution_lies_on_its_grid(api: str, tmp_path: Path, work: Path) -> None:
    path = qdq_conv(tmp_path / "q.onnx", np.uint8)
    rng = np.random.default_rng(7)
    rows = [{"x": rng.normal(0, 1, (1, 4, 8, 8)).astype(np.float32)} for _ in range(3)]
    run = run_on_nnapi(path, rows, work, api=api)
    assert run.failure is None
    session = CpuSession(path, SessionSettings(level=Level.DISABLED))
    for row, got in zip(rows, run.outputs, strict=True):
        assert np.abs(session.run(row)["y"] - got["y"]).max() <= 1 / 16 + 1e-6


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


def test_grids_that_differ_are_joined_on_that_of_the_output() -> None:
    present("android:x86_64", "nnapi")
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    operands = (
        tensor(kind, 1, 4, scale=0.5), tensor(kind, 1, 4, scale=0.25, zero=3), tensor(OperandType.INT32, size=4),
        tensor(kind, 1, 8, scale=0.5),
    )  # fmt: skip
    computer = Computer()
    computer.take_network(network_of(2, operands), np.int32(1).tobytes())
    first, second = np.array([1, 2, 3, 4], np.int8), np.array([3, 5, 7, 11], np.int8)
    (got,) = (np.frombuffer(computer.run(0, first.tobytes() + second.tobytes()), np.int8),)
    assert got.tolist() == [1, 2, 3, 4, 0, 1, 2, 4]


def test_an_operation_of_one_version_is_computed_beside_signed_integers() -> None:
    present("android:x86_64", "nnapi")
    kind = OperandType.TENSOR_QUANT8_ASYMM_SIGNED
    operands = (tensor(kind, 1, 4, scale=0.5), tensor(kind, 4, size=4, scale=0.25), tensor(kind, 1, 4, scale=0.5))
    computer = Computer()
    computer.take_network(network_of(71, operands), np.array([1, 2, 4, 4], np.int8).tobytes())
    got = np.frombuffer(computer.run(0, np.array([-8, -8, -8, 8], np.int8).tobytes()), np.int8)
    assert got.tolist() == [-2, -4, -8, 8]


@pytest.mark.parametrize(
    ("code", "words"), [(16, "NNAPI's operation LSTM is not computed here"), (1000, "operation of number 1000")]
)
def test_an_operation_that_tflite_lacks_is_named(code: int, words: str) -> None:
    present("android:x86_64", "nnapi")
    float32 = OperandType.TENSOR_FLOAT32
    with pytest.raises(DeviceError, match=words):
        Computer().take_network(network_of(code, (tensor(float32, 1), tensor(float32, 1))), b"")


def test_questions_are_answered_until_the_last() -> None:
    present("android:x86_64", "nnapi")
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


def test_without_tflite_s_kernels_a_network_is_built_and_the_run_says_what_is_missing(
    tmp_path: Path, work: Path
) -> None:
    present("android:x86_64", "nnapi")
    path = text_model(tmp_path / "r.onnx", "(float[1,4] x) => (float[1,4] y) { t = Relu(x) y = Sigmoid(t) }")
    job = make_job(path, "nnapi", [{"x": np.ones((1, 4), np.float32)}])
    request = msgspec.structs.replace(describe_job(job, provider=NNAPI), runtime=str(LOADER.find_library("x86_64")))
    argv = ["env", "EDGEKIT_NNAPI_LEVEL=31", "EDGEKIT_ANDROID_API=31", str(LOADER.find_program("x86_64")), "--pipe"]
    run = run_program(Stub(), argv, job, request, work)
    assert run.load_ms > 0
    assert {node.provider for node in run.placement} == {NNAPI}
    assert "OP_FAILED" in str(run.failure)
    assert "NNAPI: nothing here computes its networks: pip install ai-edge-litert==2.3.0" in run.log
