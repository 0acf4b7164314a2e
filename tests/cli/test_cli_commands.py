"""Each command: its exit codes, its JSON, and one line for whatever is wrong."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import numpy as np
import pytest
from demo_paths import CALIBRATION, MODEL
from fixture_types import Answer, Refused, Shown, present
from tiny_models import parse_model, write_small_net

from edgekit.cli.main import COMMANDS, group, run_command
from edgekit.model.model import load_model

BUILD = ["build", str(MODEL), "--data", str(CALIBRATION)]


@pytest.fixture(scope="module")
def bundles(demo_bundles: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy: `verify` writes into it."""
    return shutil.copytree(demo_bundles, tmp_path_factory.mktemp("cli") / "out")


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_every_command_has_help_with_an_example(name: str, shown: Shown) -> None:
    assert f"edgekit {name}" in shown([name, "--help"]).split("Example:")[1]
    command = present(group.get_command(click.Context(group), name))
    assert command.get_short_help_str(200) == COMMANDS[name]


def test_check_prints_json_and_gives_exit_code_1_for_no(tmp_path: Path, answer: Answer) -> None:
    report = answer(["check", str(MODEL), "--target", "nnapi", "--set", "api_level=31"])
    checked = report["targets"]["nnapi"]
    keys = {"evidence", "nodes", "taken", "partitions", "taken_macs", "verdict", "node_list", "advice"}
    assert keys <= checked.keys()
    assert "observed" not in checked  # nobody asked for it
    assert {"name", "op", "domain", "taken", "reasons", "macs"} <= checked["node_list"][0].keys()
    text = "g (float[1,4] x) => (float[1,4] y) { y = Erf(x) }"
    assert run_command(["check", str(parse_model(text, tmp_path / "erf.onnx")), "--target", "nnapi"]) == 1


def test_inspect_targets_devices_and_doctor_print_json(answer: Answer) -> None:
    assert answer(["inspect", str(MODEL)])["ops"]["Conv"] == 31
    assert answer(["targets", "qnn"])["settings"]["soc_model"] == "69"
    assert {target["name"] for target in answer(["targets"])["targets"]} >= {"nnapi", "qnn"}
    assert answer(["devices", "list"])["devices"]
    assert "onnxruntime" in answer(["doctor"])["versions"]


def test_quantize_measures_the_drop_by_a_metric_of_the_task(tmp_path: Path, refused: Refused, answer: Answer) -> None:
    weights = ", ".join(str(value) for value in np.random.default_rng(0).normal(size=15).round(3))
    text = f"g (float[1,3,8,8] x) => (float[1,5,8,8] y) <float[5,3,1,1] w = {{{weights}}}> {{ y = Conv(x, w) }}"
    model, rows = parse_model(text, tmp_path / "m.onnx"), np.random.default_rng(1).normal(size=(32, 3, 8, 8))
    np.savez(tmp_path / "d.npz", x=rows.astype(np.float32))
    kernel = np.array(weights.split(", "), np.float64).reshape(5, 3)
    np.save(tmp_path / "masks.npy", np.einsum("kc,nchw->nkhw", kernel, rows).argmax(1))
    arguments = ["quantize", str(model), "--data", str(tmp_path / "d.npz"), "--target", "qnn", "--metric", "miou"]
    arguments += ["--out", str(tmp_path / "q.onnx"), "--max-drop", "5", "-q"]
    found = answer([*arguments, "--labels", str(tmp_path / "masks.npy")])["predicted"]
    assert (found["measure"], found["source"], found["reference"]) == ("miou", "labels", 1.0)
    assert found["drop_interval"][0] <= found["drop_estimate"] <= 0.05
    assert found["drop_estimate"] == pytest.approx(1 - found["got"])
    assert "--metric needs labels" in refused(*arguments)


def test_compare_prints_distances_and_fails_below_a_limit(bundles: Path, answer: Answer) -> None:
    quantized = bundles / "digits_mobilenet-nnapi" / "model.onnx"
    arguments = ["compare", str(MODEL), str(quantized), "--data", str(CALIBRATION), "--samples", "4", "--layers"]
    report = answer([*arguments, "--min-sqnr", "15"])
    assert {"a", "b", "samples", "outputs", "layers"} <= report.keys()
    assert {"name", "op", "sqnr_db", "max_abs"} <= report["layers"][0].keys()
    assert run_command([*arguments, "--min-sqnr", "60"]) == 1


def test_prepare_takes_shapes_outputs_and_constants(tmp_path: Path, answer: Answer) -> None:
    text = "g (float[N,M] x, float[1] k) => (float[N,M] y, float[N,M] z){ y = Mul(x, k) z = Add(x, k) }"
    model = parse_model(text, tmp_path / "m.onnx")
    arguments = ["prepare", str(model), "--shape", "x=2,3", "--freeze", "k=2", "--outputs", "z"]
    report = answer([*arguments, "--out", str(tmp_path / "p.onnx")])["model"]
    assert [spec["name"] for spec in (*report["inputs"], *report["outputs"])] == ["x", "z"]
    assert report["outputs"][0]["shape"] == [2, 3]
    for wrong in (["--shape", "x=2"], ["--shape", "q=2,3"], ["--shape", "x=2,-1"], ["--freeze", "k=two"]):
        assert run_command(["prepare", str(model), *wrong, "--out", str(tmp_path / "q.onnx")]) == 2
    assert not (tmp_path / "q.onnx").exists()


def test_shapes_count_where_axes_of_several_sizes_have_one_name(tmp_path: Path, answer: Answer) -> None:
    text = "g (float[N,M] x, float[N,M] k) => (float[N,9] y){ y = Concat<axis=1>(x, k) }"
    model = parse_model(text, tmp_path / "m.onnx")
    arguments = ["prepare", str(model), "--shape", "x=2,3", "--shape", "k=2,6", "--out", str(tmp_path / "p.onnx")]
    assert [spec["shape"] for spec in answer(arguments)["model"]["inputs"]] == [[2, 3], [2, 6]]


@pytest.mark.slow
def test_a_recipe_gives_the_options_and_the_command_line_wins(tmp_path: Path, answer: Answer) -> None:
    (tmp_path / "r.toml").write_text('targets = ["nnapi"]\nsamples = 4\n[settings]\napi_level = "31"\n')
    model, data = tmp_path / "m.onnx", tmp_path / "x.npz"
    write_small_net(model, data)
    arguments = ["build", str(model), "--data", str(data), "--recipe", str(tmp_path / "r.toml")]
    arguments += ["--samples", "6", "--no-verify"]
    report = answer([*arguments, "--out", str(tmp_path / "out")])
    assert [bundle["target"] for bundle in report["bundles"]] == ["nnapi"]
    assert report["calibration_samples"] == 6
    assert report["bundles"][0]["check"]["settings"] == {"api_level": "31", "layout": "NHWC", "cpu": "on"}


@pytest.mark.slow
def test_ctrl_c_ends_a_command_at_once_and_leaves_no_files(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "edgekit", *BUILD, "--out", str(tmp_path / "out"), "-v"]
    child = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(tmp_path)})
    for line in present(child.stderr):
        if "build for" in line:
            break
    time.sleep(0.2)
    child.send_signal(signal.SIGINT)
    rest = child.communicate(timeout=60)[1]
    assert child.returncode == 130
    assert "interrupted" in rest
    assert "Traceback" not in rest
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_output_into_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m edgekit targets --json | head -c 1"
    done = subprocess.run(["/bin/sh", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr


def test_compare_shows_the_agreement_of_labels_and_fails_without_any(tmp_path: Path, shown: Shown) -> None:
    for op in ("ArgMax", "ArgMin"):
        text = f"g (float[1,8] x) => (int64[1] label) {{ label = {op}<axis = 1, keepdims = 0>(x) }}"
        parse_model(text, tmp_path / f"{op}.onnx")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(8, 8)).astype(np.float32))
    data = ["--data", str(tmp_path / "x.npz")]
    first, second = str(tmp_path / "ArgMax.onnx"), str(tmp_path / "ArgMin.onnx")
    assert "100.0%" in shown(["compare", first, first, *data])
    assert "0.0%" in shown(["compare", first, second, *data], 1)


def test_a_dimension_and_a_frozen_input_mean_the_same_in_every_command_that_takes_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Samples of that size are taken, and may hold the input that is gone; what does not fit is refused by its name."""
    monkeypatch.chdir(tmp_path)
    text = "g (float[1,T] x, float[1] k) => (float[1,4] y) <float[1,4] w = {1, 2, 3, 4}>"
    text += "{ s = ReduceSum(x)  m = MatMul(s, w)  y = Mul(m, k) }"
    parse_model(text, tmp_path / "m.onnx")
    values = np.random.default_rng(0).normal(size=(8, 1, 6)).astype(np.float32)
    np.savez("d.npz", x=values, k=np.ones((8, 1), np.float32))
    data = ["--data", "d.npz"]
    ways = {
        "bench": ["--runs", "1", *data],
        "build": ["--target", "cpu", "--precision", "fp32", "--no-verify", "--out", "built", *data],
        "check": ["--target", "nnapi"],
        "compare": ["m.onnx", *data],
        "convert": ["--out", "converted", *data],
        "forecast": ["--device", "Galaxy S24"],
        "inspect": [],
        "prepare": ["--out", "prepared.onnx"],
        "profile": ["--runs", "1", "--no-roofline", *data],
        "quantize": ["--target", "cpu", "--out", "int8.onnx", *data],
        "tune": ["--time-budget", "0.1s", *data],
    }
    assert {name for name in COMMANDS if _takes(name, "--dim")} == {*ways}
    assert {name for name in COMMANDS if _takes(name, "--shape")} == {*ways}
    assert {name for name in COMMANDS if _takes(name, "--freeze")} == {*ways}
    monkeypatch.setattr("edgekit.profile.measure.ROUNDS", 1)
    for name, way in ways.items():
        given = [name, "m.onnx", *way]
        # Those that start processes take one of the two; that they read the other shows below, where it is refused.
        for size in ("--dim=T=6", "--shape=x=1,6")[: 1 if name in {"bench", "profile", "tune"} else 2]:
            assert run_command([*given, size, "--freeze", "k=2"]) == 0, (name, capsys.readouterr().err)
        wrong: dict[tuple[str, ...], str] = {
            ("--dim", "T=6", "--freeze", "q=2"): "no input 'q'",
            ("--dim", "Q=6", "--freeze", "k=2"): "'Q'",
        }
        wrong["--shape", "x=2,6"] = "does not fit the model's x: float32"
        if "--data" in way:
            wrong["--dim", "T=5", "--freeze", "k=2"] = r"\[1, ?1?,? ?6\]|1x6|x'"
        for words, said in wrong.items():
            capsys.readouterr()
            assert run_command([*given, *words]) == 2, (name, words)
            assert re.search(said, capsys.readouterr().err), (name, words)
    for made in ("prepared.onnx", "int8.onnx", "converted/m.onnx"):
        if Path(made).exists():
            assert [spec.name for spec in load_model(Path(made)).inputs] == ["x"], made


def _takes(name: str, *options: str) -> bool:
    command = group.get_command(click.Context(group), name)
    return command is not None and {*options} <= {word for one in command.params for word in one.opts}
