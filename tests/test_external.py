"""Where weights lie that are not in the model's own file."""

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edgekit.model.external import DataPlace, count_bytes, list_files, point_to, read_place


def test_a_place_is_read_as_it_was_written() -> None:
    tensor = numpy_helper.from_array(np.arange(6, dtype=np.float32), "w")
    assert read_place(tensor) is None
    point_to(tensor, DataPlace("w.data", 4096, 24))
    assert not tensor.raw_data
    point_to(tensor, DataPlace("v.data", 0, 24))
    assert read_place(tensor) == DataPlace("v.data", 0, 24)
    assert list(list_files([tensor])) == ["v.data"]


def test_without_a_length_all_of_the_tensor_lies_there() -> None:
    tensor = onnx.TensorProto(data_type=onnx.TensorProto.FLOAT, dims=[3, 5], data_location=onnx.TensorProto.EXTERNAL)
    tensor.external_data.add(key="location", value="w.data")
    assert read_place(tensor) == DataPlace("w.data", 0, 60)


_BYTES = {"FLOAT": 28, "FLOAT16": 14, "BOOL": 7, "INT4": 4, "UINT4": 4, "FLOAT4E2M1": 4, "INT2": 2, "STRING": None}


@pytest.mark.parametrize(("kind", "wanted"), _BYTES.items())
def test_bytes_are_counted_as_they_are_stored(kind: str, wanted: int | None) -> None:
    number = onnx.TensorProto.DataType.Value(kind)
    assert count_bytes(onnx.TensorProto(data_type=number, dims=[7])) == wanted
    if wanted is not None:
        values = np.asarray([1, 0, 1, 0, 1, 0, 1]).astype(onnx.helper.tensor_dtype_to_np_dtype(number))
        assert len(numpy_helper.from_array(values, "w").raw_data) == wanted
