"""The float model of one that ONNX Runtime's own dynamic quantization wrote."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper, parser
from onnxruntime.quantization import QuantType, quantize_dynamic
from prepare_models import make_model, op_names, run_model
from tiny_models import with_versions

from edgekit.errors import ModelError
from edgekit.model.model import find_integer_ops, load_model
from edgekit.prepare.dequantize import dequantize_model

WORDS = """g (int64[5] x) => (float[5,6] y)
    { e = Gather(table, x) t = Tanh(e) a = MatMul(t, v) r = Relu(a) b = MatMul(r, w) y = Add(b, bias) }"""
IMAGE = "g (float[1,3,8,8] x) => (float[1,4,6,6] y) { a = Conv(x, v) y = Add(a, bias) }"
SHAPES: dict[str, dict[str, tuple[int, ...]]] = {"words": {"table": (20, 8), "v": (8, 16), "w": (16, 6), "bias": (6,)},
          "image": {"v": (4, 3, 3, 3), "bias": (1, 4, 1, 1)}}  # fmt: skip


@pytest.mark.parametrize("unsigned", [False, True])
@pytest.mark.parametrize(("kind", "per_channel"), [("words", False), ("words", True), ("image", False)])
def test_a_dynamically_quantized_model_is_made_float(
    kind: str, per_channel: bool, unsigned: bool, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    proto = parser.parse_model(with_versions(WORDS if kind == "words" else IMAGE))
    for name, shape in SHAPES[kind].items():
        proto.graph.initializer.append(numpy_helper.from_array(rng.normal(size=shape).astype(np.float32), name))
    onnx.save(proto, str(tmp_path / "m.onnx"))
    weights = QuantType.QUInt8 if unsigned else QuantType.QInt8
    quantize_dynamic(tmp_path / "m.onnx", tmp_path / "q.onnx", per_channel=per_channel, weight_type=weights)
    dynamic = load_model(tmp_path / "q.onnx")
    assert find_integer_ops(onnx.load(str(dynamic.path)))
    made = dequantize_model(dynamic, tmp_path / "out" / "f.onnx")
    assert set(op_names(made.path)) <= {"Gather", "Tanh", "MatMul", "Relu", "Add", "Conv"}
    inputs = {"x": rng.integers(0, 20, 5) if kind == "words" else rng.normal(size=(1, 3, 8, 8)).astype(np.float32)}
    wanted, found, rounded = (run_model(tmp_path / name, inputs)["y"] for name in ("m.onnx", "out/f.onnx", "q.onnx"))
    assert 0 < np.square(found - wanted).sum() < np.square(rounded - wanted).sum()
    assert np.square(found - wanted).mean() < 1e-3 * np.square(wanted).mean()


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("y = Relu(x)", "'m.onnx' is not dynamically quantized"),
        (
            "q, s, z = DynamicQuantizeLinear(x) d = DequantizeLinear(q, s, z) y = Relu(d)",
            "integers that are no weights of a known layer: DynamicQuantizeLinear",
        ),
    ],
)
def test_what_cannot_be_made_float_is_refused(body: str, message: str, tmp_path: Path) -> None:
    model = make_model(f"g (float[4] x) => (float[4] y) {{ {body} }}", tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=message):
        dequantize_model(model, tmp_path / "f.onnx")
    assert not (tmp_path / "f.onnx").exists()
