"""`edgekit compare`."""

import platform
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit._files import work_folder, write_file
from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Option, as_command, number
from edgekit.cli.screen import print_table, show_line, show_remarks
from edgekit.convert.ort_form import Cpu
from edgekit.data.data_check import refusing_bad
from edgekit.data.images import load_preprocess
from edgekit.data.samples import limit_samples, load_samples
from edgekit.devices.find import find_device
from edgekit.devices.register import load_target_here
from edgekit.errors import UsageError
from edgekit.jobs.convert import FormatReport, compare_formats
from edgekit.model.model import load_model
from edgekit.prepare.clean import freeze_model
from edgekit.prepare.opset import lower_model
from edgekit.prepare.shapes import size_inputs
from edgekit.progress import Progress
from edgekit.recipe import Recipe, load_metric
from edgekit.report import text
from edgekit.report.charts import draw_worst
from edgekit.report.html import render_comparison
from edgekit.report.tables import format_bytes, make_table
from edgekit.verify.two_models import ModelComparison, add_task, compare_models, compare_on_device

# From this SQNR on, outputs differ at most in the sign of zero.
_EQUAL_DB = 200.0


@as_command
def compare_command(
    a: Annotated[Path, Argument()],
    b: Annotated[Path | None, Argument()],
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    samples: options.SampleCount,
    formats: Annotated[bool, Option("In place of B: quantize A in each format, and compare all with A in one table.")],
    cpu: Annotated[Cpu | None, Option("With --formats: whose kernels. Default: this machine's.")],
    dims: options.Dims,
    freeze: options.Freeze,
    layers: Annotated[bool, Option("Compare layer by layer, through Q and DQ nodes.")],
    min_sqnr: Annotated[float | None, number("Fail below this signal-to-noise ratio in dB.", -200, 200)],
    device: Annotated[str | None, Option("Run B on this device; --layers then compares its layers.", "DEVICE", "--on")],
    target: Annotated[str | None, Option("The target whose session options open B, or auto. Default: nnapi.", "NAME")],
    metric: options.Metric,
    labels: Annotated[Path | None, Option("The label of each sample.", "FILE")],
    max_metric_drop: options.MetricDrop,
    custom_ops: options.CustomOps,
    html: Annotated[Path | None, Option("Write the comparison as a page too.", "FILE")],
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Compare model B with model A on the same samples, both on this machine's CPU without optimization.

    \b
    Example:
      edgekit compare model.onnx quantized.onnx --data samples.npz --layers --min-sqnr 20 --html compare.html
      edgekit compare model.onnx quantized.onnx --data samples.npz --layers --on qnn-htp-sim --target qnn
      edgekit compare model.onnx --formats --data samples.npz

    Exit code 1: an output of B does not agree with that of A (judged by its meaning, as in edgekit verify), cannot be
    compared, is not finite or lies below --min-sqnr; or the metric dropped too far. 3: there are too few samples for a
    verdict; with --accept-unproven the code is 0 then.
    """
    if b is None or formats or cpu:
        others = (b, layers, min_sqnr, device, target, metric, labels, max_metric_drop, custom_ops, html)
        if not formats or any(one not in (None, False, ()) for one in others):
            raise UsageError(
                "give a second model, or --formats with --data, --preprocess, --samples, --cpu, --dim, --freeze alone",
                hint="edgekit compare MODEL --formats --data DATA",
            )
        recipe = Recipe(dims=dims, freeze=freeze, samples=samples)
        host_cpu: Cpu = "arm" if platform.machine().lower() in {"arm64", "aarch64"} else "x64"
        formats_report = compare_formats(a, options.read_data(data, preprocess), recipe, cpu or host_cpu, progress)
        return Answer(formats_report, lambda: _show_formats(formats_report))
    if (metric is None) != (labels is None) or (max_metric_drop is not None and metric is None):
        raise UsageError("--metric, with or without --max-metric-drop, goes with --labels", hint="give both")
    if target and device is None:
        raise UsageError("--target says how a device opens B", hint="give --on DEVICE too, or leave it out")
    options.require_places((html,), ())
    with work_folder() as work:
        first = freeze_model(load_model(a, custom_ops=custom_ops), work / "frozen-a", freeze)
        inputs = size_inputs(first.inputs, dims, may_stay_open=True)
        all_samples = load_samples(data, inputs, load_preprocess(preprocess) if preprocess else None, idle=freeze)
        samples_to_compare = refusing_bad(limit_samples(all_samples, samples))
        second = load_model(b, custom_ops=custom_ops)
        # An input of A that is frozen may be a constant in B already.
        shared_constants = {spec.name: freeze[spec.name] for spec in second.inputs if spec.name in freeze}
        second = freeze_model(second, work / "frozen-b", shared_constants)
        first, second = lower_model(first, work / "a"), lower_model(second, work / "b")
        progress(f"compare on {samples_to_compare.count} samples")
        if device is None:
            report = compare_models(first, second, samples_to_compare, layers=layers)
        else:
            opening_target = load_target_here(target or "nnapi")
            report = compare_on_device(
                first, second, samples_to_compare, find_device(device, opening_target), opening_target, layers=layers
            )
        if metric is not None and labels is not None:
            limit = load_metric(metric)
            if max_metric_drop is not None:
                limit = msgspec.structs.replace(limit, max_drop=max_metric_drop)
            report = add_task(report, first, second, samples_to_compare, limit, labels=(labels, all_samples))
    if html is not None:
        write_file(
            html, render_comparison(report, draw_worst(samples_to_compare, report), min_sqnr_db=min_sqnr).encode()
        )
    code = options.exit_code(report.judge(min_sqnr), accept_unproven=accept_unproven)
    return Answer(report, lambda: show_comparison(report, min_sqnr), code)


def _show_formats(report: FormatReport) -> None:
    """Prints the formats of a model side by side."""
    table = make_table("format", "size", "SQNR", "same first class", "load", "p50", "time of float's")
    for row in report.rows:
        if row.note:
            table.add_row(row.name, "-", row.note)
            continue
        interval = "" if row.interval is None else f" (95 %: {row.interval[0]:.2f} to {row.interval[1]:.2f})"
        table.add_row(
            row.name,
            format_bytes(row.size_bytes),
            "-" if row.sqnr_db is None else "equal" if row.sqnr_db >= _EQUAL_DB else f"{row.sqnr_db:.1f} dB",
            "-" if row.agreement is None else f"{row.agreement:.1%}",
            "-" if row.load_ms is None else f"{row.load_ms:.1f} ms",
            "-" if row.median_ms is None else f"{row.median_ms:.3g} ms",
            "-" if row.ratio is None else f"{row.ratio:.2f}{interval}",
        )
    print_table(table)
    same = "others" if report.apart else "the same"
    show_line(f"- ranges from {report.calibrated} samples, judged by {report.judged} ({same}), kernels of {report.cpu}")


def show_comparison(report: ModelComparison, min_sqnr_db: float | None) -> None:
    """Prints the differences of the outputs, the reasons for the verdict, and the first bad layer."""
    print_table(text.table_outputs(report))
    if report.layers:
        print_table(text.table_layers(report.layers))
        show_line(f"first bad layer: {report.first_bad_layer or 'none'}")
    show_remarks(text.list_comparison_remarks(report, min_sqnr_db))
    if report.located is not None:
        if report.located.layers:
            show_line(f"on {report.device} against this machine, each layer with the inputs that it had on the device:")
            print_table(text.table_layers(report.located.layers))
        first, *notes = text.list_located(report.located)
        show_line(f"{report.device}: {first}")
        show_remarks(notes)
