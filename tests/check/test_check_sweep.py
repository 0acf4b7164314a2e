"""Every node test of the onnx package gets a report for every target; nothing crashes."""

import warnings
from pathlib import Path

import onnx
import pytest
from check_models import TARGETS
from onnx.backend.test import loader

from edgekit.check.advice import give_advice
from edgekit.check.check import check_graph
from edgekit.check.graph import Graph, infer_model, view_graph, view_inferred
from edgekit.check.report import CheckedNode
from edgekit.check.rules.rulebook import load_rules
from edgekit.check.trace import trace_nodes
from edgekit.prepare.opset import read_opset
from edgekit.prepare.tidy import name_nodes
from edgekit.target import load_target

DATA = Path(loader.DATA_DIR)


@pytest.fixture(scope="module")
def models() -> list[onnx.ModelProto]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = loader.load_node_model_tests()
    found = [onnx.ModelProto.FromString(case.model.SerializeToString()) for case in cases if case.model is not None]
    for model in found:
        name_nodes(model.graph)
    return [infer_model(model) for model in found]


@pytest.mark.parametrize("target", TARGETS)
def test_no_node_test_crashes_the_check(models: list[onnx.ModelProto], target: str) -> None:
    loaded = load_target(target)
    book = load_rules(loaded)
    assert len(models) > 1500

    def recheck(graph: Graph, opset: int) -> tuple[CheckedNode, ...]:
        return check_graph(graph, book, loaded.settings, opset=opset)

    for model in models:
        graph = view_inferred(model)
        nodes = recheck(graph, read_opset(model))
        assert all(node.taken or node.reasons for node in nodes)
        advice = give_advice(model, graph, nodes, recheck)
        assert all(found.gain_nodes >= 0 and found.message for found in advice)


def test_every_node_of_every_node_test_is_traced(models: list[onnx.ModelProto]) -> None:
    for model in models:
        graph = view_inferred(model)
        assert {trace.fate for _, _, trace in trace_nodes(graph, graph)} <= {"kept"}


@pytest.mark.parametrize("target", TARGETS)
def test_the_light_models_get_a_report(target: str) -> None:
    loaded = load_target(target)
    book = load_rules(loaded)
    for path in sorted((DATA / "light").glob("*.onnx")):
        graph = view_graph(onnx.load(str(path)))
        assert len(check_graph(graph, book, loaded.settings, opset=17)) == len(graph.nodes)
