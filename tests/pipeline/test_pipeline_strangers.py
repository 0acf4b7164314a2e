"""Verdicts on networks of strangers, held against an oracle that knows no gate of edgekit's: that of tools/corpus."""

import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import require_device
from stranger_models import STRANGERS, write_stranger

from edgekit.data.intervals import Z95
from edgekit.data.samples import load_samples
from edgekit.model.model import Model, load_model
from edgekit.prepare import ready_model
from edgekit.quantize import calibrate_model, quantize_model
from edgekit.quantize.accuracy.likeness import Likeness
from edgekit.quantize.accuracy.loss import DEFAULT_MAX_DROP
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.mixed_precision.auto import plan_minmax
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.plan_search import Search, write_chosen
from edgekit.target import load_target

sys.path.append(str(Path(__file__).parents[2] / "tools" / "corpus"))
from confusion import Finding, Row, Verdict, format_matrix, judge_net, read_rows, run_corpus
from oracle import DEVICES, MEASURES, State, Truth, judge
from table import Answers, Net, list_nets, read_specs

# For XNNPACK, QNN and the CPU; other tests build and verify for NNAPI. The plans of all nets are judged below.
_USUAL = {"squeeze and excitation", "steps of a sequence"}


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] * (name not in _USUAL)) for name in STRANGERS]
)
def test_a_verdict_is_what_the_oracle_says(name: str, tmp_path: Path, without_arm: Callable[[str], str]) -> None:
    stranger = STRANGERS[name]
    require_device(DEVICES[stranger.target], stranger.target)
    write_stranger(stranger, tmp_path)
    net = Net(name=name, folder=tmp_path, answers=stranger.answers)
    (finding,) = judge_net(net, [without_arm(stranger.target)], tmp_path / "out").findings
    assert (finding.verdict, finding.state) == ("pass", "right"), finding


def find_chance(reference: FloatReference, one: Model, two: Model) -> float:
    """Returns the standard error of the difference of two estimated drops, by leaving out an eighth of the samples."""
    for each in (one, two):
        reference.predict_drop(each)
    kept = [reference._compared[each.sha256] for each in (one, two)]
    gaps = list[float]()
    for group in range(8):
        indices = [index for place, index in enumerate(reference.indices) if place % 8 != group]
        judged = [Likeness(reference.parts, [own[index] for index in indices]).losses for own in kept]
        gaps.append(float(np.diff([max((loss.estimate for _, loss in each), default=0.0) for each in judged])[0]))
    return 7**0.5 * float(np.std(gaps))


@pytest.mark.parametrize("name", STRANGERS)
def test_no_plan_decides_worse_than_plain_minmax(name: str, tmp_path: Path) -> None:
    stranger = STRANGERS[name]
    write_stranger(stranger, tmp_path)
    target = load_target(stranger.target)
    model = ready_model(load_model(tmp_path / "model.onnx"), tmp_path, {}, may_stay_open=False).model
    samples = load_samples(tmp_path / "held.npz", model.inputs)
    calibration = calibrate_model(model, samples, work=tmp_path / "calibration")
    reference = FloatReference(model, samples)
    search = Search(
        model=model, calibration=calibration, target=target, precision="int8", measure=reference.predict_drop,
        compare=reference.compare, work=tmp_path,
    )  # fmt: skip
    plan, searched = find_plan(search, max_drop=None, narrow=True)
    written = write_chosen(search, plan, searched, tmp_path / "written.onnx").model
    if searched is not None and "times as wide" in searched.chosen.step:
        # Headroom costs the samples of the calibration a little, and is there for others.
        reference = FloatReference(model, load_samples(tmp_path / "many.npz", model.inputs))
    stock = plan_minmax(search, plan)
    plain = quantize_model(model, stock, calibration, tmp_path / "stock.onnx").model
    lost, least = (reference.predict_drop(each) for each in (written, plain))
    gap, reach = (lost.drop_estimate or 0) - (least.drop_estimate or 0), Z95 * find_chance(reference, written, plain)
    assert gap <= reach
    assert lost.meets(DEFAULT_MAX_DROP) or not least.meets(DEFAULT_MAX_DROP)
    # Minmax moves decisions more, or none of the plan's changed, or minmax misses the goal that the plan meets.
    is_better = lost.meets(DEFAULT_MAX_DROP) and not least.meets(DEFAULT_MAX_DROP)
    assert is_better or reference.compare(written, plain) <= 0 or lost.top1_agreement in {None, 1.0}


@pytest.mark.parametrize("answers", MEASURES)
def test_the_oracle_rejects_wrong_models(answers: Answers) -> None:
    rng = np.random.default_rng(4)
    wanted = rng.normal(size=(24, 1, 6, 8)).astype(np.float32)
    if answers == "boxes":
        corners = rng.uniform(0, 50, (24, 1, 5, 2))
        scores = rng.uniform(0.5, 1, (24, 1, 5, 1))
        wanted = np.concatenate([corners, corners + 20, scores, rng.integers(0, 3, (24, 1, 5, 1))], -1)
    near, other, holed = wanted + 1e-3 * wanted[::-1], wanted[::-1], wanted.copy()
    near[..., 5:] = wanted[..., 5:]
    holed[3].flat[0] = np.nan
    assert (judge(answers, wanted, near).state, judge(answers, wanted, other).state) == ("right", "wrong")
    assert judge(answers, wanted, holed).state == "wrong"


def test_verdicts_that_contradict_the_oracle_are_counted() -> None:
    def found(verdict: Verdict, state: State | None) -> Finding:
        truth = None if state is None else Truth(state=state)
        return Finding(target="qnn", verdict=verdict, reason="why", truth=truth)

    pairs: list[tuple[Verdict, State | None]] = [("pass", "right"), ("fail", "wrong"), ("fail", "does not start")]
    pairs += [("not proven", "right"), ("fail", "open"), ("pass", "open"), ("no bundle", None)]
    honest = [found(*pair) for pair in pairs]
    false = [found("pass", "wrong"), found("pass", "does not start"), found("fail", "right"), found("traceback", None)]
    assert not any(finding.is_wrong for finding in honest)
    assert all(finding.is_wrong for finding in false)
    idle = Finding(target="xnnpack", verdict="fail", idle=True, truth=Truth(state="right", taken=0.2))
    assert not idle.is_wrong
    assert msgspec.structs.replace(idle, truth=Truth(state="right", taken=0.9)).is_wrong
    row = Row(net="net", held_out=False, findings=(*honest, *false), cpu_s=7, wall_s=9)
    lines = list(format_matrix([row]))
    assert "| fail | 1 | 1 | 1 | 1 | 0 |" in lines
    assert "1 networks, 11 verdicts, 4 wrong (36.4 %)" in lines
    assert sum(line.startswith("WRONG net qnn") for line in lines) == 4


def test_a_fault_of_edgekit_at_one_target_is_a_wrong_verdict(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stranger = STRANGERS["steps of a sequence"]
    write_stranger(stranger, tmp_path)

    def fail(*_args: object, **_named: object) -> None:
        raise KeyError("node_linear")

    monkeypatch.setattr("edgekit.jobs.build.write_ready", fail)
    net = Net(name="net", folder=tmp_path, answers=stranger.answers)
    (finding,) = judge_net(net, ["cpu"], tmp_path / "out").findings
    assert (finding.verdict, finding.is_wrong) == ("traceback", True)
    assert "KeyError" in finding.reason


def test_a_process_that_dies_without_a_word_is_no_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("confusion.CORPUS", tmp_path)
    monkeypatch.setattr("sys.executable", shutil.which("false"))
    net = Net(name="net", folder=tmp_path, answers="classes")
    (row,) = run_corpus([net], ["cpu"], "label", 1, 60)
    assert "returned non-zero exit status 1" in row.failure
    assert not read_rows("label")


def test_the_table_of_models_is_complete_and_has_no_model_twice() -> None:
    specs, packaged = read_specs()
    nets = list_nets()
    assert len({net.name for net in nets}) == len(nets) >= 120
    assert sum(spec.held_out for spec in specs) == 20
    kept_out = ("rapidocr", "all-minilm", "resemblyzer", "torchcrepe", "basic-pitch")
    assert not [each for each in packaged if each.package.startswith(kept_out)]
