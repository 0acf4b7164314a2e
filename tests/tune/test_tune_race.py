"""Races decide by fresh rounds, and keep no promise that the noise could break."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
from fixture_types import present

from edgekit._ort import Level
from edgekit.bench.bench import ROUNDS
from edgekit.bundle.manifest import SessionSetting
from edgekit.data.samples import Samples
from edgekit.errors import UsageError
from edgekit.target import Session
from edgekit.tune.race import (
    GATE,
    LEAST_GAIN,
    TIME_OVER,
    Entrant,
    Journal,
    Measurement,
    compare_fresh,
    judge_outputs,
    race,
)
from edgekit.tune.space import SWITCHES, Change, Circumstances, list_groups
from edgekit.tune.tune import summarize_rounds

HELD = Entrant(name="held")
Take = Callable[[Sequence[Entrant]], Sequence[Measurement]]


def entrants(*names: str) -> list[Entrant]:
    return [Entrant(name=name) for name in names]


def noisy(costs: Mapping[str, float], seed: int, spread: float = 0.03) -> Take:
    """Times of settings on a machine that is loud, and gets slower for all from round to round."""
    rng, rounds = np.random.default_rng(seed), [0]

    def take(asked: Sequence[Entrant]) -> Sequence[Measurement]:
        rounds[0] += 1
        slower = 1 + 0.02 * rounds[0]
        return [
            Measurement(median_ms=slower * costs.get(one.name, 1.0) * float(np.exp(rng.normal(0, spread))))
            for one in asked
        ]

    return take


def test_equally_fast_settings_are_rarely_chosen() -> None:
    taken = sum(
        race("group", HELD, entrants("a", "b", "c", "d"), noisy({}, seed), "latency").taken for seed in range(200)
    )
    # Each decision is at 95 %, on both sides; only one side takes.
    assert taken <= 10


def test_the_fastest_is_proven_and_a_negligible_gain_is_ignored() -> None:
    names = {"slow": 1.5, "fast": 0.8, "faster": 0.7, "equal": 1.0, "bad": 3.0}
    found = race("group", HELD, entrants(*names), noisy(names, 1), "latency")
    assert (found.taken, found.challenger) == (True, "faster")
    assert found.ratio is not None
    assert found.ratio.interval[1] < 1
    assert found.ratio.rounds == ROUNDS
    found = race("group", HELD, entrants("a"), noisy({"a": 0.97}, 3, spread=1e-4), "latency")
    assert found.taken
    near = 1 - LEAST_GAIN / 2
    found = race("group", HELD, entrants("a"), noisy({"a": near}, 3, spread=1e-4), "latency")
    assert (found.taken, found.challenger) == (False, "")
    assert "none was ahead by 1%" in found.reason


def test_a_failing_setting_is_dropped_with_the_reason() -> None:
    def take(asked: Sequence[Entrant]) -> Sequence[Measurement]:
        return [
            Measurement(median_ms=0.5, fault="failed: no") if one.name == "bad" else Measurement(median_ms=1.0)
            for one in asked
        ]

    found = race("group", HELD, entrants("bad", "good"), take, "latency")
    assert not found.taken
    assert "'bad' is out: failed: no" in found.reason
    assert race("group", Entrant(name="bad"), entrants("good"), take, "latency").reason == "failed: no"
    assert compare_fresh(HELD, Entrant(name="bad"), take, "latency") == "failed: no"


def test_finished_rounds_are_saved_and_not_measured_again(tmp_path: Path) -> None:
    file, counts = tmp_path / "state.json", [0]

    def measure(_: Entrant) -> Measurement:
        counts[0] += 1
        return Measurement(median_ms=float(counts[0]))

    first = Journal(measure, 60.0, file, {"goal": "latency"})
    rounds = [first.take(entrants("a", "b")), first.take(entrants("a", "b"))]
    again = Journal(measure, 60.0, file, {"goal": "latency"})
    assert [tuple(again.take(entrants("a", "b")) or ()) for _ in range(2)] == [tuple(one or ()) for one in rounds]
    assert counts[0] == 4
    assert again.take(entrants("c")) is not None
    assert (counts[0], again.measurements) == (5, 5)
    with pytest.raises(UsageError, match="another goal"):
        Journal(measure, 60.0, file, {"goal": "load"})
    stored = json.loads(file.read_bytes())
    for changed, said in ({"done": 3}, "was changed"), ({"sha256": 3}, "no state of a search"):
        file.write_text(json.dumps({**stored, **changed}))
        with pytest.raises(UsageError, match=said):
            Journal(measure, 60.0, file, {"goal": "latency"})


def test_the_order_of_settings_rotates_from_round_to_round() -> None:
    seen: list[str] = []

    def measure(entrant: Entrant) -> Measurement:
        seen.append(entrant.name)
        return Measurement(median_ms=1.0)

    # Two settings, as in the rounds that decide, are measured as AB, BA, BA, AB.
    for names, rounds in (("ab", 4), ("abc", 6), ("abcd", 8)):
        seen.clear()
        journal = Journal(measure, 60.0)
        for _ in range(rounds):
            journal.take(entrants(*names))
        firsts, lasts = seen[:: len(names)], seen[len(names) - 1 :: len(names)]
        assert all(ends.count(name) == 2 for ends in (firsts, lasts) for name in names)


def test_a_journal_reserves_time_for_later_stages() -> None:
    journal = Journal(lambda _: Measurement(median_ms=1.0), 1e-9)
    assert journal.take(entrants("a")) is not None
    assert journal.take(entrants("a")) is None
    endless = Journal(lambda _: Measurement(median_ms=1.0), 60.0)
    endless.take(entrants("a"))
    assert endless.take(entrants("a"), reserve=10**12) is None
    assert endless.take(entrants("a"), until_s=0.0) is None
    assert endless.take(entrants("a"), until_s=60.0) is not None


def test_measurements_are_summed_up_by_medians() -> None:
    times = iter([1.0, 9.0, 2.0])
    journal = Journal(lambda _: Measurement(median_ms=next(times), pace_ms=1.0), 60.0)
    for _ in range(3):
        journal.take(entrants("a"))
    one = summarize_rounds(journal.rounds)["a"]
    assert (one.median_ms, one.measurements) == (2.0, 3)


def test_outputs_beyond_the_limit_are_reported() -> None:
    wanted = np.linspace(-1, 1, 64, dtype=np.float32).reshape(1, 64)

    def one(value: np.ndarray) -> Samples:
        return Samples(source="t", count=1, read=lambda: iter(({"y": value},)))

    assert judge_outputs(one(wanted), one(wanted), GATE) == (200.0, None)
    near, fault = judge_outputs(one(wanted), one(wanted * np.float32(1.001)), GATE)
    assert (round(present(near)), fault) == (60, None)
    far, fault = judge_outputs(one(wanted), one(wanted[:, ::-1].copy()), GATE)
    assert present(far) < 0
    assert present(fault).startswith("its outputs differ: output 'y'")


def names_of(given: Circumstances) -> dict[str, list[str]]:
    return {group.name: [change.name for change in group.changes] for group in list_groups(given)}


def test_the_search_space_depends_on_goal_provider_and_machine() -> None:
    plain = names_of(Circumstances(goal="latency", provider="CPUExecutionProvider", cores=2, branches=False))
    assert list(plain) == ["threads", "optimization level", "switches"]
    assert plain["threads"] == ["no spinning", "1 thread"]
    # From the physical cores, which are the default, to all logical ones and to halves; then both pools share them.
    twice = names_of(Circumstances(goal="latency", provider="CPUExecutionProvider", cores=8, physical=4))
    assert list(twice)[:2] == ["threads", "execution"]
    assert [name for name in twice["threads"] if "no spin" not in name] == ["8 threads", "2 threads", "1 thread"]
    assert twice["execution"] == ["parallel", "parallel, 2 by 2 threads", "parallel, 4 by 1 threads"]
    assert "IO binding" in plain["switches"]
    small = names_of(Circumstances(goal="memory", provider="CPUExecutionProvider", cores=4))
    assert "IO binding" not in small["switches"]
    assert "2 threads, no spinning" in small["threads"]
    many = names_of(
        Circumstances(goal="throughput", provider="QNNExecutionProvider", files=("full",), cores=8, dynamic_batch=True)
    )
    assert {"file", "provider options", "execution", "calls"} <= many.keys()
    assert {"batch 8", "2 runs at once"} <= set(many["calls"])


def test_an_option_that_the_target_sets_is_no_change() -> None:
    asked = Session(config={"session.intra_op.allow_spinning": "0"}, provider_options={"intra_op_num_threads": "2"})
    found = names_of(Circumstances(goal="latency", provider="XnnpackExecutionProvider", cores=2, asked=asked))
    assert found["threads"] == ["1 thread"]
    assert "2 XNNPACK threads" not in found["provider options"]


def test_changes_add_up_and_know_what_they_touch() -> None:
    held = SessionSetting(config={"a": "1"}, level=Level.BASIC)
    change = Change(name="x", threads=2, config={"b": "0"})
    assert change.apply(held) == SessionSetting(config={"a": "1", "b": "0"}, level=Level.BASIC, threads=2)
    assert change.touches == {"threads", "b"}
    assert all(one.touches for one in SWITCHES.changes)


def test_without_time_nothing_is_decided_and_the_best_so_far_is_named() -> None:
    assert race("group", HELD, entrants("a"), lambda _: None, "latency").reason == TIME_OVER
    assert compare_fresh(HELD, HELD, lambda _: None, "latency") == TIME_OVER
    journal = Journal(lambda one: Measurement(median_ms=2.0 if one.name == "a" else 1.0), 60.0)
    rounds = 2

    def take(racing: Sequence[Entrant]) -> Sequence[Measurement] | None:
        return journal.take(racing) if len(journal.rounds) < rounds - 1 else None

    (holder, challenger) = entrants("a", "b")
    found = race("x", holder, [challenger], take, "latency")
    assert found.reason == "the time was over before it was decided: so far 'b' at 0.500 was the best"
