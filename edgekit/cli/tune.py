"""`edgekit tune`."""

from pathlib import Path

import click

from edgekit._files import write_file
from edgekit.bench.subject import Opening
from edgekit.cli import options
from edgekit.cli.limits import limit
from edgekit.cli.main import YES
from edgekit.cli.screen import print_table, show_json, show_line, showing_progress
from edgekit.devices.register import DeviceChoice
from edgekit.report import timing as text
from edgekit.report.pages.tune_page import render_tuning
from edgekit.tune.report import TuneReport
from edgekit.tune.space import GOALS, Goal
from edgekit.tune.tune import Tuning, tune_on

_FILE = click.Path(path_type=Path)


@click.command(short_help="Find what a session should be told: levels, threads, memory, provider options.")
@click.argument("subject", type=_FILE)
@options.ON
@options.ON_FILE
@options.DEVICE_SET
@click.option("--goal", type=click.Choice(GOALS), default="latency", help="What is to be small (latency).")
@click.option("--candidate", "candidates", type=_FILE, multiple=True, metavar="FILE", help="Race FILE too: INT8, fp16.")
@options.SESSION_TARGET
@options.DIM
@options.FREEZE
@options.FIRST_SAMPLE
@limit(
    "--min-sqnr", "min_sqnr_db", click.FloatRange(-200, 200), "Least dB beside the reference; else the bundle's or 30."
)
@options.time_budget("Search no longer than that")
@click.option("--state", type=_FILE, metavar="FILE", help="Keep measurements; a search that was cut off goes on.")
@click.option("--apply", is_flag=True, help="Write what was found into the bundle, for this kind of machine.")
@click.option("--html", type=_FILE, metavar="FILE", help="Write an HTML page as well.")
@options.JSON
@options.verbosity
def command(
    subject: Path,
    names: tuple[str, ...],
    on_file: Path | None,
    settings: dict[str, str],
    goal: Goal,
    candidates: tuple[Path, ...],
    target: str | None,
    dims: dict[str, int],
    freeze: dict[str, float],
    data: str | None,
    min_sqnr_db: float | None,
    time_budget: float | None,
    state: Path | None,
    apply: bool,
    html: Path | None,
    as_json: bool,
    volume: int,
) -> int:
    """Find what a session of SUBJECT, a bundle or a model, should be told on a device.

    Settings race in interleaved rounds, each in a session of its own, its outputs held against the reference. The
    slower half is dropped; the last one is taken only where fresh rounds prove that it is better. What came together is
    held against the defaults once more: without proof nothing is claimed and nothing applied.

    \b
    Example:
      edgekit tune model.onnx --goal throughput --time-budget 2m --html tune.html
      edgekit tune bundles/model-cpu --on host --state tune.json --apply

    Exit code 0: the search came to an end, whatever it found. 2: the usage or an input is wrong, or the device failed.
    """
    options.require_places((html, state), (subject, *candidates))
    choice = DeviceChoice(names=names, file=on_file, settings=settings)
    asked = Tuning(
        goal=goal,
        budget_s=time_budget or Tuning().budget_s,
        candidates=candidates,
        min_sqnr_db=min_sqnr_db,
        state=state,
        apply=apply,
    )
    opening = Opening(target=target, data=data, dims=dims, freeze=freeze)
    with showing_progress(volume) as progress:
        report = tune_on(subject, choice, asked, opening, progress=progress)
    if html is not None:
        write_file(html, render_tuning(report).encode())
    show_json(report) if as_json else _show(report)
    return YES


def _show(report: TuneReport) -> None:
    """Prints the table of levels, the decisions, and what was chosen."""
    if report.levels:
        print_table(text.table_levels(report))
    print_table(text.table_decisions(report))
    print_table(text.table_tried(report))
    show_line(text.headline_tuning(report))
    for remark in text.list_tuning_remarks(report):
        show_line(f"- {remark}")
