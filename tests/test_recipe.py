"""A recipe changes what it names, and says what is wrong with it in one line."""

from pathlib import Path

import pytest

from edgekit.errors import UsageError
from edgekit.recipe import PrecisionChoice, Recipe, choose_precision, load_recipe, load_targets
from edgekit.target import load_target


def test_one_limit_is_changed_and_the_others_stay() -> None:
    (target,) = load_targets(Recipe(targets=("cpu",), thresholds={"cpu": {"min_sqnr_db": 33.0}}))
    usual = load_target("cpu").thresholds
    assert target.thresholds.min_sqnr_db == 33.0
    assert target.thresholds.min_cosine == usual.min_cosine
    assert target.thresholds.min_taken_macs == usual.min_taken_macs


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"min_cosin": 0.9}, "min_cosin"), ({"min_cosine": "high"}, "min_cosine"), ({"gate": "no"}, "gate")],
)
def test_a_limit_that_is_none_is_refused_by_its_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=rf"\[thresholds.cpu\].*{said}"):
        load_targets(Recipe(targets=("cpu",), thresholds={"cpu": changes}))


def test_limits_of_a_target_that_is_not_built_are_refused() -> None:
    with pytest.raises(UsageError, match="'qnn', which is not built"):
        load_targets(Recipe(targets=("cpu",), thresholds={"qnn": {"min_cosine": 0.9}}))


@pytest.mark.parametrize(
    ("word", "meant"), [("w8a8", "int8"), ("w8a16", "int16"), ("w4a16", "w4a16"), ("auto", "int8")]
)
def test_a_precision_may_be_told_by_its_bits(word: PrecisionChoice, meant: str) -> None:
    assert choose_precision(load_target("qnn"), word) == meant
    if word in {"w8a16", "w4a16"}:
        with pytest.raises(UsageError, match=f"does not take {meant}"):
            choose_precision(load_target("nnapi"), word)


def test_a_recipe_leaves_out_forms_on_devices_too() -> None:
    (target,) = load_targets(Recipe(targets=("cpu",), forms=("onnx",)))
    assert target.conversion.forms == ("onnx",)
    assert {each.form for each in target.verification} == {"onnx"}
    assert load_targets(Recipe(targets=("qnn",), forms=("context", "onnx")))[0] == load_target("qnn")
    with pytest.raises(UsageError, match="target 'qnn' loads none of the forms full"):
        load_targets(Recipe(targets=("qnn",), forms=("full",)))


def test_a_setting_may_be_a_number_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[settings]\napi_level = 31\n")
    assert load_recipe(tmp_path / "r.toml").settings == {"api_level": "31"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("target = ['cpu']", "did you mean 'targets'?"),
        ("[metric]\nname = 'top1'\nmax_drp = 1", "did you mean 'max_drop'?"),
        ("[outputs]\ny = 'clases'", "valid: classes, embedding"),
        ("forms = ['onnx', 'orx']", "valid: context, full"),
        ("samples = 'all'", "the keys are dims"),
    ],
)
def test_a_wrong_key_or_value_is_told_what_is_valid_there(tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_recipe(tmp_path / "r.toml")
    assert hint in caught.value.hint
