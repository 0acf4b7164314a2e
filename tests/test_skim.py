"""A model is read without its weights, and nothing else is lost."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from demo_paths import MODEL
from onnx import TensorProto, helper, numpy_helper
from onnx.backend.test import loader

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.external import point_into, skim_model

LIGHT = Path(loader.DATA_DIR) / "light"


@pytest.mark.parametrize("path", [LIGHT / "light_squeezenet.onnx", MODEL], ids=lambda path: path.stem)
def test_a_model_of_small_tensors_stays_as_it_is(path: Path) -> None:
    assert skim_model(path) == onnx.load(str(path))


@pytest.mark.parametrize("raw", [True, False], ids=["raw_data", "float_data"])
def test_big_weights_go_and_their_shapes_stay(tmp_path: Path, *, raw: bool) -> None:
    array = np.ones((300, 400), np.float32)
    tensor = helper.make_tensor("w", TensorProto.FLOAT, array.shape, array.tobytes() if raw else array.ravel(), raw=raw)
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(array, "c"))
    node = helper.make_node("Add", ["w", "c"], ["y"])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, None)
    path = tmp_path / "m.onnx"
    onnx.save(helper.make_model(helper.make_graph([constant, node], "g", [], [out], [tensor])), str(path))
    skimmed = skim_model(path)
    assert skimmed.ByteSize() < 400
    assert list(skimmed.graph.initializer[0].dims) == [300, 400]
    assert list(skimmed.graph.node[0].attribute[0].t.dims) == [300, 400]


# Of external data that were loaded the tensor says so: behind the data, where it hid that these lie outside again.
@pytest.mark.parametrize(
    ("raw", "said"),
    [(True, False), (True, True), (False, True)],
    ids=["raw_data", "raw_data_once_outside", "float_data"],
)
def test_big_weights_are_used_where_they_lie(tmp_path: Path, *, raw: bool, said: bool) -> None:
    array = np.random.default_rng(0).standard_normal((300, 400)).astype(np.float32)
    tensor = helper.make_tensor("w", TensorProto.FLOAT, array.shape, array.tobytes() if raw else array.ravel(), raw=raw)
    if said:
        tensor.data_location = TensorProto.DEFAULT
    constant = helper.make_node("Constant", [], ["c"], value=numpy_helper.from_array(array, "c"))
    node = helper.make_node("Add", ["w", "c"], ["y"])
    out = helper.make_tensor_value_info("y", TensorProto.FLOAT, [300, 400])
    path = tmp_path / "m.onnx"
    graph = helper.make_graph([constant, node], "g", [], [out], [tensor])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    pointing = point_into(path)
    assert (pointing.graph.initializer[0].data_location == TensorProto.EXTERNAL) is raw
    config = {"session.model_external_initializers_file_folder_path": str(tmp_path)}
    got = CpuSession(pointing.SerializeToString(), SessionSettings(config=config)).run({})["y"]
    assert np.array_equal(got, array + array)
