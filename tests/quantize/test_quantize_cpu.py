"""INT8 for ONNX Runtime's own CPU kernels: what each architecture gets, and what it computes on one without VNNI."""

import shutil
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from quantize_models import dequantized_constants, make_model, make_samples

from edgekit._ort import CpuSession, SessionSettings
from edgekit._proc import run_process
from edgekit.convert.forms import find_integer_nodes
from edgekit.data.samples import Samples
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize import Calibration, QuantizedModel, calibrate_model, plan_quantization, quantize_model
from edgekit.target import load_target

pytestmark = pytest.mark.slow

SETTINGS = {
    "arm64": {"arch": "arm64"},
    "x64-vnni": {"arch": "x64-vnni"},
    "x64": {"arch": "x64"},
    "x64-7bit": {"arch": "x64", "weights": "7bit"},
}
TYPES = {
    "arm64": ("int8", "int8"),
    "x64-vnni": ("uint8", "int8"),
    "x64": ("uint8", "uint8"),
    "x64-7bit": ("uint8", "int8"),
}
QEMU = "qemu-x86_64-static"
FAR = """
import sys, numpy, onnxruntime
options = onnxruntime.SessionOptions()
options.intra_op_num_threads, options.log_severity_level = 1, 4
for model in sys.argv[2:]:
    session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
    numpy.save(model + ".npy", session.run(None, {"x": numpy.load(sys.argv[1])})[0])
"""


def quantize(model: Model, calibration: Calibration, arch: str, folder: Path) -> QuantizedModel:
    plan = plan_quantization(model, calibration, load_target("cpu", SETTINGS[arch]), "int8", method="minmax")
    return quantize_model(model, plan, calibration, folder / f"{arch}.onnx")


def run(model: Model, sample: Tensors) -> Array:
    return CpuSession(model.path, SessionSettings(threads=1)).run(sample)["y"]


@pytest.mark.parametrize("arch", SETTINGS)
def test_every_node_with_a_kernel_runs_in_integers(
    net: Model, calibration: Calibration, arch: str, tmp_path: Path
) -> None:
    quantized = quantize(net, calibration, arch, tmp_path)
    seen = find_integer_nodes(quantized.model, signed=arch == "arm64")
    assert (quantized.float_nodes, all(seen.values()), len(seen)) == ((), True, 9)


@pytest.mark.parametrize("arch", SETTINGS)
@pytest.mark.parametrize(("tensor", "channels"), [("r1", 8), ("z", 4)])
def test_weights_have_a_scale_per_channel_and_the_type_of_the_kernel(
    net: Model, calibration: Calibration, arch: str, tensor: str, channels: int, tmp_path: Path
) -> None:
    model = quantize(net, calibration, arch, tmp_path).model
    weight, scale, zero = dequantized_constants(model, tensor)
    graph = onnx.load(str(model.path)).graph
    zeros = {node.input[2] for node in graph.node if node.op_type == "QuantizeLinear"}
    types = {t.data_type for t in graph.initializer if t.name in zeros}
    assert (scale.shape, weight.dtype.name, zero.dtype.name) == ((channels,), TYPES[arch][1], TYPES[arch][1])
    assert set(zero.tolist()) == {128 if arch == "x64" else 0}
    assert types == {onnx.helper.np_dtype_to_tensor_dtype(np.dtype(TYPES[arch][0]))}


def test_unsigned_weights_stand_for_the_same_numbers(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    one, other = (quantize(net, calibration, arch, tmp_path).model for arch in ("x64-vnni", "x64"))
    for tensor in ("r1", "c2", "z"):
        (signed, scale, _), (unsigned, same, zero) = (dequantized_constants(model, tensor) for model in (one, other))
        assert (scale == same).all()
        assert (signed.astype(int) == unsigned.astype(int) - int(zero[0])).all()


@pytest.mark.parametrize("method", ["minmax", "auto"])
def test_seven_bits_leave_room_for_two_products(
    net: Model, calibration: Calibration, method: str, tmp_path: Path
) -> None:
    plan = plan_quantization(net, calibration, load_target("cpu", SETTINGS["x64-7bit"]), "int8", method=method)
    model = quantize_model(net, plan, calibration, tmp_path / "q.onnx").model
    weights = [dequantized_constants(model, tensor)[0].astype(int) for tensor in ("r1", "c2", "c3", "z")]
    assert max(abs(weight).max() for weight in weights) == 64
    assert 2 * 255 * 64 < 2**15


def loud_net(folder: Path) -> tuple[Model, Samples]:
    """A layer whose inputs and weights are all near the end of their range, so that pairs of products are large."""
    text = "g (float[4,64] x) => (float[4,32] y) { y = MatMul(x, w) }"
    rng = np.random.default_rng(3)
    large = rng.uniform(0.8, 1, (64, 32)) * rng.choice([-1, 1], (64, 32))
    model = make_model(text, folder / "loud.onnx", constants={"w": large.astype(np.float32)})
    samples = [{"x": rng.uniform(0.8, 1, (4, 64)).astype(np.float32)} for _ in range(12)]
    return model, make_samples(samples)


@pytest.mark.long
@pytest.mark.skipif(shutil.which(QEMU) is None, reason=f"{QEMU} not found: apt-get install qemu-user-static")
def test_without_vnni_only_the_model_for_any_x64_is_right(tmp_path: Path) -> None:
    model, samples = loud_net(tmp_path)
    calibration = calibrate_model(model, samples, work=tmp_path / "work")
    (tmp_path / "far.py").write_text(FAR)
    sample = next(iter(samples))
    np.save(tmp_path / "x.npy", sample["x"])
    wanted = run(model, sample)
    paths = {arch: quantize(model, calibration, arch, tmp_path).model.path for arch in ("x64-vnni", "x64", "x64-7bit")}
    # One process for all: emulated, to import ONNX Runtime takes longer than to run them.
    argv = [QEMU, "-cpu", "Haswell", sys.executable, tmp_path / "far.py", tmp_path / "x.npy", *paths.values()]
    finished = run_process([str(word) for word in argv], timeout_s=120)
    assert finished.succeeded, finished.stderr[-500:]
    got = {arch: np.load(f"{path}.npy") for arch, path in paths.items()}
    errors = {arch: float(np.abs(each - wanted).max() / np.abs(wanted).max()) for arch, each in got.items()}
    assert max(errors["x64"], errors["x64-7bit"]) < 0.03
    assert errors["x64-vnni"] > 0.1
