"""A provider that takes fewer nodes than it was predicted to take: real sessions, one layer of which must fall back."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from bundle_models import make_contents
from devices_models import Altering, require_device
from exported_models import draw_inputs, export_bert
from fixture_types import present
from msgspec.structs import replace
from onnx import helper, numpy_helper
from verify_devices import InProcess, restate
from verify_models import make_images, save_network

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.folder import Bundle, open_bundle, read_check, write_bundle
from edgekit.check.report import CheckedNode
from edgekit.data.samples import Samples
from edgekit.devices.device import UNCHECKED, DeviceRun, Job, PlacedNode
from edgekit.devices.observe import count_nodes
from edgekit.evidence import Evidence
from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe
from edgekit.target import load_target
from edgekit.verify.placement import describe_hidden, describe_unmatched, find_gap, find_placed
from edgekit.verify.report import recheck_report
from edgekit.verify.run import verify_bundle
from edgekit.verify.run_report import PlacementGap, RunReport

Change = Callable[[onnx.ModelProto], None]


def compute_weights(proto: onnx.ModelProto, *names: str) -> None:
    """Makes weights results of the same values, which XNNPACK does not take: those of `names`, or of all products."""
    stored = {tensor.name for tensor in proto.graph.initializer}
    made = [
        helper.make_node("Cast", [proto.graph.input[0].name], ["floats"], "floats", to=onnx.TensorProto.FLOAT),
        helper.make_node("ReduceMean", ["floats"], ["mean"], "mean", keepdims=0),
        helper.make_node("Mul", ["mean", "none"], ["nothing"], "nothing"),
    ]
    for node in proto.graph.node:
        is_asked = node.name in names if names else node.op_type in {"Gemm", "MatMul"}
        if is_asked and node.input[1] in stored:
            weight = f"{node.name}.weight"
            made.append(helper.make_node("Add", [node.input[1], "nothing"], [weight], weight))
            node.input[1] = weight
    nodes = [*made, *proto.graph.node]
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)
    proto.graph.initializer.append(numpy_helper.from_array(np.zeros((), np.float32), "none"))


def replace_relus(proto: onnx.ModelProto) -> None:
    """Lets what three Relu nodes give pass through a Shrink that changes nothing and bears their name: not for QNN."""
    nodes = list(proto.graph.node)
    for place, node in reversed(list(enumerate(nodes))):
        if node.name in {"relu1", "relu2", "relu3"}:
            output = node.output[0]
            node.output[0] = f"{output}.before"
            nodes.insert(place + 1, helper.make_node("Shrink", list(node.output), [output], node.name, lambd=0.0))
            node.name += ".before"
    del proto.graph.node[:]
    proto.graph.node.extend(nodes)


def make_network_bundle(folder: Path, target: str) -> Bundle:
    model = save_network(folder / "network.onnx")
    contents = make_contents(folder, target=target, model=model, samples=make_images(4))
    return restate(write_bundle(contents, folder / f"network-{target}"), verification=())


@pytest.fixture(scope="module")
def network(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_network_bundle(tmp_path_factory.mktemp("network"), "nnapi")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("device", "target", "change", "lost", "names"),
    [
        ("android:x86_64", "xnnpack", lambda proto: compute_weights(proto, "conv2"),
         "2 of the 10 nodes that XnnpackExecutionProvider", "'conv2', 'relu2'"),
        ("qnn-htp-sim", "qnn", replace_relus,
         "3 of the 12 nodes that QNNExecutionProvider", "'relu1', 'relu2', 'relu3'"),
    ],
)  # fmt: skip
def test_layers_that_fall_back_fail_the_run(
    tmp_path: Path, device: str, target: str, change: Change, lost: str, names: str
) -> None:
    inner = require_device(device, target)
    bundle = make_network_bundle(tmp_path, target)
    good = verify_bundle(bundle, [inner]).runs[0]
    assert good.passed
    assert (present(good.gap).lost, good.observes_placement) == (0, True)
    line = verify_bundle(bundle, [Altering(device=inner, change=change)]).runs[0].failures[0]
    assert line.startswith(f"silent fallback: {lost} was predicted to take ran on CPUExecutionProvider")
    assert names in line


@pytest.mark.slow
def test_xnnpack_took_what_its_session_does_not_name_and_a_real_fallback_fails(tmp_path: Path) -> None:
    target = load_target("xnnpack")
    inner = require_device("android:x86_64", "xnnpack")
    bert = export_bert(tmp_path / "bert.onnx", "torchscript17")
    drawn = [draw_inputs(bert, seed) for seed in range(4)]
    stacked = {name: np.stack([each[name] for each in drawn]) for name in drawn[0]}
    np.savez(tmp_path / "bert.npz", allow_pickle=False, **stacked)
    recipe = Recipe(targets=("xnnpack",), precision="fp32")
    report = build(bert.path, Data(source=str(tmp_path / "bert.npz")), tmp_path / "out", recipe, verify=False)
    bundle = open_bundle(present(report.bundles[0].path))
    good = verify_bundle(bundle, [inner]).runs[0]
    assert good.passed
    assert good.provider_nodes == {CPU_PROVIDER: 36, target.provider: 9}
    bad = verify_bundle(bundle, [Altering(device=inner, change=compute_weights)]).runs[0]
    assert bad.failures[0].startswith(f"silent fallback: 8 of the 9 nodes that {target.provider} was predicted to take")


def _place(bundle: Bundle, *lost: str, renamed: str = "", op: str = "Conv") -> RunReport:
    """Returns the run of a device that says that some nodes ran on the CPU, one of them under another name."""
    ops = {node.name: node.op for node in read_check(bundle).node_list}

    def retell(job: Job, _run: DeviceRun) -> dict[str, Any]:
        nodes = [PlacedNode(name=name, op=own, domain="", provider=job.target.provider) for name, own in ops.items()]
        moved = {"provider": CPU_PROVIDER} | ({"name": renamed, "op": op} if renamed else {})
        return {"placement": tuple(replace(node, **moved) if node.name in lost else node for node in nodes)}

    return verify_bundle(bundle, [InProcess(evidence=Evidence.DEVICE, retell=retell)]).runs[0]


def test_little_may_be_lost_by_a_limit_and_renamed_work_is_found(network: Bundle) -> None:
    assert _place(network, "relu1").passed
    assert not _place(network, "relu1", "relu2", "relu3").passed
    assert present(_place(network, "conv0", renamed="fused_nchwc", op="FusedConv").gap).lost == 1
    assert not _place(network, "conv4", renamed="nchwc_4").passed
    report = verify_bundle(network, [InProcess()])
    run = replace(_place(network, "conv2"), thresholds=network.manifest.thresholds)
    report = replace(report, runs=(run,))
    assert not report.passed
    assert recheck_report(report, replace(network.manifest.thresholds, max_lost_share=0.5)).passed


def test_a_prediction_is_no_observation_where_the_gate_asks_for_one(network: Bundle) -> None:
    emulated = InProcess(evidence=Evidence.EMULATED)
    strict = replace(network.manifest.thresholds, needs_placement=True)
    report = recheck_report(verify_bundle(network, [emulated]), strict)
    assert report.failures == (
        "no run observed what the provider takes: verify on a device, or where the provider runs here",
    )
    assert recheck_report(verify_bundle(network, [emulated, InProcess()]), strict).passed


def checked(name: str, op: str, macs: int, *, taken: bool = True) -> CheckedNode:
    return CheckedNode(name=name, op=op, domain="", taken=taken, reasons=(), macs=macs, bytes=1, partition=0)


NODES = (
    checked("a", "Conv", 60), checked("b", "Relu", 0), checked("c", "Gemm", 40), checked("d", "Conv", 0, taken=False),
    checked("q", "QuantizeLinear", 0),
)  # fmt: skip


def observe(
    placed: str, nodes: tuple[CheckedNode, ...] = NODES, evidence: Evidence = Evidence.DEVICE, source: str = "log"
) -> tuple[DeviceRun, Job]:
    """Returns a session with nodes such as "a Conv cpu", and what was asked of it."""
    target = load_target("nnapi")
    places = tuple(
        PlacedNode(name=name, op=op, domain="", provider=CPU_PROVIDER if where == "cpu" else target.provider)
        for name, op, where in (item.split() for item in placed.split(", ") if item)
    )
    empty = Samples(source="none", count=0, read=lambda: iter(()))
    check = replace(UNCHECKED, node_list=nodes)
    job = Job(model=Path("m"), target=target, precision="int8", outputs=(), check=check, samples=empty)
    run = DeviceRun(
        device="phone", evidence=evidence, outputs=empty, placement=places, placement_source=source,  # type: ignore[arg-type]
        load_ms=0, latency_ms=(), peak_rss_bytes=0, versions={}, failure=None,
    )  # fmt: skip
    return run, job


def gap_of(placed: str, nodes: tuple[CheckedNode, ...] = NODES, **more: Any) -> PlacementGap | None:
    return find_gap(*observe(placed, nodes, **more))


@pytest.mark.parametrize(
    ("placed", "lost", "macs"),
    [
        ("a Conv npu, b Relu npu, c Gemm npu, d Conv cpu, q QuantizeLinear npu", (), 0.0),
        ("a Conv cpu, b Relu npu, c Gemm npu, d Conv cpu, q QuantizeLinear cpu", ("a",), 0.6),
        ("a Conv npu, b Relu cpu, c Gemm cpu", ("b", "c"), 0.4),
        ("fused FusedConv cpu, d Conv cpu", ("a",), 0.6),
        ("fused FusedConv cpu", (), 0.0),  # it may be d, which was not predicted taken
        ("one FusedConv cpu, two FusedConv cpu", ("a",), 0.6),
        ("a Conv npu, one FusedConv cpu, two FusedConv cpu", (), 0.0),
        ("fused FusedGemm cpu", ("c",), 0.4),
        ("fused FusedConv npu, d Conv cpu", (), 0.0),
        ("other Softmax cpu, d Conv cpu", (), 0.0),
    ],
)
def test_a_gap_is_what_was_predicted_taken_and_ran_on_the_cpu(placed: str, lost: tuple[str, ...], macs: float) -> None:
    assert gap_of(placed) == PlacementGap(predicted=3, lost=len(lost), lost_macs=macs, nodes=lost)


def test_without_products_nodes_count_and_without_observation_nothing_does() -> None:
    plain = tuple(replace(node, macs=0) for node in NODES)
    assert present(gap_of("a Conv cpu", plain)).lost_macs == pytest.approx(1 / 3)
    assert gap_of("a Conv cpu", plain[3:4]) == PlacementGap(predicted=0, lost=0, lost_macs=0.0, nodes=())
    assert gap_of("a Conv cpu", evidence=Evidence.EMULATED) is None
    assert gap_of("a Conv cpu", source="predicted") is None
    assert gap_of("") is None


SMALL = (
    *NODES, checked("e", "Softmax", 0, taken=False), checked("f", "Resize", 0, taken=False),
    checked("r", "QuantizeLinear", 0, taken=False),
)  # fmt: skip


@pytest.mark.parametrize(
    ("placed", "hidden"),
    [
        ("a Conv npu, d Conv cpu, e Softmax cpu, f Resize cpu", 0),
        ("a Conv npu, d Conv cpu, f Resize cpu", 1),
        ("a Conv npu, d Conv cpu", 2),
        ("a Conv npu", 2),  # that d is hidden is told by the work it does
        ("a Conv npu, d Conv cpu, merged Other cpu", 1),
        ("a Conv npu, d Conv cpu, merged Other npu", 2),
        ("a Conv npu, e Softmax npu, f Resize npu", 0),
    ],
)
def test_nodes_of_the_cpu_that_nobody_reports_are_counted(placed: str, hidden: int) -> None:
    gap = present(gap_of(placed, SMALL))
    assert gap.hidden == hidden
    told = f"lacks {hidden} node{'s' * (hidden > 1)} predicted for the CPU"
    assert (told in str(describe_hidden(gap))) is (hidden > 0)
    assert present(gap_of(placed, (*SMALL, checked("loop", "Loop", 0)))).hidden == 0
    assert present(gap_of(f"{placed}, fused NNAPI_1 npu", SMALL, source="profile")).hidden == 0


def test_a_limit_of_nodes_on_the_cpu_counts_those_that_are_hidden(network: Bundle) -> None:
    (run,) = verify_bundle(network, [InProcess(evidence=Evidence.DEVICE)]).runs
    hiding = replace(run, gap=replace(present(run.gap), hidden=2))
    for most, passed in ((2, True), (1, False)):
        limits = replace(run.thresholds, max_cpu_nodes=most + run.provider_nodes.get(CPU_PROVIDER, 0))
        assert replace(hiding, thresholds=limits).passed is passed
    assert describe_hidden(None) is None


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ("a Conv npu, c Gemm npu, d Conv cpu", None),
        ("x QLinearConv npu, y QGemm npu, z FusedConv cpu", None),
        ("a Conv npu, c Gemm npu", None),  # d computes next to nothing
        ("a Conv npu, d Conv cpu", "1 nodes that do the model's work ran nowhere, as 'c'"),
        ("b Relu npu", "3 nodes that do the model's work ran nowhere, as 'd', 'a', 'c'"),
        ("a Conv npu, c Gemm npu, d Conv cpu, e Conv npu", "it reports 1 Conv more than the 2 there are"),
        ("n0 ConvTranspose npu, a Conv npu, c Gemm npu, d Conv cpu", "1 ConvTranspose more than the 0 there are"),
        ("ctx EPContext npu", "3 nodes that do the model's work ran nowhere, as 'd', 'a', 'c'"),
        ("", None),
    ],
)
def test_what_a_device_reports_must_be_the_placement_of_this_model(placed: str, words: str | None) -> None:
    told = describe_unmatched(*observe(placed, source="session"))
    assert told is None if words is None else words in str(told)
    assert describe_unmatched(*observe(placed, evidence=Evidence.EMULATED)) is None
    assert describe_unmatched(*observe(placed, (*NODES, checked("loop", "Loop", 0)))) is None


@pytest.mark.parametrize(
    ("placed", "words"),
    [
        ("b Relu npu, d Conv cpu", None),
        ("one FusedConv npu", None),
        ("a Conv npu, c Gemm npu, d Conv cpu, e Conv npu", "it reports 1 Conv more than the 2 there are"),
    ],
)
def test_xnnpack_does_not_name_floats_that_it_takes_alone(placed: str, words: str | None) -> None:
    run, job = observe(placed, source="session")
    on_xnnpack = replace(job, target=load_target("xnnpack"))
    told = describe_unmatched(run, on_xnnpack)
    assert told is None if words is None else words in str(told)
    # A QDQ group has a name, and so has what runs on the CPU.
    for change in ({"integers": True}, {"taken": False}):
        check = replace(job.check, node_list=tuple(replace(node, **change) for node in NODES))
        hidden = describe_unmatched(run, replace(on_xnnpack, check=check))
        assert ("ran nowhere" in str(hidden)) == (words is None)


@pytest.mark.parametrize(
    ("placed", "source", "counts"),
    [
        ("d Conv cpu", "session", (1, 2)),
        ("b Relu npu, d Conv cpu", "session", (1, 3)),
        ("a Conv cpu, b Relu cpu, c Gemm cpu, d Conv cpu", "session", (4, 0)),
        ("one FusedConv cpu, two FusedConv cpu, three QGemm cpu", "session", (3, 0)),
        ("d Conv cpu", "profile", (1, 0)),
        ("", "session", (0, 0)),
    ],
)
def test_unnamed_nodes_count_where_the_cpu_took_none(placed: str, source: str, counts: tuple[int, int]) -> None:
    run, job = observe(placed, source=source)
    npu, xnnpack = job.target.provider, load_target("xnnpack")
    moved = tuple(replace(node, provider=xnnpack.provider) if node.provider == npu else node for node in run.placement)
    there = count_nodes(replace(run, placement=moved), replace(job, target=xnnpack))
    assert (there.get(CPU_PROVIDER, 0), there.get(xnnpack.provider, 0)) == counts
    # A provider that names what it takes took no more than it names.
    assert count_nodes(run, job).get(npu, 0) == placed.count("npu")


@pytest.mark.parametrize(
    ("change", "more", "seen"),
    [
        ({}, {}, True),
        ({}, {"source": "profile"}, False),
        ({"taken": False}, {}, False),
        ({"op": "Relu"}, {}, False),
        ({"integers": True}, {}, False),
    ],
)
def test_an_empty_list_is_one_without_the_cpu(change: dict[str, Any], more: dict[str, Any], seen: bool) -> None:
    nodes = (checked("a", "MatMul", 10), replace(checked("b", "MatMul", 10), **change))
    run, job = observe("", nodes, **{"source": "session", **more})
    on_xnnpack = replace(job, target=load_target("xnnpack"))
    assert count_nodes(run, on_xnnpack) == ({"XnnpackExecutionProvider": 2} if seen else {})
    placed = find_placed(run, on_xnnpack)
    assert (None if placed is None else placed.taken) == (2 if seen else None)
    assert count_nodes(replace(run, failure="it ended"), on_xnnpack) == count_nodes(run, job) == {}


@pytest.mark.parametrize(("macs", "told"), [(5, False), (6, True)])
def test_a_twentieth_of_the_work_may_be_gone_unseen(macs: int, told: bool) -> None:
    run, job = observe("a Conv npu, c Gemm npu, d Conv cpu", (*NODES, checked("g", "Conv", macs)), source="session")
    assert (describe_unmatched(run, job) is not None) is told


def test_a_compiled_node_of_a_profile_or_a_context_file_holds_the_work(tmp_path: Path) -> None:
    assert describe_unmatched(*observe("fused NNAPI_1 npu", source="profile")) is None
    assert describe_unmatched(*observe("fused NNAPI_1 cpu", source="profile")) is not None
    assert describe_unmatched(*observe("fused NNAPI_1 npu", source="session")) is not None
    compiled = helper.make_node("EPContext", ["x"], ["y"], domain="com.microsoft")
    proto = helper.make_model(helper.make_graph([compiled], "g", [], []))
    run, job = observe("ctx EPContext npu", source="session")
    for name, whole in (("m.onnx", True), ("m.ort", False)):
        onnx.save(proto, tmp_path / name)
        assert (describe_unmatched(run, replace(job, model=tmp_path / name)) is None) is whole
    onnx.save(helper.make_model(helper.make_graph([], "g", [], [])), tmp_path / "m.onnx")
    assert describe_unmatched(run, replace(job, model=tmp_path / "m.onnx")) is not None
