"""Two models are compared by what their outputs are for, and by the places of their outputs."""

from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnx
import pytest
from bundle_models import make_contents, make_samples
from msgspec.structs import replace
from tiny_models import save_net
from verify_devices import InProcess

from edgekit.bundle.folder import write_bundle
from edgekit.bundle.golden import make_golden
from edgekit.check.check import check_model
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.outputs import Reading
from edgekit.report.text import list_comparison_remarks
from edgekit.target import load_target
from edgekit.tune.race import judge_outputs
from edgekit.verify.run import verify_bundle
from edgekit.verify.two_models import compare_models

WEIGHT = np.random.default_rng(1).normal(size=(8, 5)).astype(np.float32)


def save_softmax(weight: npt.NDArray[np.float32], path: Path) -> Model:
    text = "(float[1,8] x) => (float[1,5] y) { [mul] xw = MatMul(x, w) [softmax] y = Softmax<axis = 1>(xw) }"
    return save_net(text, path, w=weight)


def test_two_classes_exchanged_fail_without_any_limit_and_sharper_ones_pass(tmp_path: Path) -> None:
    first = save_softmax(WEIGHT, tmp_path / "first.onnx")
    sharper = compare_models(first, save_softmax(3 * WEIGHT, tmp_path / "sharper.onnx"), make_samples(64))
    assert sharper.judge(None) == "pass"
    assert sharper.judge(30.0) == "fail"
    exchanged = compare_models(
        first, save_softmax(WEIGHT[:, [1, 0, 2, 3, 4]], tmp_path / "other.onnx"), make_samples(64)
    )
    assert exchanged.judge(None) == "fail"
    assert next(list_comparison_remarks(exchanged)).startswith("output 'y' has top-1 agreement 0.")


def test_a_setting_is_tuned_by_what_the_outputs_of_a_bundle_are_for(tmp_path: Path) -> None:
    readings = {"y": Reading(kind="classes", axis=1)}
    bundle = write_bundle(replace(make_contents(tmp_path), readings=readings), tmp_path / "read")
    limits = bundle.manifest.thresholds
    rows = [{"y": row} for row in np.random.default_rng(2).normal(size=(16, 1, 5)).astype(np.float32)]

    def give(factor: float) -> Samples:
        return Samples(source="t", count=16, read=lambda: ({"y": np.float32(factor) * row["y"]} for row in rows))

    ratio, fault = judge_outputs(give(1), give(3), limits, bundle)
    assert ratio == pytest.approx(-6.0, abs=0.1)
    assert fault is None
    for factor, kept in ((3.0, None), (-1.0, bundle)):
        _, fault = judge_outputs(give(1), give(factor), limits, kept)
        assert fault is not None


@pytest.fixture
def model(tmp_path: Path) -> Model:
    text = "(float[1,8] x) => (float[1,8] up, float[1,8] down) { [up] up = Relu(x) [down] down = Neg(x) }"
    return save_net(text, tmp_path / "two.onnx")


def reorder(model: Model, path: Path) -> Model:
    proto = onnx.load(str(model.path))
    outputs = list(proto.graph.output)[::-1]
    del proto.graph.output[:]
    proto.graph.output.extend(outputs)
    onnx.save(proto, str(path))
    return load_model(path)


def test_a_model_with_its_outputs_in_another_order_is_another_model(model: Model, tmp_path: Path) -> None:
    other = reorder(model, tmp_path / "other.onnx")
    found = compare_models(model, other, make_samples())
    assert not found.reaches(None)
    assert {output.name: output.mismatch for output in found.outputs} == {
        "up": "is output 1, in the reference 0",
        "down": "is output 0, in the reference 1",
    }
    assert compare_models(model, model, make_samples()).reaches(None)


def test_a_file_of_a_bundle_with_its_outputs_in_another_order_fails(model: Model, tmp_path: Path) -> None:
    other = reorder(model, tmp_path / "two.other.onnx")
    contents = replace(
        make_contents(tmp_path),
        source=model,
        files={"onnx": (other.path,)},
        golden=make_golden(model, make_samples(), tmp_path / "own"),
        check=check_model(model, load_target("nnapi")),
    )
    report = verify_bundle(write_bundle(contents, tmp_path / "two-nnapi"), [InProcess()])
    assert not report.passed
    assert "its outputs are in the order down, up, in the manifest up, down" in report.failures[0]
