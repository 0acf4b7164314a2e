"""The public interface: what it lists is there, typed, documented, and quick to import."""

import ast
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tiny_models import write_small_net

import edgekit

ROOT = Path(edgekit.__file__).parent


def test_the_stub_names_what_the_facade_gives() -> None:
    stub = ast.parse((ROOT / "__init__.pyi").read_text())
    named = {
        alias.asname: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert sorted(name for name in named if name) == dir(edgekit)
    for name, module in named.items():
        assert getattr(edgekit, str(name)).__module__.startswith(str(module)), name


def test_every_public_name_is_documented() -> None:
    assert [name for name in dir(edgekit) if not inspect.getdoc(getattr(edgekit, name))] == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'buidl'"):
        _ = edgekit.buidl  # type: ignore[attr-defined]


def test_the_version_is_that_of_the_command() -> None:
    done = subprocess.run([sys.executable, "-m", "edgekit", "--version"], capture_output=True, text=True, check=True)
    assert edgekit.__version__ in done.stdout


def test_help_does_not_load_onnxruntime() -> None:
    code = "import sys; from edgekit.cli.main import run_command; run_command(['--help']); print('onnx' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip().endswith("False")


def test_errors_are_one_tree_and_carry_a_hint() -> None:
    tree = ast.parse((ROOT / "errors.py").read_text())
    names = [node.name for node in tree.body if isinstance(node, ast.ClassDef)]
    assert names[0] == "EdgekitError"
    assert all(name in (ast.get_docstring(tree) or "") for name in names)


def test_paths_are_text_and_settings_numbers_from_end_to_end(tmp_path: Path) -> None:
    model, data = str(tmp_path / "m.onnx"), str(tmp_path / "d.npz")
    write_small_net(Path(model), Path(data))
    prepared = edgekit.prepare_model(edgekit.load_model(model), str(tmp_path / "p.onnx"))
    assert edgekit.load_target("nnapi", {"api_level": 31}).settings["api_level"] == "31"
    assert edgekit.load_samples(Path(data), prepared.inputs).count == 32
    given = edgekit.Data(source=tmp_path / "d.npz", labels=None, golden=str(tmp_path))  # type: ignore[arg-type]
    assert (given.source, given.golden) == (data, tmp_path)
    recipe = edgekit.Recipe(targets=("cpu",), precision="fp32", settings={"weights": 8})
    assert recipe.settings == {"weights": "8"}
    recipe = edgekit.Recipe(targets=("cpu",), precision="fp32")
    edgekit.build(model, edgekit.Data(source=data), str(tmp_path / "out"), recipe, verify=False)
    bundle = edgekit.open_bundle(str(tmp_path / "out" / "m-cpu"))
    assert bundle.manifest.target == "cpu"
    report = edgekit.package_bundles([str(bundle.folder)], "tar", str(tmp_path / "p.tar"))
    assert Path(report.out).is_file()


def test_what_is_of_another_kind_is_refused_in_one_line_that_says_what_makes_one(tmp_path: Path) -> None:
    data = tmp_path / "d.npz"
    write_small_net(tmp_path / "m.onnx", data)
    model = edgekit.load_model(tmp_path / "m.onnx")
    wrong: dict[str, Any] = {"array": np.zeros((9, 9)), "none": None, "text": "a=1"}
    for call, words in (
        (lambda: edgekit.load_model(7), "7 is no path"),  # type: ignore[arg-type]
        (lambda: edgekit.load_model(wrong["array"]), r"^array[^\n]* is no path"),
        (
            lambda: edgekit.load_target(wrong["none"]),
            r"wants a str as 'name', and was given None \(help\(edgekit.load_",
        ),
        (lambda: edgekit.load_target("cpu", wrong["text"]), "load_target wants a Mapping as 'settings', and was given"),
        (lambda: edgekit.prepare_model("m.onnx", "p.onnx"), "prepare_model wants a Model as 'model', and was given 'm"),  # type: ignore[arg-type]
        (lambda: edgekit.build("m.onnx", "d.npz", tmp_path), "build wants a Data as 'data'"),  # type: ignore[arg-type]
        (lambda: edgekit.build("m.onnx", edgekit.Data(source="d"), tmp_path, "r.toml"), "build wants a Recipe"),  # type: ignore[arg-type]
        (lambda: edgekit.package_bundles([tmp_path], "rar", "p.rar"), "no package of kind 'rar'"),  # type: ignore[arg-type]
        (
            lambda: edgekit.package_bundles("out", "tar", "p.tar"),
            r"wants a list as 'paths', and was given 'out' \(\['out'",
        ),
        (lambda: edgekit.load_samples(data, ["x"]), "wants a list as 'inputs', and was given 'x' in it"),  # type: ignore[list-item]
        (lambda: edgekit.prepare_model(model, "p.onnx", outputs="y"), "wants a list as 'outputs', and was given 'y'"),
        (lambda: edgekit.build(model, edgekit.Data(source="d"), tmp_path), r"Model\(.* is no path \(give its .path"),  # type: ignore[arg-type]
        (lambda: edgekit.Recipe(targets="cpu"), "a Recipe has 'cpu' as 'targets': Expected `array`"),  # type: ignore[arg-type]
        (lambda: edgekit.Recipe(precision="int9"), r"Invalid enum value 'int9' \(valid: auto, fp16"),  # type: ignore[arg-type]
        (lambda: edgekit.Recipe(dims={"batch": "1"}), "as 'dims': Expected `int`, got `str`"),  # type: ignore[dict-item]
    ):
        with pytest.raises(edgekit.EdgekitError, match=words) as caught:
            call()
        assert caught.value.hint
