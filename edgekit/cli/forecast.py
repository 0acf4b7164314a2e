"""`edgekit forecast`."""

from pathlib import Path
from typing import Annotated

from edgekit._files import work_folder, write_file
from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Option, as_command, number
from edgekit.cli.main import NO, UNPROVEN, YES
from edgekit.cli.screen import print_table, show_line, show_remarks
from edgekit.errors import UsageError
from edgekit.forecasts.forecast import BITS, ForecastReport, KnownTime, read_precisions
from edgekit.jobs.forecast import CpuTime, forecast, parse_cpu_times, parse_measured, read_history
from edgekit.model.model import load_model
from edgekit.prepare.clean import freeze_model
from edgekit.progress import Progress
from edgekit.report import forecasts as text


@as_command
def forecast_command(
    subject: Annotated[Path, Argument()],
    devices: Annotated[tuple[str, ...], Option('A device: "Galaxy S24", "RB3 Gen 2".', "NAME", "--device")],
    every: Annotated[bool, Option("Every device that is known by name.", words="--all")],
    bits: Annotated[str | None, Option("Some of float, w8a8, w8a16, with commas.", "NAMES", "--precision")],
    measured: Annotated[tuple[str, ...], Option('A known time: "Galaxy S25=1.9ms".', "DEVICE[:PRECISION]=TIME")],
    history: Annotated[Path | None, Option("Take times on phones from what bench recorded.", "FILE")],
    on_cpu: Annotated[tuple[str, ...], Option("What another model took on a CPU here: other.onnx=12ms.", "MODEL=TIME")],
    compiles: Annotated[bool, Option("Compile the float model for QNN: more accurate, slower.", words="--compile")],
    max_ms: Annotated[float | None, number("The largest time in ms, in the fastest precision.", 0)],
    dims: options.Dims,
    freeze: options.Freeze,
    shapes: options.Shapes,
    html: Annotated[Path | None, Option("Write an HTML page as well.", "FILE")],
    progress: Progress,
) -> Answer:
    """Say how long SUBJECT, a model or a bundle, would take on phones and boards with Qualcomm's NPU. Nothing runs.

    The figures are estimated from the times of other networks on these devices. For families of networks that were left
    out of the fit, 80 % of the times lie in the interval. A known time on one device improves the forecast for all: one
    given by --measured, or recorded by bench --on adb:SERIAL --history FILE. With --compile, QNN's compiler (of
    onnxruntime-qnn) plans the float model on this PC, which takes seconds for a small network and minutes for a large
    one.

    \b
    Example:
      edgekit forecast model.onnx --device "Galaxy S24" --measured "Galaxy S25=1.9ms"

    Exit code 0: forecast, and --max-ms is kept. 1: a device is forecast to miss --max-ms. 2: the usage or an input is
    wrong. 3: an interval crosses --max-ms, or a device has no forecast.
    """
    if every and devices:
        raise UsageError("--all and --device contradict each other", hint="give one of them")
    options.require_places((html,), (subject, history))
    precisions = read_precisions(bits) if bits is not None else None
    known: list[KnownTime | CpuTime] = [parse_measured(each, precisions or BITS) for each in measured]
    known += [] if history is None else read_history(history, subject)
    known += [time for each in on_cpu for time in parse_cpu_times(each)]
    sizes = options.add_shapes(dims, shapes, subject)
    with work_folder() as work:
        progress("count the work")
        frozen = freeze_model(load_model(subject), work, freeze).path if freeze else subject
        if compiles:
            progress("compile the model as QNN does")
        report = forecast(frozen, devices, precisions, known, dims=sizes, every=every, max_ms=max_ms, compiles=compiles)
    if html is not None:
        write_file(html, text.render_forecast(report).encode())
    code = NO if report.too_slow else UNPROVEN if report.unproven else YES
    return Answer(report, lambda: _show_forecast(report), code)


def _show_forecast(report: ForecastReport) -> None:
    show_line(text.headline_forecast(report))
    print_table(text.table_forecast(report))
    show_remarks(text.list_forecast_remarks(report))
