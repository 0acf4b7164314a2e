"""Every kind of rule says no to one tiny model and yes to its mended twin; files of rules are decoded strictly."""

import shutil
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from check_models import TARGETS, check_text, graph_of, why_not

from edgekit.check.rules import rules
from edgekit.check.rules.rulebook import Rule, derive_settings, load_rules
from edgekit.check.rules.rules import BaseRule, Forms, Never, Subject, When
from edgekit.check.rules.units import group_units
from edgekit.errors import TargetError
from edgekit.target import load_target

CASES: list[dict[str, Any]] = tomllib.loads((Path(__file__).parent / "rule_cases.toml").read_text())["case"]


def test_a_file_may_name_every_kind() -> None:
    kinds = msgspec.inspect.type_info(Rule)
    assert isinstance(kinds, msgspec.inspect.UnionType)
    every = {*BaseRule.__subclasses__(), *rules.OperandRule.__subclasses__()} - {rules.OperandRule}
    assert {kind.cls for kind in kinds.types if isinstance(kind, msgspec.inspect.StructType)} == every


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['target']}: {case['reason']}")
def test_each_kind_of_rule_refuses_a_bad_model_and_takes_its_mended_twin(case: dict[str, Any]) -> None:
    asked = {"target": case["target"], "opset": case.get("opset", 17)}
    assert case["reason"] in why_not(check_text(case["bad"], **asked))
    assert why_not(check_text(case["good"], **asked)) == ""


CONV = """g (float[1,4,8,8] x, float s, int64[K] k) => (float[1,4,8,8] y) <float[4,4,1,1] w = {1}, float[1] one = {2}> {
  r = Relu(x) y = Conv<group=1, dilations=[1,1]>(r, w) z = Add(r, one) m = Mul(r, s) u = Reshape(r, k)
  n = Sub(r, u) v = Neg(y) }"""


def subject_of(op: str) -> Subject:
    """Returns a node of a small graph, asked about for a target with two parameters."""
    graph = graph_of(CONV)
    unit = next(unit for unit in group_units(graph, None) if unit.node.op_type == op)
    return Subject(graph=graph, unit=unit, settings={"level": "29", "kind": "fast"})


@pytest.mark.parametrize(
    ("condition", "holds"),
    [
        ({}, True),
        ({"ops": ("Conv", "Relu")}, True),
        ({"ops": ("Relu",)}, False),
        ({"except_ops": ("Conv",)}, False),
        ({"except_ops": ("Relu",)}, True),
        ({"since_min": 11}, True),
        ({"since_min": 12}, False),
        ({"since_max": 11}, True),
        ({"since_max": 10}, False),
        ({"forms": ("float32",)}, True),
        ({"forms": ("float16",)}, False),
        ({"attribute": {"group": (1, 2)}}, True),
        ({"attribute": {"group": (2,)}}, False),
        ({"attribute": {"group": (1,), "dilations": ((2, 2),)}}, False),
        ({"attribute": {"strides": ((1, 1),)}}, False),
        ({"attribute_absent": ("strides",)}, True),
        ({"attribute_absent": ("strides", "group")}, False),
        ({"settings": {"kind": ("fast", "slow")}}, True),
        ({"settings": {"kind": ("slow",)}}, False),
        ({"settings": {"none": ("fast",)}}, False),
        ({"below": {"level": 30}}, True),
        ({"below": {"level": 29}}, False),
        ({"below": {"kind": 1}}, True),
        ({"at_least": {"level": 29}}, True),
        ({"at_least": {"level": 30}}, False),
        ({"quantized": False}, True),
        ({"quantized": True}, False),
        ({"inputs_min": 2}, True),
        ({"inputs_min": 3}, False),
        ({"present": (0, 1)}, True),
        ({"present": (1, 2)}, False),
        ({"absent": (2,)}, True),
        ({"absent": (1, 2)}, False),
        ({"dtypes": {"0": ("float32",)}}, True),
        ({"dtypes": {"0": ("float32",), "1": ("int8",)}}, False),
        ({"dtypes": {"2": ("float32",)}}, False),
        ({"ranks": {"0": (3, 4)}}, True),
        ({"ranks": {"0": (3,)}}, False),
        ({"fed_by": ("Relu", "Neg")}, True),
        ({"fed_by": ("Neg",)}, False),
        ({"feeds": ("Abs", "Neg")}, True),
        ({"feeds": ("Abs",)}, False),
        ({"leaves": True}, True),
        ({"leaves": False}, False),
        ({"single": (1,)}, False),
        ({"single": (2,)}, False),
    ],
)
def test_a_condition_holds_where_each_of_its_fields_does(condition: dict[str, Any], holds: bool) -> None:
    subject = subject_of("Conv")
    assert When(**condition).holds(subject) is holds
    rule = Never(text="not here", note="a note", when=When(**condition))
    assert rule.refuse(subject) == ("not here (a note)" if holds else None)


def test_one_element_is_single_and_a_parameter_that_is_no_number_counts_as_0() -> None:
    assert When(single=(1,)).holds(subject_of("Add"))
    assert not When(single=(0, 1)).holds(subject_of("Add"))
    assert not When(single=(1,)).holds(subject_of("Mul"))  # of rank 0
    assert not When(single=(1,)).holds(subject_of("Sub"))  # of a shape that nobody knows
    assert (subject_of("Add").number("level"), subject_of("Add").number("kind")) == (29, 0)
    assert Never(text="not here").refuse(subject_of("Add")) == "not here"
    assert Forms(allowed=("float32",), note="a note").refuse(subject_of("Add")) is None


@pytest.mark.parametrize(
    ("op", "rule", "reason"),
    [
        ("Conv", Forms(allowed=("float16", "qdq-uint8")), "its input is float32; only float16 is taken"),
        ("Conv", Forms(refused=("float32",)), "its input is float32, which is not taken"),
        ("Conv", Forms(refused=("float16",)), None),
        ("Add", rules.SameDtype(at=(0, 1)), None),
        ("Reshape", rules.SameDtype(at=(0, 1)), "its inputs have different types: float32, int64"),
        ("Conv", rules.Rank(at=(0,), allowed=(4,)), None),
        ("Conv", rules.Rank(at=(0,), min=4, max=4), None),
        ("Conv", rules.Rank(at=(0,), allowed=(3, 5)), "rank 4 of input 0 is not 3 or 5"),
        ("Conv", rules.Rank(at=(0,), max=3), "rank 4 of input 0 is above 3"),
        ("Conv", rules.Rank(at=(0,), min=5), "rank 4 of input 0 is below 5"),
        ("Conv", rules.Rank(at=(0,), min=5, unless_fused=True), "rank 4 of input 0 is below 5"),
        ("Sub", rules.Rank(at=(1,), max=3), "the rank of input 1 is unknown"),
        ("Add", rules.FullShape(at=(0,)), None),
        ("Add", rules.FullShape(at=(1,)), "input 1 is broadcast, from [1] to [1, 4, 8, 8]"),
        ("Neg", rules.Fused(ops=("Relu", "Conv"), at=(0, 0), text="it is fused"), "it is fused"),
        ("Neg", rules.Fused(ops=("Neg", "Conv"), at=(0, 0), text="it is fused"), None),
        ("Conv", rules.Constant(at=(1, 2)), None),
        ("Conv", rules.Constant(at=(2,), required=True), "input 2 is missing"),
        ("Add", rules.Values(at=1, min=2, max=2, min_length=1, max_length=1), None),
        ("Add", rules.Values(at=1, max_length=0), "input 1 has 1 entries; 0 to 0 are taken"),
        ("Add", rules.Values(at=1, min=3), "input 1 holds 2.0, outside 3 to inf"),
        ("Conv", rules.Attribute(name="group", absent=True), "attribute 'group' is not taken"),
        ("Conv", rules.Attribute(name="strides", absent=True), None),
        ("Relu", rules.Readers(op="Conv", attribute={"group": 1}), "Conv 'Conv_1' reads its result, and so do others"),
        ("Relu", rules.Readers(op="Conv", attribute={"group": 2}), None),
        ("Conv", rules.Readers(op="Neg"), None),
    ],
)
def test_a_rule_says_what_it_does_not_take(op: str, rule: BaseRule, reason: str | None) -> None:
    assert rule.refuse(subject_of(op)) == reason


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
def test_a_word_that_rules_do_not_know_is_refused(tmp_path: Path, old: str, new: str, message: str) -> None:
    shutil.copytree(FOLDER / "nnapi", tmp_path / "mine")
    rules = tmp_path / "mine" / "rules.toml"
    rules.write_text(rules.read_text().replace(old, new, 1))
    with pytest.raises(TargetError, match=message):
        load_rules(load_target(str(tmp_path / "mine")))


def test_a_target_without_rules_is_refused(tmp_path: Path) -> None:
    shutil.copytree(FOLDER / "nnapi", tmp_path / "mine")
    (tmp_path / "mine" / "rules.toml").unlink()
    with pytest.raises(TargetError, match="cannot read"):
        load_rules(load_target(str(tmp_path / "mine")))


@pytest.mark.parametrize(("soc", "htp"), [("30", "v68"), ("36", "v69"), ("69", "v73"), ("34", "quantized")])
def test_the_soc_decides_what_the_htp_can(soc: str, htp: str) -> None:
    assert derive_settings(load_rules(load_target("qnn")), {"soc_model": soc})["htp_class"] == htp


def test_only_q_and_dq_on_the_edge_of_a_graph_are_left_to_the_cpu() -> None:
    body = """{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) r = Relu(d)
      t = QuantizeLinear(r, s, z) y = DequantizeLinear(t, s, z) }"""
    graph = graph_of(f"g (float[1,4] x) => (float[1,4] y) <float s = {{0.1}}, uint8 z = {{128}}> {body}")
    entry = next(entry for entry in load_rules(load_target("qnn")).op if "QuantizeLinear" in entry.types)
    refused = list[str]()
    for unit in group_units(graph, None):
        subject = Subject(graph=graph, unit=unit, settings={"offload_graph_io_quantization": "1"})
        refused.append(next(filter(None, (rule.refuse(subject) for rule in entry.rules)), ""))
    assert [reason.partition(",")[0] for reason in refused] == [
        "it quantizes a graph input", "", "", "", "it makes a graph output",
    ]  # fmt: skip
