from pathlib import Path

import msgspec
import numpy as np
from quantize_models import make_model, make_samples, random_samples

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model.model import Model
from edgekit.quantize import calibrate_model, plan_quantization
from edgekit.quantize.graph.graph import read_graph
from edgekit.quantize.mixed_precision.sensitivity import diagnose_quantization, rank_activations
from edgekit.quantize.mixed_precision.variants import SWITCHES, swap_weights, switch_activations
from edgekit.quantize.qdq.build import build_qdq
from edgekit.target import load_target

WEIGHTS_ONLY = SessionSettings(level=Level.DISABLED)


def test_diagnosis_tells_weights_from_activations(net: Model, tmp_path: Path) -> None:
    calibration = calibrate_model(net, random_samples(net, count=32), work=tmp_path / "many")
    plan = plan_quantization(net, calibration, load_target("nnapi"), "int8", method="minmax")
    diagnosis = diagnose_quantization(net, calibration, plan)
    assert diagnosis.w8a8_db <= min(diagnosis.w8_db, diagnosis.a8_db) + 1
    assert diagnosis.a16w8_db > diagnosis.w8a8_db
    assert {error.name for error in diagnosis.tensors} >= {"x", "r1", "s", "z"}


def test_culprit_is_ranked_first(tmp_path: Path) -> None:
    text = """<ir_version: 8, opset_import: ["" : 17]> g (float[1,64] x) => (float[1,40] y) <float big = {1000.0}> {
      h = MatMul(x, w) t = Mul(h, h) u = Mul(t, big) r = MatMul(u, v) y = Add(r, h) }"""
    model = make_model(text, tmp_path / "m.onnx", {"w": (64, 40), "v": (40, 40)})
    rng = np.random.default_rng(0)
    rows = [{"x": (rng.normal(size=(1, 64)) * 10.0 ** rng.uniform(-2, 0)).astype(np.float32)} for _ in range(48)]
    calibration = calibrate_model(model, make_samples(rows), work=tmp_path / "work")
    plan = plan_quantization(model, calibration, load_target("nnapi"), "int8", method="minmax")
    diagnosis = diagnose_quantization(model, calibration, plan)
    assert diagnosis.tensors[0].sqnr_db < diagnosis.tensors[-1].sqnr_db
    assert diagnosis.cause in {"activations", "arithmetic"}


def test_looking_closely_at_a_few_names_all_and_the_same_first(net: Model, tmp_path: Path) -> None:
    calibration = calibrate_model(net, random_samples(net, count=32), work=tmp_path / "many")
    graph, plan = read_graph(net), plan_quantization(net, calibration, load_target("nnapi"), "int8", method="minmax")
    qdq, statistics = build_qdq(graph, plan, "m"), Path(plan.statistics)
    every = {error.name: error for error in rank_activations(graph, qdq, statistics)}
    some = rank_activations(graph, qdq, statistics, closely=3)
    assert {error.name for error in some} == every.keys()
    assert sum(error == every[error.name] for error in some) >= 3
    assert some[0] == min(every.values(), key=lambda error: error.sqnr_db)


def test_swapped_weights_are_near_the_float_ones_and_not_equal(net: Model, tmp_path: Path) -> None:
    calibration = calibrate_model(net, random_samples(net), work=tmp_path / "work")
    graph, plan = read_graph(net), plan_quantization(net, calibration, load_target("nnapi"), "int8", method="minmax")
    swapped = swap_weights(build_qdq(graph, plan, "m"), graph)
    sample = next(iter(random_samples(net)))
    one = CpuSession(net.path, WEIGHTS_ONLY).run(sample)["y"]
    two = CpuSession(swapped.SerializeToString(), WEIGHTS_ONLY).run(sample)["y"]
    assert np.allclose(one, two, atol=0.05)
    assert not np.array_equal(one, two)


def test_no_switch_on_is_the_float_model(net: Model, tmp_path: Path) -> None:
    calibration = calibrate_model(net, random_samples(net), work=tmp_path / "work")
    graph, plan = read_graph(net), plan_quantization(net, calibration, load_target("nnapi"), "int8", method="minmax")
    proto, names = switch_activations(build_qdq(graph, plan, "m"), graph)
    sample = next(iter(random_samples(net)))
    off = CpuSession(proto.SerializeToString(), WEIGHTS_ONLY).run({**sample, SWITCHES: np.zeros(len(names), bool)})
    on = CpuSession(proto.SerializeToString(), WEIGHTS_ONLY).run({**sample, SWITCHES: np.ones(len(names), bool)})
    plain = CpuSession(net.path, WEIGHTS_ONLY).run(sample)
    assert np.allclose(off["y"], plain["y"], atol=1e-6)
    assert not np.array_equal(on["y"], plain["y"])


def test_diagnosis_is_plain_data(net: Model, tmp_path: Path) -> None:
    calibration = calibrate_model(net, random_samples(net, count=16), work=tmp_path / "work")
    plan = plan_quantization(net, calibration, load_target("qnn"), "int8")
    diagnosis = diagnose_quantization(net, calibration, plan)
    assert msgspec.json.decode(msgspec.json.encode(diagnosis), type=type(diagnosis)) == diagnosis
