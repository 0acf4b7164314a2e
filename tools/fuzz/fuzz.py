"""Gives damaged files to every command, and reports those that were not refused in one line.

    python tools/fuzz/fuzz.py [--seconds 600 | --cases 1000] [--seed 1] [--command inspect] [--only 17] [--out DIR]

Each case is drawn from the seed and its number: the same seed on the same commit draws the same cases. A case calls a
command in a child of this process, on copies of small models, samples, bundles and reports, of which one or two are
damaged. It fails in these cases: a traceback leaves the command; a child dies or takes more than 10 s of CPU time; exit
code 2 comes without a line that ends in a hint; something is written, read or started outside the case's folder, or
left in its temporary folder; an input is changed; the output of `--json` is not JSON.

Each finding has a folder with the files and `command.json`; `--only NUMBER` runs one of them again.
"""

import argparse
import importlib
import json
import os
import pkgutil
import select
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec
from subjects import make_subjects
from worker import Outcome, describe_ending, keep_network_away, serve

import edgekit

_BATCH = 200
_HANG_WALL_S = 90.0


class Asked(msgspec.Struct, frozen=True, kw_only=True):
    """The cases to run: numbers from `first` on, until `cases` are done or `seconds` are over."""

    seed: int
    first: int
    cases: int | None
    seconds: float | None
    commands: tuple[str, ...]
    work: Path
    out: Path


class Found(msgspec.Struct):
    """The results so far: the number of cases by command and exit code, and the findings by their key."""

    cases: int = 0
    ends: Counter[str] = Counter()
    findings: dict[str, list[Outcome]] = {}
    last: int = -1


def run(asked: Asked) -> Found:
    """Runs cases in batches, each in a child of its own, until the cases are done or the time is over."""
    found = Found()
    started = time.monotonic()
    next_case = asked.first
    end = None if asked.cases is None else asked.first + asked.cases
    while (end is None or next_case < end) and (asked.seconds is None or time.monotonic() - started < asked.seconds):
        numbers = list(range(next_case, min(next_case + _BATCH, end or next_case + _BATCH)))
        for outcome in _run_batch(asked, numbers):
            next_case = outcome.number + 1
            _count(asked, found, outcome)
        if asked.cases is None:
            _show_state(found, time.monotonic() - started)
    return found


def _import_all() -> None:
    """Imports every module of edgekit, so that no child has to, and changes of the tree during a run have no effect."""
    for module in pkgutil.walk_packages(edgekit.__path__, "edgekit."):
        if ".standalone." not in module.name and not module.name.endswith("__main__"):
            importlib.import_module(module.name)


def _run_batch(asked: Asked, numbers: list[int]) -> Iterator[Outcome]:
    """Yields the outcomes of some cases; if the child dies, the last outcome is that of the case in which it died."""
    reader, writer = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    log = asked.work / "child.log"
    child = os.fork()
    if child == 0:
        os.close(reader)
        os.dup2(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
        os.dup2(writer, 3)
        status = 1
        try:
            serve(asked.seed, numbers, asked.work, asked.commands)
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    os.close(writer)
    running: int | None = None
    with os.fdopen(reader, "rb", buffering=0) as lines:
        for line in _read_lines(lines.fileno(), child):
            told = json.loads(line)
            running = told.get("begin")
            if running is None:
                yield msgspec.convert(told, Outcome)
    _, status = os.waitpid(child, 0)
    if status != 0:
        yield _name_death(asked, running if running is not None else numbers[0], describe_ending(status), log)


def _read_lines(descriptor: int, child: int) -> Iterator[bytes]:
    """Yields the lines of a child, and ends the child if it is silent for too long."""
    pending = b""
    while True:
        if not select.select([descriptor], [], [], _HANG_WALL_S)[0]:
            os.kill(child, 6)
        data = os.read(descriptor, 1 << 16)
        if not data:
            return
        *whole, pending = (pending + data).split(b"\n")
        yield from whole


def _name_death(asked: Asked, number: int, ending: str, log: Path) -> Outcome:
    words = log.read_text(errors="replace")
    place = asked.work / "cases" / str(number) / "command.json"
    arguments = json.loads(place.read_text()) if place.is_file() else []
    frames = [line.strip() for line in words.splitlines() if "/edgekit/" in line]
    # faulthandler prints the innermost frame first.
    inner = frames[0].partition("/edgekit/")[2] if frames else words[-200:]
    kind = "hang" if ending in {"SIGPROF", "SIGABRT"} else "death"
    return Outcome(
        number=number, command=arguments[0] if arguments else "?", arguments=tuple(arguments), code=None, kind=kind,
        key=f"{ending} {inner}", text=words[-6000:],
    )  # fmt: skip


def _count(asked: Asked, found: Found, outcome: Outcome) -> None:
    found.cases += 1
    found.ends[f"{outcome.command} {outcome.code if outcome.kind == 'ok' else 'finding'}"] += 1
    if outcome.kind == "ok":
        return
    found.last = outcome.number
    key = f"{outcome.kind}: {outcome.key}"
    found.findings.setdefault(key, []).append(outcome)
    if len(found.findings[key]) > 3:
        shutil.rmtree(asked.work / "cases" / str(outcome.number), ignore_errors=True)
        return
    _keep(asked, outcome)


def _keep(asked: Asked, outcome: Outcome) -> None:
    place = asked.out / f"{asked.seed}-{outcome.number}"
    shutil.rmtree(place, ignore_errors=True)
    source = asked.work / "cases" / str(outcome.number)
    if source.is_dir():
        asked.out.mkdir(parents=True, exist_ok=True)
        # Moved, because it may hold links and pipes, which a copy would follow or wait for.
        shutil.move(source, place)
        (place / "finding.txt").write_text(f"{outcome.kind}: {outcome.key}\n{outcome.text}", errors="replace")


def _show_state(found: Found, seconds: float) -> None:
    clean = found.cases if found.last < 0 else "some"
    causes = len(found.findings)
    print(f"fuzz: {found.cases} cases in {seconds:.0f} s, {causes} causes, {clean} without a finding", flush=True)


def _show(asked: Asked, found: Found, seconds: float) -> None:
    print("\n".join(f"  {name:24} {count}" for name, count in sorted(found.ends.items())))
    for key, outcomes in sorted(found.findings.items(), key=lambda item: -len(item[1])):
        first = outcomes[0]
        print(f"{len(outcomes)} x {key}\n    edgekit {' '.join(first.arguments)[:300]!r}")
        print(f"    again: python tools/fuzz/fuzz.py --seed {asked.seed} --only {first.number}")
        print(f"    files: {asked.out}/{asked.seed}-{first.number}")
    kinds = Counter(outcome.kind for outcomes in found.findings.values() for outcome in outcomes)
    sums = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common()) or "no finding"
    since = found.cases if found.last < 0 else asked.first + found.cases - 1 - found.last
    print(f"fuzz: {found.cases} cases of seed {asked.seed} in {seconds:.0f} s, {sums}; the last {since} found nothing")


def main() -> int:
    """Runs the requested cases, prints the counts, and returns 1 if there is a finding."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=float)
    parser.add_argument("--cases", type=int)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--only", type=int)
    parser.add_argument("--command", action="append", default=[])
    parser.add_argument("--subjects", type=Path, help="a folder where the subjects are kept for the next run")
    parser.add_argument("--out", type=Path, default=Path("build/fuzz"))
    given = parser.parse_args()
    # Warnings that a user does not see are no findings here; the tests turn every warning into an error.
    warnings.simplefilter("default")
    keep_network_away()
    _import_all()
    with tempfile.TemporaryDirectory(prefix="edgekit-fuzz-", ignore_cleanup_errors=True) as name:
        work = Path(name).resolve()
        _lay_out(work, given.subjects)
        one = given.only is not None
        seconds = given.seconds if given.seconds or given.cases or one else 600.0
        asked = Asked(
            seed=given.seed, first=given.only if one else given.first, cases=1 if one else given.cases, seconds=seconds,
            commands=tuple(given.command), work=work, out=given.out.resolve(),
        )  # fmt: skip
        started = time.monotonic()
        found = run(asked)
        _show(asked, found, time.monotonic() - started)
        for outcome in (found.findings and one and next(iter(found.findings.values()))) or ():
            print(outcome.text)
    return 1 if found.findings else 0


def _lay_out(work: Path, kept: Path | None) -> None:
    for name in ("cases", "outside", "home/cache"):
        (work / name).mkdir(parents=True)
    (work / "outside/secret.bin").write_bytes(b"secret" * 100)
    if kept is not None and kept.is_dir():
        shutil.copytree(kept, work / "subjects")
        return
    (work / "subjects/made").mkdir(parents=True)
    # In a child, because ONNX Runtime's threads do not survive the forks to come.
    child = os.fork()
    if child == 0:
        status = 1
        try:
            make_subjects(work / "subjects")
            status = 0
        finally:
            if status:
                traceback.print_exc()
            os._exit(status)
    if os.waitpid(child, 0)[1] != 0:
        raise SystemExit("fuzz: the subjects could not be made")
    if kept is not None:
        shutil.copytree(work / "subjects", kept)


if __name__ == "__main__":
    sys.exit(main())
