"""Providers of this machine as devices: what is offered, what is missing and named, and what a run on one says."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import Stub, float_conv, make_job
from fixture_types import present
from tiny_models import parse_model

from edgekit._ort import CPU_PROVIDER, CpuSession, SessionSettings
from edgekit.check.check import check_model
from edgekit.devices import observe
from edgekit.devices.device import Job, Missing
from edgekit.devices.find import (
    DEVICES,
    choose_here,
    default_target,
    find_device,
    list_devices,
    load_target_here,
    serve_device,
)
from edgekit.devices.local import provider
from edgekit.devices.local.host import COREML, UNITS, CoreMl, coreml_job, coreml_options
from edgekit.devices.local.provider import (
    PROVIDERS,
    Found,
    FoundDevice,
    LocalProvider,
    ask_provider,
    find_missing_provider,
    find_swiftshader,
    list_offered,
)
from edgekit.devices.observe import match_nodes, observe_placement
from edgekit.devices.process.run import STANDALONE, check_options, describe_job, run_python
from edgekit.devices.self_test import try_device
from edgekit.errors import DeviceError, TargetError, UsageError
from edgekit.evidence import Evidence
from edgekit.model.model import Model, load_model
from edgekit.recipe import Recipe
from edgekit.target import load_target

CUDA = "CUDAExecutionProvider"

needs_openvino = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_openvino") is None,
    reason="onnxruntime-ep-openvino is not installed: pip install onnxruntime-ep-openvino==1.8.1",
)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return make_job(float_conv(tmp_path / "conv.onnx"), default_target("host:cuda"))


def test_every_row_of_the_table_is_a_device_that_runs_its_provider() -> None:
    for name, row in PROVIDERS.items():
        assert name in DEVICES
        assert default_target(name).provider == row.name
        assert bool(row.module) != bool(row.parts or row.systems == ("win32",)), "a plug-in, or built in"
    with pytest.raises(UsageError, match=f"'host:cuda' runs {CUDA}, and target 'qnn' uses"):
        find_device("host:cuda", load_target("qnn"))
    assert {"openvino:cpu", "openvino:gpu", "openvino:npu"} <= DEVICES.keys()
    assert find_device("openvino:npu", default_target("openvino:npu")).evidence is Evidence.DEVICE
    listed = {status.name for status in list_devices()}
    assert {"openvino", "host:cuda", "host:directml"} <= listed
    assert "openvino:gpu" not in listed


def test_a_provider_that_is_not_there_names_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    assert find_missing_provider("host:directml", "") == Missing(
        reason="DmlExecutionProvider runs only on Windows", command=None
    )
    missing = present(find_missing_provider("host:cuda", ""))
    assert "was built without CUDAExecutionProvider" in missing.reason
    assert missing.command == "pip uninstall -y onnxruntime && pip install onnxruntime-gpu"
    missing = present(find_missing_provider("host:tensorrt-rtx", ""))
    assert "the wheel onnxruntime-ep-nv-tensorrt-rtx-cu12 is not installed" in missing.reason


def test_a_library_that_cuda_lacks_is_named_before_a_run(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # It says that it was built with CUDA, as onnxruntime-gpu does.
    monkeypatch.setattr(provider, "AVAILABLE_PROVIDERS", (CUDA, CPU_PROVIDER))
    monkeypatch.setattr(provider, "ask_provider", ask_provider.__wrapped__)
    monkeypatch.setattr(sys, "platform", "linux")
    with pytest.raises(DeviceError, match=r"libonnxruntime_providers_cuda\.so: cannot open") as caught:
        find_device("host:cuda", job.target).run_job(job, tmp_path)
    assert "cudnn" in caught.value.hint
    (found,) = (one for one in list_offered() if one.provider == CUDA)
    assert "cannot be loaded" in found.failure


def test_a_library_of_a_library_is_named_too(tmp_path: Path) -> None:
    (tmp_path / "none.c").write_text("void none(void) {}")
    (tmp_path / "part.c").write_text("void none(void); void part(void) { none(); }")
    for name, needed in (("libcublas_of_nobody", ()), ("libpart", ("-Wl,--no-as-needed", "-lcublas_of_nobody"))):
        source = tmp_path / ("part.c" if needed else "none.c")
        argv = ["cc", "-shared", "-o", tmp_path / f"{name}.so", source, f"-L{tmp_path}", *needed]
        subprocess.run([str(word) for word in argv], check=True)
    (tmp_path / "libcublas_of_nobody.so").unlink()
    asked = {"provider": CUDA, "library": "", "cpu_vendor": 0, "parts": [str(tmp_path / "libpart.so")]}
    argv = [sys.executable, "-P", str(STANDALONE / "ort_provider.py"), json.dumps(asked)]
    said = json.loads(subprocess.run(argv, check=True, capture_output=True, text=True).stdout)
    assert "libcublas_of_nobody.so: cannot open shared object file" in said["failure"]


def test_a_session_that_has_the_cpu_alone_is_a_failed_run(job: Job, tmp_path: Path) -> None:
    run = run_python(Stub(), job, describe_job(job, provider=CUDA), tmp_path)
    assert run.failure == f"refused: asked for {CUDA}, and the session has {CPU_PROVIDER} alone"
    assert run.outputs.count == 0


def test_a_provider_that_dies_while_it_is_asked_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import os; os.abort()")
    monkeypatch.setattr(provider, "_PROGRAM", tmp_path / "program.py")
    assert "was ended by SIGABRT" in ask_provider.__wrapped__("host:cuda").failure
    (tmp_path / "program.py").write_text("print('{')")
    assert ask_provider.__wrapped__("host:cuda") == Found(failure="the process that asks it gave no answer")


def test_an_option_that_the_provider_would_ignore_is_refused() -> None:
    with pytest.raises(TargetError, match="'load_confg' is no option of OpenVINOExecutionProvider"):
        check_options("OpenVINOExecutionProvider", {"load_confg": "{}"}, ("load_config",))
    check_options("OpenVINOExecutionProvider", {"load_config": "{}"}, ("load_config",))


def test_what_is_installed_is_listed_with_its_device() -> None:
    found = {one.provider: one for one in list_offered()}
    assert (found[CPU_PROVIDER].device, found[CPU_PROVIDER].failure) == ("host", "")
    assert CUDA not in found


@needs_openvino
def test_openvino_runs_here_and_says_what_it_finds() -> None:
    (found,) = (one for one in list_offered() if one.device == "openvino")
    assert found.failure == ""
    assert found.hardware[0].startswith("cpu: ")
    test = try_device(serve_device("openvino"))
    assert [check.name for check in test.checks if not check.passed] == []


@needs_openvino
def test_a_device_that_openvino_does_not_find_is_named() -> None:
    kinds = {one.kind for one in ask_provider("openvino").devices}
    missing = find_missing_provider("openvino", "npu")
    assert (missing is None) == ("npu" in kinds)
    assert missing is None or "finds no npu on this machine: it has cpu" in missing.reason


def test_this_machine_is_never_told_to_use_a_gpu_that_it_lacks(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(provider, "AVAILABLE_PROVIDERS", (CUDA, "TensorrtExecutionProvider", CPU_PROVIDER))
    # CUDA's libraries load without a GPU, as they do in a container.
    monkeypatch.setattr(provider, "ask_provider", lambda _: Found())
    monkeypatch.setattr(provider, "_DEV", tmp_path)
    here = choose_here(Recipe(targets=("auto", "qnn")))
    assert {"cpu", "qnn"} <= {*here.targets}
    assert not {"cuda", "tensorrt", "directml", "coreml"} & {*here.targets}
    missing = present(find_missing_provider("host:cuda", ""))
    assert missing.reason == f"this machine has no GPU that {CUDA} computes on"
    (tmp_path / "nvidiactl").touch()
    assert {"cpu", "cuda", "tensorrt"} <= {*choose_here(Recipe(targets=("auto",))).targets}
    # Where one target is wanted it is the one that has the others behind it.
    assert choose_here(Recipe(targets=("auto",)), alone=True).targets == ("tensorrt",)
    assert (load_target_here("auto").name, load_target_here("cuda").name) == ("tensorrt", "cuda")


def test_a_software_gpu_is_not_recommended_as_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LocalProvider, "find_missing", lambda _: None)
    for kind, chosen in (("cpu", False), ("gpu", True)):
        found = Found(devices=(FoundDevice(kind=kind, name="x", version="1"),))
        monkeypatch.setattr(provider, "ask_provider", lambda _, found=found: found)
        targets = choose_here(Recipe(targets=("auto",))).targets
        # OpenVINO is made for Intel's CPUs; SwiftShader plays the GPU for WebGPU.
        assert ("webgpu" in targets, "openvino" in targets) == (chosen, True)


def test_openvino_runs_on_the_cpu_unless_another_device_is_named() -> None:
    assert choose_here(Recipe(targets=("auto",))).settings["arch"] in load_target("cpu").parameters["arch"].choices
    named = Recipe(targets=("auto",), settings={"arch": "arm64"})
    assert choose_here(named).settings == {"arch": "arm64"}
    assert choose_here(Recipe(targets=("cpu",))) == Recipe(targets=("cpu",))


needs_webgpu = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_webgpu") is None or not find_swiftshader(),
    reason="onnxruntime-ep-webgpu is not installed, or SwiftShader: pip install 'edgekit[webgpu]'",
)
NET = """net (float[1,2,4,4] x) => (float[1,2,4,4] y)
  <float[2,2,1,1] w = {1, 2, 3, 4}, float s = {0.05}, uint8 z = {3}> {
    [conv] c = Conv(x, w)
    [q] q = QuantizeLinear(c, s, z)
    [dq] d = DequantizeLinear(q, s, z)
    [relu] y = Relu(d)
  }"""


@pytest.fixture
def model(tmp_path: Path) -> Model:
    return load_model(parse_model(NET, tmp_path / "net.onnx"))


@needs_webgpu
def test_the_plug_in_takes_what_the_rules_say_and_computes_what_the_cpu_does(model: Model, tmp_path: Path) -> None:
    target = load_target("webgpu")
    seen = observe_placement(model, target, find_device("webgpu", target), samples=0)
    taken = {node.name: (node.taken, real) for node, real in match_nodes(check_model(model, target), seen.providers)}
    assert taken == {"conv": (True, True), "q": (False, False), "dq": (True, True), "relu": (True, True)}
    assert seen.failure is None
    job = observe.describe_job(model, target, samples=1)
    run = find_device("webgpu", target).run_job(job, tmp_path)
    assert run.failure is None
    assert any(node.provider != CPU_PROVIDER for node in run.placement)
    (given,), (made,) = job.samples.read(), run.outputs.read()
    # The Q between rounds: what lies near a half may go either way, a step of the scale.
    assert np.abs(made["y"] - CpuSession(model.path, SessionSettings()).run(given)["y"]).max() <= 0.0501


def test_without_swiftshader_no_variable_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(provider, "_FOLDERS", (tmp_path,))
    find_swiftshader.cache_clear()
    try:
        assert find_swiftshader() == {}
        (tmp_path / "vk_swiftshader_icd.json").touch()
        find_swiftshader.cache_clear()
        found = find_swiftshader()
        assert found in ({}, {**found, "VK_ICD_FILENAMES": str(tmp_path / "vk_swiftshader_icd.json")})
    finally:
        find_swiftshader.cache_clear()


def test_looking_for_swiftshader_starts_no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    found = find_swiftshader.__wrapped__()
    assert set(found) <= {"VK_ICD_FILENAMES", "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER", "LD_LIBRARY_PATH"}


@pytest.fixture
def core_ml(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Job:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    return make_job(float_conv(tmp_path / "f.onnx"), "coreml", precision="fp16")


def cache_of(core_ml: Job, units: str = "") -> str:
    return coreml_job(core_ml, units).provider_options["ModelCacheDirectory"]


def test_the_job_holds_the_format_the_units_and_a_cache_of_its_own(core_ml: Job, tmp_path: Path) -> None:
    options = coreml_job(core_ml).provider_options
    assert (options["ModelFormat"], options["MLComputeUnits"]) == ("MLProgram", "ALL")
    assert Path(options["ModelCacheDirectory"]).is_relative_to(tmp_path / "cache/coreml")
    assert coreml_job(core_ml, "ane").provider_options["MLComputeUnits"] == "CPUAndNeuralEngine"
    network = load_target("coreml", {"model_format": "NeuralNetwork"})
    caches = [cache_of(core_ml), cache_of(core_ml, "cpu"), cache_of(msgspec.structs.replace(core_ml, target=network))]
    assert cache_of(core_ml) == caches[0]
    float_conv(tmp_path / "f.onnx", opset=18)
    caches.append(cache_of(core_ml))
    assert len(set(caches)) == 4


def test_each_compute_units_value_of_core_ml_is_a_device() -> None:
    for units in UNITS:
        assert find_device(f"coreml:{units}", load_target("coreml")).name == f"coreml:{units}"
    with pytest.raises(UsageError, match="did you mean 'coreml:"):
        find_device("coreml:npu", load_target("coreml"))


def test_options_that_make_core_ml_fail_are_refused_before_the_run() -> None:
    with pytest.raises(TargetError, match="did you mean 'ModelFormat'"):
        coreml_options({"ModelFormats": "MLProgram"})
    with pytest.raises(TargetError, match="'MLprogram' is no ModelFormat"):
        coreml_options({"ModelFormat": "MLprogram"})
    with pytest.raises(UsageError, match="no compute units 'npu'"):
        coreml_options({}, "npu")


@pytest.mark.skipif(sys.platform != "darwin", reason="needs a Mac")
def test_the_provider_itself_computes_in_half_precision(core_ml: Job, work: Path) -> None:
    run = CoreMl().run_job(core_ml, work)
    assert run.failure is None
    assert {node.provider for node in run.placement} == {COREML}
