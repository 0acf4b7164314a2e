"""`edgekit check`: what it observes, its page, and its recommendation."""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx
import pytest
from demo_paths import MODEL
from devices_models import require_device
from fixture_types import Answer, Shown
from tiny_models import save_net

from edgekit.check.check import check_model
from edgekit.check.recommend import recommend_target
from edgekit.check.report import Advice, CheckedNode, CheckReport, Disagreement
from edgekit.devices.find import find_device
from edgekit.devices.observe import Observed
from edgekit.evidence import Evidence
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.quantize.qdq import place_unmeasured
from edgekit.report.checked import (
    CheckedTarget,
    CheckSummary,
    describe_recommendation,
    list_check_remarks,
    render_check,
)
from edgekit.target import load_target

HOSTILE = "<script>alert(1)</script>\"'>"
Command = Callable[..., list[str]]


@pytest.fixture
def command(tmp_path: Path) -> Command:
    """Gives the words of a check of a model for one target, from onnx's text form and weights."""

    def write(text: str, target: str, *options: str, **weights: Array) -> list[str]:
        return ["check", str(save_net(text, tmp_path / "m.onnx", **weights).path), "--target", target, *options]

    return write


def test_the_json_of_check_has_the_observed_placement(answer: Answer) -> None:
    require_device("qnn-htp-sim", "qnn")
    targets = answer(["check", str(MODEL), "--target", "qnn", "--target", "coreml", "--observe"])["targets"]
    assert targets["qnn"]["evidence"] == "simulator"
    assert {"device": "qnn-htp-sim", "nodes": 62, "taken": 62, "disagreements": []}.items() <= targets["qnn"][
        "observed"
    ].items()
    coreml = targets["coreml"]
    if find_device("ios-sim", load_target("coreml")).find_missing() is None:
        assert coreml["observed"]["device"] == "ios-sim"
    else:
        assert (coreml["observed"], coreml["evidence"]) == (None, "predicted")
        assert "Core ML runs only on Apple hardware" in coreml["not_observed"]


def test_a_refusal_by_the_providers_own_code_gives_the_verdict_no(command: Command, answer: Answer) -> None:
    require_device("qnn-htp-sim", "qnn")
    text = """(float[1,4,8,8] x) => (float[1,4,8,8] y)
        { [a] t = Relu(x) [b] u = IsNaN(t) [c] v = Not(u) [d] w = Cast<to=1>(v) [e] y = Mul(w, t) }"""
    report = answer(command(text, "qnn", "--set", "soc_model=30", "--observe"), 1)
    assert "1002" in report["targets"]["qnn"]["observed"]["failure"]
    assert report["recommendation"].startswith("none")


def test_the_page_is_complete_and_the_text_ends_with_the_recommendation(tmp_path: Path, shown: Shown) -> None:
    page = tmp_path / "deep" / "check.html"
    arguments = ["check", str(MODEL), "--target", "xnnpack", "--target", "nnapi", "--html", str(page)]
    assert shown(arguments).splitlines()[-1].startswith("recommendation: nnapi: yes, 100% of MACs")
    text = page.read_text()
    assert "9 nodes not taken" in text
    assert "XNNPACK has no builder for GlobalAveragePool" in text
    assert "<script src" not in text


def test_a_model_that_does_not_load_gets_a_report(
    tmp_path: Path, command: Command, shown: Shown, answer: Answer
) -> None:
    head = '<ir_version: 8, opset_import: ["" : 17, "my.domain" : 1]>'
    words = command(f"{head} g (float[2] x) => (float[2] y) {{ [odd] y = my.domain.Foo(x) }}", "nnapi")
    report = answer(words, 1)
    assert "Foo" in report["refusal"]
    assert [node["name"] for node in report["targets"]["nnapi"]["node_list"]] == ["odd"]
    assert report["targets"]["nnapi"]["model_nodes"][0]["fate"] == "kept"
    assert "refused on any target" in shown([*words, "--html", str(tmp_path / "c.html")], 1)
    assert "refused on any target" in (tmp_path / "c.html").read_text()


def test_no_target_is_recommended_for_a_model_that_no_session_opens(command: Command, answer: Answer) -> None:
    report = answer(command("(float[2] x) => (int64[2] y) { y = Neg(x) }", "qnn"), 1)
    assert report["targets"]["qnn"]["verdict"] == "yes"
    assert report["recommended"]["target"] is None
    assert report["recommendation"] == (
        "none of these targets: no session of the model as it is can be made: check that the model runs in ONNX"
        " Runtime: edgekit inspect MODEL"
    )


def _node(name: str = "n", **fields: object) -> CheckedNode:
    node = CheckedNode(name=name, op="Conv", domain="ai.onnx", taken=True, reasons=(), macs=10, bytes=10, partition=0)
    return msgspec.structs.replace(node, **fields)


def _report(target: str, *nodes: CheckedNode, crossings: int = 0) -> CheckReport:
    return CheckReport(
        target=target, model="m", sha256="0", evidence="predicted", settings={}, node_list=nodes, advice=(),
        crossings=crossings,
    )  # fmt: skip


def _summarize(reports: dict[str, CheckReport], **observed: Observed | str) -> CheckSummary:
    found = {name: CheckedTarget(report=each, observed=observed.get(name)) for name, each in reports.items()}
    return CheckSummary(model="m", sha256="0" * 64, targets=found, recommended=recommend_target(reports, {}))


LEFT = _node("left", taken=False, partition=None, reasons=("too odd",))


def test_most_work_in_fewest_crossings_is_recommended() -> None:
    some = _report("some", *(_node() for _ in range(9)), LEFT)
    whole, split = _report("whole", _node()), _report("split", _node(), crossings=2)
    assert recommend_target({"some": some, "split": split, "whole": whole}, {}).target == "whole"
    line = describe_recommendation(_summarize({"some": some, "whole": whole}))
    assert line == "whole: yes, 100% of MACs in 1 partition with 0 crossings (0 B) (others: some yes, 90% of MACs)"


@pytest.mark.parametrize("op", ["Conv", "DynamicQuantizeLinear"])
def test_for_a_target_of_whole_models_the_recommendation_counts_the_other_nodes(op: str) -> None:
    nodes = (*(_node(op=op) for _ in range(9)), LEFT)
    report = msgspec.structs.replace(_report("whole", *nodes), wants_whole=True)
    line = describe_recommendation(_summarize({"whole": report}))
    assert ", once it takes the other 1 node too, since it runs whole models only" in line
    assert ("prepare --dequantize" in line) == (op != "Conv")


def test_where_each_target_says_no_none_is_recommended() -> None:
    summary = _summarize({"none": _report("none", LEFT)})
    found = summary.recommended
    assert (found.target, found.style, found.precision) == (None, None, None)
    line = describe_recommendation(summary)
    assert line.startswith("none of these targets: each refuses")
    assert line.endswith("; use the CPU")


@pytest.mark.parametrize(("others", "then"), [((), "use"), (("left",), "each other refuses")])
def test_a_target_whose_provider_made_no_session_is_named(others: tuple[str, ...], then: str) -> None:
    reports = {"whole": _report("whole", _node()), **{name: _report(name, LEFT) for name in others}}
    (reason,) = recommend_target(reports, {}, refused=["whole"]).reasons
    assert reason.startswith(f"whole made no session when it was asked; {then} ")


def test_the_cpu_is_not_recommended_where_it_refuses_the_model() -> None:
    reports = {"cpu": _report("cpu", _node(fatal=True)), "other": _report("other", LEFT)}
    (reason,) = recommend_target(reports, {"cpu": load_target("cpu"), "other": load_target("qnn")}).reasons
    assert reason.endswith("; the CPU refuses it too, so follow the advice, and check again")
    (reason,) = recommend_target(reports, {"cpu": load_target("xnnpack")}).reasons
    assert reason.endswith("; use the CPU")


@pytest.mark.parametrize(("fix", "gain", "then"), [
    ("automatic", 1, "follow the automatic advice, and check again"), ("automatic", 0, "use the CPU"),
    ("manual", 1, "use the CPU"),
])  # fmt: skip
def test_advice_that_gains_half_the_nodes_comes_first(
    fix: Literal["automatic", "manual"], gain: int, then: str
) -> None:
    advice = Advice(id="dims", subject="dims", message="fix them", fix=fix, gain_nodes=gain)
    report = msgspec.structs.replace(_report("none", LEFT, LEFT), advice=(advice,))
    assert recommend_target({"none": report}, {}).reasons[0].endswith(f"; {then}")


def test_the_recommendation_says_how_to_build_and_why() -> None:
    quantizer = _node("q", op="QuantizeLinear")
    targets = {"xnnpack": load_target("xnnpack"), "coreml": load_target("coreml")}
    found = recommend_target({"coreml": _report("coreml", _node()), "xnnpack": _report("xnnpack", LEFT)}, targets)
    assert (found.target, found.style, found.precision) == ("coreml", "onnx", "fp16")
    assert any("Neural Engine computes in fp16" in reason for reason in found.reasons)
    assert any(reason.startswith("xnnpack: no, 0% of the MACs") for reason in found.reasons)
    again = recommend_target({"xnnpack": _report("xnnpack", _node(), quantizer)}, targets)
    assert (again.style, again.precision) == ("onnx", "int8")
    assert "int8: the model is quantized already" in again.reasons


def _observed(**fields: object) -> Observed:
    found = Disagreement(name=HOSTILE, op=HOSTILE, predicted=True, observed=False)
    seen = Observed(
        device="d", evidence=Evidence.SIMULATOR, nodes=1, taken=0, not_taken=(HOSTILE,), disagreements=(found,),
        failure=None, notes=(HOSTILE,),
    )  # fmt: skip
    return msgspec.structs.replace(seen, **fields)


def test_what_was_observed_to_fail_is_not_recommended() -> None:
    reports = {"a": _report("a", _node()), "b": _report("b", _node(), _node(), LEFT)}
    assert recommend_target(reports, {}).target == "a"
    found = recommend_target(reports, {}, refused=["a"])
    assert found.target == "b"
    assert "a refused the model when it was asked" in found.reasons


def test_risks_fatal_nodes_and_disagreements_are_shown() -> None:
    def remark(report: CheckReport, **observed: Observed | str) -> list[str]:
        return list(list_check_remarks(_summarize({"t": report}, **observed), "t"))

    report = _report("t", _node("bad", fatal=True), _node(risks=("it may fail",)))
    fatal = zip("abc", ("Conv", "Gemm", "Conv"), strict=True)
    many = _report("t", *(_node(name, op=op, fatal=True) for name, op in fatal))
    assert remark(many) == [
        "fatal: Conv 'a' and 1 more make the session fail or its results wrong",
        "fatal: Gemm 'b' makes the session fail or its results wrong",
    ]
    assert remark(report) == ["fatal: Conv 'bad' makes the session fail or its results wrong", "risk: it may fail"]
    told = remark(report, t=_observed(failure="out of memory"))
    assert "observed on d: no session: out of memory" in told
    assert any("was predicted taken, and is not" in line for line in told)
    assert remark(report, t="none here")[-1] == "not observed: none here"


def test_the_page_escapes_what_models_say() -> None:
    advice = Advice(id="i", subject=HOSTILE, message=HOSTILE, fix="manual", gain_nodes=1)
    nodes = (_node(HOSTILE, op=HOSTILE, fatal=True, risks=(HOSTILE,)), _node(HOSTILE, taken=False, reasons=(HOSTILE,)))
    report = msgspec.structs.replace(_report(HOSTILE, *nodes), settings={HOSTILE: HOSTILE}, advice=(advice,))
    observed: dict[str, Observed | str] = {"a": _observed(), HOSTILE: _observed(failure=HOSTILE), "c": HOSTILE}
    summary = _summarize(dict.fromkeys(observed, report), **observed)
    page = render_check(msgspec.structs.replace(summary, model=HOSTILE))
    assert "<script>alert" not in page
    assert [words for words in ("alert(1)", "1 differ", "no session", "not observed") if words not in page] == []


def test_nodes_that_are_left_for_one_reason_are_one_row(command: Command, shown: Shown) -> None:
    chain = "".join(f"[e{i}] t{i} = Erf(t{i - 1})" for i in range(1, 6))
    text = f"(float[1,4] x) => (float[1,4] y){{ [first] t0 = Tanh(x) {chain} y = Identity(t5) }}"
    told = shown(command(text, "xnnpack"), 1)
    assert "Erf 5, Tanh 1 " in told
    assert "first, e1, e2 and 3 more" in told
    assert "e3" not in told
    # So are operators that need a fixed size, and those that share one line of advice.
    text = """(float[2,N] x) => (float[2,N] y, float[N,2] z)
        { y = Relu(x) t = Transpose<perm = [1, 0]>(x) z = Sigmoid(t) }"""
    told = shown(command(text, "nnapi"), 1)
    assert "Relu 1, Transpose 1, Sigmoid 1" in told
    assert "a dimension is dynamic" in told
    text = "(float[1,4] x) => (float[1,4] y) { a = Relu(x) b = Erf(a) c = Shrink(b) y = Relu(c) }"
    (line,) = (
        line for line in shown(command(text, "nnapi")).splitlines() if line.startswith("- ") and "has no" in line
    )
    assert line.startswith("- the provider has no Erf, Shrink: the CPU computes it.")
    assert line.endswith("(manual, +2 nodes)")


def test_a_long_name_is_shown_by_its_end(command: Command, shown: Shown) -> None:
    words = command("(float[1,4] x) => (float[1,4] y) { [last] y = Erf(x) }", "xnnpack")
    proto = onnx.load(words[1])
    proto.graph.node[0].name = ";".join(f"block_{index}/batch_norm/FusedBatchNormV3" for index in range(9)) + ";last"
    onnx.save(proto, words[1])
    told = "".join(shown(words, 1).split())
    assert "FusedBatchNormV3;last" in told
    assert "block_0" not in told


@pytest.mark.parametrize(("ir_version", "taken"), [(3, 3), (6, 2)])
def test_the_file_is_checked_as_it_is(
    command: Command, shown: Shown, answer: Answer, ir_version: int, taken: int
) -> None:
    # A weight that is an input too, as older exporters write it.
    text = f"""<ir_version: {ir_version}, opset_import: ["" : 9]> g (float[1,2,8,8] x, float[2,2,1,1] w)
        => (float[1,2,8,8] y) <float[2,2,1,1] w = {{1, 2, 3, 4}}> {{ c = Conv(x, w) r = Relu(c) y = Sigmoid(r) }}"""
    words = command(text, "nnapi")
    found = answer(words)["targets"]["nnapi"]
    # From IR version 4 on a caller may give another weight, and NNAPI wants a constant.
    assert (found["taken"], found["as_is"]["taken"]) == (3, taken)
    assert ("the file as it is: 2/3" in shown(words)) is (taken == 2)


def test_an_input_can_be_frozen(command: Command, answer: Answer) -> None:
    words = command("(float[2,4] x, float[4,3] w) => (float[2,3] y) { y = MatMul(x, w) }", "xnnpack", "--freeze", "w=1")
    found = answer(words)["targets"]["xnnpack"]
    assert (found["taken"], found["as_is"]["taken"]) == (1, 0)


EINSUM = '(float[2,4,3] x, float[2,3,4] w) => (float[2,4,4] y) { y = Einsum<equation="aij,ajk->aik">(x, w) }'


@pytest.mark.parametrize(
    ("target", "text", "nodes"),
    [
        # NNAPI takes a float MatMul whose matrices have two dimensions, or all as many: a rewrite for it alone.
        ("nnapi", "(float[2,4,3] x) => (float[2,4,2] y) <float[3,2] w = {1, -2, 3, -4, 5, 6}> { y = MatMul(x, w) }", 3),
        ("coreml", EINSUM, 1),  # a rewrite for every provider
    ],
)
def test_check_reports_the_model_as_build_makes_it(
    target: str, text: str, nodes: int, command: Command, shown: Shown, answer: Answer
) -> None:
    words = command(text, target)
    found = answer(words)["targets"][target]
    assert (found["verdict"], found["built"]["verdict"], found["built"]["taken_macs"]) == ("no", "yes", 1.0)
    told = shown(words)
    assert f"as build makes it, by the automatic changes below: yes; {nodes}/{nodes} (100% of MACs)" in told
    assert f"recommendation: {target}: yes" in told


def test_dynamic_dimensions_get_assumed_sizes(command: Command, shown: Shown, answer: Answer) -> None:
    text = "(float[N,2,8,8] x) => (float[N,2,8,8] y) <float[2,2,1,1] w = {1, 2, 3, 4}> { y = Conv(x, w) }"
    words = command(text, "qnn")
    document = answer(words, 1)
    found = document["targets"]["qnn"]
    assert (found["verdict"], found["built"]["verdict"], document["assumed"]) == ("no", "yes", {"N": 1})
    # Nobody gave this size, so the verdict of the command is that on the model as it is.
    told = shown(words, 1)
    assert told.count("for example with --dim N=1") == 2
    assert "dimension 0 of input 0 is dynamic" in told


@pytest.mark.parametrize(("activation", "parts"), [("LeakyRelu", 3), ("Relu", 1), ("Erf", 3)])
def test_a_model_that_integers_would_cut_up_is_told_before_it_is_quantized(
    activation: str, parts: int, tmp_path: Path, command: Command, answer: Answer
) -> None:
    # A check reads no values of weights as large as these.
    rng, data = np.random.default_rng(0), str(tmp_path / "data.npz")
    weights = {name: rng.normal(size=(64, 64, 3, 3)).astype(np.float32) for name in ("u", "v", "w")}
    text = f"""(float[N,64,9,9] x) => (float[N,64,3,3] y) {{
      a = Conv(x, u)  b = {activation}(a)  c = Conv(b, v)  d = {activation}(c)  y = Conv(d, w) }}"""
    np.savez(data, x=rng.normal(size=(2, 1, 64, 9, 9)).astype(np.float32))
    words = command(text, "nnapi", **weights)
    given = [*words[1:], "--shape", "x=1,64,9,9", "--data", data]
    made = answer(["quantize", *given, "--method", "minmax", "--out", str(tmp_path / "q.onnx")])
    assert made["taken"].endswith(f" in {parts} partition{'s' if parts > 1 else ''}")
    document = answer(words, 1)
    built = answer(["build", *given, "--no-verify", "--out", str(tmp_path / "built")])
    taken = f"{made['taken']}, the largest with 59% of the work"
    loss = f"as int8 it would be maybe: {taken}; --precision fp32 keeps it yes" if activation == "LeakyRelu" else ""
    assert (document["recommended"]["precision"], document["recommended"]["loss"]) == ("int8", loss)
    assert document["recommendation"].endswith(f" --dim N=1; {loss}" if loss else " --dim N=1")
    notes = [note for note in built["bundles"][0]["notes"] if "as int8 it is" in note]
    assert notes == ([f"{loss.replace('would be', 'is')}"] if loss else [])


def test_large_weights_are_not_rounded(command: Command, answer: Answer, monkeypatch: pytest.MonkeyPatch) -> None:
    weight = np.ones((64, 64, 3, 3), np.float32)
    text = "(float[1,64,9,9] x) => (float[1,64,5,5] y) { a = Conv(x, u)  b = LeakyRelu(a)  y = Conv(b, v) }"
    words = command(text, "nnapi", u=weight, v=weight)
    assert answer(words)["recommended"]["loss"].startswith("as int8 it would be maybe")
    monkeypatch.setattr("edgekit.model.model.LARGE_BYTES", weight.nbytes)
    assert answer(words)["recommended"]["loss"] == ""


def test_no_loss_is_told_of_integers_that_build_would_not_ship_so(command: Command, answer: Answer) -> None:
    # The provider would make no session of the quantized Concat, so build leaves more nodes in float.
    text = """(float[1,4,9,9] x) => (float[1,4,5,5] y) {
      a = Conv(x, u)  b = LeakyRelu(a)  c = Concat<axis = 1>(a, b)  y = Conv(c, w) }"""
    words = command(text, "nnapi", u=np.ones((4, 4, 3, 3), np.float32), w=np.ones((4, 8, 3, 3), np.float32))
    placed = place_unmeasured(load_model(Path(words[1])), load_target("nnapi"), "int8")
    assert check_model(placed, load_target("nnapi")).is_refused
    assert answer(words)["recommended"]["loss"] == ""


def test_the_loss_is_that_of_the_model_after_the_rewrites_of_a_build(command: Command, answer: Answer) -> None:
    # NNAPI takes the MatMul of three dimensions that build makes of it, but not in integers.
    loss = answer(command(EINSUM, "nnapi"))["recommended"]["loss"]
    assert loss.startswith("as int8 it would be no: 3 of 7 nodes in 2 partitions")


def test_the_loss_names_a_risk_of_the_integers(command: Command, answer: Answer) -> None:
    # Half precision is made float before it is quantized, and infinite numbers are rounded without a warning.
    weights = {"w": np.ones((2, 4, 4), np.float16), "t": np.full((13, 4), -np.inf, np.float16)}
    text = "(int64[2,3] x) => (float16[2,3,4] y) { a = Gather(t, x) y = MatMul(a, w) }"
    loss = answer(command(text, "openvino", **weights))["recommended"]["loss"]
    assert ", the largest with 100% of the work, risk: rank 3 of input 1 is above 2" in loss
    assert loss.endswith("; --precision fp16 keeps it yes")


def test_sizes_that_do_not_fit_the_model_are_not_assumed(command: Command, answer: Answer) -> None:
    text = "(float[1,2,H,W] x) => (float[1,3] y) { c = Conv(x, w) f = Flatten(c) y = MatMul(f, v) }"
    weights = {"w": np.ones((2, 2, 1, 1), np.float32), "v": np.ones((8, 3), np.float32)}
    document = answer(command(text, "qnn", **weights), 1)
    assert "built" not in document["targets"]["qnn"]
    assert document["assumed"] == {}


# For each weight, its shape; the axis of an open dimension W beside it has only one size.
DEMANDING = {
    "MatMul": ("[N,W]", "y = MatMul(x, w)", (40, 8)),
    "Gemm": ("[N,W]", "y = Gemm<transB = 1>(x, w)", (8, 40)),
    "turned": ("[N,W]", "y = Gemm<transB = 2>(x, w)", (8, 40)),
    "Conv": ("[N,W,32,32]", "y = Conv(x, w)", (8, 40, 1, 1)),
    "GRU": ("[T,N,W]", "y, h = GRU<hidden_size = 8>(x, w, r)", (1, 24, 40)),
    "moved": ("[N,T,W]", "t = Transpose<perm = [1, 0, 2]>(x) u = Relu(t) y = MatMul(u, w)", (40, 8)),
    "Mul": ("[N,W,3]", "y = Mul(w, x)", (40, 3)),
}


@pytest.mark.parametrize("kind", DEMANDING)
def test_a_size_that_a_weight_demands_is_assumed(kind: str, command: Command, answer: Answer) -> None:
    dims, body, shape = DEMANDING[kind]
    weights = {"w": np.ones(shape, np.float32)} | ({"r": np.ones((1, 24, 8), np.float32)} if kind == "GRU" else {})
    document = answer(command(f"(float{dims} x) => (float y) {{ {body} }}", "qnn", **weights), 1)
    assert (document["assumed"]["W"], document["targets"]["qnn"]["built"]["verdict"]) == (40, "yes")


def test_a_first_dimension_that_windows_slide_along_is_no_batch(command: Command, answer: Answer) -> None:
    text = "(float[T,20] x) => (float y) { u = Unsqueeze(x, f) c = Conv(u, w) y = Slice(c, z, t, t) }"
    weights = {"w": np.ones((2, 1, 7, 3), np.float32), "f": np.array([0, 1]), "z": np.array([0]), "t": np.array([2])}
    document = answer(command(text, "qnn", **weights), 1)
    assert (document["assumed"], document["targets"]["qnn"]["built"]["verdict"]) == ({"T": 128}, "yes")


def test_assumed_sizes_are_halved_until_they_fit_the_models_positions(command: Command, answer: Answer) -> None:
    text = """(float[N,L,4] x) => (float[N,L,4] y)
        { f = Shape<start = 1, end = 2>(x) p = Slice(t, z, f) y = Add(x, p) }"""
    for positions, assumed in ((20, {"N": 1, "L": 16}), (8, {"N": 1, "L": 8}), (7, {})):
        document = answer(command(text, "qnn", t=np.ones((positions, 4), np.float32), z=np.zeros(1, np.int64)), 1)
        verdict = document["targets"]["qnn"].get("built", {}).get("verdict")
        assert (document["assumed"], verdict) == (assumed, "yes" if assumed else None)
