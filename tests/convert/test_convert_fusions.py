"""What became of the nodes: claims are held against what the file holds, on tiny models and on those of the zoo."""

import collections
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import pytest
from convert_models import ARM, RUNTIME, ZOO, all_forms, make_branches, make_qdq, save_text, write_form
from demo_paths import MODEL

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.convert.convert import convert_model
from edgekit.convert.fusions import Fusions, trace_fusions
from edgekit.convert.ort_form import OrtOptions, write_level
from edgekit.convert.ort_format.report import OrtNode, read_graph, replay_saved
from edgekit.jobs.convert import optimize_levels
from edgekit.model.external import skim_model
from edgekit.model.model import load_model

X64 = OrtOptions(style="full", cpu="x64")
# Each node of these comes from one node of a model and from no other.
_HEAVY = ("Conv", "MatMul", "Gemm", "Pool")


def trace(model: Path, folder: Path, options: OrtOptions) -> tuple[Fusions, tuple[OrtNode, ...]]:
    write_form(load_model(model), folder / "m.ort", options)
    nodes = replay_saved(read_graph(folder / "m.ort"))
    return trace_fusions(skim_model(model).graph, nodes), nodes


def find_false_claims(found: Fusions, nodes: tuple[OrtNode, ...]) -> list[str]:
    """Returns the operators of which more or fewer are claimed than the file holds, and those that it has not."""
    held = collections.Counter(node.op.removeprefix("com.microsoft.") for node in nodes)
    claimed: collections.Counter[str] = collections.Counter()
    absent = [name for fate in found.fates for name in fate.became if name not in {*held, "folded", "gone"}]
    for fate in found.fates:
        for name, count in fate.became.items():
            if any(word in fate.op for word in _HEAVY):
                claimed[name] += count
    wrong = [name for name in held if any(word in name for word in _HEAVY) and claimed[name] != held[name]]
    return [*absent, *wrong]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("fastestdet", RUNTIME),
        ("fastestdet", X64),
        ("mobilenetv2_1.0_224_ptq_qdq", ARM),
        ("mobilenetv2_1.0_224_ptq_qdq", RUNTIME),
        ("ppocr_cls_mbv3", ARM),
        ("ppocr_cls_mbv3", X64),
    ],
)
@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
def test_no_claim_about_a_real_model_is_false(name: str, options: OrtOptions, tmp_path: Path) -> None:
    assert find_false_claims(*trace(ZOO / f"models/{name}.onnx", tmp_path, options)) == []


def test_a_blocked_convolution_is_named_as_such(tmp_path: Path) -> None:
    found, nodes = trace(MODEL, tmp_path, X64)
    fates = {fate.op: fate for fate in found.fates}
    if any("nchwc" in node.op for node in nodes):
        assert fates["Conv"].sentence == "31 of 31 Conv are nchwc.Conv"
        assert fates["Clip"].sentence == "21 of 21 Clip are nchwc.Conv"
        assert fates["GlobalAveragePool"].became == {"nchwc.GlobalAveragePool": 1}
    assert find_false_claims(found, nodes) == []


def test_a_false_claim_is_seen(tmp_path: Path) -> None:
    found, nodes = trace(MODEL, tmp_path, ARM)
    assert find_false_claims(found, nodes) == []
    assert find_false_claims(found, tuple(node for node in nodes if node.op != "Gemm")) == ["Gemm"]


def test_names_of_nodes_do_not_decide(tmp_path: Path) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)}
    weights |= {name: np.ones(8, np.float32) for name in ("scale", "bias", "mean", "var")}
    # Called after each other: only what they compute tells them apart.
    graph = """(float[1,3,8,8] x) => (float[1,8,6,6] y) {
      [norm] i = Identity(x)
      [relu] c = Conv(i, w)
      [conv] n = BatchNormalization(c, scale, bias, mean, var)
      [idle] r = Relu(n)
      [exp] e = Exp(scale)
      [reduce] m = ReduceMean(e)
      [add] y = Add(r, m) }"""
    found, _ = trace(save_text(tmp_path / "m.onnx", graph, weights).path, tmp_path, ARM)
    assert {fate.op: fate.became for fate in found.fates} == {
        "Add": {"Add": 1},
        "BatchNormalization": {"FusedConv": 1},
        "Conv": {"FusedConv": 1},
        "Exp": {"folded": 1},
        "Identity": {"gone": 1},
        "ReduceMean": {"folded": 1},
        "Relu": {"FusedConv": 1},
    }
    assert [(kind.ops, kind.into, kind.count) for kind in found.kinds] == [
        (("Conv", "BatchNormalization", "Relu"), "FusedConv", 1)
    ]


@pytest.mark.parametrize(("between", "op"), [("", "QLinearConv"), ("Relu", "FusedConv")])
def test_the_fate_of_each_operator_is_told(tmp_path: Path, between: str, op: str) -> None:
    model = make_qdq(tmp_path / "m.onnx", between=between)
    converted = convert_model(model, all_forms(), tmp_path / "out")
    for form in ("full", "runtime"):
        fates = {fate.op: fate for fate in converted.fates[form]}
        assert fates["Conv"].sentence == f"2 of 2 Conv are {op}"
        assert not between or fates["Relu"].became == {op: 2}


def test_each_level_is_a_file_with_fewer_nodes_and_named_fusions(tmp_path: Path) -> None:
    wanted = (Level.BASIC, Level.EXTENDED, Level.ALL)
    # A BatchNormalization becomes part of its Conv at the basic level, a Relu at the extended one.
    weights = {"w": np.random.default_rng(0).standard_normal((8, 3, 3, 3)).astype(np.float32)}
    weights |= {name: np.ones(8, np.float32) for name in ("scale", "bias", "mean", "var")}
    graph = """(float[1,3,8,8] x) => (float[1,8,6,6] y) {
      [conv] c = Conv(x, w)
      [norm] n = BatchNormalization(c, scale, bias, mean, var)
      [half] half = Cast<to = 1>(n)
      [relu] y = Relu(half) }"""
    model = save_text(tmp_path / "m.onnx", graph, weights)
    out, work = tmp_path / "out", tmp_path / "work"
    out.mkdir()
    work.mkdir()
    rows = optimize_levels(model, wanted, "arm", out, work, None, checked=True)
    assert [(row.level.value, row.nodes, row.casts_gone) for row in rows] == [
        ("disabled", 4, 0), ("basic", 2, 1), ("extended", 1, 1), ("all", 1, 1),
    ]  # fmt: skip
    kinds = [[(kind.ops, kind.into) for kind in row.kinds] for row in rows]
    assert kinds[:2] == [[], [(("Conv", "BatchNormalization"), "Conv")]]
    assert kinds[2] == [(("Conv", "BatchNormalization", "Relu"), "FusedConv")]
    assert {path.name for path in out.iterdir()} == {f"model.{level.value}.onnx" for level in wanted}
    for row in rows[1:]:
        assert row.equality is not None
        assert row.equality.passed
        assert len(onnx.load(out / row.file).graph.node) == row.nodes
        assert (row.median_ms or 0) > 0 < (row.ratio or 0)


def test_the_optimized_file_is_the_one_that_onnx_runtime_writes(tmp_path: Path) -> None:
    model = make_branches(tmp_path / "m.onnx")
    row = write_level(model, Level.ALL, "x64", tmp_path, checked=False)
    optimize_graph(model.path, tmp_path / "own.onnx", SessionSettings(level=Level.ALL, threads=1))
    own, ours = onnx.load(tmp_path / "own.onnx").graph, onnx.load(tmp_path / row.file).graph
    assert collections.Counter(node.op_type for node in own.node) == collections.Counter(
        node.op_type for node in ours.node
    )
    assert bool(row.warning) == any(node.domain.endswith("nchwc") for node in own.node)
    # In another process ONNX Runtime adds the nodes in another order.
    argv = [sys.executable, "-c", _WRITE_LEVEL, str(model.path), str(tmp_path)]
    assert subprocess.run(argv, check=True, capture_output=True).stdout == f"{row.sha256}\n".encode()


_WRITE_LEVEL = """
import sys
from pathlib import Path
from edgekit._ort import Level
from edgekit.convert.ort_form import write_level
from edgekit.model.model import load_model
print(write_level(load_model(Path(sys.argv[1])), Level.ALL, "x64", Path(sys.argv[2]), checked=False).sha256)
"""


def test_what_a_fusion_calls_alike_each_time_is_not_the_same_tensor(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((8, 8)).astype(np.float32) for name in ("v", "w")}
    weights |= {name: np.ones(8, np.float32) for name in ("b", "c")}
    weights |= {"flat": np.array([4, 8]), "deep": np.array([1, 4, 8])}
    # As an earlier optimization left the first pair: ONNX Runtime calls what it makes of the second by the same names.
    graph = """(float[1,4,8] x) => (float[1,4,8] y) {
      [gemm_input_reshape] gemm_input_reshape_arg = Reshape(x, flat)
      [first] gemm_output_reshape_arg = Gemm(gemm_input_reshape_arg, v, b)
      [gemm_output_reshape] h = Reshape(gemm_output_reshape_arg, deep)
      [relu] r = Relu(h)
      [second] m = MatMul(r, w)
      [add] y = Add(m, c) }"""
    model = save_text(tmp_path / "m.onnx", graph, weights)
    fates = {fate.op: fate.became for fate in trace(model.path, tmp_path, X64)[0].fates}
    assert (fates["MatMul"], fates["Add"]) == ({"Gemm": 1}, {"Gemm": 1})
