"""The loader's pattern for servers: what is bound and warmed up computes what a plain session does, in any batch."""

import importlib.util
from pathlib import Path

import numpy as np
import onnxruntime
from tiny_models import parse_model

import edgekit.package

LOADER = Path(edgekit.package.__file__).parent / "standalone" / "python" / "edgekit_loader.py"


def test_bound_outputs_are_those_of_a_plain_session_in_batches_of_any_size(tmp_path: Path) -> None:
    spec = importlib.util.spec_from_file_location("edgekit_loader", LOADER)
    assert spec is not None
    assert spec.loader is not None
    loader = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loader)
    text = (
        "g (float[N,3] x) => (float[N,3] y, float[N,1] z) { y = Relu(x)  z = ReduceSum<noop_with_empty_axes=1>(x, a) }"
    )
    text = text.replace("{", "<int64[1] a = {1}> {", 1)
    model = parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}', tmp_path / "m.onnx")
    session = onnxruntime.InferenceSession(str(model))
    rng = np.random.default_rng(0)
    warm = loader.Warm(session, {"x": np.zeros((1, 3), np.float32)})
    for count in (1, 1, 4, 4, 1):
        # A slice that is not contiguous is bound too.
        x = rng.normal(size=(count, 6)).astype(np.float32)[:, ::2]
        wanted = session.run(None, {"x": x})
        for got, value in zip(warm.run({"x": x}).values(), wanted, strict=True):
            np.testing.assert_array_equal(got, value)
