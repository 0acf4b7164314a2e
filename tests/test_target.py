"""Targets are data: read strictly, with their parameters set."""

import shutil
from pathlib import Path

import pytest

import edgekit.target
from edgekit.errors import TargetError, UsageError
from edgekit.target import load_target, target_names

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", target_names())
def test_every_shipped_target_loads(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    assert target.settings == {key: parameter.default for key, parameter in target.parameters.items()}
    assert target.verification
    assert not any("{" in value for value in target.session.provider_options.values())


def test_a_parameter_reaches_the_provider_options() -> None:
    assert load_target("qnn", {"soc_model": "43"}).session.provider_options["soc_model"] == "43"


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qnm", {}, "did you mean 'qnn'"),
        ("qnn", {"soc_modle": "43"}, "did you mean 'soc_model'"),
        ("qnn", {"soc_model": "99999"}, "no soc_model"),
        ("nnapi", {"api_level": "31x"}, "whole number"),
        ("nnapi", {"api_level": "5"}, "from 27 to"),
    ],
)
def test_a_wrong_name_or_value_is_refused(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_target(name, settings)


def test_a_folder_is_a_target_without_python(tmp_path: Path) -> None:
    folder = shutil.copytree(Path(edgekit.target.__file__).parent.parent / "targets/nnapi", tmp_path / "mine")
    text = (folder / "target.toml").read_text().replace('name = "nnapi"', 'name = "mine"')
    (folder / "target.toml").write_text(text)
    assert load_target(str(folder)).name == "mine"


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "targets/nnapi", tmp_path / "bad")
    (folder / "target.toml").write_text('colour = "red"\n' + (folder / "target.toml").read_text())
    with pytest.raises(TargetError, match="colour"):
        load_target(str(folder))
