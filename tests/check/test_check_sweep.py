"""The onnx package's node tests get a report for every target; nothing crashes.

Two of each set of operators stand for the others here; `make fuzz` runs them all.
"""

import warnings
from collections import defaultdict
from pathlib import Path

import onnx
import pytest
from check_models import TARGETS
from hypothesis import settings
from onnx.backend.test import loader

from edgekit.check.advice import Case, give_advice
from edgekit.check.check import check_graph
from edgekit.check.report import CheckedNode, trace_nodes
from edgekit.check.rules.rulebook import load_rules
from edgekit.graph.graph import Graph, infer_graph, view_model
from edgekit.graph.inference import infer_model
from edgekit.prepare.interface import name_nodes
from edgekit.prepare.opset import read_opset
from edgekit.target import load_target

pytestmark = [pytest.mark.fuzz, pytest.mark.slow, pytest.mark.long]

DATA = Path(loader.DATA_DIR)
EACH = None if settings().max_examples > 1000 else 2


@pytest.fixture(scope="module")
def models() -> list[tuple[onnx.ModelProto, Graph]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = loader.load_node_model_tests()
    kinds: defaultdict[frozenset[str], list[onnx.ModelProto]] = defaultdict(list)
    for case in cases:
        if case.model is not None:
            kinds[frozenset(node.op_type for node in case.model.graph.node)].append(case.model)
    found: list[tuple[onnx.ModelProto, Graph]] = []
    for kind in kinds.values():
        for model in kind[:EACH]:
            own = onnx.ModelProto.FromString(model.SerializeToString())
            name_nodes(own.graph)
            inferred = infer_model(own)
            found.append((inferred, view_model(inferred)))
    assert len(kinds) > 250
    assert len(found) > (1500 if EACH is None else 500)
    return found


@pytest.mark.parametrize("target", TARGETS)
def test_no_node_test_crashes_the_check(models: list[tuple[onnx.ModelProto, Graph]], target: str) -> None:
    loaded = load_target(target)
    book = load_rules(loaded)

    def recheck(graph: Graph, opset: int) -> tuple[CheckedNode, ...]:
        return check_graph(graph, book, loaded.settings, opset=opset)

    for model, graph in models:
        nodes = recheck(graph, read_opset(model))
        assert all(node.taken or node.reasons for node in nodes)
        advice = give_advice(Case(graph=graph, nodes=nodes, recheck=recheck))
        assert all(found.gain_nodes >= 0 and found.message for found in advice)


def test_every_node_of_every_node_test_is_traced(models: list[tuple[onnx.ModelProto, Graph]]) -> None:
    for _, graph in models:
        assert {trace.fate for _, _, trace in trace_nodes(graph, graph)} <= {"kept"}


@pytest.fixture(scope="module")
def light() -> list[Graph]:
    return [infer_graph(onnx.load(str(path))) for path in sorted((DATA / "light").glob("*.onnx"))]


@pytest.mark.parametrize("target", TARGETS)
def test_the_light_models_get_a_report(light: list[Graph], target: str) -> None:
    loaded = load_target(target)
    book = load_rules(loaded)
    for graph in light:
        assert len(check_graph(graph, book, loaded.settings, opset=17)) == len(graph.nodes)
