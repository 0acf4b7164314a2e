"""The graph that a provider is shown is the one that ONNX Runtime makes, node for node."""

from collections.abc import Iterable, Sequence
from pathlib import Path

import onnx
import onnxruntime
import pytest
from check_models import check_file, check_text, save_text, why_not
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from onnx import parser

from edgekit.check.propagation import propagate_quantization
from edgekit.devices.find import find_device
from edgekit.devices.observe import match_nodes, observe_placement
from edgekit.graph.graph import infer_graph
from edgekit.model.model import load_model
from edgekit.target import load_target

CONSTANTS = "float s = {0.05}, float t = {0.1}, uint8 z = {128}, uint8 i = {0}, int64[4] shape = {1,4,8,8}"
STEPS = {
    "quantize": "{o}q = QuantizeLinear({a}, s, z) {o} = DequantizeLinear({o}q, s, z)",
    "quantize otherwise": "{o}q = QuantizeLinear({a}, t, i) {o} = DequantizeLinear({o}q, t, i)",
    "transpose": "{o} = Transpose<perm = [0,1,2,3]>({a})",
    "reshape": "{o} = Reshape({a}, shape)",
    "pool": "{o} = MaxPool<kernel_shape = [1,1]>({a})",
    "relu": "{o} = Relu({a})",
    "add": "{o} = Add({a}, {b})",
}
# All of level 1 that could change such a graph, but for the two that are told here.
OTHERS = [
    "ConstantSharing", "CommonSubexpressionElimination", "DoubleQDQPairsRemover", "TransposeOptimizer",
    "Level1_RuleBasedTransformer", "ReshapeFusion",
]  # fmt: skip


@st.composite
def _graphs(draw: st.DrawFn) -> str:
    values, body = ["x"], list[str]()
    for at in range(draw(st.integers(2, 9))):
        a, b = draw(st.sampled_from(values[-3:])), draw(st.sampled_from(values))
        body.append(STEPS[draw(st.sampled_from(sorted(STEPS)))].format(a=a, b=b, o=f"v{at}"))
        values.append(f"v{at}")
    outputs = {value for value in values[1:] if f"({value}" not in " ".join(body)} | {draw(st.sampled_from(values[1:]))}
    told = ", ".join(f"float[1,4,8,8] {name}" for name in sorted(outputs))
    return f"g (float[1,4,8,8] x) => ({told}) <{CONSTANTS}> {{ {' '.join(body)} }}"


def _spell(nodes: Iterable[tuple[str, Sequence[str], Sequence[str]]], outputs: Iterable[str]) -> list[str]:
    """Returns each output as the expression that computes it, and the operators: names of values do not count."""
    made: dict[str, str] = {}
    ops: list[str] = []
    for op, inputs, results in nodes:
        ops.append(op)
        made[results[0]] = str(hash((op, *(made.get(name, name) for name in inputs))))
    return [*sorted(made.get(name, name) for name in outputs), *sorted(ops)]


@given(_graphs(), st.sampled_from([13, 17, 19]))
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_what_is_added_is_what_onnx_runtime_adds(tmp_path: Path, body: str, opset: int) -> None:
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : {opset}]> {body}')
    options = onnxruntime.SessionOptions()
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_BASIC
    options.optimized_model_filepath = str(tmp_path / "shown.onnx")
    options.log_severity_level = 4
    providers = ["CPUExecutionProvider"]
    onnxruntime.InferenceSession(proto.SerializeToString(), options, providers, disabled_optimizers=OTHERS)
    theirs = onnx.load(str(tmp_path / "shown.onnx")).graph
    ours = propagate_quantization(infer_graph(proto))
    outputs = [value.name for value in proto.graph.output]
    assert _spell(((node.op_type, node.input, node.output) for node in ours.nodes), outputs) == _spell(
        ((node.op_type, node.input, node.output) for node in theirs.node), outputs
    )
    given_names = {node.name for node in infer_graph(proto).nodes}
    assert given_names <= {node.name for node in ours.nodes}


QDQ = "[q] q = QuantizeLinear({0}, s, z) [d] d = DequantizeLinear(q, s, z)"
FIRST = "[p] p = QuantizeLinear(x, s, z) [o] o = DequantizeLinear(p, s, z)"
POOL = "[m] m = MaxPool<kernel_shape = [2,2]>"
SECOND = "[e] e = QuantizeLinear(m, {0}, z) [f] f = DequantizeLinear(e, {0}, z)"
SMALLEST = {
    "MaxPool before a Q": ("1,4,7,7", f"[r] r = Relu(x) {POOL}(r) {QDQ.format('m')} [y] y = Sigmoid(d)"),
    "MaxPool behind a DQ": ("1,4,7,7", f"{QDQ.format('x')} {POOL}(d) [y] y = Sigmoid(m)"),
    "Squeeze behind a DQ": ("4,8,8", f"{QDQ.format('x')} [m] m = Squeeze(d, a) [y] y = Sigmoid(m)"),
    "Unsqueeze before a Q": (
        "1,1,4,8,8", f"[r] r = Relu(x) [m] m = Unsqueeze(r, a) {QDQ.format('m')} [y] y = Sigmoid(d)"
    ),
    "ReduceMean before a Reshape and a Q": (
        "1,4", f"{FIRST} [m] m = ReduceMean<axes = [2,3]>(o) [h] h = Reshape(m, b) {QDQ.format('h')} [y] y = Sigmoid(d)"
    ),
    "a Q beside another reader": (
        "1,4,7,7", f"{QDQ.format('x')} {POOL}(d) {SECOND.format('t')} [g] g = Tanh(m) [y] y = Add(f, g)"
    ),
    "a DQ of two readers": (
        "1,4,7,7", f"{QDQ.format('x')} {POOL}(d) {SECOND.format('s')} {POOL.replace('m', 'n', 2)}(d) [y] y = Add(f, n)"
    ),
}  # fmt: skip


def _smallest(shape: str, body: str) -> str:
    constants = "float s = {0.05}, float t = {0.1}, uint8 z = {128}, int64[1] a = {0}, int64[2] b = {1, 4}"
    return f"g (float[1,4,8,8] x) => (float[{shape}] y) <{constants}> {{ {body} }}"


def _conv(kind: str, product: float) -> str:
    return f"""g (float[1,1,8,8] x) => (float[1,1,8,8] y) <float s = {{0.1}}, {kind} z = {{0}}, float u = {{0.01}},
        {kind}[1,1,1,1] w = {{9}}, int32[1] c = {{445}}, float b = {{{product}}}, int32 n = {{0}}>
        {{ [q] q = QuantizeLinear(x, s, z) [d] d = DequantizeLinear(q, s, z) [v] v = DequantizeLinear(w, u, z)
        [e] e = DequantizeLinear(c, b, n) [conv] f = Conv(d, v, e) [g] g = QuantizeLinear(f, s, z)
        [y] y = DequantizeLinear(g, s, z) }}"""


AVERAGE = (
    "g (float[1,3,8,8] x) => (float[1,3,8,8] y) <float s = {0.05}, uint8 z = {128}> { "
    + QDQ.format("x")
    + " [p] p = AveragePool<count_include_pad = 1, kernel_shape = [2,2], pads = [0,0,1,1], strides = [1,1]>(d)"
    " [e] e = QuantizeLinear(p, s, z) [y] y = DequantizeLinear(e, s, z) }"
)
HALF_SUM = (
    "g (float16[1,4,8,8] x) => (float16[1,1,8,8] y) <int64[1] a = {1}> { [r] r = Relu(x) [m] y = ReduceSum(r, a) }"
)
HALF_NORM = """g (float16[1,2,4,4] x) => (float16[1,2,4,4] y) <float16[2] s = {1, 2}> { [r] r = Relu(x)
    [n] n = BatchNormalization(r, s, s, s, s) [y] y = Sigmoid(n) }"""
CASES = {
    **{f"nnapi: {name}": ("nnapi", _smallest(*case)) for name, case in SMALLEST.items()},
    "nnapi: a bias of its own scale": ("nnapi", _conv("uint8", 0.0005)),
    "nnapi: a bias that fits": ("nnapi", _conv("uint8", 0.001)),
    "xnnpack: a bias of its own scale": ("xnnpack", _conv("int8", 0.0005)),
    "xnnpack: a bias that fits": ("xnnpack", _conv("int8", 0.001)),
    "xnnpack: a quantized AveragePool": ("xnnpack", AVERAGE),
    "coreml: a ReduceSum in fp16": ("coreml", HALF_SUM),
    "coreml: a BatchNormalization in fp16": ("coreml", HALF_NORM),
}


@pytest.mark.slow
@pytest.mark.parametrize(("target", "body"), CASES.values(), ids=CASES)
def test_the_smallest_graphs_are_placed_as_the_provider_places_them(tmp_path: Path, target: str, body: str) -> None:
    known = load_target(target)
    device = find_device("ios-sim" if target == "coreml" else "android:x86_64", known)
    missing = device.find_missing()
    if missing is not None:
        pytest.skip(f"{device.name} is not installed: {missing.reason}: {missing.command}")
    path = save_text(body, tmp_path / "m.onnx")
    seen = observe_placement(load_model(path), known, device, samples=0)
    matched = match_nodes(check_file(path, target), seen.providers)
    assert len(matched) >= 2
    assert [(node.name, node.taken) for node, _ in matched] == [(node.name, taken) for node, taken in matched]


def test_a_bias_may_have_any_scale_before_onnx_runtime_1_27() -> None:
    body = _conv("int8", 0.0005)
    assert "constant" in why_not(check_text(body, "xnnpack"))
    assert any(node.op == "Conv" and node.taken for node in check_text(body, "xnnpack", {"ort": "1.26.0"}))
