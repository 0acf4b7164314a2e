import math
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from msgspec.structs import replace
from onnx import helper, numpy_helper
from tiny_models import save_net
from verify_devices import InProcess
from verify_models import LAYERS, job_of, make_images

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.devices.device import DeviceRun, Job
from edgekit.graph.graph import view_model, view_part
from edgekit.model.model import Model, read_proto
from edgekit.verify.layers.on_device import find_least_db, locate_on_device, plan_cuts, save_prefix
from edgekit.verify.metrics.outputs import OutputReport


class Miscomputing(InProcess, frozen=True, kw_only=True):
    """Turns the sign of the last input of one layer, its weights or what it reads, before it runs."""

    layer: str

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        proto = onnx.load(str(job.model))
        assert [spec.name for spec in job.outputs] == [value.name for value in proto.graph.output]
        for node in proto.graph.node:
            if node.name == self.layer:
                proto.graph.node.append(helper.make_node("Neg", [node.input[-1]], ["edgekit.turned"]))
                node.input[-1] = "edgekit.turned"
        onnx.save(proto, str(work / "turned.onnx"))
        return super().run_job(replace(job, model=work / "turned.onnx"), work)


@pytest.mark.parametrize("layer", ["conv0", "conv3", "flatten"])
@pytest.mark.parametrize("form", [0, 1], ids=["float", "int8"])
def test_the_layer_is_found_in_few_runs(models: tuple[Model, Model], tmp_path: Path, layer: str, form: int) -> None:
    work = tmp_path / "made" / "for it"
    located = locate_on_device(Miscomputing(layer=layer), job_of(models[form]), work)
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


class Weakening(InProcess, frozen=True, kw_only=True):
    """Multiplies the weights of some layers by a factor before it runs; every layer whose name fits is weakened."""

    layer: str
    factor: float

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        proto = onnx.load(str(job.model))
        read = {node.input[1] for node in proto.graph.node if node.name.startswith(self.layer)}
        for tensor in proto.graph.initializer:
            if tensor.name in read:
                weak = numpy_helper.to_array(tensor) * np.float32(self.factor)
                tensor.CopyFrom(numpy_helper.from_array(weak, tensor.name))
        onnx.save(proto, str(work / "weak.onnx"))
        return super().run_job(replace(job, model=work / "weak.onnx"), work)


def test_a_layer_is_named_where_the_error_arises_and_none_where_it_grows_or_is_not(
    models: tuple[Model, Model], tmp_path: Path
) -> None:
    located = locate_on_device(Weakening(layer="conv1", factor=0.9), job_of(models[0]), tmp_path)
    assert (located.layer, located.notes) == ("conv1", ())
    located = locate_on_device(Weakening(layer="conv", factor=0.97), job_of(models[0]), tmp_path / "all")
    assert located.layer is None
    (note,) = located.notes
    assert note == "the error grows from layer to layer, at none by 6 dB"
    located = locate_on_device(InProcess(), job_of(models[1]), tmp_path / "none")
    assert (located.layer, located.runs) == (None, 1)


def test_cuts_part_no_node_from_its_rounding_and_beginnings_compute_what_the_whole_does(
    models: tuple[Model, Model], tmp_path: Path
) -> None:
    graph = read_proto(models[1]).graph
    rounded = {node.input[0] for node in graph.node if node.op_type == "QuantizeLinear"}
    cuts = plan_cuts(view_part(graph))
    assert len(cuts) >= LAYERS
    assert not any(rounded.intersection(cut.outputs) for cut in cuts[:-1])
    assert cuts[-1].outputs == ("y",)
    sample = next(iter(make_images(1)))
    for model in models:
        for index, cut in enumerate(plan_cuts(view_model(read_proto(model)))):
            part = save_prefix(model, cut, tmp_path / f"{model.name}{index}.onnx")
            found = CpuSession(part.path, SessionSettings(level=Level.DISABLED)).run(sample)
            assert tuple(found) == cut.outputs


def test_a_branching_model_with_a_body_and_constants_is_cut(tmp_path: Path) -> None:
    text = """(float[1,4] x) => (float[1,4] y) <float two = {2}> {
      flag = Constant<value = bool {1}>() [neg] a = Neg(x)
      [if] b = If (flag) <then_branch = then () => (float[1,4] m) { m = Mul(a, two) },
                          else_branch = other () => (float[1,4] n) { n = Abs(a) }>
      [add] y = Add(a, b) }"""
    model = save_net(text, tmp_path / "m.onnx")
    cuts = plan_cuts(view_part(read_proto(model).graph))
    assert [(cut.layer, cut.outputs) for cut in cuts] == [("neg", ("a",)), ("if", ("a", "b")), ("add", ("y",))]
    part = save_prefix(model, cuts[1], tmp_path / "part.onnx")
    session = CpuSession(part.path, SessionSettings())
    assert session.run({"x": np.ones((1, 4), np.float32)})["b"].tolist() == [[-2.0] * 4]
