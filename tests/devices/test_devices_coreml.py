"""Core ML: everything but the provider itself is exercised here, the provider only on a Mac."""

import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import Stub, float_conv, make_job

from edgekit._ort import CPU_PROVIDER, CpuSession, SessionSettings
from edgekit.devices.device import Job
from edgekit.devices.find import find_device
from edgekit.devices.local.host import COREML, UNITS, CoreMl, coreml_job, coreml_options
from edgekit.devices.process.run import run_python
from edgekit.errors import TargetError, UsageError
from edgekit.target import load_target


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    return make_job(float_conv(tmp_path / "f.onnx"), "coreml", precision="fp16")


def cache_of(job: Job, units: str = "") -> str:
    return coreml_job(job, units).provider_options["ModelCacheDirectory"]


def test_the_job_holds_the_format_the_units_and_a_cache_of_its_own(job: Job, tmp_path: Path) -> None:
    options = coreml_job(job).provider_options
    assert (options["ModelFormat"], options["MLComputeUnits"]) == ("MLProgram", "ALL")
    assert Path(options["ModelCacheDirectory"]).is_relative_to(tmp_path / "cache/coreml")
    assert coreml_job(job, "ane").provider_options["MLComputeUnits"] == "CPUAndNeuralEngine"
    network = load_target("coreml", {"model_format": "NeuralNetwork"})
    caches = [cache_of(job), cache_of(job, "cpu"), cache_of(msgspec.structs.replace(job, target=network))]
    assert cache_of(job) == caches[0]
    float_conv(tmp_path / "f.onnx", opset=18)
    caches.append(cache_of(job))
    assert len(set(caches)) == 4


def test_every_units_that_a_name_may_have_finds_its_device() -> None:
    for units in UNITS:
        assert find_device(f"coreml:{units}", load_target("coreml")).name == f"coreml:{units}"
    with pytest.raises(UsageError, match="did you mean 'coreml:"):
        find_device("coreml:npu", load_target("coreml"))


def test_options_that_the_provider_would_throw_at_are_refused_before() -> None:
    with pytest.raises(TargetError, match="did you mean 'ModelFormat'"):
        coreml_options({"ModelFormats": "MLProgram"})
    with pytest.raises(TargetError, match="'MLprogram' is no ModelFormat"):
        coreml_options({"ModelFormat": "MLprogram"})
    with pytest.raises(UsageError, match="no compute units 'npu'"):
        coreml_options({}, "npu")


def test_the_same_path_on_another_provider_gives_its_outputs(job: Job, work: Path) -> None:
    request = msgspec.structs.replace(coreml_job(job), provider=CPU_PROVIDER)
    run = run_python(Stub(), job, request, work)
    assert run.failure is None
    session = CpuSession(job.model, SessionSettings())
    for sample, got in zip(job.samples, run.outputs, strict=True):
        np.testing.assert_array_equal(got["y"], session.run(sample)["y"])


@pytest.mark.skipif(sys.platform == "darwin", reason="Core ML is here")
def test_without_core_ml_the_cpu_does_not_run_in_its_place(job: Job, work: Path) -> None:
    run = run_python(Stub(), job, coreml_job(job), work)
    assert run.failure == f"refused: asked for {COREML}, and the session has {CPU_PROVIDER} alone"
    assert run.outputs.count == 0


@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac")
def test_the_provider_itself_computes_in_half_precision(job: Job, work: Path) -> None:
    run = CoreMl().run_job(job, work)
    assert run.failure is None
    assert {node.provider for node in run.placement} == {COREML}
