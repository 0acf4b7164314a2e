"""`edgekit bench`."""

from pathlib import Path

import click
import msgspec

from edgekit._files import write_file
from edgekit.bench.bench import bench_on
from edgekit.bench.blocks import Effort
from edgekit.bench.history import hold_against_last, record_bench
from edgekit.bench.report import BenchReport
from edgekit.bench.subject import Opening
from edgekit.cli import options
from edgekit.cli.limits import limit
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import print_table, show_json, show_line, showing_progress
from edgekit.devices.register import DeviceChoice
from edgekit.errors import UsageError
from edgekit.plain import to_json
from edgekit.report.markdown import render_bench_markdown
from edgekit.report.timing.bench_series import list_series
from edgekit.report.timing.bench_text import list_bench_remarks, table_bench

_MOST = 65536


def _read_sizes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    words = [] if value is None else value.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST for word in words):
        raise click.BadParameter(f"'{value}' is no list of sizes: 1,2,4,8")
    return tuple(dict.fromkeys(map(int, words)))


@click.command(short_help="Time a bundle or a model on devices, or two of them in interleaved rounds.")
@click.argument("subject", type=click.Path(path_type=Path))
@options.ON
@options.ON_FILE
@options.DEVICE_SET
@click.option("--runs", type=click.IntRange(1, 100_000), metavar="N", help="Time N runs, whatever the spread.")
@limit("--seconds", "seconds", click.FloatRange(0.1, 3600), "At most X seconds a device (20).")
@options.THREADS
@click.option(
    "--against", type=click.Path(path_type=Path), metavar="OTHER", help="Run OTHER in rounds interleaved with SUBJECT."
)
@options.SESSION_TARGET
@click.option("--batch", "batches", metavar="N,N", callback=_read_sizes, help="Batch sizes to time, such as 1,2,4,8.")
@click.option(
    "--concurrency", metavar="N,N", callback=_read_sizes, help="Runs at once in one session to time, such as 1,2,4."
)
@click.option("--io-binding", is_flag=True, help="Bind inputs, and write outputs where those of the run before lie.")
@options.DIM
@options.FIRST_SAMPLE
@click.option(
    "--markdown", type=click.Path(path_type=Path), metavar="FILE", help="Write Markdown too, for a pull request."
)
@click.option(
    "--series", type=click.Path(path_type=Path), metavar="FILE", help="Write the figures for a dashboard too (.json)."
)
@click.option(
    "--history", type=click.Path(path_type=Path), metavar="FILE", help="Compare with the last one, and record."
)
@limit("--max-slowdown", "max_slowdown", click.FloatRange(min=1), "With --history: most times the last median.")
@options.JSON
@options.verbosity
def command(
    subject: Path,
    names: tuple[str, ...],
    on_file: Path | None,
    settings: tuple[str, ...],
    runs: int | None,
    seconds: float | None,
    threads: int,
    against: Path | None,
    target: str | None,
    batches: tuple[int, ...],
    concurrency: tuple[int, ...],
    io_binding: bool,
    dims: tuple[str, ...],
    data: str | None,
    markdown: Path | None,
    series: Path | None,
    history: Path | None,
    max_slowdown: float | None,
    as_json: bool,
    volume: int,
) -> int:
    """Time SUBJECT, a bundle or a model, on devices: median, p95, p99, load time, memory, and how sure that is.

    Cold start, the session and its first run, stands apart; runs count once their times are steady. Without --runs each
    device runs until its median is known to 2 % or its time is over. With --against both run in interleaved rounds.

    \b
    Example:
      edgekit bench bundles/model-xnnpack --on adb:R5CT1234
      edgekit bench model.onnx --history bench.sqlite --max-slowdown 1.1
      edgekit bench model.onnx --on host --dim sequence=128 --batch 1,4,8 --concurrency 1,2

    Exit code 0: something was timed, and nothing failed or is too slow. 1: not so. 2: the usage or an input is wrong.
    """
    choice = DeviceChoice(names=names, file=on_file, settings=options.parse_assignments(settings, "--set"))
    effort = Effort(runs=runs, seconds=seconds or Effort().seconds, threads=threads, io_binding=io_binding)
    efforts = [msgspec.structs.replace(effort, concurrency=count) for count in concurrency or (1,)]
    opening = Opening(target=target, data=data, dims=options.parse_dims(dims))
    openings = [msgspec.structs.replace(opening, batch=batch) for batch in batches or (None,)]
    _refuse_contradictions(against, len(openings) * len(efforts), history, max_slowdown)
    options.require_places((markdown, series, history), (subject, against))
    with showing_progress(volume) as progress:
        report = bench_on(subject, choice, efforts, openings, against=against, progress=progress)
    report = _keep(report, history, max_slowdown)
    for file, render in ((markdown, render_bench_markdown), (series, _render_series)):
        if file is not None:
            write_file(file, render(report).encode())
    show_json(report) if as_json else _show_bench(report)
    return YES if report.succeeded else NO


def _refuse_contradictions(against: Path | None, ways: int, history: Path | None, max_slowdown: float | None) -> None:
    if against is not None and ways > 1:
        raise UsageError("--against compares in one way", hint="give --batch and --concurrency one number each")
    if max_slowdown is not None and history is None:
        raise UsageError("--max-slowdown compares with a history", hint="give --history FILE")


def _keep(report: BenchReport, history: Path | None, max_slowdown: float | None) -> BenchReport:
    """Returns the report beside the last one of a history, to which it is added."""
    if history is None:
        return report
    held = hold_against_last(report, history, max_slowdown)
    record_bench(history, report)
    return held


def _render_series(report: BenchReport) -> str:
    return to_json(list_series(report))


def _show_bench(report: BenchReport) -> None:
    """Prints times: the table, each comparison, and what the times are worth."""
    if report.runs or report.skipped:
        print_table(table_bench(report))
    for remark in list_bench_remarks(report):
        show_line(f"- {remark}")
