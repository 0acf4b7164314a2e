"""Every kind of rule says no to one tiny model, with the offending value, and yes to its mended twin."""

import tomllib
from pathlib import Path

import msgspec
import pytest
from check_models import check_text, why_not

from edgekit.check.rules.kinds import Rule
from edgekit.check.rules.rules import JUDGES

CASES: list[dict[str, str]] = tomllib.loads((Path(__file__).parent / "rule_cases.toml").read_text())["case"]


def test_every_kind_has_a_judge() -> None:
    kinds = msgspec.inspect.type_info(Rule)
    assert isinstance(kinds, msgspec.inspect.UnionType)
    assert {kind.cls for kind in kinds.types if isinstance(kind, msgspec.inspect.StructType)} == set(JUDGES)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['target']}: {case['reason']}")
def test_a_rule_says_no_and_yes(case: dict[str, str]) -> None:
    assert case["reason"] in why_not(check_text(case["bad"], case["target"]))
    assert why_not(check_text(case["good"], case["target"])) == ""


def test_the_operator_of_an_old_opset_is_refused() -> None:
    nodes = check_text("g (float[1,4] x) => (float[1,4] y) { y = Relu(x) z = Split<axis=1>(x) }", "nnapi", opset=11)
    assert "Split of opset 11 is older than 13" in why_not(nodes)


def test_a_model_outside_the_opsets_is_left_alone() -> None:
    nodes = check_text("g (float[4] x) => (float[4] y) { y = Relu(x) }", "nnapi", opset=6)
    assert "the model's opset 6 is outside 7 to 27" in why_not(nodes)


def test_rules_follow_the_settings() -> None:
    body = "g (float[1,4] x) => (float[1,4] y) { y = Flatten(x) z = Relu(y) }"
    program, network = (check_text(body, "coreml", {"model_format": name}) for name in ("MLProgram", "NeuralNetwork"))
    assert [node.taken for node in program] == [False, True]
    assert [node.taken for node in network] == [True, True]
