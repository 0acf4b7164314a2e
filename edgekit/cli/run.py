"""`edgekit run`."""

import time
from pathlib import Path

import click

from edgekit.app.config import FILE, App, load_app
from edgekit.app.result import AppReport
from edgekit.app.run import headline_app, list_watched, run_app
from edgekit.app.spread import spread_processes
from edgekit.cli import options
from edgekit.cli.terminal import print_table, show_json, show_line, showing_progress
from edgekit.report.tables import format_bytes, make_table


@click.command(short_help="Build, verify and pack what an edgekit.toml names, where something changed.")
@click.argument("file", default=FILE, type=click.Path(path_type=Path))
@click.option("--only", multiple=True, metavar="NAME", help="A model, a target, or model/target; may be repeated.")
@click.option(
    "--workers",
    default=1,
    type=click.IntRange(1, 64),
    metavar="N",
    help="Build so many bundles at a time.",
    show_default=True,
)
@click.option("--bare", is_flag=True, help="Cells alone, without packages and reports: what workers do.")
@click.option("--again", is_flag=True, help="Keep nothing of earlier runs.")
@click.option("--watch", is_flag=True, help="Run again whenever a file changes, until Ctrl-C.")
@options.ACCEPT_UNPROVEN
@options.JSON
@options.verbosity
def command(
    file: Path,
    only: tuple[str, ...],
    workers: int,
    bare: bool,
    again: bool,
    watch: bool,
    accept_unproven: bool,
    as_json: bool,
    volume: int,
) -> int:
    """Build, verify and pack what FILE names, where something changed since the last run.

    Results lie in its `out` folder: bundles, packages, report.html, report.json, junit.xml and summary.md. Each bundle
    is kept as soon as it is done.

    \b
    Example:
      edgekit init model.onnx --images photos
      edgekit run
      edgekit run --only nnapi --json

    Exit code 0: every bundle passed and every package was made. 1: one did not. 2: FILE is wrong. 3: nothing failed,
    and one is not proven.
    """
    while True:
        app = load_app(file)
        seen = _stamp(app)
        with showing_progress(volume) as progress:
            spread = spread_processes(app, workers, progress) if workers > 1 else None
            report = run_app(app, only=only, again=again, bare=bare, spread=spread, progress=progress)
        show_json(report) if as_json else show_run(report)
        if not watch:
            accepts = accept_unproven or app.table.verify.accept_unproven
            return options.exit_code(report.verdict, accept_unproven=accepts)
        again = False
        while _stamp(app) == seen:
            time.sleep(1)


def show_run(report: AppReport) -> None:
    """Prints a run: a row a bundle, then the packages and where the report is."""
    table = make_table("model", "target", "state", "precision", "size", "agreement", "evidence", "result")
    for cell in report.cells:
        size = f"{format_bytes(cell.size_before)} -> {format_bytes(cell.size_after)}" if cell.bundle else "-"
        words = (cell.precision, size, cell.agreement, cell.evidence)
        table.add_row(cell.model, cell.target, cell.state, *(word or "-" for word in words), cell.verdict)
    print_table(table)
    for package in report.packages:
        said = package.failure or f"{format_bytes(package.size_bytes)}, {', '.join(package.bundles)}"
        show_line(f"package {package.name} ({package.kind}): {package.state}: {said}")
    show_line(headline_app(report))
    show_line(f"report: {report.out / 'report.html'}")


def _stamp(app: App) -> list[tuple[str, int]]:
    """Returns when each file that a run depends on was written last."""
    files = (path for place in list_watched(app) for path in (place.rglob("*") if place.is_dir() else (place,)))
    return [(str(path), path.stat().st_mtime_ns) for path in files if path.is_file()]
