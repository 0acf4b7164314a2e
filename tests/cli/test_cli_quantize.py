"""`edgekit quantize` as a stranger types it: plans edited by hand, options that do not fit, places that do not."""

import json
import re
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from tiny_models import parse_model, save_net

from edgekit.cli.main import run_command

Edit = Callable[[dict[str, Any]], object]

MODEL = (
    "(float[1,3,8,8] x) => (float[1,6] y) { [node0] a = Conv(x, u) [node1] b = Relu(a) [node2] c = Conv(b, v)"
    " [node3] p = GlobalAveragePool(c) [node4] f = Flatten(p) [node5] y = Softmax(f) }"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, its samples and a plan of it for NNAPI."""
    folder = tmp_path_factory.mktemp("quantize")
    rng = np.random.default_rng(5)
    u, v = (rng.normal(size=shape).astype(np.float32) for shape in ((8, 3, 3, 3), (6, 8, 3, 3)))
    save_net(MODEL, folder / "m.onnx", u=u, v=v)
    np.savez(folder / "d.npz", x=rng.normal(size=(12, 1, 3, 8, 8)).astype(np.float32))
    return folder


def quantize(folder: Path, *more: object, out: Path | None = None, data: str = "d.npz", target: str = "nnapi") -> int:
    arguments = ["quantize", folder / "m.onnx", "--data", folder / data, "--target", target, *more]
    arguments += [] if out is None else ["--out", out]
    return run_command([str(argument) for argument in arguments])


@pytest.fixture(scope="module")
def plan(folder: Path) -> dict[str, Any]:
    """The plan as a user has it in a file."""
    path = folder / "plan.txt"
    with pytest.MonkeyPatch.context() as patch, path.open("w") as stream:
        patch.setattr("sys.stdout", stream)
        assert quantize(folder, "--plan-only") == 0
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def put(field: str, value: object) -> Edit:
    return lambda plan: plan.update({field: value})


def add(field: str, key: str, value: object) -> Edit:
    return lambda plan: plan[field].update({key: value})


FLOAT_NODE = {"op": "Conv", "reason": "mine"}
WRONG: dict[str, tuple[Edit, str]] = {
    "unknown tensor": (add("ranges", "zz", {"low": 0, "high": 1}), "numbers for 'zz', which is no float tensor"),
    "misspelled tensor": (add("ranges", "aa", {"low": 0, "high": 1}), "did you mean 'a'"),
    "no range": (lambda plan: plan["ranges"].pop("c"), "lacks the range of 'c'"),
    "turned range": (add("ranges", "c", {"low": 2, "high": 1}), "'c' the range from 2 to 1, which has no scale"),
    "endless range": (add("ranges", "c", {"low": -3e38, "high": 3e38}), "which has no scale"),
    "16 bits on NNAPI": (add("wide", "c", {"low": 0, "high": 1}), "'c' 16 bits, which target 'nnapi' does not take"),
    "3 bits": (put("activation", "int3"), "is no plan: Invalid enum value 'int3'"),
    "other sign": (put("activation", "int8"), "activation = int8, but target 'nnapi' takes uint8"),
    "other precision": (put("precision", "fp32"), "'fp32' is no integer precision"),
    "grid without a scale": (add("grids", "y", {"scale": 0, "zero_point": 0}), "scale 0 and the zero point 0"),
    "grid beyond 8 bits": (add("grids", "y", {"scale": 0.1, "zero_point": 999}), "uint8 cannot have"),
    "misspelled operator": (put("op_types", ["Conv", "Relo"]), r"quantizes 'Relo', .*did you mean 'Relu'"),
    "unknown node": (put("float_nodes", [{"name": "node9", **FLOAT_NODE}]), "keeps node 'node9' float"),
    "node of another kind": (put("float_nodes", [{"name": "node1", **FLOAT_NODE}]), "takes node 'node1' for Conv"),
    "axis of no weight": (add("axes", "w", 0), "gives 'w' a scale for each index of axis 0"),
    "other axis": (add("axes", "u", 1), "takes axis 0"),
    "unknown method": (put("method", "mini"), "range method 'mini'"),
    "other model": (put("model_sha256", "0" * 64), "for another model"),
    "other samples": (put("samples_sha256", "0" * 64), "with other samples"),
    "other target": (put("target", "qnn"), "for target 'qnn'"),
    "impossible factors": (put("factors", {"b": [0.0] * 8}), "cannot scale the channels of 'b'"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_plan_edited_by_hand_is_refused_in_one_line(
    name: str, folder: Path, plan: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit, pattern = WRONG[name]
    edited = json.loads(json.dumps(plan))
    edit(edited)
    (tmp_path / "plan.json").write_text(json.dumps(edited))
    assert quantize(folder, "--plan", tmp_path / "plan.json", out=tmp_path / "q.onnx") == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert re.search(pattern, message), message
    assert not (tmp_path / "q.onnx").exists()


def test_allowed_edits_of_a_plan_are_applied(
    folder: Path, plan: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edited = json.loads(json.dumps(plan))
    edited["ranges"]["x"] = {"low": -2.0, "high": 2.0}
    edited["float_nodes"].append({"name": "node0", **FLOAT_NODE})
    (tmp_path / "plan.json").write_text(json.dumps(edited))
    assert quantize(folder, "--plan", tmp_path / "plan.json", "--json", out=tmp_path / "q.onnx") == 0
    report = json.loads(capsys.readouterr().out)
    assert "node0" in [node["name"] for node in report["float_nodes"]]
    keys = {"model", "out", "target", "samples", "size_before", "size_after", "quantized_nodes", "float_nodes"}
    assert keys <= report.keys()


def test_a_plan_for_other_settings_of_the_target_is_refused(
    folder: Path, plan: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    old = ("--set", "api_level=28", "--plan", tmp_path / "plan.json")
    assert quantize(folder, *old, out=tmp_path / "q.onnx") == 2
    assert "target 'nnapi'" in capsys.readouterr().err
    assert not (tmp_path / "q.onnx").exists()


UNFIT: dict[str, tuple[tuple[str, ...], str]] = {
    "all targets": (("--target", "all"), "for one target at a time"),
    "a goal that is no number": (("--max-drop", "nan"), "'nan' is no number"),
    "a state without a goal": (("--state", "s.json"), "--state keeps what a search tries"),
    "a state of a range method": (("--state", "s.json", "--method", "mse"), "--state keeps what a search tries"),
    "a plan and a method": (("--plan", "plan.txt", "--method", "mse"), "--plan is applied as it stands"),
    "a plan and its printing": (("--plan-only",), "--plan-only writes no model"),
    "a plan of other bits": (("--target", "qnn", "--plan", "plan.txt", "--precision", "int16"), "the plan is of int8"),
    "a goal and a method": (("--max-drop", "1", "--method", "mse"), "--max-drop plans by itself"),
    "a page over the model": (("--html", "m.onnx"), "'m.onnx' would be written over one that is read"),
    "a state over the page": (("--max-drop", "1", "--state", "p", "--html", "p"), "over another one that is written"),
    "a page in no folder": (("--html", "m.onnx/p.html"), "cannot write 'm.onnx/p.html'"),
}


@pytest.mark.parametrize("name", UNFIT)
def test_options_that_do_not_fit_are_refused_before_work_starts(
    name: str, folder: Path, plan: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert plan
    monkeypatch.chdir(folder)
    options, message = UNFIT[name]
    assert quantize(Path(), *options, out=Path("q.onnx")) == 2
    said = capsys.readouterr().err
    assert message in said
    assert said.count("\n") == 1
    assert not Path("q.onnx").exists()


def test_the_best_method_is_a_search_that_a_state_keeps(folder: Path, tmp_path: Path) -> None:
    state, files = tmp_path / "s.json", [tmp_path / name for name in ("best.onnx", "again.onnx", "goal.onnx")]
    for file, how in zip(files, (("--method", "best"), ("--method", "best"), ("--max-drop", "0")), strict=True):
        assert quantize(folder, *how, "--state", state, out=file, target="qnn") in {0, 1}
        steps = [trial["step"] for trial in json.loads(state.read_text())["done"]]
        assert steps[0] == "all"
        assert len(set(steps)) == len(steps)
    assert len({file.read_bytes() for file in files}) == 1
    trials = json.loads(state.read_text())["done"]
    state.unlink()
    assert quantize(folder, "--method", "best", "--state", state, "--plan-only", target="qnn") == 0
    assert json.loads(state.read_text())["done"] == trials


@pytest.mark.parametrize("command", ["quantize", "build"])
def test_missing_sizes_come_from_the_samples(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = "g (float[batch,3,side,side] x) => (float[N,C,H,W] y) { y = Relu(x) }"
    model = parse_model(text, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((12, 3, 8, 8), np.float32))
    words = [command, str(model), "--data", str(tmp_path / "d.npz"), "--target", "nnapi", "--out", str(tmp_path / "q")]
    assert run_command(words) == 2
    assert "(add --dim batch=1 --dim side=8, as in the samples)" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["m.onnx", "d.npz", "."])
def test_model_and_samples_are_not_written_over(place: str, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = (folder / "m.onnx").read_bytes(), (folder / "d.npz").read_bytes()
    assert quantize(folder, out=folder / place) == 2
    assert "written over" in capsys.readouterr().err or place == "."
    assert ((folder / "m.onnx").read_bytes(), (folder / "d.npz").read_bytes()) == before


@pytest.mark.slow
@pytest.mark.parametrize("most_bytes", [*(pytest.param(size, marks=pytest.mark.long) for size in (1500, 4000)), 12_000])
def test_a_full_disk_is_an_error_in_one_line(most_bytes: int, folder: Path, tmp_path: Path) -> None:
    arguments = ["quantize", str(folder / "m.onnx"), "--data", str(folder / "d.npz"), "--target", "nnapi"]
    arguments += ["--html", str(tmp_path / "p.html"), "--out", str(tmp_path / "q.onnx")]
    ended = subprocess.run(
        # Without -B it would leave bytecode that is cut off, which later runs cannot read.
        [sys.executable, "-B", "-m", "edgekit", *arguments],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (most_bytes, most_bytes)),
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert ended.returncode == 2
    assert ended.stderr.startswith("edgekit: error: ")
    assert "File too large" in ended.stderr or "is the disk full?" in ended.stderr
    assert ended.stderr.count("\n") == 1
    assert not list(tmp_path.glob(".edgekit-*"))


def test_plans_of_a_model_of_2_gb_are_compared(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert quantize(folder, out=tmp_path / "whole.onnx") == 0
    monkeypatch.setattr("edgekit.model.model.MOST_INLINE_BYTES", 1000)
    assert quantize(folder, out=tmp_path / "q.onnx") == 0
    whole, apart = onnx.load(str(tmp_path / "whole.onnx")), onnx.load(str(tmp_path / "q.onnx"))
    stored = [[tensor.raw_data for tensor in each.graph.initializer] for each in (whole, apart)]
    assert stored[0] == stored[1]
