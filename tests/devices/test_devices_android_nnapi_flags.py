"""What an app, a phone and a model's weights ask of NNAPI: precision, layout, a driver that refuses, products."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import float_conv, make_job, qdq_conv, require_device, round_to_half, run_in, text_model
from test_devices_android_nnapi import FLOAT_OPERATIONS, compute, float_model, load, network_of, run_on_nnapi, tensor

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.convert.ort_form import OrtOptions, write_ort
from edgekit.devices.android.android import NNAPI, X86_64, Android
from edgekit.devices.android.network import Driver, OperandType
from edgekit.devices.device import DeviceRun
from edgekit.devices.find import find_device
from edgekit.devices.observe import Observed, compare_placement, observe_placement, observe_target
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.fix import fix_model
from edgekit.prepare.rewrites.signs import UNSIGNED_WEIGHTS
from edgekit.target import load_target

pytestmark = pytest.mark.slow

DENSE = """
(float[1,8] x) => (float[1,4] y) <float[4,8] w = {%s}, float[4] b = {0.1, 0.2, 0.3, 0.4}>
{ t = Gemm<transB=1>(x, w, b) y = Sigmoid(t) }
"""
WEIGHTS = np.random.default_rng(1).normal(0, 1, (4, 8)).astype(np.float32)


def dense_model(path: Path) -> Path:
    return text_model(path, DENSE % ", ".join(map(str, WEIGHTS.reshape(-1))))


def dense_rows(count: int = 2) -> list[Tensors]:
    rng = np.random.default_rng(2)
    return [{"x": rng.normal(0, 1, (1, 8)).astype(np.float32)} for _ in range(count)]


def test_in_nchw_each_operation_is_its_formula_too(tmp_path: Path, work: Path) -> None:
    path = float_model(tmp_path / "float.onnx")
    rng = np.random.default_rng(6)
    row: Tensors = {name: rng.normal(0, 1, (1, 4, 8, 8)).astype(np.float32) for name in ("x", "x2")}
    found = run_on_nnapi(path, [row], work, "NNAPI_FLAG_USE_NCHW")
    assert found.failure is None
    (got,) = found.outputs
    wanted = CpuSession(path, SessionSettings(level=Level.DISABLED)).run(row)
    for name in FLOAT_OPERATIONS:
        np.testing.assert_allclose(got[f"y_{name}"], wanted[f"y_{name}"], atol=2e-5, rtol=2e-5, err_msg=name)
    taken = {node.op for node in found.placement if node.provider == NNAPI}
    assert {"Conv", "MaxPool", "AveragePool", "DepthToSpace", "Resize"} <= taken
    # In NCHW nothing is turned for NNAPI: only the model's own operations turn.
    own = sum("Transpose" in operation for operation in FLOAT_OPERATIONS.values())
    assert sum(node.op == "Transpose" for node in found.placement) == own


def test_half_precision_rounds_the_inputs_and_outputs_of_each_operation(tmp_path: Path, work: Path) -> None:
    path, rows = dense_model(tmp_path / "d.onnx"), dense_rows()
    found = run_on_nnapi(path, rows, work, "NNAPI_FLAG_USE_FP16")
    assert "NNAPI was allowed half precision: here each operation reads and gives halves" in found.notes
    bias = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
    for row, got in zip(rows, found.outputs, strict=True):
        summed = round_to_half(round_to_half(row["x"]) @ round_to_half(WEIGHTS).T + round_to_half(bias))
        np.testing.assert_allclose(got["y"], round_to_half(1 / (1 + np.exp(-summed))), atol=1e-3, rtol=0)
        assert np.array_equal(got["y"], round_to_half(got["y"]))


def test_a_relaxed_network_computes_in_half_precision() -> None:
    """A value beyond 65504 becomes infinite, as on a phone; a sum of halves is rounded once."""
    kind = OperandType.TENSOR_FLOAT32
    operands = (tensor(kind, 4), tensor(kind, 4, size=16), tensor(OperandType.INT32, size=4), tensor(kind, 4))
    network = msgspec.structs.replace(network_of(0, operands), relaxed=True)
    constant = np.array([40000, 0.0001, 1, 0.1], np.float32)
    computer = load(network, constant.tobytes() + np.int32(0).tobytes())
    value = np.array([40000, 1, 2048.5, 0.2], np.float32)
    got = np.frombuffer(compute(computer, value.tobytes()), np.float32)
    with np.errstate(over="ignore"):
        assert np.array_equal(got, round_to_half(round_to_half(value) + round_to_half(constant)))
    assert np.isinf(got[0])
    assert computer.describe().halves


@pytest.mark.parametrize(
    ("refused", "flags", "failure", "note"),
    [
        (
            ("LOGISTIC", "SOFTMAX"), (), "",
            "1 of 2 operations, which its reference kernels on the phone's CPU ran: 1 LOGISTIC",
        ),
        (("LOGISTIC",), ("NNAPI_FLAG_CPU_DISABLED",), "cannot run using the current set of target devices", ""),
        (("SOFTMAX",), ("NNAPI_FLAG_CPU_DISABLED",), "", ""),
        (("LOGISTIC", "FULLY_CONNECTED"), ("NNAPI_FLAG_CPU_ONLY",), "", ""),
    ],
    ids=["reference kernels run it", "without NNAPI's CPU the session ends", "all is taken", "no driver is asked"],
)  # fmt: skip
def test_a_driver_refuses_the_operations_that_its_file_lists(
    refused: tuple[str, ...], flags: tuple[str, ...], failure: str, note: str, tmp_path: Path, work: Path
) -> None:
    driver = Driver(name="npu", refused=refused)
    found = run_on_nnapi(dense_model(tmp_path / "d.onnx"), dense_rows(), work, *flags, driver=driver)
    if failure:
        assert failure in str(found.failure)
        assert "npu" in str(found.failure)
        return
    assert (found.failure, found.outputs.count) == (None, 2)
    notes = [text for text in found.notes if "refuses" in text]
    assert notes == ([f"NNAPI's driver refuses {note}"] if note else [])


def test_parameters_of_the_target_stand_for_flags(tmp_path: Path, work: Path) -> None:
    """In NCHW nothing is turned for NNAPI; without its CPU a driver that refuses ends the session."""
    require_device("android:x86_64", "nnapi")
    path = text_model(tmp_path / "p.onnx", "(float[1,4,8,8] x) => (float[1,4,1,1] y) { y = GlobalAveragePool(x) }")
    found: dict[str, DeviceRun] = {}
    for layout in ("NHWC", "NCHW"):
        for cpu in ("on", "off"):
            job = make_job(path, load_target("nnapi", {"api_level": "31", "layout": layout, "cpu": cpu}))
            device = Android(cpu=X86_64, driver=Driver(refused=("TRANSPOSE",)))
            found[layout + cpu] = run_in(device, job, work / f"{layout}{cpu}")
    assert [key for key, run in found.items() if run.failure] == ["NHWCoff"]
    assert any("2 TRANSPOSE" in note for note in found["NHWCon"].notes)
    assert not any("TRANSPOSE" in note for note in found["NCHWon"].notes)


@pytest.mark.parametrize(("flags", "provider"), [((), NNAPI), (("NNAPI_FLAG_CPU_DISABLED",), CPU_PROVIDER)])
def test_an_older_driver_takes_less(flags: tuple[str, ...], provider: str, tmp_path: Path, work: Path) -> None:
    """Weights per channel need level 29. With NNAPI's CPU its level counts, which is Android's; else the driver's."""
    path = qdq_conv(tmp_path / "q.onnx", np.uint8)
    found = run_on_nnapi(path, [], work, *flags, api="31", driver=Driver(feature_level=28))
    assert {node.provider for node in found.placement if node.op == "Conv"} == {provider}


@pytest.mark.parametrize("kind", [OperandType.TENSOR_QUANT8_ASYMM, OperandType.TENSOR_QUANT8_ASYMM_SIGNED])
@pytest.mark.parametrize("pads", [(1, 1, 1, 1), (0, 2, 1, 0), (2, 0, 0, 2)])
@pytest.mark.parametrize("code", [1, 17])
def test_pooling_over_pads_is_that_of_integers(kind: OperandType, pads: tuple[int, ...], code: int) -> None:
    """The mean of what lies inside, rounded half up, and the maximum of it: to the bit."""
    (left, right, top, bottom), window, stride = pads, 3, 2
    height, width = (6 + top + bottom - window) // stride + 1, (7 + left + right - window) // stride + 1
    numbers = [left, right, top, bottom, stride, stride, window, window, 0]
    operands = (
        tensor(kind, 1, 6, 7, 2, scale=0.5, zero=3), *(tensor(OperandType.INT32, size=4) for _ in numbers),
        tensor(kind, 1, height, width, 2, scale=0.5, zero=3),
    )  # fmt: skip
    computer = load(network_of(code, operands), np.array(numbers, np.int32).tobytes())
    dtype = np.uint8 if kind == OperandType.TENSOR_QUANT8_ASYMM else np.int8
    value = np.random.default_rng(4).integers(0, 255, (1, 6, 7, 2)).astype(np.uint8).view(dtype)
    got = np.frombuffer(compute(computer, value.tobytes(), size=height * width * 2), dtype)
    got = got.reshape(height, width, 2)
    for row in range(height):
        for column in range(width):
            rows = slice(max(row * stride - top, 0), row * stride - top + window)
            columns = slice(max(column * stride - left, 0), column * stride - left + window)
            inside = value[0, rows, columns].reshape(-1, 2).astype(np.int32)
            wanted = inside.max(0) if code == 17 else _mean(inside)
            assert np.array_equal(got[row, column], wanted.astype(dtype))


def _mean(inside: Array) -> Array:
    """TFLite's mean of integers: half is rounded away from zero."""
    total, count = inside.sum(0), len(inside)
    return np.array(np.where(total > 0, (total + count // 2) // count, -((-total + count // 2) // count)))


def test_pooling_over_nothing_is_refused() -> None:
    kind = OperandType.TENSOR_FLOAT32
    numbers = [3, 0, 0, 0, 1, 1, 2, 2, 0]
    operands = (
        tensor(kind, 1, 4, 4, 1), *(tensor(OperandType.INT32, size=4) for _ in numbers), tensor(kind, 1, 3, 6, 1),
    )  # fmt: skip
    with pytest.raises(DeviceError, match="pooling over nothing but pads"):
        load(network_of(17, operands), np.array(numbers, np.int32).tobytes())


@pytest.mark.parametrize(("level", "is_right"), [(Level.BASIC, True), (Level.ALL, False)])
def test_saved_fusions_skip_transposes(tmp_path: Path, work: Path, level: Level, is_right: bool) -> None:
    # NNAPI takes the first DQ; the Transpose is then moved into the group of the Conv, which stays on the CPU.
    weights = ", ".join(map(str, np.random.default_rng(3).integers(-100, 100, 108)))
    path = text_model(
        tmp_path / "model.onnx",
        f"(uint8[1,3,3,3] x) => (int8[1,4,1,1] y) <int8[4,3,3,3] w = {{{weights}}}, float s = {{0.02}}, "
        "float t = {0.2}, float v = {0.01}, uint8 u = {128}, int8 z = {0}> "
        "{ a = DequantizeLinear(x, s, u) b = QuantizeLinear(a, s, z)"
        " c = Transpose<perm=[0,3,1,2]>(b) d = DequantizeLinear(c, s, z) e = DequantizeLinear(w, v, z) f = Conv(d, e)"
        " y = QuantizeLinear(f, t, z) }",
    )
    rows = [{"x": np.random.default_rng(4).integers(0, 255, (1, 3, 3, 3)).astype(np.uint8)}]
    job = make_job(path, "nnapi", rows)
    write_ort(load_model(path), tmp_path / "m.ort", OrtOptions(style="runtime", cpu="arm", level=level))
    require_device("android:x86_64", "nnapi")
    android = Android(cpu=X86_64, evidence=Evidence.SAME_EP)
    done = android.run_job(msgspec.structs.replace(job, model=tmp_path / "m.ort"), work)
    assert done.failure is None
    assert NNAPI in {node.provider for node in done.placement}
    right = CpuSession(path, SessionSettings(level=Level.DISABLED)).run(rows[0])["y"]
    assert np.array_equal(next(iter(done.outputs))["y"], right) == is_right


CHANNELS = "int8-per-channel"
CASES = [
    pytest.param(spelling, weight, api, id=f"{spelling.partition('(')[0]}-{weight}-{api}")
    for spelling in ("Gemm<transB=1>(d, f)", "Gemm<transB=0>(d, f)", "MatMul(d, f)")
    for weight in ("int8", "int8-per-channel", "uint8")
    for api in ("27", "29")
]


def gemm(path: Path, spelling: str, weight: str) -> Path:
    """A product of a quantized input and a constant of 4 x 4, quantized again."""
    dtype, _, per_channel = weight.partition("-")
    zero, count = (128 if dtype == "uint8" else 0), 4 if per_channel else 1
    axis = "<axis=0>" if "transB=1" in spelling else "<axis=1>"
    shape = "[4]" if per_channel else ""
    values = ", ".join(str((7 * index) % 100 + zero) for index in range(16))
    constants = (
        f"{dtype}[4,4] w = {{{values}}}, float{shape} s = {{{', '.join(['0.01'] * count)}}},"
        f"{dtype}{shape} z = {{{', '.join([str(zero)] * count)}}},"
        "float xs = {0.02}, uint8 xz = {128}, float ys = {0.05}, uint8 yz = {128}"
    )
    body = (
        f"(float[2,4] x) => (float[2,4] y) <{constants}> {{ q = QuantizeLinear(x, xs, xz)"
        f" d = DequantizeLinear(q, xs, xz) f = DequantizeLinear{axis}(w, s, z) a = {spelling}"
        " r = QuantizeLinear(a, ys, yz) y = DequantizeLinear(r, ys, yz) }"
    )
    return text_model(path, body)


@pytest.mark.parametrize(("spelling", "weight", "api"), CASES)
def test_a_session_fails_exactly_where_check_says_so(spelling: str, weight: str, api: str, tmp_path: Path) -> None:
    target = load_target("nnapi", {"api_level": api})
    device = require_device("android:x86_64", target)
    model = load_model(gemm(tmp_path / "m.onnx", spelling, weight))
    report = check_model(model, target)
    seen = observe_placement(model, target, device)
    if weight == CHANNELS and "transB=0" in spelling and api != "27":
        # The network is built, and NNAPI cannot compute it: that shows when it is compiled, and only looking does not.
        assert report.is_refused
        return
    assert report.is_refused == (seen.failure is not None)
    is_kept = weight.startswith("int8") and "transB=1" in spelling
    assert report.is_refused == (is_kept and (weight, api) != (CHANNELS, "27"))
    if seen.failure is None:
        assert compare_placement(report, seen, device).disagreements == ()
        return
    fixed = fix_model(model, tmp_path / "fixed.onnx", [UNSIGNED_WEIGHTS]).model
    again = observe_placement(fixed, target, device)
    assert again.failure is None
    assert compare_placement(check_model(fixed, target), again, device).disagreements == ()


def test_without_litert_nnapi_is_skipped_and_observed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_target("nnapi")
    require_device("android:x86_64", target)
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)  # as if it were not installed
    missing = find_device("android:x86_64", target).find_missing()
    assert missing is not None
    assert missing.command == "pip install ai-edge-litert==2.3.0"
    assert find_device("android:x86_64", load_target("xnnpack")).find_missing() is None
    seen = observe_target(load_model(float_conv(tmp_path / "m.onnx")), target)
    assert isinstance(seen, Observed)
    assert (seen.failure, seen.disagreements) == (None, ())
