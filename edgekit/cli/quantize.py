"""`edgekit quantize`."""

import importlib
from pathlib import Path
from typing import Annotated

import click

from edgekit._files import write_file
from edgekit.cli import options
from edgekit.cli.declare import Answer, Option, as_command
from edgekit.cli.screen import show_json, show_lines
from edgekit.errors import UsageError
from edgekit.jobs.quantize import QuantizeOptions, plan_for, quantize_for
from edgekit.progress import Progress
from edgekit.quantize.ranges import METHODS
from edgekit.recipe import INTEGER_PRECISIONS, PrecisionChoice, load_metric
from edgekit.report.tables import describe_quantization


@as_command
def quantize_command(
    model: options.ModelFile,
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    target: options.TargetName,
    settings: options.Settings,
    dims: options.Sizes,
    freeze: options.Freeze,
    samples: options.SampleCount,
    steps: options.Steps,
    precision: Annotated[
        PrecisionChoice | None, Option("Default: auto.", type=click.Choice(INTEGER_PRECISIONS, case_sensitive=False))
    ],
    method: Annotated[str, Option(f"The range method: {', '.join(METHODS)}.", "NAME", default="auto")],
    max_drop: Annotated[float | None, options.max_drop("Search for a plan that drops by at most this percentage.")],
    labels: Annotated[Path | None, Option("The label of each sample of DATA.", "FILE")],
    metric: options.Metric,
    recipe: Annotated[Path | None, Option("Options in a .toml file, such as [outputs].", "FILE")],
    state: Annotated[Path | None, Option("Keep the search in FILE: an interrupted one continues from it.", "FILE")],
    cache: options.CacheFolder,
    time_budget: Annotated[
        float | None, options.time_budget("Limit planning to this time; calibrating and writing come on top")
    ],
    plan_only: Annotated[bool, Option("Print the plan as JSON and write no model.")],
    plan: Annotated[Path | None, Option("Apply a plan that --plan-only printed.", "FILE")],
    html: Annotated[Path | None, Option("A page with a chart of every layer.", "FILE")],
    out: Annotated[Path | None, Option("The QDQ model (.onnx).", "FILE")],
    progress: Progress,
) -> Answer:
    """Make a static INT8 model (QDQ) of MODEL for a target. Exit code 1: no plan met --max-drop, the best is written.

    With --labels the drop is measured, by top1 or --metric; without, it is estimated.

    \b
    Example:
      edgekit quantize model.onnx --data samples.npz --target nnapi --out model.int8.onnx
      edgekit quantize model.onnx --data samples.npz --labels masks.npy --metric miou --target qnn --out q.onnx
    """
    if metric is not None and labels is None:
        raise UsageError("--metric needs labels", hint="give --labels FILE")
    limit = None if metric is None else load_metric(metric)
    tables = {"dims": dims, "freeze": freeze, "settings": settings}
    values = {"precision": precision, "samples": samples, "max_drop": max_drop, "metric": limit}
    chosen = options.choose_recipe(recipe, tables, {**values, "targets": (target,), "thresholds": {}}, steps)
    source = options.read_data(data, preprocess, labels=labels)
    # Options that would have no effect are errors.
    if chosen.max_drop is not None:
        options.refuse_unused("--method --plan --plan-only", "--max-drop plans by itself")
    elif state is not None:
        raise UsageError("--state keeps what a search tries", hint="add --max-drop PCT, or leave it out")
    if plan is not None:
        options.refuse_unused("--method --plan-only --time-budget", "--plan is applied as it stands")
    if plan_only:
        options.refuse_unused("--out --html --labels", "--plan-only writes no model and measures none")
    options.require_places((out, html, state), (model, Path(data), labels, plan, preprocess, recipe))
    options.require_suffix(out, ".onnx")
    layers = html is not None
    quantize_options = QuantizeOptions(
        method=method, plan=plan, state=state, cache=cache, layers=layers, time_budget_s=time_budget
    )
    if plan_only:
        planned = plan_for(model, source, chosen, quantize_options, progress)
        return Answer(planned, lambda: show_json(planned))
    if out is None:
        raise UsageError("Missing option '--out'", hint="name the file to write, or give --plan-only")
    report = quantize_for(model, source, out, chosen, quantize_options, progress)
    if html is not None:
        # Imported only if needed: the import takes as long as quantizing a small network.
        pages = importlib.import_module("edgekit.report.html")
        write_file(html, pages.render_quantization(report).encode())
    return Answer(report, lambda: show_lines(describe_quantization(report)), report.met is not False)
