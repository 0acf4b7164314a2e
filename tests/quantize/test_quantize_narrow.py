"""Large constants of nodes that stay float: in 8 or 16 bits where the outputs do not notice, and only there."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from quantize_models import make_model, make_samples, plan_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.errors import UsageError
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.prepare.constants import find_narrow, narrow_constants, round_by_channel, widen_constants
from edgekit.quantize import Calibration, QuantPlan, quantize_model
from edgekit.quantize.calibration.calibrate import open_float_graph
from edgekit.quantize.check_plan import require_plan
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.candidates import find_float_constants, store_narrow
from edgekit.quantize.mixed_precision.score import SWITCHES, constants_to_inputs, open_judge, switch_weights
from edgekit.quantize.objective import find_objective
from edgekit.quantize.plan import FloatNode, NarrowConstants
from edgekit.target import load_target

FRONT = """g (float[1,64] x) => (float[1,4] y) <float eps = {0.1}> {
  s = MatMul(x, dft) t = OFFSET p = Mul(t, t) e = Add(p, eps) l = Log(e) h = MatMul(l, w1) r = Relu(h)
  y = MatMul(r, w2) }"""
PLAIN = FRONT.replace("OFFSET", "Identity(s)")
WEIGHTS: dict[str, tuple[int, ...]] = {"w1": (64, 64), "w2": (64, 4)}
_RNG = np.random.default_rng(3)
_DFT = _RNG.normal(size=(64, 64)).astype(np.float32)


def planned(folder: Path, text: str, constants: dict[str, Array]) -> tuple[Model, Calibration, QuantPlan]:
    model = make_model(text, folder / "m.onnx", WEIGHTS, constants)
    rows = [{"x": np.random.default_rng(seed).normal(size=(1, 64)).astype(np.float32)} for seed in range(24)]
    return model, *plan_model(model, folder, "nnapi", make_samples(rows), "auto")


def test_a_front_end_takes_half_the_bytes_and_a_session_knows_no_difference(tmp_path: Path) -> None:
    model, calibration, plan = planned(tmp_path, PLAIN, {"dft": _DFT})
    narrowed = store_narrow(model, plan, calibration)
    assert (narrowed.narrow.bits, narrowed.narrow.saved_bytes) == ({"dft": 16}, 64 * 64 * 2)
    assert narrowed.narrow.ratio_db > plan.judged[0].sqnr_db + 16.3
    one = quantize_model(model, plan, calibration, tmp_path / "one.onnx")
    two = quantize_model(model, narrowed, calibration, tmp_path / "two.onnx")
    assert one.size_after - two.size_after == pytest.approx(64 * 64 * 2, abs=500)
    assert (one.float_constants["dft"], two.float_constants["dft"]) == (64 * 64 * 4, 64 * 64 * 2 + 64 * 4)
    assert one.float_constants.keys() == two.float_constants.keys()
    for name in ("nnapi", "xnnpack", "cpu", "qnn", "coreml"):
        placed = [check_model(each.model, load_target(name)).node_list for each in (one, two)]
        assert [(node.name, node.taken) for node in placed[0]] == [(node.name, node.taken) for node in placed[1]]
    saved = [tmp_path / "one.saved.onnx", tmp_path / "two.saved.onnx"]
    for each, path in zip((one, two), saved, strict=True):
        CpuSession(each.model.path, SessionSettings(level=Level.BASIC, save_to=path))
    loaded = [[node.op_type for node in onnx.load(str(path)).graph.node] for path in saved]
    assert loaded[0] == loaded[1]


def test_where_a_plan_is_poor_eight_bits_do(tmp_path: Path) -> None:
    model, calibration, plan = planned(tmp_path, PLAIN, {"dft": _DFT})
    poor = [msgspec.structs.replace(each, sqnr_db=12.0) for each in plan.judged]
    plan = msgspec.structs.replace(plan, judged=tuple(poor))
    assert store_narrow(model, plan, calibration).narrow.bits == {"dft": 8}
    assert store_narrow(model, plan, calibration, reached_db=20.0).narrow.bits == {"dft": 16}


def test_no_more_samples_are_run_than_rule_a_ratio_out(tmp_path: Path) -> None:
    model, calibration, _ = planned(tmp_path, PLAIN, {"dft": _DFT})
    graph, compared = (
        open_float_graph(model, calibration),
        find_objective(open_float_graph(model, calibration), calibration),
    )
    judge = open_judge(
        constants_to_inputs(graph.model, {"dft"}), compared, Path(calibration.statistics), whole={"dft": _DFT}
    )
    other = {"dft": _DFT + np.float32(0.01)}
    whole = judge(other, -np.inf)
    assert judge({"dft": _DFT}, np.inf) == 80  # the most that a ratio says
    assert whole < judge(other, 70.0) < 70
    assert judge(other, whole) == whole


def test_the_features_before_a_layer_with_a_switch_are_compared(tmp_path: Path) -> None:
    model, calibration, _ = planned(tmp_path, PLAIN, {"dft": _DFT})
    graph = open_float_graph(model, calibration)
    compared = find_objective(graph, calibration)
    (last,) = {each.reader for each in compared if each.reader}
    rounded = {last: {1: graph.weight("w2") + np.float32(0.01)}}
    judge = open_judge(switch_weights(graph, rounded), compared, Path(calibration.statistics))
    assert judge({SWITCHES: np.array([True])}, -np.inf) < 60
    assert judge({SWITCHES: np.array([False])}, -np.inf) == 80


def test_what_fewer_bits_round_away_stays_whole(tmp_path: Path) -> None:
    # A million and something, less a million: of the something 16 bits leave nothing.
    constants = {"dft": _DFT + np.float32(1e6), "base": np.full((64, 1), 1e6, np.float32)}
    constants["mixed"] = _RNG.normal(size=(64, 80)).astype(np.float32)
    text = FRONT.replace("OFFSET", "Sub(s, b)").replace("s = MatMul", "b = MatMul(x, base) s = MatMul")
    text = text.replace("l = Log(e)", "lo = Log(e) m = MatMul(x, mixed) mm = Mul(m, m) me = Add(mm, eps) ml = Log(me)"
                        " a = ReduceMean<axes=[1]>(ml) l = Add(lo, a)")  # fmt: skip
    model, calibration, plan = planned(tmp_path, text, constants)
    assert {name for name, _ in find_float_constants(read_float_graph(model), plan)} == {"dft", "mixed"}
    assert set(store_narrow(model, plan, calibration).narrow.bits) == {"mixed"}


def test_without_held_out_samples_nothing_changes(tmp_path: Path) -> None:
    model, calibration, plan = planned(tmp_path, PLAIN, {"dft": _DFT})
    assert store_narrow(model, plan, msgspec.structs.replace(calibration, statistics="")) == plan


def test_a_plan_may_narrow_only_what_float_nodes_alone_read(tmp_path: Path) -> None:
    model, calibration, plan = planned(tmp_path, PLAIN, {"dft": _DFT})
    target = load_target("nnapi")
    require_plan(msgspec.structs.replace(plan, narrow=NarrowConstants(bits={"dft": 8})), model, calibration, target)
    wrong = msgspec.structs.replace(plan, narrow=NarrowConstants(bits={"w1": 8}))
    with pytest.raises(UsageError, match="narrows 'w1', which is no large constant of float nodes alone"):
        require_plan(wrong, model, calibration, target)
    floats = (*plan.float_nodes, FloatNode(name="n5_MatMul", op="MatMul", reason="by hand"))
    require_plan(msgspec.structs.replace(wrong, float_nodes=floats), model, calibration, target)


def test_each_channel_has_a_scale_and_a_vector_has_one() -> None:
    values = _DFT[:, :48] * np.geomspace(1e-3, 1e3, 48, dtype=np.float32)
    integers, scales = round_by_channel(values, 8)
    assert (str(integers.dtype), scales.shape) == ("int8", (1, 48))
    np.testing.assert_allclose(integers * scales, values, atol=0.51 * scales.max(), rtol=0)
    assert np.abs(integers * scales - values)[:, 0].max() <= 0.51 * scales[0, 0]
    assert round_by_channel(values.T, 16)[1].shape == (48, 1)
    assert round_by_channel(values[0], 16)[1].shape == (1,)


def test_constants_are_stored_and_widened_under_the_name_that_is_read() -> None:
    cast = helper.make_node("Cast", ["fed"], ["wide"], to=TensorProto.FLOAT, name="w_counts")
    fed = helper.make_tensor_value_info("fed", TensorProto.INT8, [64, 64])
    mul = helper.make_node("Mul", ["wide", "w"], ["y"])
    graph = helper.make_graph([cast, mul], "g", [fed], [], [numpy_helper.from_array(_DFT, "w")])
    narrow_constants(graph, {"w": 16})
    assert [node.op_type for node in graph.node] == ["Cast", "Mul", "Cast", "Mul"]
    assert list(find_narrow(graph)) == ["w"]
    assert find_narrow(graph)["w"].integers == "w__integers"
    widen_constants(graph)
    assert [node.output[0] for node in graph.node] == ["wide", "y"]
    (wide,) = (tensor for tensor in graph.initializer if tensor.name == "w")
    assert (wide.data_type, list(wide.dims)) == (TensorProto.FLOAT, [64, 64])


def test_a_cast_tells_its_type_by_name() -> None:
    cast = helper.make_node("Cast", ["i"], ["wide"], saturate=1, to=TensorProto.FLOAT)
    attributes = sorted(cast.attribute, key=lambda attribute: attribute.name)
    del cast.attribute[:]
    cast.attribute.extend(attributes)
    stored = [numpy_helper.from_array(np.ones(64, np.int8), "i"), numpy_helper.from_array(_DFT[0], "s")]
    graph = helper.make_graph([cast, helper.make_node("Mul", ["wide", "s"], ["y"])], "g", [], [], stored)
    assert list(find_narrow(graph)) == ["y"]
