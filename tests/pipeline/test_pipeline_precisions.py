"""Precisions beside plain int8: values that half precision ends at, large constants in float, and quantized models."""

import re
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
import onnx
import pytest
from fixture_types import present
from onnx import numpy_helper
from tiny_models import parse_model, save_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.bundle.folder import open_bundle
from edgekit.data.samples import Samples
from edgekit.jobs.build import build
from edgekit.jobs.check import check_targets
from edgekit.jobs.quantize import quantize_for
from edgekit.model.model import load_model
from edgekit.model.tensors import Tensors
from edgekit.prepare.constants import DISABLED, OPTIMIZER
from edgekit.recipe import Data, Recipe
from edgekit.report.tables import describe_quantization
from edgekit.verify.layers.overflows import find_lossy, find_overflows

# The front end of a voice detector: powers of a spectrum by 2 ** 20, and then their logarithm or root.
TEXT = (
    "net (float[1,4,8,8] x) => (float[1,4,8,8] y) <float k = {1048576.0}>"
    "{ [conv] c = Conv(x, w) [abs] a = Abs(c) [scale] s = Mul(a, k) [root] r = Sqrt(s) [clip] y = Relu(r) }"
)

# Powers of what is small: 1e-8 is below what half precision has digits for, though nothing overflows.
SMALL = (
    "net (float[1,4,8,8] x) => (float[1,4,8,8] y) "
    "<float k = {0.0001}, float back = {10000.0}> { [small] a = Mul(x, k) [square] s = Mul(a, a) [root] r = Sqrt(s) "
    "[same] i = Relu(r) [back] y = Mul(i, back) }"
)


def write_net(path: Path, text: str = TEXT) -> Path:
    weights = ",".join("1.0" if row == column else "0.0" for row in range(4) for column in range(4))
    return parse_model(text.replace("<float k", f"<float[4,4,1,1] w = {{{weights}}}, float k"), path)


def images(scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(0).random((8, 4, 8, 8), np.float32) + np.float32(0.25)


def test_nodes_that_overflow_stay_in_float32(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=images())
    path, data = write_net(tmp_path / "net.onnx"), Data(source=str(tmp_path / "data.npz"))
    (summary,) = build(path, data, tmp_path / "out", Recipe(targets=("coreml",))).bundles
    assert summary.failure is None
    (note,) = (note for note in summary.notes if "float32" in note)
    assert note.startswith("2 nodes stay in float32, because values there come close to 65504")
    assert "scale, root; the largest is 1.3" in note
    assert note.endswith("at 'scale'; --precision fp32 keeps all of them")
    assert not any("clamped" in note for note in summary.notes)
    assert summary.precision == "fp16"
    assert {run.verdict for run in present(summary.verify).runs} == {"pass"}


def test_a_value_within_half_precision_is_no_overflow(tmp_path: Path) -> None:
    """A constant may use all of the range, a value that samples move half of it; a mask may lie beyond."""
    text = "net (float[1,4,8,8] x) => (float[1,4,8,8] y) <float k = {K}>{ [a] s = Mul(x, k) [b] y = Neg(s) }"
    for constant, scale, found in (
        ("60000.0", 0.1, []), ("65504.0", 0.0, []), ("66000.0", 0.0, ["a"]), ("40000.0", 1.0, ["a", "b"]),
        ("-1e9", 0.0, []),
    ):  # fmt: skip
        model = load_model(write_net(tmp_path / "m.onnx", text.replace("{K}", f"{{{constant}}}")))
        given = (images() - 0.25)[:1] * np.float32(scale)
        samples = Samples(source="", count=1, read=partial(iter, [{"x": given}]))
        assert list(find_overflows(model, samples)) == found, constant


def test_nodes_that_lose_the_values_of_the_outputs_stay_in_float32(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=images())
    path, data = parse_model(SMALL, tmp_path / "net.onnx"), Data(source=str(tmp_path / "data.npz"))
    (summary,) = build(path, data, tmp_path / "out", Recipe(targets=("coreml",)), verify=False).bundles
    assert summary.failure is None
    (note,) = (note for note in summary.notes if "float32" in note)
    assert note.startswith("2 nodes stay in float32, 'square' to 'root': in half precision the outputs keep ")
    assert " dB of the 25 that the target asks for; now " in note
    assert summary.precision == "fp16"
    assert summary.path is not None
    types = {tensor.name: tensor.data_type for tensor in onnx.load(summary.path / "model.onnx").graph.initializer}
    assert onnx.TensorProto.FLOAT16 in types.values()


@pytest.mark.parametrize("precision", ["fp16", "fp32"])
def test_a_provider_of_halves_keeps_no_node_in_float32(tmp_path: Path, precision: Literal["fp16", "fp32"]) -> None:
    """Qualcomm's HTP computes float32 nodes in half precision too."""
    np.savez(tmp_path / "data.npz", x=images())
    path, data = write_net(tmp_path / "net.onnx"), Data(source=str(tmp_path / "data.npz"))
    recipe = Recipe(targets=("qnn",), precision=precision, forms=("onnx",))
    (summary,) = build(path, data, tmp_path / "out", recipe, verify=False).bundles
    assert summary.precision == precision
    assert not any("stay in float32" in note for note in summary.notes)
    (warning,) = (note for note in summary.notes if "which qnn computes in fp16" in note)
    assert warning.startswith(
        "'s' stays float, which qnn computes in fp16 (from 6e-8 to 65504): 100.0% of its values, up"
    )
    nodes = onnx.load(present(summary.path) / "model.onnx").graph.node
    assert sum(node.op_type == "Cast" for node in nodes) == (2 if precision == "fp16" else 0)


LINEAR = """net (float[1,4,8,8] x) => (float[1,4,8,8] y)
    <float s = {0.01}, int8 z = {-128}, int8 o = {0}, int8[4,4,1,1] w = {WEIGHTS}, float t = {0.02}>
    { q = QuantizeLinear(x, s, z) [conv] c = QLinearConv(q, s, z, w, s, o, t, z) y = DequantizeLinear(c, t, z) }"""


@pytest.mark.parametrize(("target", "op"), [("xnnpack", "Conv"), ("cpu", "QLinearConv")])
def test_a_model_of_qlinear_operators_is_written_as_its_target_takes_it(tmp_path: Path, target: str, op: str) -> None:
    np.savez(tmp_path / "data.npz", x=images())
    text = LINEAR.replace("WEIGHTS", ",".join(str(7 * at % 19 - 9) for at in range(16)))
    path, data = parse_model(text, tmp_path / "net.onnx"), Data(source=str(tmp_path / "data.npz"))
    (summary,) = build(path, data, tmp_path / "out", Recipe(targets=(target,)), verify=False).bundles
    assert op in {node.op_type for node in onnx.load(present(summary.path) / "model.onnx").graph.node}
    told = [note for note in summary.notes if note.startswith("rewritten for it: split-qlinear (1 node)")]
    assert bool(told) == (target == "xnnpack")
    # A check judges what a build makes, unless that is the file as it is.
    assert bool(told) == bool(check_targets(path, Recipe(targets=(target,))).targets[target].built)


@pytest.mark.parametrize(("last", "manual"), [("Relu(f)", []), ("Det(f)", ["no-builder"])])
def test_a_user_is_told_to_change_only_what_a_build_does_not(tmp_path: Path, last: str, manual: list[str]) -> None:
    """The provider takes no integers as they are; a build writes Q and DQ around the Gather."""
    text = f"""net (int64[2] i) => (float[N,M] y) <uint8[2,2] t = {{1, 2, 3, 4}}, float s = {{0.1}}, uint8 z = {{3}}>
        {{ e = Gather(t, i) f = DequantizeLinear(e, s, z) y = {last} }}"""
    report = check_targets(parse_model(text, tmp_path / "net.onnx"), Recipe(targets=("qnn",))).targets["qnn"].report
    assert "spread-quantizers" in {advice.id for advice in report.advice}
    assert sorted(advice.id for advice in report.advice if advice.fix == "manual") == manual


def test_half_precision_is_left_only_where_a_limit_asks_for_it(tmp_path: Path) -> None:
    samples = Samples(source="", count=1, read=partial(iter, [{"x": images()[:1]}]))
    model = load_model(parse_model(SMALL, tmp_path / "net.onnx"))
    names = ("small", "square", "root", "same", "back")
    found = present(find_lossy(model, names, samples, 25.0))
    assert found.nodes == ("square", "root")
    assert found.sqnr_db < 25
    assert found.kept_db > 60
    # The margin belongs to the limit, and what is float already is not looked at.
    assert find_lossy(model, names, samples, found.sqnr_db - 3.1) is None
    assert find_lossy(model, names, samples, found.sqnr_db - 2.9) is not None
    assert find_lossy(model, ("small", "same", "back"), samples, 25.0) is None
    assert len(present(find_lossy(model, names, samples, found.kept_db + 3.1)).nodes) > 2


def test_only_the_samples_that_lose_most_are_computed_again_and_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Seven samples of eight are silence, in which half precision loses nothing."""
    feeds = [*[{"x": np.zeros_like(images()[:1])}] * 7, {"x": images()[:1]}]
    samples = Samples(source="", count=8, read=partial(iter, feeds))
    model, runs = load_model(parse_model(SMALL, tmp_path / "net.onnx")), list[CpuSession]()
    run = CpuSession.run

    def count_run(session: CpuSession, inputs: Tensors) -> Tensors:
        runs.append(session)
        return run(session, inputs)

    monkeypatch.setattr(CpuSession, "run", count_run)
    found = present(find_lossy(model, ("small", "square", "root", "same", "back"), samples, 25.0))
    assert found.nodes == ("square", "root")
    sessions = len({id(session) for session in runs})
    # The float model, and half precision everywhere, for each sample; then one sample alone.
    assert len(runs) == 8 * 2 + sessions - 2


# A logarithm of powers, then a layer in integers.
LOGARITHM = (
    "net (float[1,16] x) => (float[1,8] y) <float least = {1e-10}, float[16,8] w = {WEIGHTS}> "
    "{ [power] p = Mul(x, x) [floor] a = Add(p, least) [log] l = Log(a) [head] y = MatMul(l, w) }"
)


@pytest.mark.parametrize(("least", "target", "is_lost"), [(-6, "qnn", True), (-1, "qnn", False), (-6, "cpu", False)])
def test_a_float_part_beyond_half_is_named(least: float, target: str, tmp_path: Path, *, is_lost: bool) -> None:
    rng = np.random.default_rng(0)
    weights = ",".join(f"{each:.3f}" for each in rng.normal(size=128))
    path = parse_model(LOGARITHM.replace("WEIGHTS", weights), tmp_path / "net.onnx")
    np.savez(tmp_path / "data.npz", x=(10 ** rng.uniform(least, 0, (32, 1, 16))).astype(np.float32))
    data = Data(source=str(tmp_path / "data.npz"))
    report = quantize_for(path, data, tmp_path / "q.onnx", Recipe(targets=(target,)))
    assert {"power", "floor", "log"} <= {node.name for node in report.float_nodes}
    told = [line for line in describe_quantization(report) if "computes in fp16 (from 6e-8 to 65504)" in line]
    assert bool(told) == bool(report.float_warning) == is_lost
    assert not is_lost or re.match(r"warning: '[pa]' stays float, which qnn .* of its values, down to 1\.\d", told[0])
    if is_lost:
        recipe = Recipe(targets=(target,), forms=("onnx",))
        (summary,) = build(path, data, tmp_path / "out", recipe, verify=False).bundles
        assert report.float_warning in summary.notes
        assert report.float_warning.endswith("let the app compute it before the model: edgekit prepare --inputs l")


CONSTANTS_TEXT = (
    "(float[1,4,4,4] x) => (float[1,4,4,4] y) "
    "<float s = {0.02}, uint8 z = {128}, float t = {0.05}> { a = QuantizeLinear(x, s, z) b = DequantizeLinear(a, s, z)"
    " [n] c = Conv(b, w) q = QuantizeLinear(c, t, z) y = DequantizeLinear(q, t, z) }"
)


@pytest.mark.parametrize("target", ["nnapi", "xnnpack", "qnn", "cpu"])
def test_the_session_option_that_keeps_float_weights_between_q_and_dq_is_set(tmp_path: Path, target: str) -> None:
    rng = np.random.default_rng(0)
    weight = rng.normal(0, 1, (4, 4, 1, 1)).astype(np.float32)
    weight[0] *= 0.003
    path = save_net(CONSTANTS_TEXT, tmp_path / "m.onnx", w=weight).path
    np.savez(tmp_path / "data.npz", x=rng.normal(0, 1, (4, 4, 4, 4)).astype(np.float32))
    recipe = Recipe(targets=(target,), fix=False)
    report = build(path, Data(source=str(tmp_path / "data.npz")), tmp_path / "out", recipe, verify=False)
    (summary,) = report.bundles
    assert summary.failure is None
    assert "1 layers keep float weights between Q and DQ nodes ('n')" in summary.notes[-1]
    bundle = open_bundle(tmp_path / "out" / f"m-{target}")
    config = bundle.manifest.session_config
    assert config[DISABLED] == OPTIMIZER
    config = {key: value for key, value in config.items() if key != "session.disable_cpu_ep_fallback"}
    sample = {"x": rng.normal(0, 1, (1, 4, 4, 4)).astype(np.float32)}
    wanted = CpuSession(path, SessionSettings(config={DISABLED: OPTIMIZER})).run(sample)["y"]
    files = [name for name in bundle.manifest.files if name.endswith((".onnx", ".ort")) and "/" not in name]
    plain = [name for name in files if "context" not in name and "ctx" not in name]
    for name in plain:
        got = CpuSession(bundle.folder / name, SessionSettings(config=config)).run(sample)["y"]
        assert (got == wanted).all(), name
    assert (CpuSession(path, SessionSettings()).run(sample)["y"] != wanted).any()


@pytest.mark.parametrize(
    ("activation", "zero", "note"),
    [
        ("uint8", 128, "rewritten for it: unsigned-weights (1 node); 2 of 6 nodes"),
        ("int8", 0, "made from the float form of the quantized model, which differs from it by "),
    ],
)
def test_weights_become_unsigned_for_nnapis_gemm(activation: str, zero: int, note: str, tmp_path: Path) -> None:
    model = parse_model(
        "g (float[1,3] x) => (float[1,4] y)"
        f" <float xs = {{0.02}}, {activation} xz = {{{zero}}}, float ys = {{0.1}}, {activation} yz = {{{zero}}},"
        " int8[4,3] w = {127, -2, 3, -127, 5, -128, 1, 2, 3, 4, 5, 6}, float s = {0.01}, int8 z = {0}>"
        " { q = QuantizeLinear(x, xs, xz) d = DequantizeLinear(q, xs, xz) f = DequantizeLinear(w, s, z)"
        " a = Gemm<transB=1>(d, f) r = QuantizeLinear(a, ys, yz) y = DequantizeLinear(r, ys, yz) }",
        tmp_path / "m.onnx",
    )
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(40, 1, 3)).astype(np.float32))
    data, recipe = Data(source=str(tmp_path / "d.npz")), Recipe(targets=("nnapi",))
    (bundle,) = build(model, data, tmp_path / "out", recipe, verify=False).bundles
    assert bundle.path is not None, bundle.failure
    assert any(each.startswith(note) for each in bundle.notes), bundle.notes
    tensors = onnx.load(str(bundle.path / "model.onnx")).graph.initializer
    assert {numpy_helper.to_array(it).dtype.name for it in tensors if sorted(it.dims) == [3, 4]} == {"uint8"}


def test_a_quantized_model_of_which_no_session_starts_is_not_shipped(tmp_path: Path) -> None:
    text = (
        "g (float[1,2,4,4] x) => (float[1,2,4,4] y)"
        " <int8[2,2,1,1] w = {1,2,3,4}, float s = {0.1}, float[1] t = {0.1}, int8 z = {0}>"
        " { q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) b = DequantizeLinear(w, t)"
        " c = ConvTranspose(a, b) r = QuantizeLinear(c, s, z) y = DequantizeLinear(r, s, z) }"
    )
    model = parse_model(text, tmp_path / "m.onnx")
    np.savez(tmp_path / "data.npz", x=np.random.default_rng(0).normal(size=(8, 2, 4, 4)).astype(np.float32))
    data = Data(source=str(tmp_path / "data.npz"))
    (made,) = build(model, data, tmp_path / "float", Recipe(targets=("xnnpack",)), verify=False).bundles
    assert made.notes[0].startswith("made from the float form of the quantized model")
    (bundle,) = build(model, data, tmp_path / "out", Recipe(targets=("xnnpack",), fix=False), verify=False).bundles
    assert bundle.path is None
    told = str(bundle.failure)
    assert told.startswith("no session of the int8 model starts on xnnpack because of 1 node: ConvTr")
    assert "must be a scalar" in told
    assert "give the float model" in told


def test_weights_of_integers_are_float_where_a_target_multiplies_in_float_only(tmp_path: Path) -> None:
    text = """g (float[6,8] x) => (float[6,8] y) <float s = {0.01}, int8 z = {0}>
        { d = DequantizeLinear(w, s, z) y = MatMul(x, d) }"""
    rng = np.random.default_rng(0)
    model = save_net(text, tmp_path / "m.onnx", w=rng.integers(-99, 99, (8, 8)).astype(np.int8)).path
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(8, 6, 8)).astype(np.float32))
    recipe = Recipe(targets=("xnnpack",))
    (bundle,) = build(model, Data(source=str(tmp_path / "data.npz")), tmp_path / "out", recipe, verify=False).bundles
    told = "xnnpack takes at most 0% of this model's work in int8, and 100% in float"
    assert f"built as fp32: {told}" in bundle.notes
    assert f"fp32: {told}" in check_targets(model, recipe).recommended.reasons


def test_weights_in_blocks_are_quantized_anew_for_targets_that_lack_them(tmp_path: Path) -> None:
    text = """g (float[6,32] x) => (float[6,4] y)
        { y = com.microsoft.MatMulNBits<K = 32, N = 4, bits = 8, block_size = 16>(x, w, s) }"""
    rng = np.random.default_rng(0)
    weights: Tensors = {"w": rng.integers(0, 255, (4, 2, 16)).astype(np.uint8), "s": np.full((4, 2), 0.01, np.float32)}
    model = save_net(text, tmp_path / "m.onnx", **weights).path
    np.savez(tmp_path / "data.npz", x=rng.normal(size=(24, 6, 32)).astype(np.float32))
    recipe = Recipe(targets=("qnn", "xnnpack", "cpu"))
    report = build(model, Data(source=str(tmp_path / "data.npz")), tmp_path / "out", recipe, verify=False)
    assert [each.precision for each in report.bundles] == ["int8", "fp32", "fp32"]
    assert all(present(each.check).taken_macs == 1 for each in report.bundles)
    ops = {node.op_type for node in onnx.load(present(report.bundles[-1].path) / "model.onnx").graph.node}
    assert ops == {"MatMulNBits"}
