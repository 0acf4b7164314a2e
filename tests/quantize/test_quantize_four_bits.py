"""Weights of 4 bits: what is planned, what is written, and that it errs less than it might."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from onnx import numpy_helper
from quantize_models import (
    conv_net,
    draft_of,
    make_model,
    make_samples,
    make_search,
    predicted,
    quantize,
    random_samples,
)

from edgekit._ort import CpuSession, SessionSettings
from edgekit.errors import UsageError
from edgekit.graph.graph import view_model
from edgekit.model.model import Model, save_proto
from edgekit.model.tensors import Array
from edgekit.progress import Budget
from edgekit.quantize import Calibration, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.apply import require_plan
from edgekit.quantize.calibration.held_out import read_fitted, read_held_out
from edgekit.quantize.gptq import (
    FOUR_LIMIT,
    Rounding,
    pack_int4,
    round_nearest,
    search_scale,
    weight_scale,
)
from edgekit.quantize.graph.sessions import open_quantized
from edgekit.quantize.mixed_precision.candidates import Draft, WeightError, place_draft
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.relief import COLLAPSED_DB
from edgekit.quantize.mixed_precision.score import open_judge
from edgekit.quantize.mixed_precision.weights import choose_kept, keep_eight, rank_weights, scale_errors
from edgekit.quantize.plan import Candidate
from edgekit.quantize.qdq import round_weights
from edgekit.target import Precision, load_target


@pytest.mark.parametrize("shape", [(3,), (2, 5), (4, 1, 3, 3)])
def test_packed_integers_are_read_back(shape: tuple[int, ...]) -> None:
    values = np.random.default_rng(0).integers(-8, 8, shape).astype(np.int8)
    assert (numpy_helper.to_array(pack_int4(values, "w")).astype(np.int8) == values).all()


def cost(matrix: Array, scale: Array, energy: Array) -> Array:
    error = matrix - round_nearest(matrix, scale, FOUR_LIMIT).values
    return np.asarray((error**2 * energy[:, None]).sum(axis=2))


def test_a_searched_scale_cuts_off_what_costs_little() -> None:
    matrix = np.random.default_rng(1).normal(size=(1, 6, 200)).astype(np.float32)
    matrix[..., 0] = 12.0
    matrix[:, 3] /= 100  # each channel has its own scale
    energy = np.ones((1, 200))
    energy[:, 0] = 1e-3
    whole = weight_scale(matrix, per_channel=True, limit=FOUR_LIMIT)
    found = search_scale(matrix, energy=energy)
    assert (cost(matrix, found, energy) < 0.6 * cost(matrix, whole, energy)).all()
    assert (found < 0.6 * whole).all()
    energy[:, 0] = 1e6
    assert (search_scale(matrix, energy=energy) > 0.85 * whole).all()
    assert (search_scale(matrix, energy=energy, floor=9.0) == 9.0).all()


@pytest.mark.parametrize(("precision", "activation"), [("w4a16", "uint16"), ("w4a8", "uint8")])
@pytest.mark.parametrize("method", ["auto", "minmax"])
def test_layers_that_mix_inputs_get_4_bits(
    net: Model, calibration: Calibration, tmp_path: Path, precision: Precision, activation: str, method: str
) -> None:
    plan = plan_quantization(net, calibration, load_target("qnn"), precision, method=method)
    assert (plan.activation, plan.bits) == (activation, {"w1": 4, "w3": 4, "w4": 4})
    made = quantize_model(net, plan, calibration, tmp_path / "q.onnx")
    graph = view_model(onnx.load(str(made.model.path)), tmp_path)
    weights = {node.name: graph.producers[node.input[1]] for node in graph.nodes if node.op_type in {"Conv", "Gemm"}}
    stored = {name: graph.constants[node.input[0]] for name, node in weights.items()}
    kinds = [tensor.data_type for tensor in stored.values()]
    four, eight = onnx.TensorProto.INT4, onnx.TensorProto.INT8
    assert kinds == [four, eight, four, four]
    for node in weights.values():
        values, scale, zero = (numpy_helper.to_array(graph.constants[name]) for name in node.input)
        assert len(scale) == values.shape[0]
        assert zero.shape == scale.shape
        assert not zero.astype(np.int8).any()
    reference = CpuSession(net.path, SessionSettings())
    for session in (CpuSession(made.model.path, SessionSettings()), open_quantized(made.model.path)):
        for sample in random_samples(net, 3, seed=5):
            assert np.abs(session.run(sample)["y"] - reference.run(sample)["y"]).max() < 0.1


def test_a_weight_taken_out_of_a_plan_keeps_8_bits(net: Model, calibration: Calibration, tmp_path: Path) -> None:
    target = load_target("qnn")
    plan = plan_quantization(net, calibration, target, "w4a16", method="minmax")
    more = msgspec.structs.replace(plan, bits={"w1": 4})
    require_plan(more, net, calibration, target)
    made = quantize_model(net, more, calibration, tmp_path / "q.onnx")
    types = [tensor.data_type for tensor in onnx.load(str(made.model.path)).graph.initializer]
    # The weight and its zero point.
    assert types.count(onnx.TensorProto.INT4) == 2
    for bits, what in (({"w2": 4}, "has 8 for it"), ({"w1": 3}, "takes 4"), ({"b1": 4}, "has 8 for it")):
        with pytest.raises(UsageError, match=what):
            require_plan(msgspec.structs.replace(plan, bits=bits), net, calibration, target)


def test_a_model_of_opset_21_needs_no_operators_of_onnx_runtime(tmp_path: Path) -> None:
    proto = onnx.load(str(conv_net(tmp_path).path))
    proto.opset_import[0].version, proto.ir_version = 21, 10
    net = save_proto(proto, tmp_path / "newer.onnx")
    made = quantize(net, tmp_path, "qnn", method="minmax", precision="w4a8")
    assert {node.domain for node in onnx.load(str(made.model.path)).graph.node} == {""}


def errors_of(*pairs: tuple[int, float]) -> list[WeightError]:
    return [WeightError(name=f"w{index}", size=size, noise=noise) for index, (size, noise) in enumerate(pairs)]


@pytest.mark.parametrize(
    ("pairs", "most", "kept"),
    [
        (((10, 0.1), (10, 0.02)), 1.0, set[str]()),
        (((10, 0.1), (10, 0.02)), 0.05, {"w0"}),
        (((100, 0.1), (1, 0.05), (100, 0.001)), 0.11, {"w1"}),
        (((100, 0.1), (1, 0.05), (110, 0.001)), 0.01, {"w1", "w0"}),
        (((100, 0.1), (1, 0.05), (40, 0.001)), 0.001, {"w1", "w2"}),
        (((10, 0.1), (10, 0.02)), 0.001, {"w0"}),
    ],
)
def test_what_costs_most_keeps_8_bits(pairs: tuple[tuple[int, float], ...], most: float, kept: set[str]) -> None:
    assert choose_kept(errors_of(*pairs), most, 1e-4) == kept


def draft_narrow(net: Model, calibration: Calibration, rounding: Rounding) -> Draft:
    draft = draft_of(net, calibration, "qnn", "w4a16")
    return msgspec.structs.replace(draft, plan=msgspec.structs.replace(draft.plan, rounding=rounding))


def round_draft(draft: Draft, plan: QuantPlan) -> onnx.ModelProto:
    return round_weights(place_draft(draft), draft.graph, plan, draft.statistics)


def judge(draft: Draft, plan: QuantPlan) -> float:
    return open_judge(round_draft(draft, plan), draft.compared, draft.statistics, keep_float_weights=False)()


def narrow_net(folder: Path) -> Model:
    """A net of which one small layer has a weight that 4 bits do not hold: its rows mix sizes 30 times apart."""
    text = """net (float[1,3,8,8] x) => (float[1,8,8,8] y) {
        a = Conv<kernel_shape=[1,1]>(x, w1, b1)
        b = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(a, w2)
        c = Relu(b)
        y = Conv<kernel_shape=[1,1]>(c, w3)
      }"""
    rng = np.random.default_rng(3)
    torn = rng.normal(size=(16, 3, 1, 1)) * np.array([1.0, 0.03, 0.03]).reshape(1, 3, 1, 1)
    balance = rng.normal(size=(16, 16, 3, 3)) / 12
    return make_model(
        text,
        folder / "narrow.onnx",
        {"b1": (16,), "w3": (8, 16, 1, 1)},
        {"w1": torn.astype(np.float32), "w2": balance.astype(np.float32)},
    )


def test_the_weights_that_4_bits_hurt_most_keep_8(tmp_path: Path) -> None:
    net = narrow_net(tmp_path)
    sizes = np.array([1, 30, 30], np.float32).reshape(1, 3, 1, 1)
    samples = [{"x": row["x"] * sizes} for row in random_samples(net, 24)]
    calibration = calibrate_model(net, make_samples(samples), work=tmp_path / "work")
    draft = draft_narrow(net, calibration, "gptq")
    ratio = judge(draft, draft.plan)
    lead = Candidate(method="minmax", rounding="gptq", sqnr_db=ratio)
    found, tried = keep_eight(draft, lead, Budget())
    assert "w1" not in found.bits
    assert "w2" in found.bits
    best = max(tried, key=lambda candidate: candidate.sqnr_db)
    assert 0 < best.eight_bit_share < 0.2
    assert best.sqnr_db >= COLLAPSED_DB > ratio + 3
    assert quantize_model(net, found, calibration, tmp_path / "q.onnx").quantized_nodes
    assert keep_eight(draft, msgspec.structs.replace(lead, sqnr_db=COLLAPSED_DB), Budget()) == (draft.plan, ())
    spent = Budget(end=0.0)
    assert keep_eight(draft, lead, spent) == (draft.plan, ())
    assert spent.left_out == ["weights of 8 bits"]


@pytest.mark.parametrize(("ratio", "is_missed"), [(40.0, False), (20.0, True)])
def test_where_a_goal_is_missed_more_weights_keep_8_bits(tmp_path: Path, *, ratio: float, is_missed: bool) -> None:
    """In all but the first plan the outputs hold values that hardly differ, which is what is told of them."""
    net = narrow_net(tmp_path)
    calibration = calibrate_model(net, random_samples(net, 24), work=tmp_path / "work")

    def measure(quantized: Model) -> Prediction:
        return predicted(None, sqnr_db=ratio if quantized.path.stem == "all" else 40.0)

    search = make_search((net, calibration), measure, load_target("qnn"), tmp_path, "w4a16")
    plan, searched = find_plan(search, max_drop=0.005, narrow=False)
    first, chosen = present(searched).trials[0].plan, present(searched).chosen
    assert chosen.step == ("all, more weights in 8 bits" if is_missed else "all")
    assert (len(plan.bits) < len(first.bits)) == is_missed
    assert any(each.eight_bit_share for each in plan.judged) or not is_missed


def test_each_weight_is_ranked_by_what_it_alone_costs(tmp_path: Path) -> None:
    net = narrow_net(tmp_path)
    calibration = calibrate_model(net, random_samples(net, 24), work=tmp_path / "work")
    draft = draft_narrow(net, calibration, "gptq")
    errors = {error.name: error for error in rank_weights(draft, place_draft(draft))}
    assert {name: error.size for name, error in errors.items()} == {"w1": 48, "w2": 2304, "w3": 128}
    # Each alone, through the whole of the quantizer.
    for name, error in errors.items():
        alone = msgspec.structs.replace(draft.plan, bits={name: 4})
        assert -10 * np.log10(error.noise) == pytest.approx(judge(draft, alone), abs=2)


WIDE_NET = """net (float[1,4,8,8] x) => (float[1,4,8,8] y) {
    a = Conv<kernel_shape=[1,1]>(x, w1, b1)
    y = Conv<kernel_shape=[1,1]>(a, w2, b2)
  }"""


def test_layers_rounded_in_order_make_up_for_those_before(tmp_path: Path) -> None:
    # 64 channels of four signals: what the first layer errs, the second can take back.
    shapes = {"w1": (64, 4, 1, 1), "b1": (64,), "w2": (4, 64, 1, 1), "b2": (4,)}
    net = make_model(WIDE_NET, tmp_path / "wide.onnx", shapes)
    calibration = calibrate_model(net, random_samples(net, 48), work=tmp_path / "work")
    ratios: dict[Rounding, float] = {}
    roundings: tuple[Rounding, ...] = ("nearest", "gptq", "qronos")
    for rounding in roundings:
        draft = draft_narrow(net, calibration, rounding)
        rounded = round_draft(draft, draft.plan)
        ratios[rounding] = open_judge(rounded, draft.compared, draft.statistics, keep_float_weights=False)()
        # What was rounded once is the same when it is read again.
        assert round_draft(draft, draft.plan) == rounded
    assert ratios["gptq"] > ratios["nearest"] + 1
    assert ratios["qronos"] > ratios["gptq"] + 3


def test_samples_that_judge_plans_do_not_fit_weights(net: Model, tmp_path: Path) -> None:
    work = tmp_path / "work"
    calibrate_model(net, random_samples(net, 60), work=work)
    fitted = [sample["x"].tobytes() for sample in read_fitted(work)]
    assert len(fitted) == 16
    assert not {sample["x"].tobytes() for sample, _ in read_held_out(work)} & set(fitted)
    whole = (work / "fitted.bin").read_bytes()
    for damaged in (whole[:-1], whole[:20], b"", b"\xff" * 64, whole.replace(b"<f4", b"|O8")):
        (work / "fitted.bin").write_bytes(damaged)
        with pytest.raises(UsageError, match="are damaged"):
            list(read_fitted(work))
    (work / "fitted.bin").unlink()
    with pytest.raises(UsageError, match="are gone"):
        list(read_fitted(work))


def test_errors_are_scaled_to_what_all_cost_together() -> None:
    scaled = scale_errors(errors_of((1, 0.3), (1, 0.1)), 0.2)
    assert [error.noise for error in scaled] == pytest.approx([0.15, 0.05])
