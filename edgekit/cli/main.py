"""The entry point of the command line: the commands, how errors are shown, and the exit codes."""

import ctypes
import difflib
import errno
import gc
import importlib
import os
import signal
import sys
import tempfile
import threading
from pathlib import Path
from types import FrameType

import click

from edgekit.errors import EdgekitError
from edgekit.serialize import escape_controls

# malloc.h of glibc.
_M_ARENA_MAX, _M_MMAP_THRESHOLD, _M_TRIM_THRESHOLD = -8, -3, -1
# Larger arrays are mapped one by one; this is the largest threshold that glibc allows on 64 bits.
_MAX_HEAP_ARRAY = 32 << 20
# The system's errors if there is no space for intermediate files.
_NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_MAX_MESSAGE = 2000
# 130 is what shells report for a program that SIGINT (2) ended: 128 + 2.
YES, NO, WRONG, UNPROVEN, INTERRUPTED = 0, 1, 2, 3, 130
"""Exit codes: the answer is yes; it is no; the usage or an input is wrong; neither yes nor no is proven; Ctrl-C."""

GROUPS = {
    "Start here": {
        "build": "Make a verified bundle of a model for each target.",
        "check": "Say node by node what each target would take, why not, and what to do.",
        "verify": "Run a bundle on devices and compare with the float model.",
        "package": "Pack bundles for an app: AAR, Swift or npm package, zip, tar, or ORT's own model package.",
    },
    "Look at a model": {
        "inspect": "Print what a model contains, or where its bytes are.",
        "targets": "List the targets, or show one.",
        "compare": "Compare two models: how far their outputs differ, and in which layer that begins.",
        "diff": "Show what changed between two versions of a bundle or of a model.",
    },
    "One step of a build": {
        "prepare": "Fix shapes and clean the graph, as a provider will see it.",
        "quantize": "Make a static INT8 model for a target.",
        "convert": "Write the files that a runtime loads: ORT format, full or runtime style.",
        "operators": "Write or compare the operators config of a custom ONNX Runtime build.",
    },
    "Time and settings": {
        "forecast": "Say how long a model would take on which phone, with an interval, before anyone owns one.",
        "bench": "Time a bundle or a model on devices, or two of them in interleaved rounds.",
        "profile": "Say where the time of a run goes, kernel by kernel, and why one model is slower than another.",
        "tune": "Find the best session settings: optimization level, threads, memory, provider options.",
    },
    "Many models": {
        "init": "Write an edgekit.toml for a model.",
        "run": "Build, verify and pack what an edgekit.toml names, where something changed.",
        "runs": "List, show or compare the verifications in a history.",
        "group": "Build or verify several models that belong together, such as encoder and decoder.",
        "join": "Join bundles of several targets into one that stores shared files once.",
        "sign": "Sign a bundle, so that tampering with any byte is found.",
    },
    "This machine and its devices": {
        "doctor": "Say what this machine, or a phone, has, what it lacks, and how to get it.",
        "devices": "List, install or test what can run a bundle here.",
        "runner": "Build the program that runs a model on a phone or a board.",
        "demo": "Build and verify four bundles of the demo model.",
        "completion": "Print what a shell needs to complete commands and options.",
        "schema": "Print the JSON Schema of edgekit.toml, and with --json every command with its options.",
    },
}
"""Every command with its short help, by heading of `edgekit --help`."""
COMMANDS = {name: line for commands in GROUPS.values() for name, line in commands.items()}
# The module of `edgekit.cli` that holds a command, if its name is not that of the command.
_MODULES = {
    **dict.fromkeys(("package", "join", "sign"), "release"),
    **dict.fromkeys(("targets", "runner", "doctor"), "devices"),
    **dict.fromkeys(("diff", "operators", "check"), "inspect"),
    **dict.fromkeys(("prepare", "quantize", "convert"), "steps"),
    **dict.fromkeys(("bench", "profile", "tune", "forecast"), "timing"),
    **dict.fromkeys(("demo", "group", "init", "run"), "build"),
    **dict.fromkeys(("runs", "compare"), "verify"),
    "completion": "schema",
}


class _LazyGroup(click.Group):
    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002 - click's signature
        return sorted(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:  # noqa: ARG002
        if cmd_name not in COMMANDS:
            return None
        # Imported when it is used: `edgekit --help` must not load onnx, numpy and ONNX Runtime.
        name = f"edgekit.cli.{_MODULES.get(cmd_name, cmd_name)}"
        if name not in sys.modules:
            # Its objects stay: no time is spent on looking for garbage among them, now or later.
            gc.disable()
            try:
                importlib.import_module(name)
            finally:
                gc.freeze()
                gc.enable()
        command: click.Command = getattr(sys.modules[name], f"{cmd_name}_command")
        command.short_help = COMMANDS[cmd_name]
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        # click's message would not name the most similar command.
        if name not in COMMANDS and not name.startswith("-"):
            near = difflib.get_close_matches(name, COMMANDS, n=1)
            hint = f"did you mean '{near[0]}'?" if near else f"commands: {', '.join(sorted(COMMANDS))}"
            raise click.UsageError(f"there is no command '{name}' ({hint})", ctx)
        found = super().resolve_command(ctx, args)
        if found[1] is not None and not {"-h", "--help"} & set(args):
            # A warning if ONNX Runtime is newer than the tested versions; only commands that need it have loaded it.
            ort, is_quiet = sys.modules.get("edgekit._ort"), bool({"-q", "--quiet"} & set(args))
            warning = None if ort is None or is_quiet else ort.describe_untested()
            if warning is not None:
                click.echo(f"edgekit: warning: {warning}", err=True)
            # A file in the current folder is not read by itself: it could load libraries, or name a key to trust.
            if (path := ctx.params["config"]) is not None:
                # Imported only if needed: half of all commands read no TOML.
                schema = importlib.import_module("edgekit.cli.schema")
                if (table := schema.read_defaults(path).get(name)) is not None:
                    ctx.default_map = {name: schema.map_defaults(path, name, table, found[1])}
                    if not is_quiet and "quiet" not in table:
                        gives = f"{path} gives {name} its {', '.join(table)}"
                        click.echo(f"{gives}, unless the command line does", err=True)
        return found

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:  # noqa: ARG002
        width = max(map(len, COMMANDS))
        for heading, commands in GROUPS.items():
            with formatter.section(heading):
                formatter.write_dl([(name.ljust(width), line) for name, line in commands.items()])


@click.group(cls=_LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(package_name="edgekit-onnx", message="edgekit %(version)s")
@click.option(
    "--config",
    type=click.Path(path_type=Path),
    envvar="EDGEKIT_CONFIG",
    metavar="FILE",
    help="Take the defaults of options from [commands.NAME] of this edgekit.toml; also EDGEKIT_CONFIG.",
)
def group(config: Path | None) -> None:
    """Take an ONNX model to phones and boards: check, quantize, convert, bundle, verify.

    \b
    Example:
      edgekit build model.onnx --data samples.npz --out bundles
    """


def main() -> None:
    """Runs the command line and ends the process with the exit code; SIGTERM is handled like Ctrl-C."""
    # All threads allocate from one heap, where the C library supports that (glibc): memory that one thread has freed
    # can then be used by another. Quantizing an encoder of 25 million parameters took 45 MB less. A heap that keeps
    # what was freed has pages for the next large array: to get new ones took 2 of 29 CPU seconds of quantizing a
    # detector. `trim_heap` gives them back before a model is opened.
    set_option = None if sys.platform == "win32" else getattr(ctypes.CDLL(None), "mallopt", None)
    if set_option is not None:
        set_option(_M_ARENA_MAX, 1)
        set_option(_M_MMAP_THRESHOLD, _MAX_HEAP_ARRAY)
        set_option(_M_TRIM_THRESHOLD, 2 * _MAX_HEAP_ARRAY)
    # As an exception it runs every `finally`, which removes temporary files and ends child processes. A terminal or an
    # ssh session that is closed sends SIGHUP, which this process ignores under `nohup`; Windows has no SIGHUP.
    for name in ("SIGTERM", "SIGHUP"):
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)
    sys.unraisablehook = _send_again
    sys.exit(run_command(sys.argv[1:]))


def _interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def _send_again(lost: "sys.UnraisableHookArgs") -> None:
    """Interrupts again if Python ignored that, because it came while a generator was closed."""
    if lost.exc_type is KeyboardInterrupt:
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGTERM)).start()
    else:
        sys.__unraisablehook__(lost)


def run_command(arguments: list[str]) -> int:
    """Runs one command and returns its exit code."""
    try:
        # Not standalone: click would print errors in its own form, and end the process with its own codes.
        code = group.main(arguments, prog_name="edgekit", standalone_mode=False)
    except EdgekitError as error:
        return _complain(str(error))
    # Arguments are missing, so click gives the help text: it goes to stderr.
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return WRONG
    except click.ClickException as error:
        message = error.format_message()
        context = error.ctx if isinstance(error, click.UsageError) else None
        # The context is None if an option lacks its value.
        hint = f"see '{context.command_path if context else 'edgekit'} --help'"
        # What the option is for, as --help says it: whoever writes `--samples data.npz` means another option.
        if isinstance(error, click.BadParameter) and isinstance(error.param, click.Option) and error.param.help:
            words = " ".join(filter(None, (error.param.opts[0], error.param.metavar)))
            hint = f"{words}: {error.param.help.removesuffix('.')}; {hint}"
        return _complain(f"{message} ({hint})")
    except (click.Abort, KeyboardInterrupt):
        click.echo("edgekit: interrupted; nothing half-written is left", err=True)
        return INTERRUPTED
    except OSError as error:
        if isinstance(error, BrokenPipeError):
            # `edgekit ... | head` is no error. stderr is closed because Python would report it again at exit.
            sys.stderr.close()
            return NO
        # Anything else is a bug in edgekit, and its traceback is needed to fix it.
        if error.errno not in {*_NO_SPACE, errno.ENAMETOOLONG}:
            raise
        place, hint = error.filename, "(free some space, or set TMPDIR to a larger place)"
        if error.errno == errno.ENAMETOOLONG:
            return _complain(f"'{place}': {error.strerror} (give a shorter path)")
        # Without a name it is stdout, or an open file: an intermediate one, or one that will be moved into its place.
        if place is None:
            places = f"to stdout, in '{tempfile.gettempdir()}' or beside the output"
            return _complain(f"cannot write {places}: {error.strerror} {hint}")
        return _complain(f"cannot write '{place}': {error.strerror} {hint}")
    return code if isinstance(code, int) else YES


def _complain(message: str) -> int:
    shown = " ".join(message.split())
    # A message may quote a very long name: the beginning says what is wrong, the end what to do.
    if len(shown) > _MAX_MESSAGE:
        shown = f"{shown[:_MAX_MESSAGE]} ... {shown[-300:]}"
    click.echo(escape_controls(f"edgekit: error: {shown}"), err=True)
    return WRONG
