"""Inputs as an app has them (uint8, another layout, other names, frozen), outputs left out, and where weights lie."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from prepare_models import ZOO, make_inputs, make_model, op_names, run_model

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.images import Preprocess
from edgekit.errors import ModelError, RuntimeRefusal, UsageError
from edgekit.jobs.check import PrepareOptions, prepare_for
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.clean import freeze_model, prepare_model
from edgekit.prepare.external import place_weights, refuse_inline
from edgekit.prepare.interface import InterfaceChanges, change_interface, remaining_preprocess

IMAGENET = Preprocess(size=(6, 4), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def make_net(path: Path, shape: tuple[int, ...] = (1, 3, 4, 6), kind: str = "float") -> Model:
    dtype = np.float16 if kind == "float16" else np.float32
    weight = np.random.default_rng(0).standard_normal((5, shape[1], 1, 1)).astype(dtype)
    text = f"g ({kind}{list(shape)} image) => ({kind}{[1, 5, *shape[2:]]} scores)"
    model = make_model(f"{text} {{ [conv] c = Conv(image, w) scores = Relu(c) }}", path, weights={"w": weight})
    proto = onnx.load(str(path))
    helper.set_model_props(proto, {"author": "me"})
    onnx.save(proto, str(path))
    return load_model(model.path)


def run(model: Model, **inputs: Array) -> Array:
    return next(iter(CpuSession(model.path, SessionSettings()).run(inputs).values()))


PIXELS = np.random.default_rng(1).integers(0, 256, (1, 3, 4, 6)).astype(np.uint8)


def normalise(pixels: Array) -> Array:
    mean, std = (np.asarray(values, np.float32)[:, None, None] for values in (IMAGENET.mean, IMAGENET.std))
    result: Array = (pixels.astype(np.float32) * np.float32(IMAGENET.scale) - mean) / std
    return result


def test_normalisation_moves_into_the_model_to_the_bit(tmp_path: Path) -> None:
    model = make_net(tmp_path / "m.onnx")
    changed = change_interface(model, tmp_path / "r.onnx", InterfaceChanges(preprocess=IMAGENET))
    assert str(changed.inputs[0]) == "image: uint8[1,3,4,6]"
    assert np.array_equal(run(changed, image=PIXELS), run(model, image=normalise(PIXELS)))
    assert remaining_preprocess(IMAGENET) == Preprocess(size=(6, 4), scale=1.0, dtype="uint8")


def test_half_precision_inputs_take_images_too(tmp_path: Path) -> None:
    model = make_net(tmp_path / "m.onnx", kind="float16")
    changed = change_interface(model, tmp_path / "r.onnx", InterfaceChanges(preprocess=IMAGENET))
    expected = run(model, image=normalise(PIXELS).astype(np.float16))
    assert np.allclose(run(changed, image=PIXELS), expected, rtol=2e-3, atol=2e-3)


def test_preprocessing_layout_and_names_change_in_one_call(tmp_path: Path) -> None:
    model = make_net(tmp_path / "m.onnx")
    changes = InterfaceChanges(
        preprocess=IMAGENET, layouts={"image": "nhwc"}, renames={"image": "pixels", "scores": "classes"}
    )
    report = prepare_for(model, tmp_path / "r.onnx", PrepareOptions(changes=changes))
    assert [str(spec) for spec in (*report.model.inputs, *report.model.outputs)] == [
        "pixels: uint8[1,4,6,3]", "classes: float32[1,5,4,6]",
    ]  # fmt: skip
    got = run(report.model, pixels=np.ascontiguousarray(PIXELS.transpose(0, 2, 3, 1)))
    assert np.array_equal(got, run(model, image=normalise(PIXELS)))
    proto = onnx.load(str(report.model.path))
    assert {entry.key: entry.value for entry in proto.metadata_props} == {"author": "me"}
    onnx.checker.check_model(proto, full_check=True)


def test_channels_last_become_channels_second(tmp_path: Path) -> None:
    text = "g (float[1,4,6,3] x) => (float[1,3] y) { y = ReduceMean<axes=[1,2], keepdims=0>(x) }"
    model = make_model(text, tmp_path / "m.onnx")
    changed = change_interface(model, tmp_path / "r.onnx", InterfaceChanges(layouts={"x": "nchw"}))
    values = np.random.default_rng(2).standard_normal((1, 3, 4, 6)).astype(np.float32)
    expected = run(model, x=np.ascontiguousarray(values.transpose(0, 2, 3, 1)))
    assert np.allclose(run(changed, x=values), expected, atol=1e-6)


def test_names_can_change_places_and_reach_into_bodies(tmp_path: Path) -> None:
    text = """g (bool c, float[2] a, float[2] b) => (float[2] y) {
        y = If (c) <then_branch = t () => (float[2] p) { p = Sub(a, b) },
                    else_branch = e () => (float[2] q) { q = Neg(a) }>
    }"""
    model = make_model(text, tmp_path / "m.onnx")
    changes = InterfaceChanges(renames={"a": "b", "b": "a", "y": "z"})
    changed = change_interface(model, tmp_path / "r.onnx", changes)
    first, second = np.array([5, 6], np.float32), np.array([1, 2], np.float32)
    assert run(changed, c=np.array(True), b=first, a=second).tolist() == [4, 4]
    assert [spec.name for spec in changed.outputs] == ["z"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (InterfaceChanges(renames={"imge": "x"}), "no input or output 'imge'.*image"),
        (InterfaceChanges(renames={"image": "c"}), "cannot be called 'c', a name that is taken"),
        (InterfaceChanges(renames={"image": "x", "scores": "x"}), "cannot be called 'x'"),
        (InterfaceChanges(layouts={"imag": "nhwc"}), "no input 'imag'.*image"),
        (InterfaceChanges(layouts={"image": "nchw"}), r"shape \[1, 3, 4, 6\] is nchw already"),
        (InterfaceChanges(preprocess=IMAGENET, image_input="img"), "no input 'img'"),
        (InterfaceChanges(preprocess=Preprocess(size=(6, 4), color="L")), "3 channels on axis 1, the preprocessing 1"),
        (InterfaceChanges(preprocess=Preprocess(size=(6, 4), dtype="uint8")), "normalises nothing"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, changes: InterfaceChanges, message: str) -> None:
    model = make_net(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=message):
        prepare_for(model, tmp_path / "out/r.onnx", PrepareOptions(changes=changes))
    assert not (tmp_path / "out").exists()


def test_a_model_without_an_image_is_refused(tmp_path: Path) -> None:
    model = make_model("g (float[1,3] x) => (float[1,3] y) { y = Relu(x) }", tmp_path / "m.onnx")
    with pytest.raises(UsageError, match="no float input of rank 4"):
        change_interface(model, tmp_path / "r.onnx", InterfaceChanges(preprocess=IMAGENET))


def test_weights_go_beside_the_model_and_back(tmp_path: Path) -> None:
    model = make_net(tmp_path / "m.onnx", (1, 300, 4, 6))
    values = np.random.default_rng(3).standard_normal((1, 300, 4, 6)).astype(np.float32)
    expected = run(model, image=values)
    report = prepare_for(model, tmp_path / "r.onnx", PrepareOptions(external=True))
    assert report.model.external_files == ("r.onnx.data",)
    assert np.array_equal(run(report.model, image=values), expected)
    inside = place_weights(report.model, external=False)
    assert inside.external_files == ()
    assert not (tmp_path / "r.onnx.data").exists()
    assert np.array_equal(run(inside, image=values), expected)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["m.onnx", "r.onnx"]


def test_weights_of_2_gb_cannot_go_inside(tmp_path: Path) -> None:
    model = make_net(tmp_path / "m.onnx")
    with pytest.raises(ModelError, match=r"ends at 2 GB"):
        refuse_inline(
            Model(**{name: getattr(model, name) for name in model.__struct_fields__} | {"size_bytes": 3 << 30})
        )


@pytest.mark.parametrize("opset", [9, 13, 15, 18, 21, 22])
def test_a_model_is_converted_to_older_and_newer_opsets(tmp_path: Path, opset: int) -> None:
    model = make_net(tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "p.onnx", {}, opset=opset)
    assert prepared.opsets["ai.onnx"] == opset
    assert np.array_equal(run(prepared, image=normalise(PIXELS)), run(model, image=normalise(PIXELS)))


HEADS = """g (float[2] x, int64 k, string s) => (float[2] y, float[2] z, string t)
    { y = Abs(x)  c = Cast<to = 1>(k)  n = Neg(x)  z = Mul(n, c)  t = Identity(s) }"""


def test_outputs_are_left_out_with_what_made_them(tmp_path: Path) -> None:
    model = make_model(HEADS, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {}, outputs=["y"])
    assert [spec.name for spec in prepared.outputs] == ["y"]
    assert op_names(prepared.path) == ["Abs"]
    with pytest.raises(UsageError, match="no output 'yy', nor a value"):
        prepare_model(model, tmp_path / "out.onnx", {}, outputs=["yy"])


def test_a_value_inside_the_graph_becomes_an_output(tmp_path: Path) -> None:
    model = make_model(HEADS, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {}, outputs=["n", "y"])
    assert [(spec.name, spec.dtype, spec.shape) for spec in prepared.outputs] == [
        ("y", "float32", (2,)),
        ("n", "float32", (2,)),
    ]
    assert op_names(prepared.path) == ["Abs", "Neg"]


def test_a_value_of_unknown_type_is_no_output(tmp_path: Path) -> None:
    model = make_model(
        "g (float[2] x) => (float[2] y) { z = my.Own(x) y = Relu(x) t = my.Own(z) }", tmp_path / "m.onnx"
    )
    with pytest.raises(UsageError, match="the type of 't' is unknown"):
        prepare_model(model, tmp_path / "out.onnx", {}, outputs=["t"])


SPECTRUM = """g (float[N,4] x, float[4] gain) => (float[N,2] y)
    <int64[1] k = {4}, float[4,2] w = {1, 0, 1, 2, 1, 0, 1, 2}>
    { p = Mul(x, x) l, i = TopK<axis = -1>(p, k) s = Mul(l, gain) h = MatMul(s, w) y = Relu(h) }"""


def test_a_value_inside_the_graph_becomes_an_input(tmp_path: Path) -> None:
    model = make_model(SPECTRUM, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {"N": 3}, inputs=["gain", "l"])
    assert [(spec.name, spec.dtype, spec.shape) for spec in prepared.inputs] == [
        ("gain", "float32", (4,)),
        ("l", "float32", (3, 4)),
    ]
    assert op_names(prepared.path) == ["Mul", "MatMul", "Relu"]
    whole = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "gain": np.ones(4, np.float32)}
    front = np.sort(whole["x"] ** 2)[:, ::-1]
    assert run_model(prepared.path, {"gain": whole["gain"], "l": front})["y"].tolist() == (
        run_model(model.path, whole)["y"].tolist()
    )


@pytest.mark.parametrize(
    ("names", "dims", "message"),
    [
        (["l"], {"N": 3}, "the outputs still need the input 'gain'.*--inputs l,gain"),
        (["gain", "ll"], {"N": 3}, "no input 'll', nor a value of this name.*did you mean 'l'"),
        (["gain", "l"], {}, "the shape of 'l' is unknown"),
        (["y"], {"N": 3}, "'y' is an output, and cannot be an input too.*name a value before it"),
    ],
)
def test_inputs_that_leave_something_unknown_are_refused(
    names: list[str], dims: dict[str, int], message: str, tmp_path: Path
) -> None:
    model = make_model(SPECTRUM, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=message):
        prepare_model(model, tmp_path / "out.onnx", dims, inputs=names, may_stay_open=True)


def test_a_number_inside_the_graph_becomes_an_input_and_an_output_does_not(tmp_path: Path) -> None:
    model = make_model(
        "g (float[2] x) => (float[2] y, float[2] a) { a = Abs(x) s = ReduceMax<keepdims = 0>(a) y = Mul(x, s) }",
        tmp_path / "m.onnx",
    )
    prepared = prepare_model(model, tmp_path / "out.onnx", inputs=["x", "s"], outputs=["y"])
    assert [(spec.name, spec.shape) for spec in prepared.inputs] == [("x", (2,)), ("s", ())]
    with pytest.raises(UsageError, match=r"'a' is an output, and cannot be an input too.*--outputs y"):
        prepare_model(model, tmp_path / "out.onnx", inputs=["x", "a"])


def test_a_frozen_input_is_folded(tmp_path: Path) -> None:
    model = make_model(HEADS, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {}, constants={"k": 3})
    frozen = freeze_model(model, tmp_path / "frozen", {"k": 3})
    assert [spec.name for spec in prepared.inputs] == [spec.name for spec in frozen.inputs] == ["x", "s"]
    assert freeze_model(model, tmp_path, {}) is model
    assert "Cast" not in op_names(prepared.path)
    inputs = {"x": np.array([1, -2], np.float32), "s": np.array("a", object)}
    assert run_model(prepared.path, inputs)["z"].tolist() == [-3, 6]


@pytest.mark.parametrize(
    ("constants", "message"),
    [({"kk": 1}, "no input 'kk'"), ({"k": 1.5}, "cannot hold 1.5"), ({"s": 1}, "input 's' holds no numbers")],
)
def test_what_cannot_be_frozen_is_refused(tmp_path: Path, constants: dict[str, float], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        prepare_model(make_model(HEADS, tmp_path / "m.onnx"), tmp_path / "out.onnx", {}, constants=constants)


@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
def test_a_branch_that_fits_no_static_shape_goes_with_its_condition(tmp_path: Path) -> None:
    model = load_model(ZOO / "models/silero_vad.onnx")
    dims = {"input:0": 1, "input:1": 576, "state:1": 1}
    with pytest.raises(RuntimeRefusal, match="If_0"):
        prepare_model(model, tmp_path / "out.onnx", dims)
    prepared = prepare_model(model, tmp_path / "out.onnx", dims, constants={"sr": 16000})
    assert "If" not in op_names(prepared.path)
    inputs = make_inputs(prepared)
    expected = run_model(model.path, inputs | {"sr": np.array(16000)})
    got = run_model(prepared.path, inputs)
    assert all(np.allclose(expected[name], got[name], atol=1e-5) for name in expected)
