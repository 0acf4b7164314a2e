"""ML Programs: what a package says is read, what is damaged is refused, each operation is what ONNX and Apple mean."""

import io
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import coreml_values
import msgspec
import numpy as np
import onnx
import pytest
from coreml_values import compare, compute, list_cases
from mil_programs import blob, constant, named, operation, scaled, write_package
from onnx import helper

from edgekit._ort import CpuSession, SessionSettings
from edgekit.devices.ios.compute import Computer, compute_program, read_package, read_program, require_known
from edgekit.devices.ios.operations import OPERATIONS, Arguments
from edgekit.devices.process.pipes import Facts, answer_questions
from edgekit.model.tensors import Array

X = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)


def test_a_program_is_read_with_its_weights(tmp_path: Path) -> None:
    program = read_package(scaled(tmp_path / "a.mlpackage"))
    assert (program.opset, program.outputs) == ("CoreML6", ("y",))
    assert [(step.kind, step.name) for step in program.operations] == [("const", "const_0"), ("mul", "mul_0")]
    assert program.inputs[0].shape == (2, 4)
    found = compute_program(program, {"x": X})["y"]
    assert np.array_equal(found, X * np.array([1, 2, 3, 0.1], np.float32))


def test_half_precision_is_rounded_where_the_program_says_so(tmp_path: Path) -> None:
    program = read_package(scaled(tmp_path / "a.mlpackage", "float16"))
    found = compute_program(program, {"x": X})["y"]
    weight = np.array([1, 2, 3, 0.1], np.float16).astype(np.float32)
    assert found.dtype == np.float16
    assert np.array_equal(found, (X.astype(np.float16).astype(np.float32) * weight).astype(np.float16))
    assert np.isinf(compute_program(program, {"x": np.full((2, 4), 65504, np.float32)})["y"][0, 1])


def test_sums_are_not_in_half_precision(tmp_path: Path) -> None:
    """4096 ones more than 2048: a sum in halves stays at 2048."""
    steps = [
        operation("const", {}, named("axes", "int32", (1,)), {"val": constant(np.array([-1], np.int32))}),
        operation("reduce_sum", {"x": "x", "axes": "axes"}, named("y", "float16", (1,))),
    ]
    package = write_package(tmp_path / "a.mlpackage", [named("x", "float16", (1, 4096))], ["y"], steps)
    assert compute_program(read_package(package), {"x": np.ones((1, 4096))})["y"][0] == 4096


def test_an_unknown_operation_is_an_error_with_its_name(tmp_path: Path) -> None:
    program = read_package(scaled(tmp_path / "a.mlpackage", kind="whirl"))
    with pytest.raises(ValueError, match="operation 'whirl' of 'whirl_0' is not computed by edgekit"):
        require_known(program)
    with pytest.raises(ValueError, match="'whirl'"):
        compute_program(program, {"x": X})
    mul, relu = (read_package(scaled(tmp_path / f"{kind}.mlpackage", kind=kind)) for kind in ("mul", "relu"))
    require_known(mul)
    with pytest.raises(ValueError, match="mul 'mul_0': operands could not be broadcast"):
        compute_program(mul, {"x": np.ones((2, 3))})
    assert np.array_equal(compute_program(relu, {"x": X})["y"], np.maximum(X, 0))
    with pytest.raises(ValueError, match="input 'x' is missing"):
        compute_program(relu, {})


def test_a_file_that_is_no_program_is_refused_with_the_reason(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is a neural network"):
        read_program(b"\xa2\x1f\x00", tmp_path)
    with pytest.raises(ValueError, match="is no ML Program"):
        read_program(b"", tmp_path)
    with pytest.raises(ValueError, match="holds no model"):
        read_package(tmp_path)
    for data in (b"\x0a", b"\x0a\x05ab", b"\x0b\x01", b"\xff" * 20, b"\x09\x01"):
        with pytest.raises(ValueError, match="is damaged"):
            read_program(data, tmp_path)


def test_a_damaged_program_is_refused_and_never_computes_something_else(tmp_path: Path) -> None:
    package = scaled(tmp_path / "a.mlpackage")
    path = next(package.rglob("model.mlmodel"))
    whole = path.read_bytes()
    for at in range(0, len(whole), 3):
        for data in (whole[:at], whole[:at] + bytes([whole[at] ^ 0x15]) + whole[at + 1 :]):
            try:
                compute_program(read_program(data, path.parent), {"x": X})
            except (ValueError, LookupError, OSError, OverflowError):
                continue
    blobs = next(package.rglob("weight.bin"))
    blobs.write_bytes(blobs.read_bytes()[:-60])
    with pytest.raises(ValueError, match="is cut off"):
        read_package(package)


def test_weights_outside_the_package_are_not_read(tmp_path: Path) -> None:
    steps = [operation("const", {}, named("w", "float32", (1,)), {"val": blob(np.ones(1, np.float32), 64)})]
    path = next(write_package(tmp_path / "a.mlpackage", [], ["w"], steps).rglob("model.mlmodel"))
    data = path.read_bytes().replace(b"@model_path/weights/weight.bin", b"@model_path/../../../secret.bi")
    (tmp_path / "secret.bi").write_bytes(bytes(200))
    with pytest.raises(ValueError, match="lies outside"):
        read_program(data, path.parent)


def test_questions_are_answered_one_by_one(tmp_path: Path) -> None:
    package = scaled(tmp_path / "a.mlpackage")
    x, y = ({"name": name, "type": 1, "shape": [2, 4]} for name in "xy")
    questions: list[dict[str, Any]] = [
        {"ask": "model", "id": 0, "path": str(package)}, {"ask": "model", "id": 1, "path": str(tmp_path / "none")},
        {"ask": "run", "id": 0, "inputs": [x], "outputs": [y]},
    ]  # fmt: skip
    lines = b"".join(msgspec.json.encode(question) + b"\n" for question in questions)
    ask = io.BytesIO(lines + X.tobytes() + b'{"ask":"run","id":1}\n{"ask":"end"}\n')
    answer = io.BytesIO()
    computer = Computer()
    answer_questions(computer, ask, answer)
    said = answer.getvalue()
    assert said.startswith(b"\n\n\n" + np.array([2, 2, 4], np.int64).tobytes())
    assert b"No such file" in said
    assert computer.describe() == Facts(operations={"mul": 1}, halves=0)


IMAGE = np.random.default_rng(2).standard_normal((2, 4, 7, 9)).astype(np.float32)
WEIGHT = np.random.default_rng(3).standard_normal((6, 4, 3, 2)).astype(np.float32)
THIN = np.random.default_rng(4).standard_normal((4, 1, 3, 3)).astype(np.float32)
GROUPED = np.random.default_rng(5).standard_normal((6, 2, 3, 3)).astype(np.float32)
BIAS = np.linspace(-1, 1, 6, dtype=np.float32)
FOUR = np.linspace(0.5, 2, 4, dtype=np.float32)
ROWS = np.random.default_rng(6).standard_normal((3, 9)).astype(np.float32)
GRID = np.random.default_rng(7).uniform(-1.2, 1.2, (2, 5, 6, 2)).astype(np.float32)
CUSTOM: dict[str, Any] = {"pad_type": "custom"}
SIZED: dict[str, Any] = {"x": IMAGE, "target_size_height": 5, "target_size_width": 20}
NONE = np.array([], np.float32)

# An operation of which coremltools infers no value, or not of such input: coreml_values.py has the others. What it is
# given, the operator of ONNX that means the same, its inputs and its attributes.
CASES: list[tuple[str, dict[str, Any], str, list[Array], dict[str, Any]]] = [
    ("conv", CUSTOM | {"x": IMAGE, "weight": WEIGHT, "bias": BIAS, "pad": [1, 2, 0, 1], "strides": [2, 1],
                       "dilations": [1, 2]},
     "Conv", [IMAGE, WEIGHT, BIAS], {"pads": [1, 0, 2, 1], "strides": [2, 1], "dilations": [1, 2]}),
    ("conv", {"x": IMAGE, "weight": WEIGHT, "pad_type": "valid"}, "Conv", [IMAGE, WEIGHT], {}),
    ("conv", {"x": IMAGE, "weight": THIN, "groups": 4, "pad_type": "same", "strides": [2, 2]},
     "Conv", [IMAGE, THIN], {"auto_pad": "SAME_UPPER", "group": 4, "strides": [2, 2]}),
    ("conv", {"x": IMAGE, "weight": GROUPED, "groups": 2, "pad_type": "same_lower", "strides": [2, 3]},
     "Conv", [IMAGE, GROUPED], {"auto_pad": "SAME_LOWER", "group": 2, "strides": [2, 3]}),
    *[("conv", {"x": IMAGE, "weight": WEIGHT, "pad_type": kind}, "Conv", [IMAGE, WEIGHT], {"auto_pad": meant})
      for kind, meant in (("same", "SAME_UPPER"), ("same_lower", "SAME_LOWER"))],
    ("conv_transpose", CUSTOM | {"x": IMAGE, "weight": np.ascontiguousarray(WEIGHT.transpose(1, 0, 2, 3)),
                                 "bias": BIAS, "pad": [1, 1, 0, 1], "strides": [2, 1]},
     "ConvTranspose", [IMAGE, np.ascontiguousarray(WEIGHT.transpose(1, 0, 2, 3)), BIAS],
     {"pads": [1, 0, 1, 1], "strides": [2, 1]}),
    ("conv_transpose", CUSTOM | {"x": IMAGE, "weight": np.ascontiguousarray(WEIGHT.transpose(1, 0, 2, 3)),
                                 "pad": [1, 0, 0, 0], "strides": [2, 2], "output_shape": [2, 6, 15, 17]},
     "ConvTranspose", [IMAGE, np.ascontiguousarray(WEIGHT.transpose(1, 0, 2, 3))],
     {"pads": [1, 0, 0, 1], "strides": [2, 2], "output_padding": [1, 0]}),
    ("conv_transpose", {"x": IMAGE, "weight": THIN, "groups": 4, "strides": [2, 2], "pad_type": "valid"},
     "ConvTranspose", [IMAGE, THIN], {"group": 4, "strides": [2, 2]}),
    ("max_pool", CUSTOM | {"x": IMAGE, "kernel_sizes": [3, 2], "strides": [2, 2], "pad": [1, 1, 0, 0],
                           "ceil_mode": True},
     "MaxPool", [IMAGE], {"kernel_shape": [3, 2], "strides": [2, 2], "pads": [1, 0, 1, 0], "ceil_mode": 1}),
    ("avg_pool", CUSTOM | {"x": IMAGE, "kernel_sizes": [3, 3], "strides": [2, 1], "pad": [1, 1, 1, 1],
                           "exclude_padding_from_average": True},
     "AveragePool", [IMAGE], {"kernel_shape": [3, 3], "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    ("avg_pool", CUSTOM | {"x": IMAGE, "kernel_sizes": [3, 3], "strides": [2, 1], "pad": [1, 1, 1, 1]},
     "AveragePool", [IMAGE],
     {"kernel_shape": [3, 3], "strides": [2, 1], "pads": [1, 1, 1, 1], "count_include_pad": 1}),
    ("batch_norm", {"x": IMAGE, "gamma": FOUR, "beta": FOUR, "mean": FOUR, "variance": FOUR, "epsilon": 1e-3},
     "BatchNormalization", [IMAGE, FOUR, FOUR, FOUR, FOUR], {"epsilon": 1e-3}),
    ("instance_norm", {"x": IMAGE, "gamma": FOUR, "beta": FOUR, "epsilon": 1e-3},
     "InstanceNormalization", [IMAGE, FOUR, FOUR], {"epsilon": 1e-3}),
    ("gather", {"x": ROWS, "indices": np.array([2, -1]), "axis": 1}, "Gather", [ROWS, np.array([2, -1])], {"axis": 1}),
    ("gather_nd", {"x": ROWS, "indices": np.array([[2, 1], [0, 3]])},
     "GatherND", [ROWS, np.array([[2, 1], [0, 3]])], {}),
    ("depth_to_space", {"x": IMAGE, "block_size": 2}, "DepthToSpace", [IMAGE], {"blocksize": 2}),
    ("upsample_nearest_neighbor", {"x": IMAGE, "scale_factor_height": 2, "scale_factor_width": 3},
     "Resize", [IMAGE, NONE, np.array([1, 1, 2, 3], np.float32)],
     {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}),
    ("upsample_bilinear", {"x": IMAGE, "scale_factor_height": 2.0, "scale_factor_width": 3.0, "align_corners": True},
     "Resize", [IMAGE, NONE, np.array([1, 1, 2, 3], np.float32)],
     {"mode": "linear", "coordinate_transformation_mode": "align_corners"}),
    ("upsample_bilinear", {"x": IMAGE, "scale_factor_height": 2.0, "scale_factor_width": 3.0, "align_corners": False,
                           "half_pixel_centers": True},
     "Resize", [IMAGE, NONE, np.array([1, 1, 2, 3], np.float32)], {"mode": "linear"}),
    ("resize_nearest_neighbor", SIZED,
     "Resize", [IMAGE, NONE, NONE, np.array([2, 4, 5, 20])],
     {"mode": "nearest", "nearest_mode": "floor", "coordinate_transformation_mode": "asymmetric"}),
    *[("resize_bilinear", SIZED | mode, "Resize", [IMAGE, NONE, NONE, np.array([2, 4, 5, 20])],
       {"mode": "linear", "coordinate_transformation_mode": meant})
      for mode, meant in (({}, "asymmetric"), ({"sampling_mode": "STRICT_ALIGN_CORNERS"}, "align_corners"),
                          ({"sampling_mode": "UNALIGN_CORNERS"}, "half_pixel"))],
    ("resample", {"x": IMAGE, "coordinates": GRID, "padding_mode": "constant", "sampling_mode": "bilinear"},
     "GridSample", [IMAGE, GRID], {}),
    ("resample", {"x": IMAGE, "coordinates": GRID, "padding_mode": "border", "align_corners": True},
     "GridSample", [IMAGE, GRID], {"padding_mode": "border", "align_corners": 1}),
]  # fmt: skip


def as_given(value: Any) -> tuple[Array | str, ...]:
    if isinstance(value, str):
        return (value,)
    if isinstance(value, list) and value and isinstance(value[0], np.ndarray):
        return tuple(value)
    return (np.asarray(value),)


@pytest.mark.parametrize("case", range(len(CASES)), ids=[f"{case[0]}-{at}" for at, case in enumerate(CASES)])
def test_an_operation_computes_what_its_onnx_operator_computes(case: int, tmp_path: Path) -> None:
    kind, given, op, feeds, attributes = CASES[case]
    found = OPERATIONS[kind](Arguments({name: as_given(value) for name, value in given.items()}))
    names = [f"i{index}" for index in range(len(feeds))]
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(feed.dtype), feed.shape)
        for name, feed in zip(names, feeds, strict=True)
    ]
    used = [name if feed.size else "" for name, feed in zip(names, feeds, strict=True)]
    kept = [value for value in inputs if value.name in used]
    outputs = [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, None)]
    graph = helper.make_graph([helper.make_node(op, used, ["y"], **attributes)], "g", kept, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=9)
    onnx.save(model, str(tmp_path / "m.onnx"))
    session = CpuSession(tmp_path / "m.onnx", SessionSettings())
    wanted = session.run({name: feed for name, feed in zip(names, feeds, strict=True) if name in used})["y"]
    assert isinstance(found, np.ndarray)
    assert found.shape == wanted.shape
    assert np.allclose(found, wanted, rtol=1e-4, atol=1e-5)


def test_every_operation_is_compared_with_coremltools_or_onnx() -> None:
    assert OPERATIONS.keys() == ({kind for kind, _ in list_cases()} | {case[0] for case in CASES})


@pytest.mark.long
@pytest.mark.slow
def test_the_operations_of_an_opset_compute_what_coremltools_computes() -> None:
    if find_spec("coremltools") is None:
        pytest.skip("coremltools is not installed")
    finished = subprocess.run(
        [sys.executable, coreml_values.__file__, "iOS17"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout
    assert "55 operations, 198 comparisons in iOS17; 0 too far apart" in finished.stdout
    assert "coremltools infers nothing of: avg_pool, batch_norm, conv, " in finished.stdout


def test_values_that_are_too_far_apart_are_a_problem() -> None:
    row = compare("exp", "float32", (np.nextafter(coreml_values.ROWS, 9),), (coreml_values.ROWS,))
    assert (row.problem, row.ulp) == ("", 1.0)
    for found in (coreml_values.ROWS + np.float32(1e-5), coreml_values.ROWS * np.float32(np.nan)):
        assert compare("exp", "float32", (found,), (coreml_values.ROWS,)).problem == "too far apart"
    assert compare("shape", "float32", (np.array([1, 2]),), (np.array([1, 3]),)).problem == "too far apart"
    wrong = compare("exp", "float16", (coreml_values.ROWS[0],), (coreml_values.ROWS,))
    assert wrong.problem == "shape (8,), coremltools (3, 8)"


def test_parameters_that_are_missing_or_do_not_fit_are_told() -> None:
    for kind in ("elu", "leaky_relu", "sigmoid_hard"):
        with pytest.raises(ValueError, match=f"{kind} '{kind}': its parameter alpha is missing"):
            compute(kind, {"x": coreml_values.ROWS}, (coreml_values.ROWS,))
    with pytest.raises(ValueError, match=r"its shape \[0, 2, 4\] leaves sizes to an input of rank 2"):
        compute("reshape", {"x": coreml_values.ROWS, "shape": [0, 2, 4]}, (coreml_values.ROWS,))
    with pytest.raises(ValueError, match="concat 'concat': it interleaves its parts"):
        compute("concat", {"values": [coreml_values.ROWS], "interleave": True}, (coreml_values.ROWS,))
