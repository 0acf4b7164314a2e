"""`[commands.NAME]` of an `edgekit.toml`: every option has a place there, and an error in it says where."""

import json
from pathlib import Path

import click
import jsonschema
import pytest
from fixture_types import Refused, present
from tiny_models import parse_model

from edgekit.cli.main import COMMANDS, group, run_command
from edgekit.cli.schema import describe_file

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
