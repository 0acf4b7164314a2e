"""Q and DQ as each provider wants its node units: what the rules of the target take, and the numbers they ask for."""

from pathlib import Path

import numpy as np
import pytest
from quantize_models import Units, make_model, quantize, random_samples

from edgekit.check.check import check_model
from edgekit.devices.observe import observe_target
from edgekit.model.model import Model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.target import load_target

NET = """net (float[1,3,8,8] x) => (float[1,4] y) <float low = {0}, float high = {6}, int64[2] shape = {1, 16}> {
    c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w1, b1)
    r1 = Clip(c1, low, high)
    c2 = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=8>(r1, w2, b2)
    r2 = Relu(c2)
    s = Add(r2, r1)
    c3 = Conv<kernel_shape=[1,1]>(s, w3, b3)
    k = Concat<axis=1>(s, c3)
    p = AveragePool<kernel_shape=[8,8]>(k)
    f = Reshape(p, shape)
    z = Gemm<transB=1>(f, w4, b4)
    y = Softmax(z)
  }
"""
SHAPES = {
    "w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 1, 3, 3), "b2": (8,), "w3": (8, 8, 1, 1), "b3": (8,),
    "w4": (4, 16), "b4": (4,),
}  # fmt: skip
CASES: dict[str, tuple[str, dict[str, str], set[str], str, str]] = {
    "nnapi": ("nnapi", {}, {"Conv"}, "uint8", "int8"),
    "nnapi-28": ("nnapi", {"api_level": "28"}, set(), "uint8", "int8"),
    "qnn": ("qnn", {}, {"Conv", "Gemm"}, "uint8", "int8"),
    "xnnpack": ("xnnpack", {}, {"Conv", "Gemm"}, "int8", "int8"),
    "cpu-arm64": ("cpu", {"arch": "arm64"}, {"Conv", "Gemm"}, "int8", "int8"),
    "cpu-x64-vnni": ("cpu", {"arch": "x64-vnni"}, {"Conv", "Gemm"}, "uint8", "int8"),
    "cpu-x64": ("cpu", {"arch": "x64"}, {"Conv", "Gemm"}, "uint8", "uint8"),
}
"""Target, its parameters, which layers have a scale per channel, and the types of activations and weights."""
XNNPACK_LEAVES = {"Add", "Concat", "AveragePool", "Gemm", "Reshape"}
"""XNNPACK has no builder, or no signed kernel, for these whatever we write."""


@pytest.fixture(scope="module", params=list(CASES))
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Model]:
    folder: Path = tmp_path_factory.mktemp("units")
    net = make_model(NET, folder / "net.onnx", SHAPES)
    target = load_target(*CASES[request.param][:2])
    calibration = calibrate_model(net, random_samples(net), work=folder / "work")
    plan = plan_quantization(net, calibration, target, "int8", method="minmax")
    return request.param, quantize_model(net, plan, calibration, folder / "q.onnx").model


def test_the_provider_takes_every_unit_that_it_can(made: tuple[str, Model]) -> None:
    case, model = made
    report = check_model(model, load_target(*CASES[case][:2]))
    left = {node.op for node in report.node_list if not node.taken and not node.is_quantizer}
    assert left == (XNNPACK_LEAVES if case == "xnnpack" else set())
    convs = [node for node in report.node_list if node.op == "Conv"]
    assert [node.integers for node in convs] == [True, True, True]


@pytest.mark.slow
def test_the_real_provider_takes_them_as_predicted(made: tuple[str, Model]) -> None:
    case, model = made
    seen = observe_target(model, load_target(*CASES[case][:2]))
    if isinstance(seen, str):
        pytest.skip(seen)
    differ = [found for found in seen.disagreements if found.op != "DequantizeLinear"]  # one that the CPU fuses is gone
    assert (seen.failure, differ) == (None, [])
    # Before API level 29 NNAPI has no QuantizeLinear: that of the input is left.
    assert seen.taken == seen.nodes - (case == "nnapi-28") or case == "xnnpack"


def test_activations_clipped_by_their_scale_need_no_node(made: tuple[str, Model]) -> None:
    assert not {"Relu", "Clip"} & {node.op_type for node in Units(made[1]).nodes}


def test_weights_and_biases_are_as_the_kernels_take_them(made: tuple[str, Model]) -> None:
    case, model = made
    _, _, per_channel, activation, weight = CASES[case]
    units = Units(model)
    for node in (node for node in units.nodes if node.op_type in {"Conv", "Gemm"}):
        step, zero = units.read(node, 1)
        input_step, input_zero = units.read(node, 0)
        bias_step = units.read(node, 2)[0]
        # NNAPI's model builder knows no int8 weight of a Gemm.
        stored = "uint8" if case.startswith("nnapi") and node.op_type == "Gemm" else weight
        assert (step.ndim, zero.dtype.name, input_zero.dtype.name) == (node.op_type in per_channel, stored, activation)
        assert set(zero.reshape(-1).tolist()) == {128 if stored == "uint8" else 0}
        assert units.constant(node, 2).dtype == np.int32
        assert np.allclose(bias_step.reshape(-1), (input_step * step).reshape(-1), rtol=1e-6)


def test_what_moves_or_averages_values_keeps_their_scale(made: tuple[str, Model]) -> None:
    units = Units(made[1])
    for op in ("AveragePool", "Reshape"):
        node = units.find(op)
        assert units.read(node, 0) == units.write(node)


def test_a_concat_shares_one_scale_where_the_provider_demands_it(made: tuple[str, Model]) -> None:
    case, model = made
    units = Units(model)
    concat = units.find("Concat")
    found = (*(units.read(concat, at) for at in (0, 1)), units.write(concat))
    assert (len({(float(scale), int(zero)) for scale, zero in found}) == 1) is (case == "nnapi-28")


def test_a_softmax_has_a_scale_of_1_over_256(made: tuple[str, Model]) -> None:
    case, model = made
    units = Units(model)
    softmax = units.find("Softmax")
    if case == "xnnpack":
        assert softmax.output[0] == "y"
        return
    scale, zero = units.write(softmax)
    assert int(zero) == np.iinfo(zero.dtype).min
    assert float(scale) == pytest.approx(1 / 256, rel=0.01)
    assert (float(scale) == 1 / 256) is (case != "qnn")


def test_biases_stay_floats_where_the_parser_has_no_dq_for_them(tmp_path: Path) -> None:
    net = make_model(NET, tmp_path / "net.onnx", SHAPES)
    model = quantize(net, tmp_path, "tensorrt", method="minmax").model
    units = Units(model)
    convs = [node for node in units.nodes if node.op_type == "Conv"]
    assert [units.stored[node.input[2]].dtype.name for node in convs] == ["float32"] * 3
    zeros = [units.read(node, at)[1] for node in convs for at in (0, 1)]
    assert {(zero.dtype.name, int(np.abs(zero).max())) for zero in zeros} == {("int8", 0)}
    assert not [node.reasons for node in check_model(model, load_target("tensorrt")).node_list if not node.taken]
