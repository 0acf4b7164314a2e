"""`edgekit profile`."""

from pathlib import Path

import click

from edgekit._files import write_file
from edgekit.bench.subject import Opening
from edgekit.cli import options
from edgekit.cli.limits import limit
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import print_table, show_json, show_line, showing_progress
from edgekit.devices.register import DeviceChoice
from edgekit.errors import UsageError
from edgekit.profile.measure import Watching
from edgekit.profile.profile import encode_chrome, profile_on
from edgekit.profile.report import ProfileReport
from edgekit.report import timing as text
from edgekit.report.pages.profile_page import render_profile


@click.command(
    short_help="Say where the time of a run goes, kernel by kernel, and why one model is slower than another."
)
@click.argument("subject", type=click.Path(path_type=Path))
@options.ON
@options.ON_FILE
@options.DEVICE_SET
@click.option("--against", type=click.Path(path_type=Path), metavar="OTHER", help="Say why OTHER is slower or faster.")
@options.SESSION_TARGET
@click.option("--runs", type=click.IntRange(1, 1000), metavar="N", help="Watch N runs in each of three rounds.")
@limit("--seconds", "seconds", click.FloatRange(0.1, 3600), "Begin nothing after X seconds (10).")
@options.THREADS
@options.DIM
@options.FREEZE
@options.FIRST_SAMPLE
@click.option("--top", type=click.IntRange(1, 10_000), default=15, metavar="N", help="Show N rows of each table (15).")
@click.option(
    "--trace",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the runs for Perfetto; ONNX Runtime's own file goes beside it, FILE.ort.json.",
)
@click.option("--html", type=click.Path(path_type=Path), metavar="FILE", help="Write an HTML page as well.")
@click.option("--no-roofline", is_flag=True, help="Do not measure what the machine reaches.")
@click.option("--probe-again", is_flag=True, help="Measure again what the machine reaches.")
@options.JSON
@options.verbosity
def command(
    subject: Path,
    names: tuple[str, ...],
    on_file: Path | None,
    settings: dict[str, str],
    against: Path | None,
    target: str | None,
    runs: int | None,
    seconds: float | None,
    threads: int,
    dims: dict[str, int],
    freeze: dict[str, float],
    data: str | None,
    top: int,
    trace: Path | None,
    html: Path | None,
    no_roofline: bool,
    probe_again: bool,
    as_json: bool,
    volume: int,
) -> int:
    """Say where the time of a run of SUBJECT, a bundle or a model, goes: by operator and kernel, and what each reaches.

    ONNX Runtime's profiler watches rounds of runs, between rounds without it, so that its own cost is known. With
    --against, or on two devices, layers are held against each other, and the reasons are named.

    \b
    Example:
      edgekit profile model.onnx --html profile.html --trace trace.json
      edgekit profile int8.onnx --against float.onnx --on adb:R5CT1234

    Exit code 0: everything was profiled. 1: not so. 2: the usage or an input is wrong.
    """
    options.require_places((trace, html), (subject, against))
    if no_roofline and probe_again:
        raise UsageError("--probe-again measures what --no-roofline leaves out", hint="give one of them")
    choice = DeviceChoice(names=names, file=on_file, settings=settings)
    watching = Watching(
        runs=runs,
        seconds=seconds,
        threads=threads,
        roofline=not no_roofline,
        probe_again=probe_again,
        raw=trace is not None,
    )
    opening = Opening(target=target, data=data, dims=dims, freeze=freeze)
    with showing_progress(volume) as progress:
        found = profile_on(subject, choice, watching, opening, against=against, progress=progress)
    if trace is not None:
        write_file(trace, encode_chrome(found.profiled))
        for number, one in enumerate(found.profiled):
            if one.raw:
                write_file(trace.with_suffix(f".ort{number or ''}.json"), one.raw)
    if html is not None:
        write_file(html, render_profile(found).encode())
    show_json(found.report) if as_json else show_profile(found.report, top)
    return YES if found.report.succeeded else NO


def show_profile(report: ProfileReport, top: int) -> None:
    """Prints profiles, one after another, and then what sets them apart."""
    for profile in report.profiles:
        show_line(text.headline_profile(profile))
        if profile.failure is None:
            print_table(text.table_operators(profile, top))
            print_table(text.table_nodes(profile, top))
            if profile.memory:
                print_table(text.table_memory(profile))
            if profile.npu:
                print_table(text.table_npu(profile, top))
            for remark in text.list_profile_remarks(profile):
                show_line(f"- {remark}")
    if report.comparison is not None:
        show_line(text.describe_profiles(report.comparison))
        for cause in report.comparison.causes:
            show_line(f"- {text.describe_cause(cause)}")
        if report.comparison.pairs:
            print_table(text.table_pairs(report.comparison, top))
    for remark in text.list_report_remarks(report):
        show_line(f"- {remark}")
