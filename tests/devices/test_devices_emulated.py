"""The emulated arithmetic against numpy's."""

import json
from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import ENDS, SHAPE, float_conv, make_job, qdq_conv, round_to_half, text_model
from onnx import helper
from other_machine.client import Adb
from other_machine.machine import start_machine

from edgekit._ort import CPU_PROVIDER, CpuSession, SessionSettings
from edgekit.cli.main import run_command
from edgekit.devices.device import Job
from edgekit.devices.local.emulated import Emulated
from edgekit.devices.remote.examine import PhoneFacts, judge_facts, read_facts
from edgekit.model.tensors import Array
from edgekit.profile.events import read_trace


def run_one(job: Job, work: Path) -> Array:
    run = Emulated().run_job(job, work)
    assert run.failure is None
    return next(iter(run.outputs))["y"]


def text_job(path: Path, body: str, x: Array, *, left: tuple[str, ...] = (), target: str = "qnn") -> Job:
    return make_job(text_model(path, body), target, [{"x": x}], precision="fp16", left=left)


ADDED = "(float[1,3] x) => (float[1,3] y) <float[3] w = {0.3, 1, 1}> { y = Add(x, w) }"
BRANCHES = """(float[1,2] x) => (float[1,2] y) <float[1] big = {1}> {
    s = ReduceSum <keepdims = 0> (x)
    c = Greater(s, big)
    y = If (c) <
        then_branch = t () => (float[1,2] a) { a = Neg(x) },
        else_branch = e () => (float[1,2] b) { b = Add(x, big) }
    >
}"""
SQUARED = "(float[1,1] x) => (float[1,1] y) { s = Mul(x, x) y = Sqrt(s) }"
LEFT_IN_FLOAT = """(float16[1,1] x) => (float16[1,1] y) {
    h = Abs(x) a = Cast<to = 1>(h) b = Mul(a, a) c = Sqrt(b) d = Cast<to = 10>(c) y = Neg(d)
}"""
X, W = np.array([[0.1, 2049.0, 1e-9]], np.float32), np.array([0.3, 1, 1], np.float32)
HIGH, PAIR = np.array([[300.0]], np.float32), np.array([[4.0, 0.1]], np.float32)

# A graph, its input, the nodes that stay on the CPU, and its output; to ONNX 1 is float and 10 is float16.
CASES: dict[str, tuple[str, Array, tuple[str, ...], Array]] = {
    "a taken node reads and gives halves": (ADDED, X, (), round_to_half(round_to_half(X) + round_to_half(W))),
    "a node that stays on the CPU is not rounded": (ADDED, X, ("n0",), X + W),
    "a value beyond half is infinite": (
        SQUARED, HIGH, (), np.array([[np.inf]])
    ),
    "a weight beyond half is infinite": (
        "(float[1,1] x) => (float[1,1] y) <float[1] w = {100000}> { y = Add(x, w) }", HIGH, (), np.array([[np.inf]])
    ),
    "integers and branches pass through": (BRANCHES, PAIR, ("n2",), -PAIR),
    "whole numbers are not rounded": (
        "(float[1,2] x) => (float[2,1] y) <int64[2] k = {2, 1}> { y = Reshape(x, k) }", PAIR, (), round_to_half(PAIR).T
    ),
    "a node may be called as edgekit calls a Cast": (
        '(int64[1] x) => (float[1] y) { ["a/cast"] a = Cast<to = 1>(x) y = Neg(a) }', np.array([3]), (), np.array([-3])
    ),
    "a change of type rounds nothing": (
        "(int64[1] x) => (float[1] y) { y = Cast<to = 1>(x) }", np.array([100_001]), (), np.array([100_001])
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_values_are_rounded_as_the_provider_would(case: str, tmp_path: Path, work: Path) -> None:
    body, x, left, wanted = CASES[case]
    np.testing.assert_array_equal(run_one(text_job(tmp_path / "m.onnx", body, x, left=left), work), wanted)


@pytest.mark.parametrize(
    ("target", "body", "x", "wanted"),
    [
        ("coreml", LEFT_IN_FLOAT, HIGH.astype(np.float16), -300),
        ("coreml", SQUARED, HIGH, 300),
        ("qnn", LEFT_IN_FLOAT, HIGH.astype(np.float16), -np.inf),
    ],
)
def test_float32_is_rounded_to_half(
    target: str, body: str, x: Array, wanted: float, tmp_path: Path, work: Path
) -> None:
    got = run_one(text_job(tmp_path / "m.onnx", body, x, target=target), work)
    np.testing.assert_array_equal(got, [[wanted]])


def test_a_shared_weight_is_rounded_for_the_provider_only(tmp_path: Path, work: Path) -> None:
    x = np.zeros((1, 1), np.float32)
    body = "(float[1,1] x) => (float[1,1] y, float[1,1] z) <float[1] w = {0.1}> { y = Add(x, w) z = Add(x, w) }"
    (got,) = Emulated().run_job(text_job(tmp_path / "m.onnx", body, x, left=("n1",)), work).outputs
    assert got["y"] == round_to_half(np.array(0.1, np.float32))
    assert got["z"] == np.float32(0.1)


def test_a_float16_file_is_rounded_after_every_node(tmp_path: Path, work: Path) -> None:
    body = (
        "(float16[1,1] x) => (float16[1,1] y, float16[1,1] z) { s = Mul(x, x) y = Sqrt(s) t = Mul(x, x) z = Sqrt(t) }"
    )
    job = text_job(tmp_path / "m.onnx", body, np.array([[300.0]], np.float16), left=("n2", "n3"))
    (got,) = Emulated().run_job(job, work).outputs
    assert np.isinf(got["y"]).all()
    assert got["z"] == 300
    assert got["y"].dtype == np.float16


def test_a_float16_weight_keeps_its_value(tmp_path: Path, work: Path) -> None:
    body = f"{ENDS} {{ h = Cast<to=10>(x) s = Add(h, w) y = Cast<to=1>(s) }}"
    path = text_model(tmp_path / "w.onnx", body, w=np.array([0.3], np.float16))
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    got = run_one(make_job(path, "qnn", [{"x": x}], precision="fp16"), work)
    np.testing.assert_array_equal(got, round_to_half(round_to_half(x) + np.float32(np.float16(0.3))))


def test_weights_that_are_graph_inputs_too_stay_optional(tmp_path: Path, work: Path) -> None:
    proto = onnx.load(str(float_conv(tmp_path / "f.onnx")))
    proto.graph.input.append(helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, (4, 4, 3, 3)))
    onnx.save(proto, str(tmp_path / "f.onnx"))
    run_one(make_job(tmp_path / "f.onnx", "qnn", precision="fp16"), work)


def test_the_scales_of_a_resize_keep_its_size(tmp_path: Path, work: Path) -> None:
    body = f'{ENDS} {{ y = Resize<mode="nearest">(x, , s) }}'
    # 8 times 1.1249 are 8 whole pixels; rounded to half it is 1.125, and there would be 9.
    path = text_model(tmp_path / "r.onnx", body, s=np.array([1, 1, 1.1249, 1.1249], np.float32))
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    expected = CpuSession(path, SessionSettings()).run({"x": round_to_half(x)})["y"]
    np.testing.assert_array_equal(run_one(make_job(path, "qnn", [{"x": x}], precision="fp16"), work), expected)


def test_the_region_of_a_resize_is_read_in_full_precision(tmp_path: Path, work: Path) -> None:
    body = f'{ENDS} {{ y = Resize<coordinate_transformation_mode="tf_crop_and_resize">(x, r, , s) }}'
    region = np.array([0, 0, 0.1, 0.1, 1, 1, 0.9, 0.9], np.float32)
    path = text_model(tmp_path / "r.onnx", body, r=region, s=np.array([1, 4, 8, 8], np.int64))
    x = np.random.default_rng(1).normal(size=SHAPE).astype(np.float32)
    expected = CpuSession(path, SessionSettings()).run({"x": round_to_half(x)})["y"]
    got = run_one(make_job(path, "qnn", [{"x": x}], precision="fp16"), work)
    np.testing.assert_array_equal(got, round_to_half(expected))


def test_fp32_is_left_alone(tmp_path: Path, work: Path) -> None:
    path = text_model(tmp_path / "m.onnx", "(float[1,2] x) => (float[1,2] y) { y = Neg(x) }")
    np.testing.assert_array_equal(run_one(make_job(path, "coreml", [{"x": PAIR}], precision="fp32"), work), -PAIR)


def test_a_quantized_unit_is_rounded_onto_its_grid(tmp_path: Path, work: Path) -> None:
    got = run_one(make_job(qdq_conv(tmp_path / "q.onnx", np.uint8), "nnapi"), work)
    np.testing.assert_array_equal(got * 16, np.round(got * 16))
    assert len(np.unique(got)) > 10


def test_the_placement_is_predicted(tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "qnn", precision="fp16", left=("relu",))
    run = Emulated().run_job(job, work)
    assert run.placement_source == "predicted"
    assert [node.provider for node in run.placement] == ["QNNExecutionProvider", CPU_PROVIDER]


def test_nothing_is_fused(tmp_path: Path, work: Path) -> None:
    job = msgspec.structs.replace(make_job(float_conv(tmp_path / "f.onnx"), "coreml", precision="fp32"), trace=True)
    run = Emulated().run_job(job, work)
    assert run.trace is not None
    assert [step.op for step in read_trace(run.trace).executions[0].steps] == ["Conv", "Relu"]


def test_a_check_of_another_model_is_a_failure(tmp_path: Path, work: Path) -> None:
    job = make_job(float_conv(tmp_path / "f.onnx"), "qnn", precision="fp16")
    proto = onnx.load(str(job.model))
    proto.graph.node[0].name = "renamed"
    onnx.save(proto, str(job.model))
    assert "it has no node 'conv'" in str(Emulated().run_job(job, work).failure)


# A phone examined: faults seeded in a root behind adb are found, each with its cause, and a good one has none.

GOOD = PhoneFacts(
    abi="arm64-v8a", model="SM-S921B", android="13", api_level="30", soc="SM8650", maker="QTI", page_size="4096",
    soc_id="557", rpc="/vendor/lib64/libcdsprpc.so", lists="1", public="1", rpc_device="/dev/fastrpc-cdsp",
    skels="libQnnHtpV75Skel.so ", nnapi="/system/lib64/libneuralnetworks.so", nnapi_drivers="neuralnetworks.xml",
    soc_model="57", htp="75",
)  # fmt: skip


def test_a_good_phone_has_no_findings() -> None:
    assert judge_facts(GOOD) == ()


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"abi": "armeabi-v7a"}, ["abi"]),
        ({"page_size": "16384"}, ["pages"]),
        ({"maker": "Google", "soc": "Tensor G3", "htp": ""}, ["chip"]),
        ({"rpc": "", "public": "", "rpc_device": ""}, ["rpc"]),
        ({"public": ""}, ["rpc-public"]),
        ({"api_level": "34"}, ["rpc-manifest"]),
        ({"rpc_device": ""}, ["rpc-device"]),
        ({"htp": "66", "skels": "libQnnHtpV66Skel.so"}, ["old-npu"]),
        ({"skels": "libQnnHtpV73Skel.so "}, ["skel"]),
        ({"nnapi": "", "nnapi_drivers": ""}, ["nnapi"]),
        ({"nnapi_drivers": ""}, ["nnapi-driver"]),
        # Faults come before warnings.
        ({"page_size": "16384", "rpc_device": ""}, ["rpc-device", "pages"]),
    ],
)
def test_each_cause_of_a_refusal_is_found_from_the_phones_facts(changes: Mapping[str, str], found: list[str]) -> None:
    findings = judge_facts(msgspec.structs.replace(GOOD, **changes))
    assert [finding.id for finding in findings] == found
    assert all(finding.cause and finding.fix and "{" not in finding.cause + finding.fix for finding in findings)


def test_facts_of_a_phone_are_bounded_and_unknown_ones_dropped() -> None:
    facts = read_facts(f"abi={'x' * 9999}\nsoc=sm8650\nhtp=99\nevil=1\nno line\n")
    assert (len(facts.abi), facts.soc_model, facts.htp) == (200, "57", "75")


_SEEDS = {
    "vendor/lib64/libcdsprpc.so": "", "vendor/etc/public.libraries.txt": "libcdsprpc.so\n", "dev/fastrpc-cdsp": "",
    "system/lib64/libneuralnetworks.so": "", "vendor/etc/vintf/manifest/android.hardware.neuralnetworks.xml": "",
    "vendor/lib/rfsa/adsp/libQnnHtpV75Skel.so": "",
}  # fmt: skip
_SAYS = {"ro.product.cpu.abi": "arm64-v8a", "ro.build.version.sdk": "30", "ro.soc.model": "SM8650",
         "ro.soc.manufacturer": "QTI", "ro.product.model": "Edge Fake 1"}  # fmt: skip


def _program(path: Path, cases: Mapping[str, str]) -> None:
    lines = "".join(f"{key}) echo '{value}';;\n" for key, value in cases.items())
    path.write_text(f'#!/bin/sh\ncase "$1" in\n{lines}esac\n')
    path.chmod(0o755)


@pytest.mark.slow
@pytest.mark.parametrize("arm", [False, pytest.param(True, marks=pytest.mark.long)], ids=["native", "arm64"])
def test_faults_seeded_in_a_root_behind_adb_are_found(arm: bool, adb: Adb, capsys: pytest.CaptureFixture[str]) -> None:
    with start_machine(arm=arm, adb=True) as machine, adb.connected(machine) as serial:

        def examine(code: int) -> list[str]:
            capsys.readouterr()
            assert run_command(["doctor", "--on", f"adb:{serial}", "--json"]) == code
            report = json.loads(capsys.readouterr().out)
            assert report["facts"]["model"] == "Edge Fake 1"
            return [finding["id"] for finding in report["findings"]]

        for name, text in _SEEDS.items():
            path = machine.root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        _program(machine.root / "system/bin/getprop", _SAYS)
        _program(machine.root / "system/bin/getconf", {"PAGE_SIZE": "4096"})
        # Android's own shell and tools answer the same; looking once at them is enough, as qemu runs each.
        if not arm:
            assert examine(0) == []
        _program(machine.root / "system/bin/getconf", {"PAGE_SIZE": "16384"})
        (machine.root / "vendor/lib/rfsa/adsp/libQnnHtpV75Skel.so").unlink()
        if not arm:
            assert examine(0) == ["pages", "skel"]
        (machine.root / "dev/fastrpc-cdsp").unlink()
        (machine.root / "vendor/etc/public.libraries.txt").write_text("libother.so\n")
        assert examine(1) == ["rpc-public", "rpc-device", "pages", "skel"]
        if not arm:
            others = {"ro.soc.manufacturer": "MediaTek", "ro.soc.model": "MT6989"}
            _program(machine.root / "system/bin/getprop", {**_SAYS, **others})
            assert "chip" in examine(1)


def test_a_phone_that_is_not_connected_is_reported(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(["doctor", "--on", "ssh:pi"]) == 2
    assert "adb:SERIAL" in capsys.readouterr().err
