"""Dimensions: several at once, unnamed ones, and every way to name one wrongly."""

import zipfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from prepare_models import ZOO, make_inputs, make_model, op_names, prepare, run_model
from tiny_models import parse_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.images import Preprocess
from edgekit.data.samples import read_shapes
from edgekit.errors import ModelError, RuntimeRefusal, UsageError
from edgekit.graph.graph import read_graph
from edgekit.jobs.check import PrepareOptions, prepare_for
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, TensorSpec
from edgekit.prepare.clean import freeze_model, prepare_model, sketch_model
from edgekit.prepare.external import place_weights, refuse_inline
from edgekit.prepare.interface import InterfaceChanges, change_interface, remaining_preprocess
from edgekit.prepare.shapes import derive_dim, find_sizes, proposing_sizes, solve_dim

TWO = "g (float[N,S] x, float[?,S] z) => (float[A,B] y, float[N,S] w) { y = Concat<axis = 0>(x, z)  w = Abs(x) }"


def make_named(text: str, path: Path, **names: str) -> Model:
    """Returns a model whose inputs and outputs have first dimensions of these names; the text form has no formulas."""

    def name_dims(proto: onnx.ModelProto) -> None:
        for value in (*proto.graph.input, *proto.graph.output):
            if value.name in names:
                value.type.tensor_type.shape.dim[0].dim_param = names[value.name]

    return make_model(text, path, edit=name_dims)


def shapes(model: Model) -> list[tuple[int | str | None, ...] | None]:
    """Returns the shapes of all inputs and outputs."""
    return [spec.shape for spec in (*model.inputs, *model.outputs)]


@pytest.mark.parametrize("dims", [{"N": 2, "S": 3, "z:0": 4}, {"x:0": 2, "x:1": 3, "z:0": 4}], ids=["names", "axes"])
def test_several_dims_are_fixed_and_outputs_follow(tmp_path: Path, dims: dict[str, int]) -> None:
    model, prepared = prepare(TWO, tmp_path, dims)
    assert shapes(prepared) == [(2, 3), (4, 3), (6, 3), (2, 3)]
    assert not model.is_static


def test_missing_dims_are_all_named_with_their_options(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"'N' \(axis 0 of input 'x'\), 'z:0'") as caught:
        prepare(TWO, tmp_path, {"S": 3})
    assert caught.value.hint == "add --dim N=INT --dim z:0=INT"
    assert not (tmp_path / "out.onnx").exists()


def test_a_placeholder_is_no_name(tmp_path: Path) -> None:
    def name_all(proto: onnx.ModelProto) -> None:
        for axis in (2, 3):
            proto.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = "?"

    text = "g (float[1,3,?,?] x) => (float[?,?,?,?] y) { y = Abs(x) }"
    model, prepared = prepare(text, tmp_path, {"x:2": 48, "x:3": 192}, edit=name_all)
    assert model.inputs[0].shape == (1, 3, None, None)
    assert shapes(prepared) == [(1, 3, 48, 192)] * 2
    with pytest.raises(UsageError, match=r"no dynamic dimension '\?'"):
        prepare(text, tmp_path, {"?": 48}, edit=name_all)


def test_sizes_of_the_samples_are_proposed(tmp_path: Path) -> None:
    model = make_model(TWO, tmp_path / "m.onnx")
    np.savez(tmp_path / "d.npz", x=np.zeros((5, 2, 3), np.float32), z=np.zeros((5, 4, 3), np.float32))
    for name, sizes in (("d", "--dim N=2 --dim z:0=4, as in the samples"), ("gone", "--dim N=INT --dim z:0=INT")):
        with pytest.raises(UsageError) as caught, proposing_sizes(model.inputs, tmp_path / f"{name}.npz", None):
            prepare_model(model, tmp_path / "out.onnx", {"S": 3})
        assert caught.value.hint == f"add {sizes}"


def test_axes_that_an_exporter_called_alike_get_their_own_sizes(tmp_path: Path) -> None:
    """A sentence encoder on Maven Central calls batch and sequence `batch`."""
    text = "g (float[batch,batch] x, float[batch,batch] y) => (float[batch,batch] z) { z = Add(x, y) }"
    model, rows = make_model(text, tmp_path / "m.onnx"), np.zeros((5, 1, 48), np.float32)
    np.savez(tmp_path / "d.npz", x=rows, y=rows)
    with pytest.raises(UsageError) as caught, proposing_sizes(model.inputs, tmp_path / "d.npz", None):
        prepare_model(model, tmp_path / "out.onnx")
    assert caught.value.hint == "add --dim x:0=1 --dim x:1=48 --dim y:0=1 --dim y:1=48, as in the samples"
    prepared = prepare_model(model, tmp_path / "out.onnx", {"x:0": 1, "x:1": 48, "y:0": 1, "y:1": 48})
    assert shapes(prepared) == [(1, 48)] * 3
    with pytest.raises(UsageError, match="'y:0'"):
        prepare_model(model, tmp_path / "out.onnx", {"x:0": 1, "x:1": 48})


def test_a_size_is_solved_for_the_name_in_a_formula_and_a_batch_axis_is_added(tmp_path: Path) -> None:
    spec = TensorSpec(name="x", dtype="float32", shape=("batch", "2*length", None, 7))
    np.savez(tmp_path / "d.npz", x=np.zeros((2, 6, 5, 7), np.float32))
    rows = read_shapes(tmp_path / "d.npz", [spec])
    assert rows == [{"x": (1, 6, 5, 7)}] * 2
    assert find_sizes([spec], rows) == {"batch": 1, "length": 3, "x:2": 5}
    assert find_sizes([spec], [*rows, {"x": (1, 6, 4, 7)}]) == {"batch": 1, "length": 3}


def test_what_is_no_array_has_no_axes(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "d.npz", "w") as archive:
        archive.writestr("x", b"no array")
    (tmp_path / "d").mkdir()
    (tmp_path / "d.npz").rename(tmp_path / "d" / "0.npz")
    assert read_shapes(tmp_path / "d", [TensorSpec(name="x", dtype="float32", shape=(2, 3))]) == [{"x": ()}]


@pytest.mark.parametrize(
    ("dims", "message", "hint"),
    [
        ({"M": 1}, "no dynamic dimension 'M'", "valid: N, S, z:0"),
        ({"batch": 1}, "no dynamic dimension 'batch'", "valid: N, S, z:0"),
        ({"z:O": 1}, "no dynamic dimension 'z:O'", "did you mean 'z:0'"),
        ({"N": -1}, "'N=-1' is no size", "from 0 to"),
        ({"N": 2**31 + 1}, "is no size", "from 0 to"),
        ({"N": 2, "x:0": 3}, "'N' is given both 2 and 3", "one number"),
    ],
)
def test_a_wrong_dim_is_refused(tmp_path: Path, dims: dict[str, int], message: str, hint: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        prepare(TWO, tmp_path, dims)
    assert hint in caught.value.hint


def test_a_fixed_axis_may_be_repeated_but_not_changed(tmp_path: Path) -> None:
    text = "g (float[1,3] x) => (float[1,3] y) { y = Abs(x) }"
    assert prepare(text, tmp_path, {"x:0": 1})[1].is_static
    with pytest.raises(UsageError, match="contradicts the model") as caught:
        prepare(text, tmp_path, {"x:0": 2})
    assert caught.value.hint == "it is fixed at 1 there"


@pytest.mark.parametrize(
    ("formula", "size"),
    [
        *(("a+b", 5), ("2*a - 1", 3), ("b//a", 1), ("a", None), ("a+c", None), ("a//0", None), ("f(a)+1", None)),
        *(("a**9", None), ("(" * 90 + "a+1" + ")" * 90, 3), ("a+" * 200 + "a", None), ("floor(b/2) + 1", 2)),
        *(("ceiling(b/2)", 2), ("Max(1, b - 1)", 2), ("-a + b", 1), ("b/2", None), ("((b - 1)//2) + 1", 2)),
        *(("b**2", 9), ("a**-1", None), ("(" * 20 + "b" + "**8)" * 20, None), ("FloorDiv(b, 2)", 1)),
        *(("FloorDiv(b)", None), ("Mod(b, a) + PythonMod(b, a)", 2), ("CeilToInt(IntTrueDiv(b, 2))", 2)),
        *(("TruncToInt(b/2) + FloorToInt(b/2) + CeilDiv(b, 2)", 4), ("CleanDiv(4*b, a)", 6), ("Mod(b, 0)", None)),
    ],
)
def test_a_dimension_is_derived_from_a_formula_or_left_open(formula: str, size: int | None) -> None:
    assert derive_dim(formula, {"a": 2, "b": 3}) == size


@pytest.mark.parametrize(
    ("formula", "value", "solved"),
    [
        *(("c + a", 9, ("c", 7)), ("2*c", 8, ("c", 4)), ("2*c", 9, None), ("c*c", 9, None), ("c + d", 9, None)),
        *(("a + b", 5, None), ("0*c", 0, None)),
    ],
)
def test_formulas_are_solved_for_their_last_name(formula: str, value: int, solved: tuple[str, int] | None) -> None:
    assert solve_dim(formula, value, {"a": 2, "b": 3}) == solved


def test_a_name_follows_from_a_formula_and_must_agree_with_it(tmp_path: Path) -> None:
    text = "g (float[past,4] x, float[seq,4] y, float[T,4] z) => (float[?,?] w) { w = Concat<axis = 0>(x, y, z) }"
    model = make_named(text, tmp_path / "m.onnx", z="past + seq")
    prepared = prepare_model(model, tmp_path / "out.onnx", {"past + seq": 16, "seq": 1})
    assert [spec.shape for spec in prepared.inputs] == [(15, 4), (1, 4), (16, 4)]
    with pytest.raises(UsageError, match="is given as 16 and comes to 4"):
        prepare_model(model, tmp_path / "out.onnx", {"past + seq": 16, "seq": 1, "past": 3})
    with pytest.raises(UsageError, match="comes to -1"):
        prepare_model(model, tmp_path / "out.onnx", {"past + seq": 2, "seq": 3})


@pytest.mark.parametrize(
    ("dims", "given", "sizes"),
    [
        (("s0", "s1", "s0 + s1"), {"s0": 2, "s1": 3}, (2, 3, 5)),
        (("s0", "2*s0", "s0**2"), {"s0": 3}, (3, 6, 9)),
        (("2*s0", "s0 + s1", "s1"), {"s0": 2, "s1": 0}, (4, 2, 0)),
        (("past", "seq", "past + seq"), {"past": 0, "seq": 4}, (0, 4, 4)),
        (("s77", "((s77 - 1)//2) + 1", "Max(1, s77)"), {"s77": 6}, (6, 3, 6)),
    ],
)
def test_a_formula_of_dynamo_is_never_asked_for(
    tmp_path: Path, dims: tuple[str, str, str], given: dict[str, int], sizes: tuple[int, int, int]
) -> None:
    text = "g (float[A] x, float[B] y, float[C] z) => (float[A] a, float[B] b, float[C] c) {a=Abs(x) b=Abs(y) c=Abs(z)}"
    model = make_named(text, tmp_path / "m.onnx", **dict(zip("xyzabc", (*dims, *dims), strict=True)))
    prepared = prepare_model(model, tmp_path / "out.onnx", given)
    assert shapes(prepared) == [(size,) for size in (*sizes, *sizes)]
    with pytest.raises(UsageError, match="without a number") as caught:
        prepare_model(model, tmp_path / "none.onnx", {})
    assert caught.value.hint == "add " + " ".join(f"--dim {name}=INT" for name in sorted(given))


def test_a_negative_dimension_is_dynamic(tmp_path: Path) -> None:
    def negate(proto: onnx.ModelProto) -> None:
        proto.graph.input[0].type.tensor_type.shape.dim[0].dim_value = -1

    model, prepared = prepare("g (float[1,3] x) => (float[1,3] y) { y = Abs(x) }", tmp_path, {"x:0": 5}, edit=negate)
    assert (model.inputs[0].name_axes(), prepared.inputs[0].shape) == ({0: "x:0"}, (5, 3))


def test_an_input_without_a_rank_gets_one(tmp_path: Path) -> None:
    def forget(proto: onnx.ModelProto) -> None:
        for value in (*proto.graph.input, *proto.graph.output):
            value.type.tensor_type.ClearField("shape")

    text = "g (float[1] x) => (float[1] y) { y = Abs(x) }"
    model, prepared = prepare(text, tmp_path, {"x:0": 2, "x:1": 5}, edit=forget)
    assert prepared.outputs[0].shape == (2, 5)
    with pytest.raises(UsageError, match="input 'x' has no rank"):
        prepare_model(model, tmp_path / "out.onnx", {})


@pytest.mark.parametrize("write", [prepare_model, sketch_model])
def test_a_branch_that_is_not_taken_need_not_fit_the_dimensions(write: Callable[..., Model], tmp_path: Path) -> None:
    text = """g (float[N,M] x) => (float[N,M] y)
      <bool take = {1}, float[4] four = {1, 2, 3, 4}, float[5] five = {1, 2, 3, 4, 5}> {
      y = If (take) <
        then_branch = then () => (float[N,M] a) { a = Add(x, four) },
        else_branch = other () => (float[N,M] b) { b = Add(x, five) }> }"""
    prepared = write(make_model(text, tmp_path / "m.onnx"), tmp_path / "out.onnx", {"N": 1, "M": 4})
    assert [node.op_type for node in onnx.load(str(prepared.path)).graph.node] == ["Add"]
    assert [spec.shape for spec in prepared.outputs] == [(1, 4)]


# Inputs as an app has them (uint8, another layout, other names, frozen), outputs left out, and where weights lie.

IMAGENET = Preprocess(size=(6, 4), mean=(0.485, 0.456, 0.406), std=(0.229, 0.224, 0.225))


def make_net(path: Path, shape: tuple[int, ...] = (1, 3, 4, 6), kind: str = "float") -> Model:
    dtype = np.float16 if kind == "float16" else np.float32
    weight = np.random.default_rng(0).standard_normal((5, shape[1], 1, 1)).astype(dtype)
    text = f"g ({kind}{list(shape)} image) => ({kind}{[1, 5, *shape[2:]]} scores) {{ [conv] c = Conv(image, w)"
    author = partial(helper.set_model_props, dict_value={"author": "me"})
    return make_model(f"{text} scores = Relu(c) }}", path, weights={"w": weight}, edit=author)


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
    facts = {name: getattr(model, name) for name in model.__struct_fields__} | {"size_bytes": 3 << 30}
    with pytest.raises(ModelError, match=r"ends at 2 GB"):
        refuse_inline(Model(**facts))


HEADS = """g (float[2] x, int64 k, string s) => (float[2] y, float[2] z, string t)
    { y = Abs(x)  c = Cast<to = 1>(k)  n = Neg(x)  z = Mul(n, c)  t = Identity(s) }"""


@pytest.mark.parametrize(("outputs", "ops"), [(["y"], ["Abs"]), (["y", "n"], ["Abs", "Neg"])])
def test_outputs_are_left_out_or_taken_from_inside(outputs: list[str], ops: list[str], tmp_path: Path) -> None:
    model = make_model(HEADS, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {}, outputs=outputs[::-1])
    assert [*map(str, prepared.outputs)] == [f"{name}: float32[2]" for name in outputs]
    assert op_names(prepared.path) == ops


SPECTRUM = """g (float[N,4] x, float[4] gain) => (float[N,2] y)
    <int64[1] k = {4}, float[4,2] w = {1, 0, 1, 2, 1, 0, 1, 2}>
    { p = Mul(x, x) l, i = TopK<axis = -1>(p, k) s = Mul(l, gain) h = MatMul(s, w) y = Relu(h) }"""


def test_a_value_inside_the_graph_becomes_an_input(tmp_path: Path) -> None:
    model = make_model(SPECTRUM, tmp_path / "m.onnx")
    prepared = prepare_model(model, tmp_path / "out.onnx", {"N": 3}, inputs=["gain", "l"])
    assert [*map(str, prepared.inputs)] == ["gain: float32[4]", "l: float32[3,4]"]
    assert op_names(prepared.path) == ["Mul", "MatMul", "Relu"]
    whole = {"x": np.arange(12, dtype=np.float32).reshape(3, 4), "gain": np.ones(4, np.float32)}
    fed = {"gain": whole["gain"], "l": np.sort(whole["x"] ** 2)[:, ::-1]}
    assert np.array_equal(run_model(prepared.path, fed)["y"], run_model(model.path, whole)["y"])


OWN = "g (float[2] x) => (float[2] y) { z = my.Own(x) y = Relu(x) t = my.Own(z) }"


@pytest.mark.parametrize(
    ("text", "changes", "message"),
    [
        (SPECTRUM, {"inputs": ["l"], "dims": {"N": 3}},
         "the outputs still need the input 'gain'.*--inputs l,gain"),
        (SPECTRUM, {"inputs": ["gain", "ll"], "dims": {"N": 3}},
         "no input 'll', nor a value of this name.*did you mean 'l'"),
        (SPECTRUM, {"inputs": ["gain", "l"]}, "the shape of 'l' is unknown"),
        (SPECTRUM, {"inputs": ["y"], "dims": {"N": 3}},
         "'y' is an output, and cannot be an input too.*name a value before it"),
        (OWN, {"outputs": ["t"]}, "the type of 't' is unknown"),
        (HEADS, {"outputs": ["yy"]}, "no output 'yy', nor a value"),
        (HEADS, {"constants": {"kk": 1}}, "no input 'kk'"),
        (HEADS, {"constants": {"k": 1.5}}, "cannot hold 1.5"),
        (HEADS, {"constants": {"s": 1}}, "input 's' holds no numbers"),
    ],
)  # fmt: skip
def test_changed_inputs_outputs_and_constants_must_be_there_and_fit(
    text: str, changes: dict[str, Any], message: str, tmp_path: Path
) -> None:
    model = make_model(text, tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=message):
        prepare_model(model, tmp_path / "out.onnx", **{"may_stay_open": "inputs" in changes} | changes)


def test_a_number_inside_the_graph_becomes_an_input_and_an_output_does_not(tmp_path: Path) -> None:
    text = "g (float[2] x) => (float[2] y, float[2] a) { a = Abs(x) s = ReduceMax<keepdims = 0>(a) y = Mul(x, s) }"
    model = make_model(text, tmp_path / "m.onnx")
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


def test_a_size_of_minus_one_is_unknown_and_makes_no_sizes(tmp_path: Path) -> None:
    text = """(float[1,1,9,4] x) => (float y) <float[1,1,3,3] w = {1,2,3,4,5,6,7,8,9}>
        { a = Conv<strides = [2,2], pads = [1,1,1,1]>(x, w) y = ReduceMax(a) }"""
    # onnx's converter infers shapes too.
    proto = parse_net(text, opset=11)
    proto.graph.input[0].type.tensor_type.shape.dim[2].dim_value = -1
    onnx.save(proto, tmp_path / "m.onnx")
    prepared = prepare_model(load_model(tmp_path / "m.onnx"), tmp_path / "p.onnx", {}, may_stay_open=True)
    assert read_graph(prepared).value("a").shape == (1, 1, None, 2)
