"""The float model of one that ONNX Runtime's own dynamic quantization wrote."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnxruntime.quantization import QuantType, quantize_dynamic
from prepare_models import make_model, run_model

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.errors import ModelError
from edgekit.model.model import iterate_nodes, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.dequantize import dequantize_model

# Each with its weights. "bodies" has a layer in the body of a loop that reads an activation from outside, "letters" an
# embedding whose rows go into layers as they are, "fused" products that ONNX Runtime's optimizer fuses, and "attention"
# what its optimizer for transformers makes.
MODELS: dict[str, tuple[str, dict[str, tuple[int, ...]]]] = {
    "words": (
        """g (int64[5] x) => (float[5,6] y)
        { e = Gather(table, x) t = Tanh(e) a = MatMul(t, v) r = Relu(a) b = MatMul(r, w) y = Add(b, bias) }""",
        {"table": (20, 8), "v": (8, 16), "w": (16, 6), "bias": (6,)},
    ),
    "image": (
        "g (float[1,3,8,8] x) => (float[1,4,6,6] y) { a = Conv(x, v) y = Add(a, bias) }",
        {"v": (4, 3, 3, 3), "bias": (1, 4, 1, 1)},
    ),
    "speech": (
        """g (float[6,1,8] x) => (float[2,1,4] y)
        { l, y = LSTM<hidden_size = 4, direction = "bidirectional">(x, v, w, b) }""",
        {"v": (2, 16, 8), "w": (2, 16, 4), "b": (2, 32)},
    ),
    "letters": (
        """g (int64[1,9] x) => (float[1,6,7] y, float[1,9,4] z)
        { e = Gather(table, x) z = MatMul(e, v) t = Transpose<perm = [0, 2, 1]>(e) a = Conv(t, w) y = Add(a, bias) }""",
        {"table": (20, 8), "v": (8, 4), "w": (6, 8, 3), "bias": (6, 1)},
    ),
    "bodies": (
        """g (float[1,8] x) => (float[1,8] y) <int64 n = {3}, bool go = {1}>
        { a = MatMul(x, v) y = Loop(n, go, a)<body = b (int64 i, bool c, float[1,8] s) => (bool d, float[1,8] t)
            { d = Identity(c) p = MatMul(x, w) q = MatMul(s, v) r = Add(p, q) t = Tanh(r) }> }""",
        {"v": (8, 8), "w": (8, 8)},
    ),
    "fused": (
        """g (float[5,8] x) => (float[5,16] y, float[5,6] z, float[5,6] r)
        { t = Tanh(x) y = MatMul(t, v) b = MatMul(t, w) z = Add(b, bias) u = Relu(x) p = MatMul(u, w) r = Add(p, bias) }
        """,
        {"v": (8, 16), "w": (8, 6), "bias": (6,)},
    ),
    "attention": (
        "g (float[1,6,8] x) => (float[1,6,8] y) { a = com.microsoft.Attention<num_heads = 2>(x, v, b) y = Relu(a) }",
        {"v": (8, 24), "b": (24,)},
    ),
}
FLOAT = {"Add", "Attention", "Conv", "Gather", "Identity", "Loop", "LSTM", "MatMul", "Relu", "Tanh", "Transpose"}


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize("per_channel", [False, True])
@pytest.mark.parametrize("kind", MODELS)
def test_a_dynamically_quantized_model_is_made_float(
    kind: str, per_channel: bool, unsigned: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    text, shapes = MODELS[kind]
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    model = make_model(text, tmp_path / "m.onnx", weights=weights, imports=', "com.microsoft" : 1')
    quantize_dynamic(
        model.path, tmp_path / "q.onnx", per_channel=per_channel,
        weight_type=QuantType.QUInt8 if unsigned else QuantType.QInt8, extra_options={"EnableSubgraph": True},
    )  # fmt: skip
    if kind == "fused":
        optimize_graph(tmp_path / "q.onnx", tmp_path / "fused.onnx", SessionSettings(level=Level.EXTENDED))
        (tmp_path / "fused.onnx").replace(tmp_path / "q.onnx")
        fused = {node.op_type for node in onnx.load(str(tmp_path / "q.onnx")).graph.node}
        assert fused >= {"DynamicQuantizeMatMul", "MatMulIntegerToFloat"}
    dynamic = load_model(tmp_path / "q.onnx")
    made = dequantize_model(dynamic, tmp_path / "out" / "f.onnx")
    assert {node.op_type for node in iterate_nodes(onnx.load(str(made.path)).graph)} <= FLOAT
    shape = tuple(dim for dim in model.inputs[0].shape or () if isinstance(dim, int))
    is_text = model.inputs[0].dtype == "int64"
    inputs = {"x": rng.integers(0, 20, shape) if is_text else rng.normal(size=shape).astype(np.float32)}
    results = (run_model(path, inputs).values() for path in (model.path, made.path))
    for wanted, found in zip(*results, strict=True):
        assert 0 < np.square(found - wanted).mean() < 4e-3 * np.square(wanted).mean()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Relu(x)", "'m.onnx' is not dynamically quantized"),
        (
            "q, s, z = DynamicQuantizeLinear(x) y = Cast<to = 1>(q)",
            "quantized operators that cannot be made float: DynamicQuantizeLinear",
        ),
    ],
)
def test_what_cannot_be_made_float_is_refused(body: str, message: str, tmp_path: Path) -> None:
    model = make_model(f"g (float[4] x) => (float[4] y) {{ {body} }}", tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=message):
        dequantize_model(model, tmp_path / "f.onnx")
    assert not (tmp_path / "f.onnx").exists()


def test_a_convolution_keeps_the_bias_that_was_added_as_integers(tmp_path: Path) -> None:
    """As an older quantizer of ONNX Runtime wrote it; ddddocr's reader of captchas is such a file."""
    body = """g (float[1,3,8,8] x) => (float[1,4,6,6] y) {
        q, s, z = DynamicQuantizeLinear(x) scales = Mul(s, vs) a = ConvInteger(q, v, z, vz)
        d = Div(bias, scales) f = Floor(d) i = Cast <to = 6> (f) b = Reshape(i, shape)
        c = Add(a, b) e = Cast <to = 1> (c) y = Mul(e, scales) }"""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "v": rng.integers(0, 255, (4, 3, 3, 3)).astype(np.uint8), "vs": np.array(0.01, np.float32),
        "vz": np.array(128, np.uint8), "bias": rng.normal(size=4).astype(np.float32), "shape": np.array([1, 4, 1, 1]),
    }  # fmt: skip
    dynamic = make_model(body, tmp_path / "q.onnx", weights=weights)
    made = dequantize_model(dynamic, tmp_path / "f.onnx")
    assert [node.op_type for node in onnx.load(str(made.path)).graph.node] == ["Conv"]
    inputs = {"x": rng.normal(size=(1, 3, 8, 8)).astype(np.float32)}
    found, rounded = (run_model(tmp_path / name, inputs)["y"] for name in ("f.onnx", "q.onnx"))
    assert np.square(found - rounded).mean() < 1e-3 * np.square(found).mean()
