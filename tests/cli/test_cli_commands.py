"""Each command: exit codes, JSON, one line for whatever is wrong, its defaults in a file, and what it shows."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import click
import jsonschema
import numpy as np
import onnx
import pytest
from demo_paths import CALIBRATION, MODEL
from fixture_types import Answer, Refused, Shown, present
from tiny_models import parse_model, write_small_net

from edgekit.cli.main import COMMANDS, group, run_command
from edgekit.cli.schema import describe_file
from edgekit.cli.screen import print_table, showing_progress
from edgekit.model.model import load_model
from edgekit.report.tables import make_table
from edgekit.serialize import escape_controls

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


NAMED = ("--config", "edgekit.toml")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, with a model in it."""
    parse_model("agraph (float[N,4] x) => (float[N,4] y) { y = Relu(x) }", tmp_path / "m.onnx")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_the_schema_has_every_option_of_every_command() -> None:
    schema = describe_file()
    places = schema["$defs"]["AppTable"]["properties"]["commands"]["properties"]
    context = click.Context(group, info_name="edgekit")
    assert places.keys() == COMMANDS.keys()
    for name in COMMANDS:
        command = present(group.get_command(context, name))
        words = [max(each.opts, key=len) for each in command.params if isinstance(each, click.Option)]
        assert {f"--{key.replace('_', '-')}" for key in places[name]["properties"]} == set(words)
    # One validator: jsonschema.validate judges the schema itself in each call.
    takes = jsonschema.Draft202012Validator(schema)
    takes.check_schema(schema)
    good = {"check": {"set": {"api_level": 30}, "observe": True}}
    wrong: list[dict[str, dict[str, object]]] = [{"chek": {}}, {"check": {"sett": {}}}, {"check": {"observe": "yes"}}]
    files = [{"models": {}, "targets": {}, "commands": table} for table in (good, *wrong)]
    assert [takes.is_valid(text) for text in files] == [True, False, False, False]


def test_a_value_of_the_file_is_the_default_of_its_option(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = '[commands.prepare]\nout = "made.onnx"\ndim = { N = 3 }\nfix = false\njson = true\n'
    (folder / "edgekit.toml").write_text(text)
    assert run_command([*NAMED, "prepare", "m.onnx"]) == 0
    made, said = capsys.readouterr()
    assert (json.loads(made)["model"]["inputs"][0]["shape"], said.count("\n")) == ([3, 4], 1)
    assert said.startswith("edgekit.toml gives prepare its out, dim, fix, json, unless the command line does\n")
    assert run_command([*NAMED, "prepare", "m.onnx", "--dim", "N=5", "--out", "typed.onnx", "--quiet"]) == 0
    made, said = capsys.readouterr()
    assert (json.loads(made)["model"]["inputs"][0]["shape"], said) == ([5, 4], "")
    assert sorted(path.name for path in folder.glob("*.onnx")) == ["m.onnx", "made.onnx", "typed.onnx"]
    # Other commands know nothing of it, and help is there though the file is broken.
    (folder / "edgekit.toml").write_text("[commands.prepare\n")
    assert run_command([*NAMED, "prepare", "--help"]) == 0


def test_a_file_without_the_option_or_variable_that_names_it_is_not_read(
    folder: Path, capsys: pytest.CaptureFixture[str], refused: Refused, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "edgekit.toml").write_text("[commands.targets]\njson = true\n")
    assert run_command(["targets"]) == 0
    printed, said = capsys.readouterr()
    assert (printed.startswith("{"), said) == (False, "")
    monkeypatch.setenv("EDGEKIT_CONFIG", "edgekit.toml")
    assert run_command(["targets"]) == 0
    assert json.loads(capsys.readouterr().out)
    monkeypatch.setenv("EDGEKIT_CONFIG", "lost.toml")
    assert "cannot read 'lost.toml'" in refused("targets")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[commands.targets]\njsn = true", "line 2, column 1: commands.targets.jsn: targets has no such option ("),
        ('[commands.targets]\njson = "yes"', "line 2, column 1: commands.targets.json: it is on or off (true or"),
        ("[commands]\ntargets = 1", "line 2, column 1: commands.targets: it is no table (for example [commands.tar"),
        ("[commands.targets\n", "'edgekit.toml' is malformed: Expected ']'"),
    ],
)
def test_an_error_names_file_line_and_key(text: str, wanted: str, folder: Path, refused: Refused) -> None:
    (folder / "edgekit.toml").write_text(text)
    assert wanted in refused(*NAMED, "targets")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("[commands.chek]", "line 5, column 1: commands.chek: there is no such command (did you mean 'check'?)"),
        ("[commands.bench]\nruns = 0", "line 6, column 1: commands.bench.runs: 0 is not in the range 1<=x<=100000"),
        ('[commands.bench]\nruns = "few"', "line 6, column 1: commands.bench.runs: 'few' is not a valid integer"),
        ("[commands.check]\nset = [true]", "line 6, column 1: commands.check.set: it takes a text, a list of texts"),
    ],
)
def test_run_checks_the_tables_of_all_commands(text: str, wanted: str, folder: Path, refused: Refused) -> None:
    (folder / "edgekit.toml").write_text('[models.m]\npath = "m.onnx"\ndata = { source = "x" }\n[targets.cpu]\n' + text)
    assert wanted in refused("run", str(folder / "edgekit.toml"))


TAG, LOST, PICTURE, RED = "[/INST]", "blk[se]", ":key:", "\x1b[31m"


@pytest.fixture
def speaking(tmp_path: Path) -> Path:
    path = parse_model(
        "g (float[batch,3] x) => (float[batch,3] y) { a = Relu(x) b = Sigmoid(a) c = Tanh(b) y = Erf(c) }",
        tmp_path / "speaking.onnx",
    )
    model = onnx.load(path)
    for node, name in zip(model.graph.node, (TAG, LOST, PICTURE, RED), strict=True):
        node.name = name
    model.producer_name = f"{TAG} {RED}"
    onnx.helper.set_model_props(model, {"chat": f"{TAG} [bold]{LOST}"})
    onnx.save(model, path)
    return path


@pytest.mark.parametrize(
    ("command", "shown"),
    [
        (["inspect"], [TAG, "[bold]blk[se]", "float32[batch,3]", "\\x1b[31m"]),
        (["inspect", "--sizes"], []),
        (["check", "--target", "xnnpack", "--dim", "batch=1"], [TAG, LOST, PICTURE, "\\x1b[31m"]),
    ],
)
def test_names_of_a_model_are_shown_literally_with_control_characters_escaped(
    speaking: Path, command: list[str], shown: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    run_command([command[0], str(speaking), *command[1:]])
    printed = capsys.readouterr()
    assert [text for text in shown if text not in printed.out] == []
    assert RED not in printed.out + printed.err


def test_an_error_contains_no_terminal_codes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["inspect", str(tmp_path / f"{RED}.onnx")]) == 2
    shown = capsys.readouterr().err
    assert "\\x1b[31m.onnx" in shown
    assert RED not in shown


def test_progress_does_not_read_names_as_markup(capsys: pytest.CaptureFixture[str]) -> None:
    with showing_progress(1) as progress:
        progress(f"{TAG} {LOST} {PICTURE} {RED}")
    assert f"{TAG} {LOST} {PICTURE} \\x1b[31m" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("volume", "quiet_s", "said"), [(0, 60.0, ""), (0, 0.0, "after 0 s: calibrate\n"), (-1, 0.0, "")]
)
def test_in_a_log_a_long_command_says_from_time_to_time_how_far_it_is(
    volume: int, quiet_s: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("edgekit.cli.screen.QUIET_S", quiet_s)
    with showing_progress(volume) as progress:
        progress("calibrate")
    assert capsys.readouterr().err == said


def test_a_spinner_reads_no_markup(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    with showing_progress(0) as progress:
        progress(f"{TAG} {LOST}")
    assert RED not in capsys.readouterr().err


def test_a_narrow_terminal_cuts_no_words(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    words = [f"agreement{number}" for number in range(6)]
    print_table(make_table(*words))
    shown = capsys.readouterr().out
    assert [word for word in words if word not in shown] == []


def test_printable_text_is_not_escaped() -> None:
    assert escape_controls("Größe → 3\t4\n") == "Größe → 3\t4\n"
    assert escape_controls("a\x00b\x9bc\u202ed") == "a\\x00b\\x9bc\\u202ed"


PAGES = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize("shell", ["bash", "fish", "zsh"])
def test_each_shell_gets_its_script(shell: str, shown: Shown) -> None:
    assert f"_EDGEKIT_COMPLETE={shell}_complete" in shown(["completion", shell])


@pytest.mark.parametrize(("words", "wanted"), [("edgekit qu", "quantize"), ("edgekit build --prec", "--precision")])
def test_the_script_asks_the_command(
    words: str, wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = {"COMP_WORDS": words, "COMP_CWORD": str(words.count(" ")), "_EDGEKIT_COMPLETE": "bash_complete"}
    for name, value in asked.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(SystemExit):
        run_command([])
    assert f"plain,{wanted}" in capsys.readouterr().out.splitlines()


def test_the_list_for_agents_leads_to_pages() -> None:
    links = re.findall(r"\]\(([^)]+)\)", (PAGES / "llms.txt").read_text())
    assert len(links) > 5
    assert all((PAGES / link).is_file() for link in links)
