"""Weights of products in blocks that Qualcomm's LPBQ can hold, between Q and DQ of 16 bits."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from exported_models import draw_inputs, export_bert
from onnx import numpy_helper
from quantize_models import make_samples

from edgekit.errors import UsageError
from edgekit.jobs.build import build
from edgekit.model.model import Model, load_model
from edgekit.prepare import prepare_model
from edgekit.quantize import Calibration, calibrate_model, quantize_model
from edgekit.quantize.check_plan import require_plan
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.plan import QuantPlan, draft_plan
from edgekit.recipe import Data, Recipe, choose_precision
from edgekit.target import load_target
from edgekit.verify.report import VerifyReport

TARGET = load_target("qnn", {"blocks": "32"})


@pytest.fixture(scope="module")
def bert(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Calibration]:
    folder = tmp_path_factory.mktemp("bert")
    model = prepare_model(export_bert(folder / "bert.onnx", "torchscript17"), folder / "ready.onnx", {})
    samples = make_samples([draw_inputs(model, seed) for seed in range(8)])
    return model, calibrate_model(model, samples, work=folder / "calibration")


def plan_blocks(model: Model, calibration: Calibration, **changes: object) -> QuantPlan:
    plan = draft_plan(model, read_float_graph(model), calibration, TARGET, "w4a16")
    return msgspec.structs.replace(plan, **changes)


def products(path: Path) -> list[onnx.NodeProto]:
    return [node for node in onnx.load(str(path)).graph.node if node.op_type == "MatMulNBits"]


@pytest.mark.parametrize("rounding", ["nearest", "comq"])
def test_products_of_three_dimensions_get_blocks_of_lpbq(
    bert: tuple[Model, Calibration], tmp_path: Path, rounding: str
) -> None:
    plan = plan_blocks(*bert, rounding=rounding)
    require_plan(plan, bert[0], bert[1], TARGET)
    made = quantize_model(bert[0], plan, bert[1], tmp_path / "q.onnx")
    proto = onnx.load(str(made.model.path))
    stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    makers = {name: node.op_type for node in proto.graph.node for name in node.output}
    found = products(made.model.path)
    assert len(found) == 4
    assert {makers[node.input[0]] for node in found} == {"DequantizeLinear"}
    for node in found:
        scales = stored[node.input[2]]
        steps = scales / scales.max(axis=1, keepdims=True) * 16
        assert np.allclose(steps, np.rint(steps), atol=1e-4)
        assert (scales > 0).all()
    # Nothing of what the blocks replace is left.
    read = {name for node in proto.graph.node for name in node.input}
    assert set(stored) <= read
    gemms = [node for node in proto.graph.node if node.op_type == "Gemm"]
    assert gemms
    assert all(makers[node.input[1]] == "DequantizeLinear" for node in gemms)


def test_rounding_by_samples_gives_other_integers(bert: tuple[Model, Calibration], tmp_path: Path) -> None:
    noise: dict[str, float] = {}
    graph = read_float_graph(bert[0])
    for rounding in ("nearest", "comq"):
        made = quantize_model(bert[0], plan_blocks(*bert, rounding=rounding), bert[1], tmp_path / f"{rounding}.onnx")
        stored = {each.name: numpy_helper.to_array(each) for each in onnx.load(str(made.model.path)).graph.initializer}
        first = products(made.model.path)[0]
        packed, scales = stored[first.input[1]], stored[first.input[2]]
        values = np.stack([packed & 15, packed >> 4], axis=-1).reshape(*packed.shape[:2], -1).astype(np.float32) - 8
        weight = numpy_helper.to_array(graph.constants[first.input[1].removesuffix("_q4")])
        noise[rounding] = float(np.abs((values * scales[..., None]).reshape(len(scales), -1).T - weight).max())
        assert noise[rounding] < 4 * float(scales.max())
    assert noise["comq"] != noise["nearest"]


def test_a_weight_that_keeps_8_bits_is_in_no_block(bert: tuple[Model, Calibration], tmp_path: Path) -> None:
    plan = plan_blocks(*bert)
    first = next(iter(plan.bits))
    few = msgspec.structs.replace(plan, bits={name: bits for name, bits in plan.bits.items() if name != first})
    made = quantize_model(bert[0], few, bert[1], tmp_path / "q.onnx")
    assert f"{first}_q4" not in {name for node in products(made.model.path) for name in node.input}


def test_only_a_target_with_blocks_gets_blocks(bert: tuple[Model, Calibration]) -> None:
    with pytest.raises(UsageError, match="has blocks of 64 weights, but w4a16 of target 'qnn' takes 32"):
        require_plan(plan_blocks(*bert, block=64), bert[0], bert[1], TARGET)
    with pytest.raises(UsageError, match="has blocks of 32 weights, but w4a16 of target 'qnn' takes none"):
        require_plan(plan_blocks(*bert), bert[0], bert[1], load_target("qnn"))


def test_blocks_are_refused_beside_another_precision_than_w4a16() -> None:
    assert TARGET.session.provider_options["enable_block_quant_weight_optimization"] == "1"
    assert choose_precision(TARGET, "auto") == "w4a16"
    with pytest.raises(UsageError, match="16 bits"):
        choose_precision(TARGET, "int8")


@pytest.mark.long
@pytest.mark.slow
def test_a_build_with_blocks_passes_in_the_simulator(tmp_path: Path) -> None:
    model = export_bert(tmp_path / "bert.onnx", "torchscript17")
    drawn = [draw_inputs(load_model(model.path), seed) for seed in range(24)]
    np.savez(tmp_path / "d.npz", **{name: np.stack([sample[name] for sample in drawn]) for name in drawn[0]})  # type: ignore[arg-type]
    recipe = Recipe(targets=("qnn",), settings={"blocks": "32"})
    (bundle,) = build(model.path, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", recipe).bundles
    assert any("gemm-to-matmul (2 nodes)" in note for note in bundle.notes)
    assert len(products(tmp_path / "out" / "bert-qnn" / "model.onnx")) >= 4
    found: VerifyReport | None = bundle.verify
    assert found is not None
    assert found.verdict == "pass"
    assert list(found.runs[0].provider_nodes) == ["QNNExecutionProvider"]
