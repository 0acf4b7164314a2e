"""`edgekit tune`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit._files import write_file
from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, as_command, number
from edgekit.cli.main import YES
from edgekit.cli.screen import print_table, show_json, show_line, show_remarks, showing_progress
from edgekit.cli.subjects import Devices, ModelOpening
from edgekit.report import tuning
from edgekit.tune.space import GOALS, Goal
from edgekit.tune.tune import Tuning, tune_on


@as_command
def tune_command(
    subject: Annotated[Path, Argument()],
    choice: Devices,
    goal: Annotated[Goal, Option("What to minimize (latency).", type=click.Choice(GOALS), default="latency")],
    candidates: Annotated[tuple[Path, ...], Option("Race FILE too: INT8, fp16.", "FILE", "--candidate")],
    opening: ModelOpening,
    min_sqnr_db: Annotated[
        float | None,
        number(
            "Least signal-to-noise ratio in dB against the reference; default: the bundle's limit, or 30.",
            click.FloatRange(-200, 200),
            "--min-sqnr",
        ),
    ],
    time_budget: Annotated[float | None, options.time_budget("Search no longer than that")],
    state: Annotated[
        Path | None, Option("Keep measurements in FILE: an interrupted search continues from it.", "FILE")
    ],
    apply: Annotated[bool, Option("Write the settings into the bundle, for this kind of machine.")],
    html: options.HtmlFile,
    as_json: options.Json,
    volume: options.Volume,
) -> int:
    """Find the best session settings for SUBJECT, a bundle or a model, on a device.

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
    asked = Tuning(
        goal=goal,
        budget_s=time_budget or Tuning().budget_s,
        candidates=candidates,
        min_sqnr_db=min_sqnr_db,
        state=state,
        apply=apply,
    )
    with showing_progress(volume) as progress:
        report = tune_on(subject, choice, asked, opening, progress=progress)
    if html is not None:
        write_file(html, tuning.render_tuning(report).encode())
    if as_json:
        show_json(report)
        return YES
    if report.levels:
        print_table(tuning.table_levels(report))
    print_table(tuning.table_decisions(report))
    print_table(tuning.table_tried(report))
    show_line(tuning.headline_tuning(report))
    show_remarks(tuning.list_tuning_remarks(report))
    return YES
