"""The WebGPU plug-in on this machine: what it takes is what the rules say, and it computes what the CPU does."""

import importlib.util
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tiny_models import parse_model

from edgekit._ort import CPU_PROVIDER, CpuSession, SessionSettings
from edgekit.check.check import check_model
from edgekit.devices.find import find_device
from edgekit.devices.local import provider
from edgekit.devices.local.provider import find_swiftshader
from edgekit.devices.observe import describe_job, match_nodes, observe_placement
from edgekit.model.model import Model, load_model
from edgekit.target import load_target

needs_webgpu = pytest.mark.skipif(
    importlib.util.find_spec("onnxruntime_ep_webgpu") is None or not find_swiftshader(),
    reason="onnxruntime-ep-webgpu is not installed, or SwiftShader: pip install 'edgekit[webgpu]'",
)
NET = """<ir_version: 8, opset_import: ["" : 17]> net (float[1,2,4,4] x) => (float[1,2,4,4] y)
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
    job = describe_job(model, target, samples=1)
    run = find_device("webgpu", target).run_job(job, tmp_path)
    assert run.failure is None
    assert any(node.provider != CPU_PROVIDER for node in run.placement)
    (given,), (made,) = job.samples.read(), run.outputs.read()
    # The Q between rounds: what lies near a half may go either way, a step of the scale.
    assert np.abs(made["y"] - CpuSession(model.path, SessionSettings()).run(given)["y"]).max() <= 0.0501


def test_without_a_driver_nothing_is_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
