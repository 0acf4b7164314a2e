from pathlib import Path

import numpy as np
import onnx
import pytest
from bundle_models import make_contents
from fixture_types import present
from markupsafe import escape
from msgspec.structs import replace
from verify_devices import InProcess
from verify_models import break_layer, make_images

from edgekit.bundle.folder import Bundle, write_bundle
from edgekit.bundle.golden import Golden, KnownOutputs
from edgekit.bundle.manifest import encode_json
from edgekit.check.check import check_model
from edgekit.evidence import Evidence
from edgekit.model.model import Model, save_proto
from edgekit.model.tensors import Tensors
from edgekit.report.html import render_verify
from edgekit.report.text import list_verify_remarks
from edgekit.serialize import to_json
from edgekit.target import load_target
from edgekit.verify.attribute import attribute_loss, share_loss
from edgekit.verify.layers.comparison import compare_with_float
from edgekit.verify.report import AttributionStep, Step
from edgekit.verify.run import verify_bundle


@pytest.fixture(scope="module")
def steps(models: tuple[Model, Model]) -> dict[Step, Model]:
    return {"prepare": models[0], "quantize": models[1]}


@pytest.fixture(scope="module")
def honest(steps: dict[Step, Model], tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return bundle_of(steps, steps["quantize"], tmp_path_factory.mktemp("honest"))


def bundle_of(steps: dict[Step, Model], quantized: Model, folder: Path, *, float_model: Model | None = None) -> Bundle:
    contents = replace(
        make_contents(folder, model=steps["prepare"], samples=make_images(6), labels=tuple(range(6))),
        precision="int8",
        files={"onnx": (quantized.path,)},
        check=check_model(quantized, load_target("nnapi")),
    )
    evidence = compare_with_float(float_model or steps["prepare"], quantized, contents.golden)
    return write_bundle(replace(contents, layers=encode_json(evidence)), folder / "bundle")


def test_the_loss_of_an_honest_device_is_that_of_quantization(steps: dict[Step, Model], honest: Bundle) -> None:
    report, known = verify_bundle(honest, [InProcess()]), KnownOutputs(room_bytes=1 << 20)
    explained = attribute_loss(honest, report, steps, {"prepare": known})
    # The float model runs once for all bundles of a build.
    assert (
        attribute_loss(honest, report, steps, {"prepare": known}) == explained == attribute_loss(honest, report, steps)
    )
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


def test_a_broken_layer_is_named_in_a_report_that_fails(steps: dict[Step, Model], tmp_path: Path) -> None:
    broken = break_layer(steps["quantize"], tmp_path / "model.onnx", "conv3", lambda weight: -weight)
    bundle = bundle_of(steps, broken, tmp_path)
    report = verify_bundle(bundle, [InProcess()])
    assert not report.passed
    assert report.first_bad_layer == "conv3"
    assert any(line.startswith("layer 'conv3' (Conv) is the first whose") for line in list_verify_remarks(report))


def test_layers_that_onnx_runtime_does_not_trace_are_not_left_out_in_silence(
    steps: dict[Step, Model], tmp_path: Path
) -> None:
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
    assert str(escape(note)) in render_verify(report)


def test_a_bundle_without_an_onnx_file_says_that_no_layers_were_compared(steps: dict[Step, Model]) -> None:
    golden = Golden(folder=Path(), samples=0, inputs=(), outputs=(), has_labels=False)
    evidence = compare_with_float(steps["prepare"], None, golden)
    assert evidence.note == "the layers were not compared: the bundle holds no ONNX file"


def step(name: Step, sqnr_db: float | None, top1: float = 1.0, accuracy: float = 0.9) -> AttributionStep:
    return AttributionStep(step=name, sqnr_db=sqnr_db, top1_agreement=top1, accuracy=accuracy)


def test_shares_add_up_even_where_a_step_takes_error_away() -> None:
    shared = share_loss([step("prepare", 200.0), step("quantize", 20.0), step("convert", None), step("provider", 30.0)])
    assert [item.noise_share for item in shared] == [pytest.approx(0.0), pytest.approx(10.0), None, pytest.approx(-9.0)]
    shared = share_loss(
        [step("prepare", 120.0), step("quantize", 25.0, 0.95, 0.85), step("device", 20.0, 0.9, 0.87)], 0.91
    )
    assert sum(item.top1_loss or 0.0 for item in shared) == pytest.approx(0.1)
    assert sum(item.accuracy_loss or 0.0 for item in shared) == pytest.approx(0.04)


def test_equal_outputs_have_no_error_that_a_step_could_make() -> None:
    shared = share_loss([step("prepare", 200.0), step("quantize", 30.0), step("device", 200.0)])
    assert [item.noise_share for item in shared] == [None, None, None]


def test_without_a_finite_run_there_is_nothing_to_attribute(steps: dict[Step, Model], honest: Bundle) -> None:
    report = verify_bundle(honest, [])
    assert attribute_loss(honest, report, steps) == report
    assert report.advice is None
    device = InProcess(lie=lambda rows: [{"y": row["y"] * np.float32(np.nan)} for row in rows])
    report = verify_bundle(honest, [device])
    assert attribute_loss(honest, report, steps) == report
    assert replace(report, runs=()).passed is False
