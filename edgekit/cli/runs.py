"""`edgekit runs`."""

from pathlib import Path

import click

from edgekit.bench.history import list_benches
from edgekit.cli import options
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import show_json, show_line
from edgekit.cli.terminal import show_verify
from edgekit.verify.history import diff_runs, list_runs, read_run

HISTORY = click.option(
    "--history",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="What verify or bench --history wrote.",
)


@click.group(name="runs", short_help="List, show or compare the verifications in a history.")
def command() -> None:
    """List, show or compare the verifications that `edgekit verify --history FILE` recorded.

    \b
    Example:
      edgekit runs diff 3 4 --history verify.sqlite
    """


@command.command(name="list")
@HISTORY
@click.option("--bundle", metavar="NAME", help="Only those of this bundle.")
@options.JSON
def list_command(history: Path, bundle: str | None, as_json: bool) -> int:
    """List the verifications, oldest first."""
    runs = list_runs(history, bundle=bundle)
    if as_json:
        names = ("id", "time", "bundle", "target", "passed", "verdict")
        show_json({"runs": [{name: getattr(run, name) for name in names} for run in runs]})
    for run in () if as_json else runs:
        show_line(f"{run.id}  {run.time}  {run.bundle}  {run.verdict}")
    if not runs and not as_json:
        show_line(f"no verification of '{bundle}' is recorded" if bundle else "no verification is recorded")
    return YES


@command.command(name="bench")
@HISTORY
@click.option("--subject", metavar="NAME", help="Only those of this bundle or model.")
@options.JSON
def bench_command(history: Path, subject: str | None, as_json: bool) -> int:
    """List the benchmarks that `edgekit bench --history FILE` recorded, oldest first."""
    benches = list_benches(history, subject=subject)
    if as_json:
        show_json({"benches": benches})
    for one in () if as_json else benches:
        for run in one.report.runs:
            time = run.failure or f"{run.median_ms:.3g} ms, 95 % {run.interval_ms[0]:.3g} to {run.interval_ms[1]:.3g}"
            show_line(f"{one.id}  {one.time}  {one.subject}  {run.device}  batch {run.batch}  {time}")
    if not benches and not as_json:
        show_line("no benchmark is recorded")
    return YES


@command.command(name="show")
@click.argument("number", type=int)
@HISTORY
@options.JSON
def show_command(number: int, history: Path, as_json: bool) -> int:
    """Show one verification. Exit code 1: it failed. 3: it is not proven."""
    run = read_run(history, number)
    show_json(run) if as_json else show_verify(run.report)
    return options.exit_code(run.verdict)


@command.command(name="diff")
@click.argument("before", type=int)
@click.argument("now", type=int)
@HISTORY
@options.JSON
def diff_command(before: int, now: int, history: Path, as_json: bool) -> int:
    """Say what was different about two verifications. Exit code 1: something became worse."""
    found = diff_runs(read_run(history, before), read_run(history, now))
    if as_json:
        show_json(found)
        return NO if found.regressions else YES
    for change in found.changes:
        show_line(f"changed: {change}")
    for line in found.regressions:
        show_line(f"worse: {line}")
    show_line("nothing became worse" if not found.regressions else f"{len(found.regressions)} figures became worse")
    return NO if found.regressions else YES
