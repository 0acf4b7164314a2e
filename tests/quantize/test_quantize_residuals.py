"""Weights of a Gemm that adds what is no bias of one dimension, as ONNX Runtime makes it of a residual, in blocks."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from quantize_models import make_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model import external
from edgekit.model import model as model_file
from edgekit.model.model import Model, load_model, read_proto
from edgekit.model.tensors import Array
from edgekit.prepare import prepare_model
from edgekit.quantize.weight_only.blocks import quantize_blocks
from edgekit.quantize.weight_only.convert import WeightForm, WeightOnlyOptions, compress_weights

ROWS, WIDTH, HIDDEN = 3, 64, 96
BIASES: dict[str, Array] = {
    "one": np.arange(WIDTH, dtype=np.float32),
    "row": np.arange(WIDTH, dtype=np.float32)[None],
    "column": np.arange(ROWS, dtype=np.float32)[:, None],
    "single": np.array([0.5], np.float32),
}


HEAD = f"g (float[{ROWS},{WIDTH}] x) => (float[{ROWS},{WIDTH}] y) "


def make_residuals(path: Path, weights: dict[str, Array]) -> Model:
    """Writes x + MatMul(Relu(MatMul x)) twice."""
    layer = (
        "[upN] uN = MatMul({0}, upN) [reluN] rN = Relu(uN) [downN] dN = MatMul(rN, downN) [addN] {1} = Add({0}, dN) "
    )
    layers = layer.format("x", "middle").replace("N", "0") + layer.format("middle", "y").replace("N", "1")
    return make_model(f"{HEAD}{{ {layers} }}", path, constants=weights)


def draw_weights() -> dict[str, Array]:
    rng = np.random.default_rng(0)
    shapes = {"up": (WIDTH, HIDDEN), "down": (HIDDEN, WIDTH)}
    return {
        f"{name}{index}": rng.standard_normal(shape).astype(np.float32) / 8
        for index in range(2)
        for name, shape in shapes.items()
    }


def round_weight(weight: Array, bits: int) -> Array:
    values, scales = quantize_blocks(weight, bits, 32)
    middle = np.float32(2 ** (bits - 1))
    return np.asarray(((values - middle) * scales[..., None]).reshape(weight.shape[1], -1)[:, : len(weight)].T)


def run(model: Model) -> Array:
    sample = {"x": np.random.default_rng(1).standard_normal((ROWS, WIDTH)).astype(np.float32)}
    return CpuSession(model.path, SessionSettings(level=Level.DISABLED)).run(sample)["y"]


@pytest.mark.parametrize(("form", "bits"), [("int4", 4), ("int8", 8)])
def test_all_weights_of_a_chain_with_residuals_get_blocks(tmp_path: Path, form: WeightForm, bits: int) -> None:
    weights = draw_weights()
    prepared = prepare_model(make_residuals(tmp_path / "m.onnx", weights), tmp_path / "p.onnx", {})
    assert [node.op_type for node in read_proto(prepared).graph.node].count("Gemm") == 2
    light = compress_weights(prepared, WeightOnlyOptions(form=form), tmp_path / "c.onnx")
    assert len(light.changed) == 4
    graph = read_proto(light.model).graph
    assert [node.op_type for node in graph.node] == ["MatMulNBits", "Relu", "MatMulNBits", "Add"] * 2
    assert {tensor.name for tensor in graph.initializer}.isdisjoint(weights)
    rounded = make_residuals(tmp_path / "r.onnx", {name: round_weight(value, bits) for name, value in weights.items()})
    assert run(light.model) == pytest.approx(run(rounded), abs=1e-4)


def test_a_gemm_that_is_to_be_kept_keeps_its_sum(tmp_path: Path) -> None:
    prepared = prepare_model(make_residuals(tmp_path / "m.onnx", draw_weights()), tmp_path / "p.onnx", {})
    kept = next(node for node in read_proto(prepared).graph.node if node.op_type == "Gemm")
    light = compress_weights(prepared, WeightOnlyOptions(form="int4", kept=(kept.name,)), tmp_path / "c.onnx")
    assert len(light.changed) == 3
    assert kept in read_proto(light.model).graph.node


def test_what_came_from_external_data_loads_where_weights_inside_are_mapped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_residuals(tmp_path / "m.onnx", draw_weights())
    onnx.save(read_proto(model), str(tmp_path / "e.onnx"), save_as_external_data=True, location="e.data")
    # As of 64 MB and more, and of weights of 128 kB and more.
    monkeypatch.setattr(model_file, "LARGE_BYTES", 1)
    monkeypatch.setattr(external, "MAX_DATA_BYTES", 1000)
    options = WeightOnlyOptions(form="int4", kept=("down0", "up1"))
    light = compress_weights(load_model(tmp_path / "e.onnx"), options, tmp_path / "c.onnx")
    assert light.changed == ("up0", "down1")
    assert run(light.model).shape == (ROWS, WIDTH)


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("factor", [1.0, 2.0])
def test_a_gemm_with_any_constant_bias_gets_blocks_and_one_with_factors_none(
    tmp_path: Path, bias: str, factor: float
) -> None:
    first, second = draw_weights()["up0"], draw_weights()["down0"]

    def make(path: Path, weight: Array) -> Model:
        text = f"[matmul] h = MatMul(x, w) [gemm] y = Gemm<transB=1, alpha={factor}>(h, turned, c)"
        turned = np.ascontiguousarray(weight.T)
        weights = {"w": round_weight(first, 8), "turned": turned, "c": BIASES[bias]}
        return make_model(f"{HEAD}{{ {text} }}", path, constants=weights)

    light = compress_weights(make(tmp_path / "m.onnx", second), WeightOnlyOptions(form="int8"), tmp_path / "c.onnx")
    assert light.changed == (("matmul", "gemm") if factor == 1 else ("matmul",))
    adds = [node.name for node in read_proto(light.model).graph.node if node.op_type == "Add"]
    assert adds == (["gemm_sum"] if factor == 1 and bias != "one" else [])
    wanted = make(tmp_path / "r.onnx", round_weight(second, 8) if factor == 1 else second)
    assert run(light.model) == pytest.approx(run(wanted), abs=1e-3)
