"""Verdicts on networks of strangers, held against an oracle that knows no gate of edgekit's: that of tools/corpus."""

import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
from devices_models import present
from stranger_models import STRANGERS, write_stranger

sys.path.append(str(Path(__file__).parents[2] / "tools" / "corpus"))
from confusion import Finding, Row, Verdict, format_matrix, judge_net
from oracle import DEVICES, MEASURES, State, Truth, judge
from table import Answers, Net, list_nets, read_specs


@pytest.mark.slow
@pytest.mark.parametrize("name", STRANGERS)
def test_a_verdict_is_what_the_oracle_says(name: str, tmp_path: Path, without_arm: Callable[[str], str]) -> None:
    stranger = STRANGERS[name]
    present(DEVICES[stranger.target], stranger.target)
    write_stranger(stranger, tmp_path)
    net = Net(name=name, folder=tmp_path, answers=stranger.answers)
    (finding,) = judge_net(net, [without_arm(stranger.target)], tmp_path / "out").findings
    assert (finding.verdict, finding.state) == ("pass", "right"), finding


@pytest.mark.parametrize("answers", MEASURES)
def test_the_oracle_says_no(answers: Answers) -> None:
    rng = np.random.default_rng(4)
    wanted = rng.normal(size=(24, 1, 6, 8)).astype(np.float32)
    if answers == "boxes":
        corners = rng.uniform(0, 50, (24, 1, 5, 2))
        scores = rng.uniform(0.5, 1, (24, 1, 5, 1))
        wanted = np.concatenate([corners, corners + 20, scores, rng.integers(0, 3, (24, 1, 5, 1))], -1)
    near, other, holed = wanted + 1e-3 * wanted[::-1], wanted[::-1], wanted.copy()
    near[..., 5:] = wanted[..., 5:]
    holed[3].flat[0] = np.nan
    assert judge(answers, wanted, near).state == "right"
    assert judge(answers, wanted, other).state == "wrong"
    assert judge(answers, wanted, holed).state == "wrong"


def test_who_contradicts_the_truth_is_counted() -> None:
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


def test_the_table_holds_what_was_asked_for() -> None:
    specs, packaged = read_specs()
    nets = list_nets()
    assert len({net.name for net in nets}) == len(nets) >= 120
    assert sum(spec.held_out for spec in specs) == 20
    kept_out = ("rapidocr", "all-minilm", "resemblyzer", "torchcrepe", "basic-pitch")
    assert not [each for each in packaged if each.package.startswith(kept_out)]
