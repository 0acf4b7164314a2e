"""`edgekit compare`."""

from pathlib import Path

import click
import msgspec

from edgekit._files import require_place, write_file
from edgekit.cli import options
from edgekit.cli.limits import DROP, METRIC, limit
from edgekit.cli.screen import show_json, showing_progress
from edgekit.cli.terminal import show_comparison
from edgekit.data.data_check import refusing_bad
from edgekit.data.images import load_preprocess
from edgekit.data.samples import Samples, limit_samples, load_samples
from edgekit.devices.find import find_device
from edgekit.errors import UsageError
from edgekit.model.model import Model, load_model
from edgekit.recipe import load_metric
from edgekit.report.pages.charts import draw_outputs
from edgekit.report.pages.html import render_comparison
from edgekit.target import TaskLimit, load_target
from edgekit.verify.two_models import ModelComparison, add_task, compare_models, compare_on_device


@click.command(short_help="Say how far one model lies from another, and in which layer it begins.")
@click.argument("a", type=click.Path(path_type=Path))
@click.argument("b", type=click.Path(path_type=Path))
@options.DATA
@options.PREPROCESS
@options.SAMPLES
@click.option("--layers", is_flag=True, help="Compare layer by layer, through Q and DQ nodes.")
@limit("--min-sqnr", "min_sqnr", click.FloatRange(-200, 200), "Say no below this signal-to-noise ratio in dB.")
@click.option("--on", "device", metavar="DEVICE", help="Run B on this device; --layers then compares its layers.")
@click.option("--target", metavar="NAME", help="How the device opens B. Default: nnapi.")
@METRIC
@click.option("--labels", type=click.Path(path_type=Path), metavar="FILE", help="The label of each sample.")
@DROP
@options.CUSTOM_OPS
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write the comparison as a page too.")
@options.ACCEPT_UNPROVEN
@options.JSON
@options.verbosity
def command(
    a: Path,
    b: Path,
    data: str,
    preprocess: Path | None,
    samples: int | None,
    layers: bool,
    min_sqnr: float | None,
    device: str | None,
    target: str | None,
    metric: str | None,
    labels: Path | None,
    max_metric_drop: float | None,
    custom_ops: tuple[Path, ...],
    html: Path | None,
    accept_unproven: bool,
    as_json: bool,
    volume: int,
) -> int:
    """Say how far model B lies from model A on the same samples, both on this machine's CPU without optimisation.

    \b
    Example:
      edgekit compare model.onnx quantized.onnx --data samples.npz --layers --min-sqnr 20 --html compare.html
      edgekit compare model.onnx quantized.onnx --data samples.npz --layers --on qnn-htp-sim --target qnn

    Exit code 1: an output cannot be compared, is not finite, or lies below --min-sqnr; the metric fell too far; or with
    --layers a layer does not compute what A's does, beyond rounding. 3: there are too few samples to tell whether the
    metric fell too far; --accept-unproven makes 0 of that.
    """
    if (metric is None) != (labels is None) or (max_metric_drop is not None and metric is None):
        raise UsageError("--metric, with or without --max-metric-drop, goes with --labels", hint="give both")
    _check_places(target, device, html)
    first = load_model(a, custom_ops=custom_ops)
    given = load_samples(data, first.inputs, load_preprocess(preprocess) if preprocess else None)
    chosen = refusing_bad(limit_samples(given, samples))
    second = load_model(b, custom_ops=custom_ops)
    with showing_progress(volume) as progress:
        progress(f"compare on {chosen.count} samples")
        report = _compare(first, second, chosen, device, target, layers=layers)
        if metric is not None and labels is not None:
            limit = _load_task(metric, max_metric_drop)
            report = add_task(report, first, second, chosen, limit, labels=(labels, given))
    if html is not None:
        write_file(html, _render(report, chosen, min_sqnr))
    show_json(report) if as_json else show_comparison(report)
    return options.exit_code(report.judge(min_sqnr), accept_unproven=accept_unproven)


def _compare(
    first: Model, second: Model, samples: Samples, device: str | None, target: str | None, *, layers: bool
) -> ModelComparison:
    if device is None:
        return compare_models(first, second, samples, layers=layers)
    opens = load_target(target or "nnapi")
    return compare_on_device(first, second, samples, find_device(device, opens), opens, layers=layers)


def _check_places(target: str | None, device: str | None, html: Path | None) -> None:
    if target and device is None:
        raise UsageError("--target says how a device opens B", hint="give --on DEVICE too, or leave it out")
    if html is not None:
        require_place(html)


def _load_task(metric: str, max_drop: float | None) -> TaskLimit:
    task = load_metric(metric)
    return task if max_drop is None else msgspec.structs.replace(task, max_drop=max_drop)


def _render(report: ModelComparison, samples: Samples, min_sqnr: float | None) -> bytes:
    return render_comparison(report, draw_outputs(samples, report), min_sqnr_db=min_sqnr).encode()
