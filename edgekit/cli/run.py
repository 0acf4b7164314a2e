"""Commands around an `edgekit.toml`: init writes it, run builds what it names."""

import time
from functools import partial
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit._files import write_file
from edgekit.app.config import FILE, App, list_cells, load_app
from edgekit.app.draft import draft_app
from edgekit.app.result import AppReport, headline_app, list_inputs
from edgekit.app.run import run_app
from edgekit.cli import options
from edgekit.cli.declare import Argument, Json, Option, Volume, as_command, exit_code, number
from edgekit.cli.defaults import check_defaults
from edgekit.cli.schema import describe_file
from edgekit.cli.screen import print_table, show_json, show_line, show_remarks, showing_progress
from edgekit.devices.find import choose_here
from edgekit.errors import UsageError
from edgekit.model.model import load_model
from edgekit.package.package import Kind
from edgekit.progress import say_nothing
from edgekit.recipe import Recipe
from edgekit.report.tables import format_bytes, make_table
from edgekit.serialize import to_json


@as_command
def run_command(
    file: Annotated[Path, Argument(default=FILE)],
    only: Annotated[tuple[str, ...], Option("A model, a target, or model/target; may be repeated.", "NAME")],
    workers: Annotated[int | None, number("Build so many bundles at a time; 1 by default.", 1, 64, metavar="N")],
    scheduler: Annotated[str | None, Option("Build on a Dask cluster: tcp://HOST:8786.", "ADDRESS")],
    store: Annotated[str | None, Option("Share results: a folder, or a URL of fsspec (s3://, gs://).", "PLACE")],
    bare: Annotated[bool, Option("Build bundles alone, without packages and reports, as workers do.")],
    again: Annotated[bool, Option("Build everything again, without results of earlier runs.")],
    watch: Annotated[bool, Option("Run again whenever a file changes, until Ctrl-C.")],
    accept_unproven: options.AcceptUnproven,
    as_json: Json,
    volume: Volume,
) -> int:
    """Build, verify and pack what FILE names, where something changed since the last run.

    Results are written into its `out` folder: bundles, packages, report.html, report.json, junit.xml and summary.md.
    Each bundle is kept as soon as it is finished, with a line on stderr. With --only the report has the earlier results
    of the other bundles.

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
        check_defaults(file)
        stamp = _stamp(app)
        sweep = app.table.sweep
        sweep = msgspec.structs.replace(
            sweep,
            workers=1 if bare else workers or sweep.workers,
            scheduler=None if bare or workers else scheduler or sweep.scheduler,
            store=str(Path(store).absolute()) if store and "://" not in store else store or sweep.store,
        )
        app = msgspec.structs.replace(app, table=msgspec.structs.replace(app.table, sweep=sweep))
        with showing_progress(volume) as progress:
            landed = say_nothing if volume < 0 else partial(show_line, aside=True)
            report = run_app(app, only=only, again=again, bare=bare, progress=progress, landed=landed)
        show_json(report) if as_json else show_run(report)
        if not watch:
            accept = accept_unproven or app.table.verify.accept_unproven
            return exit_code(report.verdict, accept_unproven=accept)
        again = False
        while _stamp(app) == stamp:
            time.sleep(1)


def show_run(report: AppReport) -> None:
    """Prints a run: a row for each bundle, then the packages and the path of the report."""
    table = make_table("model", "target", "state", "precision", "size", "agreement", "evidence", "result")
    for cell in report.cells:
        size = f"{format_bytes(cell.size_before)} -> {format_bytes(cell.size_after)}" if cell.bundle else "-"
        cells = (cell.precision, size, cell.agreement, cell.evidence)
        table.add_row(cell.model, cell.target, cell.state, *(word or "-" for word in cells), cell.verdict)
    print_table(table)
    for package in report.packages:
        result = package.failure or f"{format_bytes(package.size_bytes)}, {', '.join(package.bundles)}"
        show_line(f"package {package.name} ({package.kind}): {package.state}: {result}")
    show_line(headline_app(report))
    show_line(f"report: {report.out / 'report.html'}")


def _stamp(app: App) -> list[tuple[str, int]]:
    """Returns the path and the modification time (ns) of each file that a run depends on."""
    inputs = (place for cell in list_cells(app) for places in list_inputs(cell, ()).values() for place in places)
    files = (path for place in (app.path, *inputs) for path in (place.rglob("*") if place.is_dir() else (place,)))
    return [(str(path), path.stat().st_mtime_ns) for path in files if path.is_file()]


@as_command
def init_command(
    model: options.ModelFile,
    images: Annotated[Path | None, Option("A folder of sample images.", "DIR")],
    data: Annotated[str | None, Option("Sample inputs: .npz, folder, or module:function.", "DATA")],
    labels: Annotated[Path | None, Option("The class of each evaluation sample.", "FILE")],
    targets: Annotated[
        tuple[str, ...], Option(None, "NAME", "--target", default=("nnapi", "xnnpack"), show_default=True)
    ],
    package: Annotated[Kind | None, Option("Pack the bundles as this kind of package.", words="--as")],
    out: Annotated[Path, Option(None, "FILE", default=FILE, show_default=True)],
) -> None:
    """Write an edgekit.toml for MODEL, with facts read from the model, and guesses that are marked as such.

    If the file exists, the model is added to it, for its targets and packages.

    \b
    Example:
      edgekit init model.onnx --images photos --target nnapi --target xnnpack --as aar
      edgekit run

    Exit code 0: written. 2: an input is wrong, or the file has the model already.
    """
    known = load_app(out) if out.exists() else None
    if known is not None and load_model(model).name in known.table.models:
        raise UsageError(f"'{out}' has this model already", hint="change it there, or give another --out")
    text, remarks = draft_app(
        model,
        out.parent,
        data=data,
        images=images,
        labels=labels,
        targets=choose_here(Recipe(targets=targets)).targets,
        package=package,
        existing="" if known is None else out.read_text(),
    )
    write_file(out, text.encode())
    # The first line of the TOML file names the schema, for editors.
    write_file(out.parent / "edgekit.schema.json", to_json(describe_file()).encode())
    show_remarks(remarks)
    show_line(f"{out}: edgekit run {out} builds, verifies and packs what it names")
