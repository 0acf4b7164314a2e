"""Does `edgekit tune` find what an exhaustive grid finds, and in which share of its time?

    python tools/bench/tune_grid.py [NAME | MODEL.onnx ...] [--on host:native] [--state DIR] [--rounds 8]

NAME is one of tools/bench/architectures.py (encoder25m) or of ../shared/zoo/models. Each cell of the grid gets as many
rounds as one decision of the search; then what both chose is compared in fresh rounds. Times of others on this machine
hit neighbours alike: shares are said in seconds and in sessions measured, which do not depend on them. With `--state`
what was measured is kept, and a run that was cut off goes on. Exit code 1 where a goal is missed.
"""

import argparse
import itertools
import os
import tempfile
from functools import partial
from pathlib import Path

import msgspec
from architectures import ARCHITECTURES
from quantize_ratio import write_model

from edgekit._ort import Level
from edgekit.bench.subject import Opening, open_subject
from edgekit.bundle.manifest.tuned import SessionSetting
from edgekit.devices.bundled import set_job
from edgekit.devices.device import Job
from edgekit.devices.register import DeviceChoice, choose_devices
from edgekit.tune.front import sum_up
from edgekit.tune.journal import Journal
from edgekit.tune.measure import GATE, Course, measure
from edgekit.tune.race import compare_fresh
from edgekit.tune.report import Entrant, TuneReport
from edgekit.tune.tune import DEFAULTS, Tuning, tune_on

ZOO = Path(__file__).parents[2].parent / "shared" / "zoo" / "models"
NEAR, SHARE, SECONDS = 1.03, 0.2, 300.0
_SPIN = {"session.intra_op.allow_spinning": "0"}


def main() -> int:
    """Prints a line a subject."""
    parser = argparse.ArgumentParser()
    parser.add_argument("subjects", nargs="*", default=["mobilenetv2", "encoder25m"])
    parser.add_argument("--on", default="host:native")
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    missed = False
    with tempfile.TemporaryDirectory() as folder:
        state = options.state or Path(folder) / "state"
        state.mkdir(parents=True, exist_ok=True)
        for name in options.subjects:
            missed |= _run(_find(name, Path(folder)), options.on, state / Path(name).stem, options.rounds)
    return int(missed)


def list_cells() -> list[Entrant]:
    """Returns the grid, the defaults first: levels, threads with and without spinning, memory, IO binding."""
    threads = {
        "default threads": SessionSetting(),
        "no spinning": SessionSetting(config=_SPIN),
        "1 thread": SessionSetting(threads=1),
    }
    cells = [
        Entrant(
            name=f"{level}, {name}, arena {arena}, pattern {pattern}, binding {binding}",
            setting=msgspec.structs.replace(
                threads[name], level=level, arena=arena, memory_pattern=pattern, io_binding=binding
            ),
        )
        for level, name, arena, pattern, binding in itertools.product(
            (Level.ALL, Level.EXTENDED, Level.BASIC), threads, (True, False), (True, False), (False, True)
        )
    ]
    return [DEFAULTS, *cells[1:]]


def _run(path: Path, on: str, state: Path, rounds: int) -> bool:
    """Runs both searches of a subject and prints what they came to; returns True where a goal is missed."""
    tuning = Tuning(goal="latency", budget_s=SECONDS, state=state.with_suffix(".tune.json"))
    print(f"{path.stem}: load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores", flush=True)
    found = tune_on(path, DeviceChoice(names=(on,)), tuning, Opening(), progress=partial(print, "  ", flush=True))
    course = _make_course(path, on, state, found)
    grid = Journal(partial(measure, course), float("inf"), state.with_suffix(".grid.json"), {"rounds": str(rounds)})
    cells = list_cells()
    for number in range(rounds):
        grid.take(cells)
        print(f"  round {number + 1} of {rounds}: {grid.seconds:.0f} s", flush=True)
    tried = sum_up(grid.rounds)
    best = min(cells, key=lambda cell: tried[cell.name].median_ms)
    last = Journal(partial(measure, course), float("inf"), state.with_suffix(".last.json"), {"best": best.name})
    chosen = msgspec.structs.replace(found.chosen, name=f"tuned: {found.chosen.name}", file="")
    ratio = compare_fresh(best, chosen, last.take, "latency")
    if isinstance(ratio, str):
        raise SystemExit(ratio)
    low, high = ratio.interval
    share, sessions = found.seconds / grid.seconds, found.measurements / grid.measurements
    gain = tried[best.name].median_ms / tried[DEFAULTS.name].median_ms
    print(
        f"{path.stem}: tune chose '{found.chosen.name}', the grid '{best.name}' ({gain:.3f} of the defaults);"
        f" tuned takes {ratio.value:.3f} of the grid's (95 %: {low:.3f} to {high:.3f}); {found.seconds:.0f} s and"
        f" {found.measurements} sessions of {grid.seconds:.0f} s and {grid.measurements}: {share:.2f} of the time,"
        f" {sessions:.2f} of the sessions; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return ratio.value > NEAR or sessions > SHARE or found.seconds > SECONDS


def _make_course(path: Path, on: str, state: Path, found: TuneReport) -> Course:
    subject = open_subject(path, state, Opening())
    (device,) = choose_devices(DeviceChoice(names=(on,)), subject.target_for, default=())
    job = subject.job_for(device)

    def job_for(entrant: Entrant) -> Job:
        return set_job(job, entrant.setting)

    guess = next(one.median_ms for one in found.tried if one.entrant == DEFAULTS)
    loose = msgspec.structs.replace(GATE, min_cosine=-1.0, min_sqnr_db=-200.0)
    return Course(device=device, goal="latency", job_for=job_for, reference={}, gate=loose, guess_ms=guess)


def _find(name: str, folder: Path) -> Path:
    if name in ARCHITECTURES:
        return write_model(ARCHITECTURES[name](), folder, 1)[0]
    return next(iter(sorted(ZOO.glob(f"{name}*.onnx"))), Path(name))


if __name__ == "__main__":
    raise SystemExit(main())
