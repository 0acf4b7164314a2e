"""Every node test of the onnx package, and any graph of nodes that bear known names, gets a report for every target.

The nodes' inputs, outputs, attributes and domains are drawn by hypothesis; nothing crashes.
"""

import warnings
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from check_models import TARGETS
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
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
        (advice,) = give_advice([Case(graph=graph, nodes=nodes, recheck=recheck)])
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


LOADED = [load_target(target) for target in TARGETS]
BOOKS = [load_rules(target) for target in LOADED]
OPS = sorted({op for book in BOOKS for entry in book.op for op in entry.types} | {"Sum", "Dropout", "NoSuchOperator"})
ATTRIBUTES = [
    "axis",
    "kernel_shape",
    "pads",
    "mode",
    "dilations",
    "group",
    "transB",
    "split",
    "auto_pad",
    "min",
    "axes",
]
CONSTANTS = [
    numpy_helper.from_array(np.ones(shape, dtype), f"c{at}")
    for at, (shape, dtype) in enumerate(
        [
            ((), np.float32),
            ((0,), np.float32),
            ((4,), np.int64),
            ((4, 2, 3, 3), np.float32),
            ((), np.uint8),
            ((), np.int8),
        ]
    )
]
NAMES = ["x0", "x1", "", *(tensor.name for tensor in CONSTANTS)]
VALUES = st.sampled_from([0, 1, -1, [1, 1], [2], "SAME", "linear", 1.5])


@st.composite
def _models(draw: st.DrawFn) -> onnx.ModelProto:
    nodes: list[onnx.NodeProto] = []
    for at in range(draw(st.integers(1, 6))):
        known = st.sampled_from([*NAMES, *(name for node in nodes for name in node.output)])
        attributes: dict[str, Any] = draw(st.dictionaries(st.sampled_from(ATTRIBUTES), VALUES, max_size=3))
        outputs = [f"v{at}_{place}" for place in range(draw(st.integers(0, 2)))]
        domain = draw(st.sampled_from(["", "", "ai.onnx", "com.microsoft", "my.domain"]))
        inputs = draw(st.lists(known, max_size=4))
        nodes.append(helper.make_node(draw(st.sampled_from(OPS)), inputs, outputs, domain=domain, **attributes))
    shapes: st.SearchStrategy[Any] = st.sampled_from([None, [], [1, 4, 8, 8], ["N", 3], [2, 3], [0]])
    types = st.sampled_from([1, 2, 3, 6, 7, 9, 10, 8, 11])
    values = [helper.make_tensor_value_info(name, draw(types), draw(shapes)) for name in ("x0", "x1")]
    opsets = [helper.make_opsetid("", draw(st.sampled_from([7, 11, 13, 17, 21]))), helper.make_opsetid("my.domain", 1)]
    return helper.make_model(helper.make_graph(nodes, "g", values, [], CONSTANTS), opset_imports=opsets)


@given(_models())
def test_any_graph_gets_a_report_and_advice(model: onnx.ModelProto) -> None:
    graph = view_model(infer_model(model))
    for target, book in zip(LOADED, BOOKS, strict=True):

        def recheck(changed: Graph, opset: int, target: Any = target, book: Any = book) -> tuple[CheckedNode, ...]:
            return check_graph(changed, book, target.settings, opset=opset)

        nodes = recheck(graph, 17)
        assert len(nodes) == len(graph.nodes)
        assert all(node.taken or node.reasons for node in nodes)
        give_advice([Case(graph=graph, nodes=nodes, recheck=recheck)])
