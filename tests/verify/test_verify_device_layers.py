"""The layer that a device computes otherwise: by tensors inside and by bisection, on real devices and altered ones."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_models import make_bundle
from devices_models import Altering, require_device
from fixture_types import present
from onnx import helper
from tiny_models import save_net
from verify_devices import InProcess, from_list, turning
from verify_models import LAYERS, change_weights, job_of, make_images, turn_weights

from edgekit._ort import CPU_PROVIDER, CpuSession, SessionSettings
from edgekit.devices.device import DeviceRun, Job, PlacedNode
from edgekit.graph.graph import view_part
from edgekit.model.model import Model, read_proto
from edgekit.verify.layers.comparison import LayerReport, Located
from edgekit.verify.layers.on_device import (
    find_device_layer,
    find_least_db,
    find_wrong_layer,
    locate_on_device,
    plan_cuts,
    plan_probes,
    save_prefix,
)
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.run import verify_bundle

FORMS = pytest.mark.parametrize("form", [0, 1], ids=["float", "int8"])


def look(name: str, target: str, job: Job, work: Path, *, layer: str | None = None) -> Located:
    device = require_device(name, target)
    return find_device_layer(device if layer is None else turning(device, layer), job, work)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "target", "form"),
    [
        pytest.param("host", "nnapi", 0, id="host-float", marks=pytest.mark.long),
        pytest.param("host:native", "nnapi", 1, id="native-int8"),
        pytest.param("android:x86_64", "xnnpack", 1, id="xnnpack-int8"),
        pytest.param("qnn-htp-sim", "qnn", 1, id="qnn-int8", marks=pytest.mark.long),
    ],
)
def test_the_altered_layer_is_named_and_no_other(
    models: tuple[Model, Model], tmp_path: Path, device: str, target: str, form: int
) -> None:
    job = job_of(models[form], target)
    honest = look(device, target, job, tmp_path / "honest")
    assert (honest.layer, honest.found_by) == (None, "tensors")
    located = look(device, target, job, tmp_path / "altered", layer="conv2")
    assert (located.layer, located.found_by, located.runs) == ("conv2", "tensors", 3)
    own = {layer.name: layer.own_sqnr_db or 0.0 for layer in located.layers}
    far = {layer.name: layer.sqnr_db or 0.0 for layer in located.layers}
    assert own.pop("conv2") < 0.0
    assert min(own.values()) > 40.0
    assert max(far[f"conv{index}"] for index in range(2, LAYERS)) < 0.0


@pytest.mark.slow
@pytest.mark.long
def test_emulated_arm_gives_the_tensors_inside(models: tuple[Model, Model], tmp_path: Path) -> None:
    job = job_of(models[1], samples=make_images(1))
    located = look("arm64", "nnapi", job, tmp_path, layer="conv3")
    assert (located.layer, located.found_by) == ("conv3", "tensors")


def test_slices_find_what_one_run_finds(models: tuple[Model, Model], tmp_path: Path) -> None:
    asked: list[list[str]] = []

    def note(job: Job, _run: DeviceRun) -> dict[str, Any]:
        asked.append([spec.name for spec in job.outputs])
        left = PlacedNode(name="c", op="Conv", domain="", provider=CPU_PROVIDER)
        return {"placement": (left,) * (1 + (len(job.outputs) > 1))}

    device, job = turning(InProcess(retell=note), "conv3"), job_of(models[1])
    whole = find_device_layer(device, job, tmp_path / "whole")
    asked.clear()
    sliced = find_device_layer(device, job, tmp_path / "sliced", slice_bytes=4000)
    # Of what lies before a slice the device gives only what its layers read.
    assert asked[0] == ["y"]
    assert max(map(len, asked[:-2])) == 3
    assert (whole.layer, sliced.layer) == ("conv3", "conv3")
    assert (whole.runs, whole.cuts, sliced.runs) == (3, 0, 7)
    note_of_one = "with tensors inside as outputs more nodes ran on the CPU: 1 Conv"
    assert (sliced.layers, sliced.notes, whole.notes) == (whole.layers, (note_of_one,), (note_of_one,))


@pytest.mark.slow
def test_one_wrong_weight_is_enough(models: tuple[Model, Model], tmp_path: Path) -> None:
    def flip(weight: np.ndarray) -> np.ndarray:
        """Flips one bit of one weight, which most of the layer's outputs do not show."""
        weight[5, 3, 1, 1] ^= 64
        return weight

    device = Altering(device=InProcess(), change=lambda proto: change_weights(proto, "conv2", flip))
    assert find_device_layer(device, job_of(models[1], samples=make_images(1)), tmp_path).layer == "conv2"


def withhold(job: Job, run: DeviceRun) -> dict[str, Any]:
    """Gives nothing but the outputs that the model had."""
    names = [spec.name for spec in job.outputs]
    assert names == [*next(iter(run.outputs))]
    return {"outputs": from_list([{"y": row["y"]} if "y" in names else row for row in run.outputs])}


@pytest.mark.slow
@FORMS
def test_a_device_that_gives_outputs_only_is_bisected(models: tuple[Model, Model], tmp_path: Path, form: int) -> None:
    device, job = turning(InProcess(retell=withhold), "conv1"), job_of(models[form])
    located = find_device_layer(device, job, tmp_path / "cut")
    assert (located.layer, located.found_by) == ("conv1", "cuts")
    assert located.notes == ("the model was bisected, because the device does not give tensors inside",)
    assert located.runs <= 2 + 2 + math.log2(located.cuts)
    refused = find_device_layer(device, job, tmp_path / "kept", may_cut=False)
    assert (refused.layer, refused.runs, refused.cuts, refused.layers) == (None, 2, 0, ())
    assert "to bisect the model: edgekit verify --layers" in refused.notes[0]


def fuse(proto: onnx.ModelProto) -> None:
    """Turns a layer, but not where tensors inside are given out: a fused kernel with a fault."""
    if not {"r1", "r2", "r3"} <= {value.name for value in proto.graph.output}:
        turn_weights(proto, "conv2")


@pytest.mark.slow
def test_a_device_that_dies_or_whose_outputs_change_is_bisected(models: tuple[Model, Model], tmp_path: Path) -> None:
    located = find_device_layer(InProcess(failure="was ended by SIGSEGV"), job_of(models[0]), tmp_path)
    assert located.layer == "conv0"
    assert "was ended by SIGSEGV" in located.notes[0]
    located = find_device_layer(Altering(device=InProcess(), change=fuse), job_of(models[0]), tmp_path / "fused")
    assert (located.layer, located.found_by) == ("conv2", "cuts")
    assert "the outputs change when tensors inside become outputs" in located.notes[0]


@pytest.mark.slow
def test_cuts_part_no_group(models: tuple[Model, Model], tmp_path: Path) -> None:
    floats = [(probe.layer, probe.op, probe.tensor) for probe in plan_probes(models[0])]
    convs = [(f"conv{index}", "Conv", f"r{index}") for index in range(LAYERS)]
    assert floats == [*convs, ("pool", "GlobalAveragePool", "pooled"), ("flatten", "Flatten", "y")]
    quantized = plan_probes(models[1])
    assert [probe.layer for probe in quantized] == ["x", *(f"conv{i}" for i in range(LAYERS)), "pool", "flatten"]
    assert all(probe.grid is not None for probe in quantized)
    body = "[mul] m = MatMul(x, w) [bias] a = Add(m, b) [gate] s = Sigmoid(a) [silu] y = Mul(a, s)"
    weights = {"w": np.eye(4, dtype=np.float32), "b": np.ones(4, np.float32)}
    model = save_net(f"(float[1,4] x) => (float[1,4] y) {{ {body} }}", tmp_path / "silu.onnx", **weights)
    assert [(probe.layer, probe.tensor) for probe in plan_probes(model)] == [("mul", "a"), ("gate", "s"), ("silu", "y")]


@pytest.mark.slow
def test_a_verification_names_the_layer_of_a_device_that_is_wrong(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    (run,) = verify_bundle(bundle, [turning(InProcess(), "mul")]).runs
    assert present(run.located).layer == "mul"
    assert any(
        "the first layer that the device computes otherwise than this machine is 'mul'" in line for line in run.failures
    )
    (good,) = verify_bundle(bundle, [InProcess()]).runs
    assert good.located is None
    (asked,) = verify_bundle(bundle, [InProcess()], layers=True).runs
    assert (present(asked.located).layer, asked.passed) == (None, True)


@pytest.mark.slow
def test_four_samples_are_run_however_many_there_are(models: tuple[Model, Model], tmp_path: Path) -> None:
    counts: list[int] = []

    def count(job: Job, _run: DeviceRun) -> dict[str, Any]:
        counts.append(job.samples.count)
        return {}

    find_device_layer(InProcess(retell=count), job_of(models[0], samples=make_images(64)), tmp_path)
    assert counts == [4, 4]


@pytest.mark.parametrize("layer", ["conv0", "conv3", "flatten"])
@FORMS
def test_the_layer_is_found_in_few_runs(models: tuple[Model, Model], tmp_path: Path, layer: str, form: int) -> None:
    def change(proto: onnx.ModelProto) -> None:
        """Turns the sign of the last input of one layer, its weights or what it reads."""
        for node in (node for node in proto.graph.node if node.name == layer):
            proto.graph.node.append(helper.make_node("Neg", [node.input[-1]], ["edgekit.turned"]))
            node.input[-1] = "edgekit.turned"

    device, work = Altering(device=InProcess(), change=change), tmp_path / "made" / "for it"
    located = locate_on_device(device, job_of(models[form]), work)
    assert located.layer == layer
    assert 1 + math.floor(math.log2(located.cuts)) <= located.runs <= 2 + math.log2(located.cuts)


@pytest.mark.parametrize(
    ("figures", "least"),
    [
        ({"sqnr_db": 15.0}, 15.0),
        ({"exact_match": 1.0}, 50.0),
        ({"sqnr_db": 60.0, "exact_match": 1.0}, 50.0),
        ({"exact_match": 0.5}, -math.inf),
        ({"sqnr_db": 50.0, "exact_match": 0.5}, -math.inf),
        ({"sqnr_db": 50.0, "non_finite": 1}, -math.inf),
        ({"sqnr_db": 50.0, "mismatch": "has another shape"}, -math.inf),
    ],
)
def test_the_worst_output_of_a_beginning_counts(figures: dict[str, Any], least: float) -> None:
    report = OutputReport(name="y", samples=2, **figures)
    assert find_least_db([report, OutputReport(name="z", samples=2, sqnr_db=50.0)]) == least
    assert find_least_db([]) == -math.inf
    assert find_least_db([OutputReport(name="z", samples=2, exact_match=1.0)]) == math.inf


@pytest.mark.parametrize(
    ("ratios", "steps", "least_db", "named"),
    [
        ([60.0, 29.9, 10.0, None], None, 40.0, "1"),
        ([60.0, 30.0, None, 10.0], None, 40.0, "2"),
        ([60.0, 40.1, 61.0], None, 14.0, None),
        ([60.0, 40.0, 61.0], None, 14.0, "1"),
        ([60.0, 40.0, 61.0], None, 15.0, None),
        ([61.0, 40.0, 60.0, 45.0], None, 14.0, "1"),
        ([60.0, 9.0, 61.0], (2.0, 0.5), 40.0, None),
        ([60.0, 9.0, 61.0], (2.0, 0.5), 14.0, "1"),
        ([60.0, 61.0], (2.1, 0.5), 40.0, "0"),
        ([60.0, 61.0], (2.0, 0.6), 40.0, "0"),
        ([], None, -math.inf, None),
    ],
)
def test_a_layer_is_wrong_by_its_own_error_or_far_below_the_others_where_outputs_are(
    ratios: list[float | None], steps: tuple[float, float] | None, least_db: float, named: str | None
) -> None:
    channel_steps, offset_steps = ((steps[0], 0.1), steps[1]) if steps else (None, None)
    layers = [
        LayerReport(
            name=str(place), op="Conv", tensor="t", sqnr_db=0.0, max_abs=0.0, own_sqnr_db=ratio, own_bias=0.0,
            offset_steps=offset_steps, channel_steps=channel_steps,
        )
        for place, ratio in enumerate(ratios)
    ]  # fmt: skip
    assert find_wrong_layer(layers, least_db) == named


def weakening(factor: float, *layers: int) -> Altering:
    """Multiplies the weights of some layers by a factor."""

    def change(proto: onnx.ModelProto) -> None:
        for index in layers:
            change_weights(proto, f"conv{index}", lambda weight: weight * np.float32(factor))

    return Altering(device=InProcess(), change=change)


def test_a_layer_is_named_where_the_error_arises(models: tuple[Model, Model], tmp_path: Path) -> None:
    located = locate_on_device(weakening(0.9, 1), job_of(models[0]), tmp_path)
    assert (located.layer, located.notes) == ("conv1", ())
    located = locate_on_device(weakening(0.97, *range(LAYERS)), job_of(models[0]), tmp_path / "all")
    assert located.layer is None
    (note,) = located.notes
    assert note == "the error grows from layer to layer, at none by 6 dB"
    located = locate_on_device(InProcess(), job_of(models[1]), tmp_path / "none")
    assert (located.layer, located.runs) == (None, 1)


def test_a_branching_model_with_a_body_and_constants_is_cut(tmp_path: Path) -> None:
    text = """(float[1,4] x) => (float[1,4] y) <float two = {2}> {
      flag = Constant<value = bool {1}>() [neg] a = Neg(x)
      [if] b = If (flag) <then_branch = then () => (float[1,4] m) { m = Mul(a, two) },
                          else_branch = other () => (float[1,4] n) { n = Abs(a) }>
      [add] y = Add(a, b) }"""
    model = save_net(text, tmp_path / "m.onnx")
    cuts = plan_cuts(view_part(read_proto(model).graph), plan_probes(model))
    assert cuts == [("neg", ("a",)), ("if", ("a", "b")), ("add", ("y",))]
    part = save_prefix(model, cuts[1][1], tmp_path / "part.onnx")
    session = CpuSession(part.path, SessionSettings())
    assert session.run({"x": np.ones((1, 4), np.float32)})["b"].tolist() == [[-2.0] * 4]
