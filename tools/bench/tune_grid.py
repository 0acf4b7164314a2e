"""Does `edgekit tune` find what an exhaustive grid finds, and in which share of its time?

    python tools/bench/tune_grid.py [NAME | MODEL.onnx ...] [--on host:native] [--state DIR] [--rounds 8]

NAME is one of tools/bench/architectures.py (encoder25m) or of ../shared/zoo/models. Each cell of the grid gets as many
rounds as one decision of the search; then what both chose is compared in fresh rounds. On a busy machine their interval
is wide: where both have one thread they are compared in CPU seconds too, in one process, which others hardly change.
Shares are said in seconds and in sessions measured. With `--state` what was measured is kept, and a run that was cut
off goes on. Exit code 1 where a goal is missed.
"""

import argparse
import itertools
import os
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import msgspec
import onnxruntime
from architectures import ARCHITECTURES
from quantize_ratio import write_model

from edgekit._ort import Level
from edgekit.bench.latency import Ratio, compare_rounds
from edgekit.bench.subject import Opening, open_subject
from edgekit.bundle.manifest.tuned import SessionSetting
from edgekit.data.random_samples import draw_samples
from edgekit.devices.bundled import set_job
from edgekit.devices.device import Job
from edgekit.devices.register import DeviceChoice, choose_devices
from edgekit.model.model import load_model
from edgekit.model.tensors import Tensors
from edgekit.tune.front import sum_up
from edgekit.tune.journal import Journal
from edgekit.tune.measure import GATE, Course, measure
from edgekit.tune.race import compare_fresh
from edgekit.tune.report import Entrant, TuneReport
from edgekit.tune.tune import DEFAULTS, Tuning, tune_on

ZOO = Path(__file__).parents[2].parent / "shared" / "zoo" / "models"
NEAR, SHARE, SECONDS = 1.03, 0.2, 300.0
ort: Any = onnxruntime
_LEVELS = {
    Level.ALL: ort.GraphOptimizationLevel.ORT_ENABLE_ALL,
    Level.EXTENDED: ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED,
    Level.BASIC: ort.GraphOptimizationLevel.ORT_ENABLE_BASIC,
}
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
    unit = "times"
    if best.setting.threads == 1 == chosen.setting.threads:
        ratio, unit = compare_cpu(path, best.setting, chosen.setting), "CPU seconds"
    low, high = ratio.interval
    share, sessions = found.seconds / grid.seconds, found.measurements / grid.measurements
    gain = tried[best.name].median_ms / tried[DEFAULTS.name].median_ms
    print(
        f"{path.stem}: tune chose '{found.chosen.name}', the grid '{best.name}' ({gain:.3f} of the defaults);"
        f" tuned takes {ratio.value:.3f} of the grid's (95 %, {unit}: {low:.3f} to {high:.3f});"
        f" {found.seconds:.0f} s and {found.measurements} sessions of {grid.seconds:.0f} s and {grid.measurements}:"
        f" {share:.2f} of the time, {sessions:.2f} of the sessions; load {os.getloadavg()[0]:.1f}",
        flush=True,
    )
    return ratio.value > NEAR or sessions > SHARE or found.seconds > SECONDS


def compare_cpu(path: Path, a: SessionSetting, b: SessionSetting) -> Ratio:
    """Returns how many times the CPU seconds of A a run of B takes; both have one thread."""
    samples = draw_samples(load_model(path).inputs)
    if samples is None:
        raise SystemExit(f"no sample can be drawn for '{path}'")
    sample = next(iter(samples))
    calls = [_open(path, setting, sample) for setting in (a, b)]
    rounds: list[tuple[float, float]] = []
    for number in range(24):
        spent: dict[int, float] = {}
        for side in (0, 1) if number % 2 == 0 else (1, 0):
            spent[side] = median(_spend(calls[side]) for _ in range(8))
        rounds.append((spent[0], spent[1]))
    return compare_rounds(rounds)


def _spend(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def _open(path: Path, setting: SessionSetting, sample: Tensors) -> Callable[[], object]:
    options = ort.SessionOptions()
    options.graph_optimization_level = _LEVELS[setting.level]
    options.intra_op_num_threads = setting.threads
    options.enable_cpu_mem_arena, options.enable_mem_pattern = setting.arena, setting.memory_pattern
    for key, value in setting.config.items():
        options.add_session_config_entry(key, value)
    session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    feeds = dict(sample)
    session.run(None, feeds)
    if not setting.io_binding:
        return lambda: session.run(None, feeds)
    binding = session.io_binding()
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    for output in session.get_outputs():
        binding.bind_output(output.name)
    session.run_with_iobinding(binding)
    for output, made in zip(session.get_outputs(), binding.get_outputs(), strict=True):
        binding.bind_ortvalue_output(output.name, made)
    return lambda: session.run_with_iobinding(binding)


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
