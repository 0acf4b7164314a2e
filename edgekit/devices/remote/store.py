"""Stores sets of files on a machine that is reached by a shell, and runs programs there that leave no files behind.

Everything is below one folder: each set of files in a folder named by its digest, files that are being sent in
`part-...`, and the working folder of a running program in `run-...`. The names of the last two contain the computer,
process and thread that they belong to, so that left-overs of dead ones, or of a broken link, are removed at the next
contact. Scripts are POSIX shell, as on small systems; every word that does not come from edgekit is quoted.
"""

import hashlib
import os
import platform
import re
import secrets
import shlex
import tarfile
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath

from edgekit._files import digest_files, digest_unchanged, read_chunks
from edgekit._proc import run_process, stream_process
from edgekit.devices.device import Device
from edgekit.devices.process.run import last_line
from edgekit.errors import DeviceError

STEP_S = 30.0
"""The time limit of one step of a conversation with a device, without the time to transfer files."""
# adb's client waits for ever if the daemon stops answering (measured), so each step has its own time limit, which grows
# with the bytes to transfer.
SLOWEST_BYTES_PER_S = 256 << 10
"""A slower link counts as dead; USB 2 and slow Wi-Fi are ten times faster."""

KEPT_SETS = 12
"""How many sets of files are kept on a machine; the least recently used are removed first."""

COUNT_CORES = "nproc 2>/dev/null || echo"
"""A line of a script that prints the number of cores, or an empty line."""

_SPARE_BYTES = 4 << 20
# The speed of sha256sum on a slow board; the time limit of a step grows with the bytes to read.
_SLOWEST_DIGEST_BYTES_PER_S = 4 << 20
_BEGIN = "EDGEKIT-BEGIN"
_DONE = "EDGEKIT-DONE"
_ANSWER = 1 << 16
# adb sends a command as a service name whose length has four hex digits: a command of more than 65,535 bytes arrives
# garbled (measured).
_MAX_SCRIPT_BYTES = 60_000
# Kills the process group, with the program's children; if there is no setsid, only the process.
_KILL = "kill -9 -$p 2>/dev/null || kill -9 $p 2>/dev/null"
_TEST = """h() { if command -v sha256sum >/dev/null; then sha256sum; else shasum -a 256; fi; }
t() { s=$(h < "$1") || exit 1; [ "${s%% *}" = "$2" ] || { echo "'$3' arrived damaged" >&2; exit 1; }; }
"""
_CLEAN_S = 5.0


def make_folder_name(kind: str) -> str:
    """Returns a new name for a remote folder of the kind `part` or `run`: with computer, process and thread."""
    return f"{kind}-{_computer()}-{os.getpid()}-{threading.get_ident()}-{secrets.token_hex(4)}"


class Shell(Device, frozen=True, kw_only=True):
    """A machine that runs scripts in a POSIX shell and answers; a step may take `step_timeout_s`.

    A link slower than `slowest_bytes_per_s` counts as dead.
    """

    step_timeout_s: float = STEP_S
    slowest_bytes_per_s: int = SLOWEST_BYTES_PER_S

    def command(self, script: str) -> tuple[str, ...]:
        """Returns the local command that runs a script on the machine, with stdin, stdout and stderr passed through."""
        raise NotImplementedError

    @property
    def probe(self) -> str:
        """The command by which a user sees whether the machine answers at all."""
        raise NotImplementedError


def ask(
    shell: Shell, script: str, *, step: str, timeout_s: float | None = None, feed: Iterable[bytes] | None = None
) -> str:
    """Returns the complete output of a script; `feed` is its standard input.

    Some clients report success if the link dies, so the script itself prints a marker when it reaches its end.

    Raises:
        DeviceError: the script did not reach its end, or failed; the message names machine and step.
    """
    # In a subshell, so that an `exit` in the script cannot skip the end marker.
    whole = f"echo {_BEGIN}; (\n{script}\n); rc=$?; echo; echo {_DONE} $rc"
    if len(whole.encode()) > _MAX_SCRIPT_BYTES:
        raise DeviceError(f"'{shell.name}' while {step}: too many files", hint="put the weights into one file")
    limit_s = shell.step_timeout_s if timeout_s is None else timeout_s
    if feed is None:
        finished = run_process(shell.command(whole), timeout_s=limit_s)
        output_text = finished.stdout
    else:
        answer = bytearray()
        finished = stream_process(
            shell.command(whole), timeout_s=limit_s, feed=feed, take=lambda stream: answer.extend(stream.read(_ANSWER))
        )
        output_text = answer.decode(errors="replace")
    before, begin, rest = output_text.replace("\r\n", "\n").partition(f"{_BEGIN}\n")
    output, done, code = rest.rpartition(f"\n{_DONE} ")
    if begin and before.strip():
        raise DeviceError(
            f"'{shell.name}' while {step}: its shell writes '{last_line(before)[:80]}' before every command",
            hint="make the shell's start-up files silent where no terminal is: that text would mix with tensors",
        )
    if not done:
        why = "it does not answer" if finished.timed_out else last_line(finished.stderr)
        words = f"'{shell.name}' while {step}: {why or 'the link broke before the end'}"
        raise DeviceError(words, hint=shell.probe)
    if code.strip() != "0":
        reason = last_line(finished.stderr) or f"the shell ended with exit code {code.strip()}"
        words = f"'{shell.name}' while {step}: {reason[-300:]}"
        raise DeviceError(words, hint=f"is it connected, with space? {shell.probe}")
    return output


def read_count(text: str) -> str:
    """Returns a number that a machine printed, "" if it is none."""
    return text.strip() if text.strip().isascii() and text.strip().isdecimal() and len(text.strip()) < 5 else ""


def push_set(shell: Shell, base: str, files: Mapping[str, Path]) -> str:
    """Returns the folder below `base` that holds these files, which are sent if the machine lacks them.

    They are compared with their digests before the set gets its name.

    Raises:
        DeviceError: the machine does not answer, has no space, or holds other bytes than were sent.
    """
    wanted = dict(sorted(files.items()))
    for name in wanted:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or not name.isprintable():
            raise DeviceError(f"'{name}' is no name for a file on a device", hint="rename the file")
    digest = digest_files(files)
    place, listed = shlex.quote(base), " ".join(shlex.quote(name) for name in wanted)
    script = f"""
mkdir -p {place} && chmod 700 {place} && cd {place} || exit 1
for d in part-* run-*; do [ -e "$d" ] && echo "left $d"; done
[ -d {digest} ] && touch {digest} && (cd {digest} && wc -c {listed}) |
    while read -r n l; do echo "size $n"; done
df -Pk . | while read -r a b c d e; do echo "free $d"; done
exit 0"""
    lines = [[*line.split(" "), ""] for line in ask(shell, script, step="looking at what is there").splitlines()]
    # `wc` prints the total of several files last.
    sizes = [int(words[1]) for words in lines if words[0] == "size" and _is_number(words[1])][: len(wanted)]
    free_bytes = [int(words[1]) * 1024 for words in lines if words[0] == "free" and _is_number(words[1])]
    # The folders of programs and transfers that have ended.
    to_remove = [words[1] for words in lines if words[0] == "left" and _is_left_over(words[1])]
    if sizes == [path.stat().st_size for path in wanted.values()]:
        if to_remove:
            ask(shell, f"cd {place} || exit 1\n{_script_removals(base, to_remove)}", step="removing left-overs")
        return f"{base}/{digest}"
    if sizes:  # the set is there, but damaged, as after a sudden power-off
        to_remove.append(digest)
    # It gets its final name only when it is complete and checked, so that a set that is found is always complete.
    part = make_folder_name("part")
    try:
        _fill(shell, base, part, digest, wanted, free_bytes[-1] if free_bytes else None, to_remove)
    except BaseException:
        remove_folder(shell, base, part)
        raise
    return f"{base}/{digest}"


def wrap_program(base: str, run: str, argv: Sequence[str]) -> str:
    """Returns the script that runs a program with the shell's streams, and removes the folder of the run at its end.

    The program does not replace the shell, so that the shell can clean up when the link hangs up: it then kills the
    program and its children. The file `pid` in the folder holds the program's process id while it runs.
    """
    folder = shlex.quote(f"{base}/{run}")
    words = " ".join(shlex.quote(word) for word in argv)
    return (
        f"umask 077; mkdir -p {folder} && cd {folder} || exit 125; ulimit -c 0; exec 3<&0; p=; s=; "
        "command -v setsid >/dev/null && s=setsid; "
        f"trap '{_KILL}; cd /; rm -rf {folder}; exit 129' HUP TERM; "
        f"TMPDIR={folder} $s {words} <&3 3<&- & p=$!; exec 3<&- </dev/null; "
        f"echo $p > pid; wait $p; rc=$?; cd /; rm -rf {folder}; exit $rc"
    )


def _fill(
    shell: Shell, base: str, part: str, digest: str, wanted: Mapping[str, Path], free: int | None, stale: Sequence[str]
) -> None:
    digests = {name: digest_unchanged(path) for name, path in wanted.items()}
    size_bytes = sum(path.stat().st_size for path in wanted.values())
    needed = size_bytes + _SPARE_BYTES
    # Checked before anything is sent, because sending may take minutes.
    if free is not None and free < needed:
        sizes = f"{needed >> 10} kB are needed below '{base}', {free >> 10} kB are free"
        raise DeviceError(f"'{shell.name}' while sending files: {sizes}", hint="free space on the device")
    place = shlex.quote(base)
    # Files are sent under numbers, so that no tar handles the user's file names. Of tar's complaint the first line
    # has the reason.
    script = f"""cd {place} || exit 1
{_script_removals(base, stale)}umask 077
mkdir {part} && cd {part} || exit 1
e=$(tar -xf - 2>&1) || {{ echo "$e" | head -n 1 >&2; exit 1; }}"""
    limit_s = shell.step_timeout_s + size_bytes / shell.slowest_bytes_per_s
    ask(shell, script, step="sending files", timeout_s=limit_s, feed=_pack(list(wanted.values())))
    # Each file is compared with its digest and gets its name, then the set; the least recently used sets are removed.
    lines = [f"cd {place}/{part} || exit 1\n{_TEST}"]
    for number, (name, path) in enumerate(wanted.items()):
        quoted = shlex.quote(name)
        parent = str(PurePosixPath(name).parent)
        mode = "700" if os.access(path, os.X_OK) else "600"
        lines += [
            f"t {number} {digests[name]} {quoted}",
            *([f"mkdir -p {shlex.quote(parent)} || exit 1"] if parent != "." else []),
            f"chmod {mode} {number} && mv {number} {quoted} || exit 1",
        ]
    publish = f"""cd .. || exit 1
if [ -d {digest} ]; then rm -rf {part}; else mv {part} {digest} || exit 1; fi
n=0
for d in $(ls -t); do
    case $d in
    part-*|run-*) ;;
    *) n=$((n + 1)); [ $n -le {KEPT_SETS} ] || rm -rf "$d" ;;
    esac
done"""
    limit_s = shell.step_timeout_s + needed / _SLOWEST_DIGEST_BYTES_PER_S
    ask(shell, "\n".join([*lines, publish]), step="checking what arrived", timeout_s=limit_s)


def _pack(files: Sequence[Path]) -> Iterator[bytes]:
    """Yields files as a tar archive under numbers, which POSIX, GNU and Android's tar read alike."""
    for number, path in enumerate(files):
        entry = tarfile.TarInfo(str(number))
        entry.size = path.stat().st_size
        yield entry.tobuf(tarfile.GNU_FORMAT)
        with path.open("rb") as file:
            yield from read_chunks(file)
        yield bytes(-entry.size % tarfile.BLOCKSIZE)
    yield bytes(2 * tarfile.BLOCKSIZE)


def remove_folder(shell: Shell, base: str, name: str) -> None:
    """Removes a remote folder and kills its program, if the machine can be reached within some seconds."""
    script = f"cd {shlex.quote(base)} || exit 0\n{_script_removals(base, [name])}"
    deadline = time.monotonic() + _CLEAN_S
    # A link that just broke may come back within seconds; the user should not wait longer.
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            ask(shell, script, step="cleaning up", timeout_s=min(seconds_left, shell.step_timeout_s))
            return
        except DeviceError:
            time.sleep(min(0.4, seconds_left))


def _script_removals(base: str, names: Sequence[str]) -> str:
    """Returns the script lines that kill the programs of folders, if they still run, and remove the folders."""
    # A program that became another one keeps TMPDIR, which lies in the folder.
    ours = f"{{ [ ! -r /proc/$p/cmdline ] || grep -qs {shlex.quote(base)} /proc/$p/cmdline /proc/$p/environ; }}"
    return "".join(
        f"[ -f {name}/pid ] && read -r p < {name}/pid && {ours} && {{ {_KILL}; }}\nrm -rf {name}\n" for name in names
    )


def _is_left_over(name: str) -> bool:
    """Returns True for a folder that this computer made and no longer uses.

    Either its process has ended; or it belongs to this process, and its thread has ended or is the current one, which
    uses no folder now.
    """
    found = re.fullmatch(rf"(?:part|run)-{_computer()}-(\d{{1,18}})-(\d{{1,18}})-[0-9a-f]+", name, re.ASCII)
    if found is None:
        return False
    pid, thread = map(int, found.groups())
    if pid == os.getpid():
        others = {other.ident for other in threading.enumerate()} - {threading.get_ident()}
        return thread not in others
    try:
        # Signal 0 only tests whether the process exists.
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        return False
    return False


def _is_number(word: str) -> bool:
    return word.isdecimal() and len(word) < 20


def _computer() -> str:
    # Hashed, so that the computer's name is not revealed on the phone.
    return hashlib.sha256(f"{platform.node()} {os.getuid()}".encode()).hexdigest()[:8]
