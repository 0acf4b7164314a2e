"""`edgekit forecast`."""

from pathlib import Path

import click

from edgekit._files import work_folder, write_file
from edgekit.cli import options
from edgekit.cli.limits import limit
from edgekit.cli.main import NO, UNPROVEN, YES
from edgekit.cli.screen import print_table, show_json, show_line, showing_progress
from edgekit.errors import UsageError
from edgekit.forecasts.forecast import BITS, ForecastReport, read_precisions
from edgekit.jobs.forecast import forecast
from edgekit.jobs.known_times import parse_cpu_times, parse_measured, read_history
from edgekit.model.model import load_model
from edgekit.prepare.clean import freeze_model
from edgekit.report import forecasts as text
from edgekit.report.pages.forecast_page import render_forecast


@click.command(short_help="Say how long a model would take on which phone, with an interval, before anyone owns one.")
@click.argument("subject", type=click.Path(path_type=Path))
@click.option("--device", "devices", multiple=True, metavar="NAME", help='A device: "Galaxy S24", "RB3 Gen 2".')
@click.option("--all", "every", is_flag=True, help="Every device that is known by name.")
@click.option("--precision", "bits", metavar="NAMES", help="Some of float, w8a8, w8a16, with commas between them.")
@click.option(
    "--measured", multiple=True, metavar="DEVICE[:PRECISION]=TIME", help='A time that is known: "Galaxy S25=1.9ms".'
)
@click.option(
    "--history", type=click.Path(path_type=Path), metavar="FILE", help="Take times on phones from what bench recorded."
)
@click.option(
    "--on-cpu", multiple=True, metavar="MODEL=TIME", help="What another model took on a CPU at hand: other.onnx=12ms."
)
@limit("--max-ms", "max_ms", click.FloatRange(min=0), "Most milliseconds, in the best precision.")
@options.DIM
@options.FREEZE
@options.SHAPE
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page as well.")
@options.JSON
@options.verbosity
def command(
    subject: Path,
    devices: tuple[str, ...],
    every: bool,
    bits: str | None,
    measured: tuple[str, ...],
    history: Path | None,
    on_cpu: tuple[str, ...],
    max_ms: float | None,
    dims: dict[str, int],
    freeze: dict[str, float],
    shapes: tuple[str, ...],
    html: Path | None,
    as_json: bool,
    volume: int,
) -> int:
    """Say how long SUBJECT, a model or a bundle, would take on phones and boards with Qualcomm's NPU. Nothing runs.

    The figures are drawn from what other networks took on these devices. 80 % of networks of kinds that took no part in
    making the forecast lie in the interval. A time that is known for one device moves all others: typed, or recorded by
    bench --on adb:SERIAL --history FILE.

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
    known = [parse_measured(each, precisions or BITS) for each in measured]
    known += [] if history is None else read_history(history, subject)
    timed = [time for each in on_cpu for time in parse_cpu_times(each)]
    sizes = options.add_shapes(dims, shapes, subject)
    with showing_progress(volume) as progress, work_folder() as work:
        progress("count the work")
        frozen = freeze_model(load_model(subject), work, freeze).path if freeze else subject
        report = forecast(frozen, devices, precisions, known, on_cpu=timed, dims=sizes, every=every, max_ms=max_ms)
    if html is not None:
        write_file(html, render_forecast(report).encode())
    show_json(report) if as_json else show_forecast(report)
    return NO if report.too_slow else UNPROVEN if report.unproven else YES


def show_forecast(report: ForecastReport) -> None:
    """Prints a forecast: the table of devices, then what to know of it."""
    show_line(text.headline_forecast(report))
    print_table(text.table_forecast(report))
    for line in text.list_forecast_remarks(report):
        show_line(f"- {line}")
