"""The cause of a wrong layer: each change is named as it was made, and what nobody made is not named."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_models import make_bundle, make_contents
from devices_models import Altering
from fixture_types import present
from markupsafe import escape
from msgspec.structs import replace
from tiny_models import save_net
from verify_devices import InProcess, from_list, restate
from verify_models import change_weights, find_weights, job_of, make_images, quantize, save_network

from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import Golden, KnownOutputs
from edgekit.bundle.manifest import encode_json
from edgekit.check.check import check_model
from edgekit.devices.device import Device, DeviceRun, Job, refuse_run
from edgekit.evidence import Evidence
from edgekit.model.model import Model, save_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.report.html import render_page
from edgekit.report.text import list_verify_remarks
from edgekit.serialize import to_json
from edgekit.target import load_target
from edgekit.verify.attribute import attribute_loss, share_loss
from edgekit.verify.layers.comparison import compare_layers, compare_with_float, explain_layers
from edgekit.verify.layers.on_device import find_device_layer
from edgekit.verify.metrics.changes import describe_change
from edgekit.verify.report import AttributionStep, Step
from edgekit.verify.run import verify_bundle

RNG = np.random.default_rng(0)
PICTURES = RNG.normal(size=(4, 8, 20, 20))
EACH = np.exp(RNG.normal(size=(1, 8, 1, 1)))


def spoil(value: Array, place: Any) -> Array:
    changed = value.copy()
    changed[place] *= 0.3
    return changed


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x * 2, "times a factor of 2:"),
        (lambda x: x + 0.7, "plus a constant of 0.7:"),
        (lambda x: x * 0.3 + 2, "times a factor of 0.3 plus 2:"),
        (lambda x: x.clip(-0.5, 0.8), "limited to -0.5 and 0.8: look for a scale"),
        (lambda x: (x * 2).clip(-0.5, 0.8), "times a factor of 2:"),
        (lambda x: x + EACH, "plus a constant in each channel"),
        (lambda x: x * EACH, "times a factor in each channel"),
        (lambda x: x * EACH + 3 / EACH, "scaled and moved in each channel"),
        (lambda x: x * 3 + EACH, "times a factor of 3 plus a constant in each channel"),
        (lambda x: x * 0 + EACH, "is a constant in each channel"),
        (lambda x: x * 0 + 4, "is 4 everywhere"),
        (lambda x: x[:, np.random.default_rng(1).permutation(8)], "in another order"),
        (lambda x: spoil(x, (slice(None), 3)), "but for 1 of 8 channels (3)"),
        (lambda x: spoil(x, (..., 0)), "but for its borders"),
        (lambda x: x[..., ::-1], "mirrored along axis 3"),
        (lambda x: x.swapaxes(2, 3), "with axes 2 and 3 exchanged"),
        (lambda x: np.roll(x, (1, -3), (2, 3)), "moved by 1 along axis 2, -3 along axis 3"),
        (np.tanh, "is a function of the reference"),
        (lambda x: x.transpose(0, 2, 3, 1).reshape(x.shape), "in the other layout"),
        (lambda x: x, ""),
        (lambda x: x + 0.01 * RNG.normal(size=x.shape), ""),
        (lambda x: x + 0.5 * RNG.normal(size=x.shape), ""),
        (lambda x: RNG.permutation(x.reshape(-1)).reshape(x.shape), ""),
        (lambda x: x * np.nan, ""),
        (lambda x: x[:, :2], ""),
    ],
)
def test_a_change_is_named_as_it_was_made_and_noise_is_none(change: Callable[[Array], Array], words: str) -> None:
    said = describe_change(PICTURES, np.asarray(change(PICTURES)))
    assert words in said
    assert bool(words) == bool(said)


def test_a_constant_added_to_probabilities_is_no_factor() -> None:
    sure = np.exp(12 * PICTURES[:, :, 0, 0])
    sure /= sure.sum(axis=1, keepdims=True)
    assert "plus a constant of 0.5:" in describe_change(sure, sure + 0.5)


def test_values_that_end_where_half_precision_does_are_no_matter_of_a_scale() -> None:
    large = PICTURES * 5e4
    assert "half precision ends at 65504" in describe_change(large, large.clip(-131008, 65504))
    assert "half precision ends at 65504" in describe_change(large, large.clip(-65504, 4e4))
    assert "a scale that is too small" in describe_change(large, large.clip(-65503, 4e4))


def test_an_activation_that_is_missing_is_named_behind_one_that_clips() -> None:
    said = describe_change(np.maximum(PICTURES, 0), PICTURES)
    assert "but for its least or largest values: look for an activation" in said


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    return quantize(tmp_path_factory.mktemp("causes"))


def set_attribute(proto: onnx.ModelProto, name: str, value: list[int]) -> None:
    node = next(node for node in proto.graph.node if node.name == "conv2")
    attributes = [*(each for each in node.attribute if each.name != name), onnx.helper.make_attribute(name, value)]
    del node.attribute[:]
    node.attribute.extend(attributes)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda proto: change_weights(proto, "conv2", np.zeros_like), "'w2', is 0 everywhere"),
        (lambda proto: change_weights(proto, "conv2", lambda w: w.swapaxes(0, 1)),
         "'w2', is the reference with axes 1"),
        (lambda proto: change_weights(proto, "conv2", RNG.permutation),
         "'w2', holds the reference's values in another"),
        (lambda proto: set_attribute(proto, "pads", [2, 2, 0, 0]), "'pads' is [2, 2, 0, 0], in the reference [1, 1, 1"),
        (lambda proto: set_attribute(proto, "dilations", [1, 1]), ""),
        (lambda proto: change_weights(proto, "conv2", np.copy), ""),
    ],
)  # fmt: skip
def test_what_a_layer_has_otherwise_than_in_the_float_model_is_named(
    models: tuple[Model, Model], tmp_path: Path, change: Callable[[onnx.ModelProto], None], words: str
) -> None:
    proto = onnx.load(str(models[0].path))
    assert find_weights(proto, "conv2")
    change(proto)
    said = " ".join(explain_layers(compare_layers(models[0], save_proto(proto, tmp_path / "b.onnx"), make_images())))
    assert words in said
    assert bool(words) == bool(said) == ("'conv2'" in said)


def test_attributes_are_named_in_the_order_of_their_names(tmp_path: Path) -> None:
    node = "[lrn] y = LRN<size = 3, alpha = {}, beta = {}, bias = {}>(x)"
    text = f"(float[1,3,12,12] x) => (float[1,3,12,12] y) {{{{ {node} }}}}"
    chosen = ((0.5, 0.75, 1.0), (0.9, 0.5, 2.0))
    a, b = (save_net(text.format(*values), tmp_path / f"{values[0]}.onnx") for values in chosen)
    (said,) = explain_layers(compare_layers(a, b, make_images()))
    names = ["alpha", "beta", "bias"]
    found = [name for name in said.split("'") if name in names]
    assert found == names[: len(found)]
    assert len(found) > 1


class Fed(Device, frozen=True, kw_only=True):
    """A device whose session gets changed inputs, and that returns at most so many outputs."""

    change: Callable[[Array], Array]
    name: str = "emulated"
    evidence: Evidence = Evidence.EMULATED
    most: int = 1000

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        if len(job.outputs) > self.most:
            return refuse_run(self, "too many outputs")
        rows: list[Tensors] = [{name: self.change(value) for name, value in row.items()} for row in job.samples]
        return InProcess(evidence=self.evidence).run_job(replace(job, samples=from_list(rows)), work)


@pytest.mark.parametrize("form", [0, 1], ids=["float", "int8"])
def test_another_input_is_named_and_no_layer(models: tuple[Model, Model], tmp_path: Path, form: int) -> None:
    job = job_of(models[form])
    honest = find_device_layer(Fed(change=np.copy), job, tmp_path / "honest")
    assert (honest.layer, honest.runs) == (None, 2)
    for place, (change, words) in enumerate(
        [
            (lambda x: np.ascontiguousarray(x[..., ::-1]), "mirrored along axis 3"),
            (lambda x: x * np.float32(255), "times a factor of 255"),
            (lambda x: np.ascontiguousarray(x[:, ::-1]), "in another order"),
        ]
    ):
        found = find_device_layer(Fed(change=change), job, tmp_path / str(place))
        assert (found.layer, found.runs) == ("x", 3)
        assert words in present(found.bad).explained


def test_a_usual_mistake_in_inputs_that_a_device_does_not_show_is_named_too(tmp_path: Path) -> None:
    contents = make_contents(tmp_path, target="nnapi", model=save_network(tmp_path / "net.onnx"), samples=make_images())
    bundle = restate(write_bundle(contents, tmp_path / "net-nnapi"), verification=())
    shown, sealed = (
        verify_bundle(bundle, [Fed(change=lambda x: x * np.float32(255), most=most)]).runs[0] for most in (1000, 1)
    )
    assert "is what the float model makes of inputs times 255" in sealed.traps[0]
    assert (shown.traps, present(shown.located).layer) == ((), "x")


def test_a_result_of_minus_zero_is_written_as_zero() -> None:
    assert describe_change(PICTURES, np.full_like(PICTURES, -0.0)).startswith("is 0 everywhere:")


def test_the_result_of_a_wrong_layer_is_described(models: tuple[Model, Model], tmp_path: Path) -> None:
    device = Altering(device=InProcess(), change=lambda proto: change_weights(proto, "conv2", np.zeros_like))
    found = find_device_layer(device, job_of(models[0]), tmp_path)
    said = "; its result is 0 everywhere: look for weights or inputs of zero"
    assert (found.layer, found.bad and found.bad.explained) == ("conv2", said)


def test_a_device_that_gives_something_else_each_time_is_told_from_a_wrong_layer(tmp_path: Path) -> None:
    bundle, rng = make_bundle(tmp_path), np.random.default_rng(5)
    noisy = InProcess(
        evidence=Evidence.EMULATED,
        lie=lambda rows: [{"y": row["y"] * rng.normal(size=row["y"].shape).astype(np.float32)} for row in rows],
    )
    plan = (replace(bundle.manifest.verification[0], device="emulated", form="onnx"),)
    run = verify_bundle(restate(bundle, verification=plan), [noisy]).runs[0]
    assert "output 'y' is another when the device runs the same samples again" in run.failures


@pytest.fixture(scope="module")
def steps(models: tuple[Model, Model]) -> dict[Step, Model]:
    return {"prepare": models[0], "quantize": models[1]}


@pytest.fixture(scope="module")
def honest(steps: dict[Step, Model], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of(steps, steps["quantize"], tmp_path_factory.mktemp("honest"))


def bundle_of(steps: dict[Step, Model], quantized: Model, folder: Path, *, float_model: Model | None = None) -> Bundle:
    plain = make_contents(folder, model=steps["prepare"], samples=make_images(6), labels=tuple(range(6)))
    check = check_model(quantized, load_target("nnapi"))
    contents = replace(plain, precision="int8", files={"onnx": (quantized.path,)}, check=check)
    evidence = compare_with_float(float_model or steps["prepare"], quantized, contents.golden)
    return write_bundle(replace(contents, layers=encode_json(evidence)), folder / "bundle")


def test_the_loss_of_an_honest_device_is_that_of_quantization(steps: dict[Step, Model], honest: Bundle) -> None:
    report, known = verify_bundle(honest, [InProcess()]), KnownOutputs(room_bytes=1 << 20)
    explained = attribute_loss(honest, report, steps, {"prepare": known})
    # The float model runs once for all bundles of a build.
    assert explained == attribute_loss(honest, report, steps, {"prepare": known})
    assert explained == attribute_loss(honest, report, steps)
    assert known.ran == 6
    shares = {step.step: step.noise_share or 0.0 for step in explained.attribution}
    assert list(shares) == ["prepare", "quantize", "provider"]
    assert sum(shares.values()) == pytest.approx(1.0)
    assert shares["quantize"] > 0.7
    assert "step 'quantize'" in present(explained.advice)
    assert explained.first_bad_layer is None


def add_noise(rows: list[Tensors]) -> list[Tensors]:
    rng = np.random.default_rng(0)
    return [{"y": (row["y"] + rng.normal(scale=0.3, size=row["y"].shape)).astype(np.float32)} for row in rows]


def test_the_loss_of_a_noisy_device_is_attributed_to_the_device(steps: dict[Step, Model], honest: Bundle) -> None:
    device = InProcess(lie=add_noise, evidence=Evidence.DEVICE)
    explained = attribute_loss(honest, verify_bundle(honest, [device]), steps)
    assert "step 'device'" in present(explained.advice)
    assert all(step.accuracy is not None for step in explained.attribution)


def test_untraced_layers_are_not_left_out_in_silence(steps: dict[Step, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(steps["prepare"].path))
    proto.graph.node[0].domain = "nowhere"
    proto.opset_import.append(onnx.helper.make_opsetid("nowhere", 1))
    strange = save_proto(proto, tmp_path / "strange.onnx")
    report = verify_bundle(bundle_of(steps, steps["quantize"], tmp_path, float_model=strange), [])
    (note,) = report.notes
    assert not report.layers
    assert note.startswith("the layers were not compared with the float model's: ONNX Runtime refuses ")
    assert note in list_verify_remarks(report)
    assert note in to_json(report)
    assert str(escape(note)) in render_page(report)


def test_a_bundle_without_an_onnx_file_says_that_no_layers_were_compared(steps: dict[Step, Model]) -> None:
    golden = Golden(folder=Path(), samples=0, inputs=(), outputs=(), has_labels=False)
    evidence = compare_with_float(steps["prepare"], None, golden)
    assert evidence.note == "the layers were not compared: the bundle holds no ONNX file"


def step(name: Step, sqnr_db: float | None, top1: float = 1.0, accuracy: float = 0.9) -> AttributionStep:
    return AttributionStep(step=name, sqnr_db=sqnr_db, top1_agreement=top1, accuracy=accuracy)


def test_shares_add_up_even_where_a_step_takes_error_away() -> None:
    shared = share_loss([step("prepare", 200.0), step("quantize", 20.0), step("convert", None), step("provider", 30.0)])
    assert [item.noise_share for item in shared] == [pytest.approx(0.0), pytest.approx(10.0), None, pytest.approx(-9.0)]
    steps = [step("prepare", 120.0), step("quantize", 25.0, 0.95, 0.85), step("device", 20.0, 0.9, 0.87)]
    shared = share_loss(steps, 0.91)
    assert sum(item.top1_loss or 0.0 for item in shared) == pytest.approx(0.1)
    assert sum(item.accuracy_loss or 0.0 for item in shared) == pytest.approx(0.04)


@pytest.mark.parametrize("last", [200.0, 131.0], ids=["equal", "rounding of float32"])
def test_equal_outputs_have_no_error_that_a_step_could_make(last: float) -> None:
    """Of a float bundle with 131 dB the provider was told to make 95 % of the error: what matters, to the CPU."""
    shared = share_loss([step("prepare", 200.0), step("quantize", 30.0), step("device", last)])
    assert [item.noise_share for item in shared] == [None, None, None]


def test_without_a_finite_run_there_is_nothing_to_attribute(steps: dict[Step, Model], honest: Bundle) -> None:
    report = verify_bundle(honest, [])
    assert attribute_loss(honest, report, steps) == report
    assert report.advice is None
    device = InProcess(lie=lambda rows: [{"y": row["y"] * np.float32(np.nan)} for row in rows])
    report = verify_bundle(honest, [device])
    assert attribute_loss(honest, report, steps) == report
    assert replace(report, runs=()).passed is False
