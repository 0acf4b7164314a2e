"""Commands that build bundles: build and demo of one model, group of several, init and run by an `edgekit.toml`."""

import time
from functools import partial
from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

import click
import msgspec

from edgekit._files import list_below, write_file
from edgekit.app.config import FILE, App, list_cells, load_app
from edgekit.app.draft import draft_app
from edgekit.app.result import AppReport, headline_app, list_inputs
from edgekit.app.run import run_app
from edgekit.bundle.archive import opened_folder
from edgekit.bundle.group import open_group
from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Json, Option, Volume, as_command, exit_code, number, subcommand
from edgekit.cli.options import Devices, Required, add_required
from edgekit.cli.schema import check_defaults, describe_file
from edgekit.cli.screen import print_table, show_json, show_line, show_lines, show_remarks, showing_progress
from edgekit.devices.find import choose_here
from edgekit.errors import UsageError
from edgekit.jobs.build import build
from edgekit.jobs.group import build_group
from edgekit.model.model import load_model
from edgekit.package.package import Kind
from edgekit.progress import Progress, say_nothing
from edgekit.recipe import Data, Recipe
from edgekit.report import text
from edgekit.report.summary import BuildReport
from edgekit.report.tables import describe_group, describe_group_build, format_bytes, make_table
from edgekit.serialize import to_json
from edgekit.verify.on_devices import choosing, verify_group


@as_command
def build_command(
    model: options.ModelFile,
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    evaluation: options.EvaluationSource,
    labels: Annotated[Path | None, Option("The class of each --eval sample.", "FILE")],
    golden: Annotated[
        Path | None,
        Option("Take the float reference of this earlier build, so that another CPU makes the same bytes.", "DIR"),
    ],
    targets: Annotated[
        tuple[str, ...],
        Option("A target, its folder, all (the default), pc, or auto: what this machine runs.", "NAME", "--target"),
    ],
    settings: options.Settings,
    dims: options.DimsOrBuckets,
    shapes: options.Shapes,
    freeze: options.Freeze,
    pad: options.Pad,
    precision: options.PrecisionWord,
    samples: options.SampleCount,
    steps: options.Steps,
    fix: Annotated[
        bool | None,
        Option("Rewrite the graph where a target then takes more (the default).", words="--fix/--no-fix", default=None),
    ],
    max_drop: Annotated[float | None, options.max_drop("At most this percentage of answers may change.")],
    recipe: options.RecipeFile,
    cache: options.CacheFolder,
    time_budget: Annotated[
        float | None,
        options.time_budget(
            "Limit planning and verifying to this time; calibrating, converting and starting devices come on top"
        ),
    ],
    verify: Annotated[bool, options.verify_option("bundle")],
    out: Annotated[Path, Option("Where the bundles go.", "DIR")],
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Make a verified bundle of MODEL for each target.

    \b
    Example:
      edgekit build model.onnx --data samples.npz --target nnapi --target qnn --dim batch=1 --out bundles

    Exit code 0: every bundle passed. 1: one failed. 2: an input is wrong, nothing was written. 3: one is not proven.
    """
    options.require_suffix(out)
    tables = {**options.parse_buckets(dims, shapes, model), "pad": pad, "freeze": freeze, "settings": settings}
    given = {"targets": targets, "precision": precision, "samples": samples, "max_drop": max_drop, "fix": fix}
    chosen = options.choose_recipe(recipe, tables, given, steps)
    samples_from = options.read_data(data, preprocess, evaluation=evaluation, labels=labels, golden=golden)
    report = build(
        model, samples_from, out, chosen, verify=verify, cache=cache, time_budget_s=time_budget, progress=progress
    )
    return Answer(report, lambda: show_build(report), report.verdict, accept_unproven)


@as_command
def demo_command(
    out: Annotated[Path, Option("Where they go.", "DIR", default="edgekit-demo")], progress: Progress
) -> Answer:
    """Build and verify four bundles of the demo model, a small network trained on handwritten digits.

    \b
    Example:
      edgekit demo --out build/demo

    Exit code 0: none failed; the table says what is not proven on this machine. 1: one failed.
    """
    recipe = Recipe(targets=("nnapi", "coreml", "qnn", "xnnpack"))
    with as_file(files("edgekit") / "demo") as folder:
        calibration, evaluation = (str(folder / f"{name}.npz") for name in ("calibration", "evaluation"))
        data = Data(source=calibration, evaluation=evaluation, labels=folder / "evaluation_labels.npy")
        report = build(folder / "digits_mobilenet.onnx", data, out, recipe, progress=progress)
    return Answer(report, lambda: show_build(report), report.verdict, accept_unproven=True)


def show_build(report: BuildReport) -> None:
    """Prints a build: the table, the remarks, and the path of the report."""
    print_table(text.table_build(report))
    if not report.passed:
        show_line(text.headline_build(report))
    show_remarks(text.list_remarks(report))
    show_line(f"report: {report.report}")


@click.group
def group_command() -> None:
    """Build or verify several models that belong together.

    For example encoder and decoder, prefill and decode, or detector and classifier.

    \b
    Example:
      edgekit group build speech.toml --data audio.npz --target cpu --target qnn --out bundles
      edgekit group verify bundles/speech-cpu
    """


@subcommand(group_command, "build", "Make a verified folder of the group for each target.")
def group_build_command(
    group: Annotated[Path, Argument()],
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    evaluation: options.EvaluationSource,
    labels: Annotated[Path | None, Option("The expected result of the whole group for each --eval sample.", "FILE")],
    targets: Annotated[tuple[str, ...], Option("A target, its folder, all (default), or auto.", "NAME", "--target")],
    settings: options.Settings,
    precision: options.PrecisionWord,
    samples: options.SampleCount,
    recipe: Annotated[Path | None, Option("Options of `edgekit build` for every member (.toml).", "FILE")],
    verify: Annotated[bool, options.verify_option("group")],
    out: Annotated[Path, Option("Where the folders go.", "DIR")],
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Make a verified folder for each target of GROUP, a .toml that names models and which output feeds which input.

    The float models run from end to end on every sample: that calibrates each member, and gives the reference results.

    \b
    Example:
      edgekit group build speech.toml --data audio.npz --eval test.npz --labels texts.txt --target cpu --out bundles

    Exit code 0: every target passed. 1: one failed. 2: an input is wrong, nothing was written. 3: one is not proven.
    """
    options.require_suffix(out)
    tables = {"settings": settings}
    chosen = options.choose_recipe(recipe, tables, {"targets": targets, "precision": precision, "samples": samples})
    samples_data = options.read_data(data, preprocess, evaluation=evaluation, labels=labels)
    report = build_group(group, samples_data, out, chosen, verify=verify, progress=progress)
    return Answer(report, lambda: show_lines(describe_group_build(report)), report.verdict, accept_unproven)


@subcommand(group_command, "verify", "Run a group on devices, from its inputs to its result.")
def group_verify_command(
    folder: Annotated[Path, Argument()],
    choice: Devices,
    require: Required,
    key: options.PublicKey,
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Run FOLDER, made by `edgekit group build`, on devices: each member by itself, and the whole group.

    FOLDER may be an archive that `edgekit package` wrote; nothing is written into an archive.

    \b
    Example:
      edgekit group verify bundles/speech-qnn --require qnn-htp-sim
      edgekit group verify speech.tar --key release.pem.pub

    Exit code 0: every device that ran passed. 1: one failed. 2: the usage or an input is wrong. 3: it is not proven.
    """
    # What is written into an unpacked archive is lost with it.
    with opened_folder(folder) as unpacked:
        group = open_group(unpacked, key=key)
        report = verify_group(group, choosing(add_required(choice, require)), required=require, progress=progress)
    lines = (*describe_group(report), f"{report.group}-{report.target}: {report.verdict}")
    return Answer(report, lambda: show_lines(lines), report.verdict, accept_unproven)


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
    files = (path for place in (app.path, *inputs) for path in list_below(place) if path.is_file())
    return [(str(path), path.stat().st_mtime_ns) for path in files]


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
