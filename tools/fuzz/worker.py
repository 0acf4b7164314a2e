"""Runs cases in a process of their own, and judges each: how it ended, what it printed, what it wrote."""

import contextlib
import faulthandler
import json
import os
import resource
import shutil
import signal
import socket
import sys
import time
import traceback
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
from cases import Case

from edgekit.cli.main import run_command

HANG_CPU_S = 10.0
_MOST_BYTES = 8 << 30
_MOST_LINE = 3000
# Programs that commands may start: this Python for a device's child, and those whose version `find_missing` asks.
_PROGRAMS = ("python", "node", "cmake", "git", "adb", "qemu", "ssh", "zig", "java")


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The outcome of a case: `kind` is "ok" or what was wrong, `key` is the same for findings of one cause."""

    number: int
    command: str
    arguments: tuple[str, ...]
    code: int | None
    kind: str = "ok"
    key: str = ""
    text: str = ""
    cpu_s: float = 0.0


class Fence:
    """Records accesses outside the folder of the current case. Python cannot remove such a hook."""

    def __init__(self) -> None:
        self.inside = ""
        self.outside = ""
        self.cache = ""
        self.broken: list[str] = []

    def watch(self, event: str, arguments: tuple[Any, ...]) -> None:
        """Handles an event of Python's audit table (docs.python.org/3/library/audit_events.html)."""
        if not self.inside:
            return
        if event == "open" and isinstance(arguments[0], str | bytes | os.PathLike):
            path = os.path.realpath(os.fsdecode(arguments[0]))
            flags = arguments[2] if isinstance(arguments[2], int) else 0
            writes = flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
            if path.startswith(self.outside) or (writes and not self._is_allowed(path)):
                self.broken.append(f"opens {path}")
        elif event in {"os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.symlink", "os.link", "os.truncate"}:
            self._check_paths(event, arguments)
        elif event == "subprocess.Popen":
            program = Path(os.fsdecode(arguments[0])).name
            if not program.startswith(_PROGRAMS):
                self.broken.append(f"starts {program}")
        elif event in {"os.system", "os.exec", "os.posix_spawn", "socket.connect", "socket.getaddrinfo", "pty.spawn"}:
            self.broken.append(f"{event} {str(arguments)[:80]}")

    def _check_paths(self, event: str, arguments: tuple[Any, ...]) -> None:
        for argument in arguments[:2]:
            if isinstance(argument, str | bytes | os.PathLike):
                # Only links in the parent are followed: the file that is removed or renamed may itself be a link.
                path = Path(os.path.abspath(os.fsdecode(argument)))  # noqa: PTH100 - Path.absolute keeps ".."
                place = str(Path(os.path.realpath(path.parent)) / path.name)
                # A name relative to an open folder, as in rmtree, is another place than it seems.
                if len(arguments) > 1 and isinstance(arguments[-1], int) and arguments[-1] != -1:
                    continue
                if not self._is_allowed(place):
                    self.broken.append(f"{event} {place}")

    def _is_allowed(self, path: str) -> bool:
        own = path == self.inside or path.startswith((f"{self.inside}/", "/proc/self/", self.cache))
        # Devices lie in /dev itself; its folders may hold other files, such as those in memory.
        return own or Path(path).parent == Path("/dev")


FENCE = Fence()


def serve(seed: int, numbers: list[int], folder: Path, commands: tuple[str, ...]) -> None:
    """Runs cases and writes a line to the descriptor 3 before each begins and one after it ended."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (_MOST_BYTES, _MOST_BYTES))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 30, 1 << 30))
    # Else the compiled code of a library that a case imports would count as a file written outside.
    sys.dont_write_bytecode = True
    sys.addaudithook(FENCE.watch)
    # A case that takes too much CPU time ends here, in its traceback.
    for number in numbers:
        place = folder / "cases" / str(number)
        _tell({"begin": number})
        outcome = run_case(Case(seed, number, folder / "subjects", place), folder, commands)
        _tell(msgspec.to_builtins(outcome))
        if outcome.kind == "ok":
            shutil.rmtree(place, ignore_errors=True)


def _tell(value: object) -> None:
    os.write(3, json.dumps(value).encode() + b"\n")


def run_case(case: Case, folder: Path, commands: tuple[str, ...]) -> Outcome:
    """Prepares and runs one case, and judges it."""
    shutil.rmtree(case.folder, ignore_errors=True)
    case.prepare(commands)
    (case.folder / "command.json").write_text(json.dumps(case.arguments))
    before = _list_files(case.folder)
    outside = _list_files(folder / "outside")
    os.chdir(case.folder)
    said = case.folder.parent / f"{case.number}.said"
    FENCE.broken = []
    started = time.process_time()
    with _alone(case, said, folder):
        code, trace = _call(case.arguments)
    cpu_s = time.process_time() - started
    os.chdir(folder)
    words = said.read_bytes().decode(errors="replace")
    said.unlink()
    told = Told(code=code, trace=trace, shown=words.partition(_MARK)[0], words=words.partition(_MARK)[2])
    wrong = next(judge(case, told, before, _list_files(case.folder)), None)
    if _list_files(folder / "outside") != outside:
        wrong = ("outside", "outside changed", "a file outside was written")
    if FENCE.broken and wrong is None:
        wrong = ("outside", FENCE.broken[0].split()[0] + case.command, "; ".join(FENCE.broken[:5]))
    outcome = Outcome(number=case.number, command=case.command, arguments=tuple(case.arguments), code=code, cpu_s=cpu_s)
    if wrong is None:
        return outcome
    kind, key, text = wrong
    return msgspec.structs.replace(outcome, kind=kind, key=key, text=text[-6000:])


_MARK = "\x01stderr\x01"


class Told(msgspec.Struct, frozen=True, kw_only=True):
    """How a command ended: its exit code, or the traceback that left it; its output; its lines on stderr."""

    code: int | None
    trace: str
    shown: str
    words: str


@contextlib.contextmanager
def _alone(case: Case, said: Path, folder: Path) -> Iterator[None]:
    """Gives the case an environment, streams and limits of its own for the block."""
    place = case.folder
    os.environ.update(TMPDIR=str(place / "tmp"), HOME=str(folder / "home"), XDG_CACHE_HOME=str(folder / "home/cache"))
    import tempfile  # noqa: PLC0415 - its idea of the folder is to be forgotten

    tempfile.tempdir = None
    shown = said.with_suffix(".shown")
    kept = [os.dup(1), os.dup(2)]
    old = (sys.stdout, sys.stderr)
    with shown.open("w", encoding="utf-8", errors="surrogateescape") as out, said.open("w", encoding="utf-8") as err:
        os.dup2(out.fileno(), 1)
        os.dup2(err.fileno(), 2)
        sys.stdout, sys.stderr = out, err
        faulthandler.enable(kept[1])
        faulthandler.register(signal.SIGPROF, kept[1], all_threads=True, chain=True)
        signal.setitimer(signal.ITIMER_PROF, HANG_CPU_S)
        FENCE.inside, FENCE.outside, FENCE.cache = str(place), str(folder / "outside"), str(folder / "home/cache")
        try:
            yield
        finally:
            FENCE.inside = ""
            signal.setitimer(signal.ITIMER_PROF, 0)
            sys.stdout, sys.stderr = old
            for number, descriptor in enumerate(kept, 1):
                os.dup2(descriptor, number)
                os.close(descriptor)
            faulthandler.enable(2)
    whole = shown.read_bytes() + _MARK.encode() + said.read_bytes()
    shown.unlink()
    said.write_bytes(whole)


def _call(arguments: list[str]) -> tuple[int | None, str]:
    try:
        return run_command(arguments), ""
    except SystemExit as error:
        return None, f"SystemExit: {error.code}"
    except BaseException:  # noqa: BLE001 - whatever leaves the command line is the finding
        return None, traceback.format_exc()


def _list_files(folder: Path) -> dict[str, tuple[int, int, int]]:
    found: dict[str, tuple[int, int, int]] = {}
    for root, folders, files in os.walk(folder):
        for name in (*files, *folders):
            state = os.lstat(os.path.join(root, name))  # noqa: PTH118 - thousands of them
            size = state.st_size if name in files else 0
            changed = state.st_mtime_ns if name in files else 0
            found[os.path.relpath(f"{root}/{name}", folder)] = (state.st_mode, size, changed)
    return found


def judge(
    case: Case, told: Told, before: Mapping[str, tuple[int, int, int]], after: Mapping[str, tuple[int, int, int]]
) -> Iterator[tuple[str, str, str]]:
    """Yields the faults of a case: their kind, the key that findings of one cause share, and a text."""
    if told.code is None:
        yield "traceback", _place_of(told.trace), told.trace
    if "Traceback (most recent call last)" in told.words + told.shown:
        yield "traceback in words", _place_of(told.words), told.words
    if told.code not in {0, 1, 2, 3}:
        yield "exit code", str(told.code), told.words
    lines = told.words.strip().splitlines()
    if told.code == 2 and (len(lines) != 1 or not lines[0].startswith("edgekit: error: ")):
        yield "no one line", f"{case.command} {len(lines)} {lines[0][:30] if lines else ''}", told.words
    if told.code == 2 and lines and (len(lines[0]) > _MOST_LINE or not lines[0].endswith(")")):
        yield "no hint, or too long", lines[0][:80], lines[0]
    if "Warning: " in told.words:
        yield "warning", told.words.partition("Warning: ")[2][:40], told.words
    if strange := next((c for c in told.words + told.shown if ord(c) < 32 and c not in "\n\t"), None):
        yield "control character", f"{case.command} {strange!r}", repr(told.words + told.shown)
    if "--json" in case.arguments and told.code in {0, 1, 3} and "--help" not in case.arguments:
        yield from _judge_json(case, told.shown)
    yield from _judge_files(case, told, before, after)


def _place_of(trace: str) -> str:
    """Returns the kind of an exception and the innermost line of edgekit in its traceback."""
    lines = trace.strip().splitlines()
    places = [line.strip() for line in lines if "/edgekit/" in line and "File " in line]
    inner = places[-1].partition("/edgekit/")[2] if places else "?"
    kind = next((line for line in reversed(lines) if line and line[0] not in " \t"), "?")
    return f"{kind.partition(':')[0]} {inner}"


def _judge_json(case: Case, shown: str) -> Iterator[tuple[str, str, str]]:
    def refuse(word: str) -> None:
        raise ValueError(f"{word} is no JSON")

    try:
        json.loads(shown, parse_constant=refuse)
    except (ValueError, RecursionError) as error:
        yield "json", f"{case.command} {str(error)[:30]}", f"{error}: {shown[-3000:]}"


def _judge_files(
    case: Case, told: Told, before: Mapping[str, tuple[int, int, int]], after: Mapping[str, tuple[int, int, int]]
) -> Iterator[tuple[str, str, str]]:
    new = sorted(after.keys() - before.keys())
    left = [name for name in new if name.startswith(("tmp/", ".edgekit-")) or "/.edgekit-" in name]
    if left:
        yield "left behind", f"{case.command} {left[0][:12]}", " ".join(left[:20])
    made = [name for name in new if not name.startswith("tmp/")]
    # `golden/..` is the folder of the case itself.
    asked = [os.path.normpath(place) for place in case.writes]
    odd = [name for name in made if not any(w in {".", name} or name.startswith(f"{w}/") for w in asked)]
    if odd:
        yield "unasked file", f"{case.command} {odd[0][:20]}", " ".join(odd[:20])
    if told.code == 2 and made:
        yield "half-written", f"{case.command} {made[0][:20]}", " ".join(made[:20]) + "\n" + told.words
    lost = sorted(name for name, state in before.items() if after.get(name) != state and name not in case.writes)
    lost = [name for name in lost if name != "tmp"]
    if lost:
        yield "changed input", f"{case.command} {lost[0][:20]}", " ".join(lost[:20])


def describe_ending(status: int) -> str:
    """Returns how a worker ended that reported nothing: the signal's name, or its exit code."""
    code = os.waitstatus_to_exitcode(status)
    return signal.Signals(-code).name if code < 0 else f"exit {code}"


def keep_network_away() -> None:
    """Makes every look-up of a host name in this process fail."""

    def refuse(*_arguments: object, **_options: object) -> list[object]:
        raise OSError("no network in here")

    socket.getaddrinfo = refuse  # type: ignore[assignment]
