"""Every node test of the onnx package gets a report for every target; nothing crashes."""

import warnings
from pathlib import Path

import onnx
import pytest
from check_models import TARGETS
from onnx.backend.test import loader

from edgekit.check.check import check_graph
from edgekit.check.graph import Graph, view_graph
from edgekit.check.rulebook import load_rules
from edgekit.target import load_target

DATA = Path(loader.DATA_DIR)


@pytest.fixture(scope="module")
def graphs() -> list[Graph]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = loader.load_node_model_tests()
    models = [case.model for case in cases if case.model is not None]
    return [view_graph(onnx.ModelProto.FromString(model.SerializeToString())) for model in models]


@pytest.mark.parametrize("target", TARGETS)
def test_no_node_test_crashes_the_check(graphs: list[Graph], target: str) -> None:
    loaded = load_target(target)
    book = load_rules(loaded)
    assert len(graphs) > 1500
    for graph in graphs:
        nodes = check_graph(graph, book, loaded.settings, opset=17)
        assert all(node.taken or node.reasons for node in nodes)


@pytest.mark.parametrize("target", TARGETS)
def test_the_light_models_get_a_report(target: str) -> None:
    loaded = load_target(target)
    book = load_rules(loaded)
    for path in sorted((DATA / "light").glob("*.onnx")):
        graph = view_graph(onnx.load(str(path)))
        assert len(check_graph(graph, book, loaded.settings, opset=17)) == len(graph.nodes)
