"""A model with weights beside it runs on a device whose ONNX Runtime cannot ask where a file really lies."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from devices_models import make_job, present
from onnx import TensorProto, helper, numpy_helper


@pytest.mark.slow
def test_arm64_runs_a_model_with_weights_beside_it(tmp_path: Path) -> None:
    weight = np.arange(600, dtype=np.float32).reshape(2, 300)
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, size]) for name, size in (("x", 2), ("y", 300)))
    node = helper.make_node("MatMul", ["x", "w"], ["y"], name="mix")
    proto = helper.make_model(
        helper.make_graph([node], "g", [x], [y], [numpy_helper.from_array(weight, "w")]),
        opset_imports=[helper.make_opsetid("", 17)],
        ir_version=8,
    )
    onnx.save(proto, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=0)
    device = present("arm64:native")
    sample, work = {"x": np.array([[2.0, 1.0]], np.float32)}, tmp_path / "work"
    work.mkdir()
    run = device.run_job(make_job(tmp_path / "m.onnx", "cpu", [sample]), work)
    assert run.failure is None
    (got,) = run.outputs
    assert np.array_equal(got["y"], sample["x"] @ weight)
