"""What a real provider does with a model stands beside what check predicts of it."""

import json
from pathlib import Path

import msgspec
import pytest
from demo_paths import MODEL
from fixture_types import Shown
from tiny_models import parse_model

from edgekit.check.check import check_model
from edgekit.check.recommend import ask_ort_checker, explain_difference, find_opinion
from edgekit.cli.main import run_command
from edgekit.devices.device import Device
from edgekit.devices.find import NamedDevice, find_device
from edgekit.devices.observe import (
    Observed,
    compare_placement,
    describe_job,
    name_as_model,
    observe_placement,
    observe_target,
)
from edgekit.errors import DeviceError
from edgekit.evidence import Evidence
from edgekit.model.model import Model, load_model
from edgekit.prepare.clean import prepare_model
from edgekit.target import Target, load_target

pytestmark = pytest.mark.slow

# One that needs no emulated Arm, where there is one.
DEVICES = {"qnn": "qnn-htp-sim", "xnnpack": "android:x86_64", "nnapi": "android:x86_64"}
HEAD = "g "
LEFT = f"{HEAD}(float[1,4,8,8] x) => (float[1,4,8,8] y) {{ "


def _device(target: Target) -> Device:
    device = find_device(DEVICES[target.name], target)
    missing = device.find_missing()
    if missing is not None:
        pytest.skip(f"needs {device.name}: {missing.command}")
    return device


def _observe(text: str, folder: Path, target: str, **settings: str) -> Observed:
    """What the provider of a target does with a model."""
    model, chosen = load_model(parse_model(text, folder / "m.onnx")), load_target(target, settings)
    device = _device(chosen)
    return compare_placement(check_model(model, chosen), observe_placement(model, chosen, device), device)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return prepare_model(load_model(MODEL), tmp_path_factory.mktemp("demo") / "demo.onnx", {})


@pytest.mark.parametrize(("name", "taken"), [("qnn", 62), ("xnnpack", 53), ("nnapi", 62)])
def test_the_demo_is_placed_as_predicted_and_a_wrong_prediction_is_listed(demo: Model, name: str, taken: int) -> None:
    target = load_target(name)
    device, report = _device(target), check_model(demo, target)
    placement = observe_placement(demo, target, device)
    seen = compare_placement(report, placement, device)
    assert (seen.device, seen.nodes, seen.taken) == (DEVICES[name], 62, taken)
    assert seen.disagreements == ()
    assert seen.failure is None
    assert len(seen.not_taken) == 62 - taken
    nodes = {node.name: node for node in report.node_list}
    nodes["block1/add"] = msgspec.structs.replace(nodes["block1/add"], taken=not nodes["block1/add"].taken)
    wrong = msgspec.structs.replace(report, node_list=tuple(nodes.values()))
    (found,) = compare_placement(wrong, placement, device).disagreements
    assert (found.name, found.op, found.observed) == ("block1/add", "Add", name != "xnnpack")
    assert found.predicted is not found.observed
    # A node that breaks the session may be claimed before.
    nodes["block1/add"] = msgspec.structs.replace(nodes["block1/add"], fatal=True)
    broken = msgspec.structs.replace(report, node_list=tuple(nodes.values()))
    assert compare_placement(broken, placement, device).disagreements == ()


def test_the_best_device_is_asked(tmp_path: Path) -> None:
    model = load_model(parse_model(f"{LEFT}[n] y = Relu(x) }}", tmp_path / "m.onnx"))
    target = load_target("nnapi")
    if missing := find_device("android", target).find_missing():
        pytest.skip(f"needs android: {missing.command}")
    seen = observe_target(model, target)
    assert isinstance(seen, Observed), seen
    assert (seen.device, seen.nodes, seen.taken, seen.disagreements) == ("android", 1, 1, ())


def test_a_node_that_qnn_refuses_is_named(tmp_path: Path) -> None:
    seen = _observe(f"{LEFT}[first] t = Relu(x) [odd] u = Shrink(t) [last] y = Mul(u, t) }}", tmp_path, "qnn")
    assert seen.not_taken == ("odd",)
    assert (seen.nodes, seen.taken, seen.disagreements) == (3, 2, ())
    assert any("odd" in note for note in seen.notes)


def test_a_node_fused_on_the_cpu_is_not_taken_for_one_of_xnnpack(tmp_path: Path) -> None:
    text = LEFT + "[a] t = MatMul(x, x) [b] u = Transpose<perm=[0,1,3,2]>(x) [c] v = MatMul(t, u) [d] y = Relu(v) }"
    seen = _observe(text, tmp_path, "xnnpack")
    assert set(seen.not_taken) >= {"a", "c", "d"}
    assert seen.disagreements == ()


def test_a_session_that_the_vendor_refuses_is_a_finding(tmp_path: Path) -> None:
    seen = _observe(f"{HEAD}(float[2,4] x) => (float[2,4] y) {{ [n] y = Elu(x) }}", tmp_path, "qnn", soc_model="30")
    assert seen.refused
    assert "1002" in str(seen.failure)


def test_a_sample_that_fails_does_not_hide_the_placement(tmp_path: Path) -> None:
    text = "(float[2,4] x, int64[2] shape) => (float[N,M] y) { [r] t = Relu(x) [s] y = Reshape(t, shape) }"
    seen = _observe(HEAD + text, tmp_path, "xnnpack")
    assert seen.nodes == 2
    assert seen.failure is None
    assert any("random numbers failed" in note for note in seen.notes)


def test_what_cannot_be_asked_says_why(demo: Model) -> None:
    target = msgspec.structs.replace(load_target("nnapi"), provider="VitisAIExecutionProvider")
    seen = observe_target(demo, target)
    assert isinstance(seen, str)
    assert "VitisAIExecutionProvider" in seen


def test_a_model_that_nnapi_s_own_builder_refuses_is_a_finding(tmp_path: Path) -> None:
    """Its partitioner takes a quantized Gemm of s8 weights, whose builder then does not know their type."""
    text = (
        f"{HEAD}(float[1,4] x) => (float[1,4] y)"
        " <float s = {0.5}, uint8 z = {128}, int8 w = {0}, int8[4,4] k = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7}> {"
        " [q] xq = QuantizeLinear(x, s, z) [d] xd = DequantizeLinear(xq, s, z) [k] kd = DequantizeLinear(k, s, w)"
        " [g] c = Gemm<transB=1>(xd, kd) [r] cq = QuantizeLinear(c, s, z) [o] y = DequantizeLinear(cq, s, z) }"
    )
    seen = _observe(text, tmp_path, "nnapi")
    assert seen.refused
    assert "valid type" in str(seen.failure)


def test_a_device_without_the_time_to_make_a_session_has_not_refused_the_model(demo: Model) -> None:
    slow = NamedDevice(label="slow", device=_device(load_target("xnnpack")), timeout_s=0.001)
    with pytest.raises(DeviceError, match=r"no session: .* ran out of time \(0\.001 s\)"):
        observe_placement(demo, load_target("xnnpack"), slow)


def test_a_missing_device_says_how_to_get_it(demo: Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    seen = observe_target(demo, load_target("xnnpack"))
    assert isinstance(seen, str)
    assert "edgekit" in seen
    assert "install" in seen


@pytest.mark.parametrize(("shape", "count"), [("2,3", 2), ("N,3", 0), ("999999,999999", 0)])
def test_no_sample_where_a_size_is_open_or_very_large(shape: str, count: int, tmp_path: Path) -> None:
    text = f"{HEAD}(float[{shape}] x) => (float[{shape}] y) {{ y = Relu(x) }}"
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    assert describe_job(model, load_target("xnnpack"), samples=2).samples.count == count


def test_names_lose_what_the_layout_added_but_no_name_of_the_model() -> None:
    placed = {"conv_token_3": "Q", "a_token_4": "Q", "a": "C"}
    assert name_as_model(placed, {"conv", "a"}) == {"conv": "Q", "conv_token_3": "Q", "a_token_4": "Q", "a": "C"}
    assert name_as_model({"b_token_5": "C"}, {"b", "b_token_5"}) == {"b_token_5": "C"}


def test_only_the_vendors_own_code_outweighs_the_rules() -> None:
    seen = Observed(
        device="d", evidence=Evidence.SIMULATOR, nodes=0, taken=0, not_taken=(), disagreements=(), failure="no",
        notes=(),
    )  # fmt: skip
    assert seen.refused
    assert not msgspec.structs.replace(seen, evidence=Evidence.SAME_EP).refused
    assert not msgspec.structs.replace(seen, failure=None).refused


# ONNX Runtime's own checker is asked in a child process, and its verdict is told apart from ours.


def test_the_demo_is_judged_for_three_providers() -> None:
    """A target that the checker does not know has no opinion."""
    found = ask_ort_checker(MODEL)
    assert find_opinion(found, check_model(load_model(MODEL), load_target("qnn"))) is None
    assert found.failure is None
    assert [(opinion.provider, opinion.verdict) for opinion in found.opinions] == [
        ("NNAPI", "yes"),
        ("CoreML NeuralNetwork", "yes"),
        ("CoreML MLProgram", "maybe"),
    ]


def test_a_crash_of_the_checker_is_told(tmp_path: Path, shown: Shown) -> None:
    text = "g (float[1,4] x) => (float[4,1] y) { t = Relu(x) y = Transpose(t) }"
    model = parse_model(text, tmp_path / "m.onnx")
    assert "IndexError" in str(ask_ort_checker(model).failure)
    assert "checker fails on this model: it ended with exit code 1" in shown(
        ["check", str(model), "--target", "nnapi", "--compare-ort"]
    )


def test_a_false_yes_is_explained(tmp_path: Path) -> None:
    text = (
        "g (float[1,1,4,4,4] x, float[1,1,4,4,4] z) => (float[1,1,4,4,4] y)"
        "<float[1,1,1,1,1] w = {1}> { t = Add(x, z) u = Conv(t, w) v = Relu(u) y = Add(v, z) }"
    )
    path = parse_model(text, tmp_path / "m.onnx")
    report = check_model(load_model(path), load_target("nnapi"))
    opinion = find_opinion(ask_ort_checker(path), report)
    assert opinion is not None
    assert (opinion.verdict, report.verdict) == ("yes", "no")
    assert any("operator names only" in reason and "Conv" in reason for reason in explain_difference(opinion, report))


def test_the_command_tells_both_verdicts(capsys: pytest.CaptureFixture[str], shown: Shown) -> None:
    arguments = ["check", str(MODEL), "--target", "coreml", "--compare-ort"]
    printed = shown(arguments)
    assert "ONNX Runtime's checker says maybe for CoreML MLProgram: 61 of 62 nodes in 2 partitions" in printed
    assert "check says yes for coreml, because" in printed
    assert run_command([*arguments, "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["ort_checker"]["opinions"]) == 3
