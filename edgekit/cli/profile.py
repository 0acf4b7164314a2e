"""`edgekit profile`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit._files import write_file
from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, as_command, number
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import print_table, show_json, show_line, show_remarks, showing_progress
from edgekit.cli.subjects import Devices, ModelOpening, Threads
from edgekit.errors import UsageError
from edgekit.profile.measure import ProfileOptions
from edgekit.profile.profile import encode_chrome, profile_on
from edgekit.profile.report import ProfileReport
from edgekit.report import profiles as text


@as_command
def profile_command(
    subject: Annotated[Path, Argument()],
    choice: Devices,
    against: Annotated[Path | None, Option("Say why OTHER is slower or faster.", "OTHER")],
    runs: Annotated[int | None, Option("Watch N runs in each of three rounds.", "N", type=click.IntRange(1, 1000))],
    seconds: Annotated[
        float | None, number("Start no further round after X seconds (10).", click.FloatRange(0.1, 3600))
    ],
    threads: Threads,
    opening: ModelOpening,
    top: Annotated[int, Option("Show N rows of each table (15).", "N", type=click.IntRange(1, 10_000), default=15)],
    trace: Annotated[
        Path | None,
        Option("Write the runs for Perfetto; ONNX Runtime's own file goes beside it, FILE.ort.json.", "FILE"),
    ],
    html: options.HtmlFile,
    no_roofline: Annotated[bool, Option("Do not measure the machine's roofline (its peak rates).")],
    probe_again: Annotated[bool, Option("Measure the machine's roofline again.")],
    as_json: options.Json,
    volume: options.Volume,
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
    asked = ProfileOptions(
        runs=runs,
        seconds=seconds,
        threads=threads,
        roofline=not no_roofline,
        probe_again=probe_again,
        raw=trace is not None,
    )
    with showing_progress(volume) as progress:
        found = profile_on(subject, choice, asked, opening, against=against, progress=progress)
    if trace is not None:
        write_file(trace, encode_chrome(found.profiled))
        for number, one in enumerate(found.profiled):
            if one.raw:
                write_file(trace.with_suffix(f".ort{number or ''}.json"), one.raw)
    if html is not None:
        write_file(html, text.render_profile(found).encode())
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
            show_remarks(text.list_profile_remarks(profile))
    if report.comparison is not None:
        show_line(text.describe_profiles(report.comparison))
        show_remarks(map(text.describe_cause, report.comparison.causes))
        if report.comparison.pairs:
            print_table(text.table_pairs(report.comparison, top))
    show_remarks(text.list_report_remarks(report))
