"""`edgekit runs`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit.bench.history import list_benches
from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, subcommand
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import show_json, show_line
from edgekit.cli.verify import show_verify
from edgekit.verify.history import diff_runs, list_runs, read_run

History = Annotated[Path, Option("What verify or bench --history wrote.", "FILE")]


@click.group
def runs_command() -> None:
    """List, show or compare the verifications that `edgekit verify --history FILE` recorded.

    \b
    Example:
      edgekit runs diff 3 4 --history verify.sqlite
    """


@subcommand(runs_command, "list")
def list_command(
    history: History,
    bundle: Annotated[str | None, Option("Only those of this bundle.", "NAME")],
    as_json: options.Json,
) -> int:
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


@subcommand(runs_command, "bench")
def bench_command(
    history: History,
    subject: Annotated[str | None, Option("Only those of this bundle or model.", "NAME")],
    as_json: options.Json,
) -> int:
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


@subcommand(runs_command, "show")
def show_command(
    number: Annotated[int, Argument()],
    history: History,
    as_json: options.Json,
) -> int:
    """Show one verification. Exit code 1: it failed. 3: it is not proven."""
    run = read_run(history, number)
    show_json(run) if as_json else show_verify(run.report)
    return options.exit_code(run.verdict)


@subcommand(runs_command, "diff")
def diff_command(
    before: Annotated[int, Argument()],
    now: Annotated[int, Argument()],
    history: History,
    as_json: options.Json,
) -> int:
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
