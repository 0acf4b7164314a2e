"""Target files are decoded strictly."""

import shutil
from pathlib import Path

import pytest
from check_models import TARGETS

from edgekit.check.rules.rulebook import derive_settings, load_rules
from edgekit.errors import TargetError
from edgekit.target import load_target

FOLDER = Path(__file__).parents[2] / "targets"


@pytest.mark.parametrize("target", TARGETS)
def test_every_operator_and_rule_has_a_source(target: str) -> None:
    book = load_rules(load_target(target))
    sourced = {op for entry in book.op if entry.source for op in entry.types}
    assert sourced == {op for entry in book.op for op in entry.types}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('style = "wave"', 'style = "waves"', "waves"),
        ('kind = "static"', 'kind = "statics"', "statics"),
        ('kind = "static"', 'kind = "static", dim = 1', "dim"),
        ('use = ["api29"]', 'use = ["api99"]', "uses group 'api99', which it does not define"),
    ],
)
def test_a_wrong_word_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    shutil.copytree(FOLDER / "nnapi", tmp_path / "mine")
    rules = tmp_path / "mine" / "rules.toml"
    text = rules.read_text()
    rules.write_text(text.replace(old, new, 1))
    with pytest.raises(TargetError, match=message):
        load_rules(load_target(str(tmp_path / "mine")))


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "nnapi", tmp_path / "mine")
    (tmp_path / "mine" / "rules.toml").unlink()
    with pytest.raises(TargetError, match="cannot read"):
        load_rules(load_target(str(tmp_path / "mine")))


@pytest.mark.parametrize(("soc", "htp"), [("30", "v68"), ("36", "v69"), ("69", "v73"), ("34", "quantized")])
def test_the_soc_decides_what_the_htp_can(soc: str, htp: str) -> None:
    book = load_rules(load_target("qnn"))
    assert derive_settings(book, {"soc_model": soc})["htp_class"] == htp
