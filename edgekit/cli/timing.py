"""Commands about times: bench, profile and tune measure them, forecast predicts them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec

from edgekit._files import work_folder, write_file
from edgekit.bench.bench import Effort, bench_on
from edgekit.bench.history import compare_with_last, record_bench
from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Option, as_command, number
from edgekit.cli.options import Devices, ModelOpening, Threads
from edgekit.cli.screen import print_table, show_line, show_remarks
from edgekit.devices.device import Queue
from edgekit.errors import UsageError
from edgekit.forecasts.forecast import BITS, KnownTime, read_precisions
from edgekit.jobs.forecast import CpuTime, forecast, parse_cpu_times, parse_measured, read_history
from edgekit.model.model import load_model
from edgekit.prepare.clean import freeze_model
from edgekit.profile.measure import ProfileOptions
from edgekit.profile.profile import profile_on
from edgekit.progress import Progress
from edgekit.report import profiles, tables, timing
from edgekit.report.ci import render_bench_markdown
from edgekit.report.pages import make_page
from edgekit.serialize import to_json
from edgekit.tune.space import Goal
from edgekit.tune.tune import Tuning, tune_on

_MAX_SIZE = 65536
_WAIT_MS = 5.0


def _read_sizes(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[int, ...]:
    words = [] if value is None else value.split(",")
    if not all(word.isdecimal() and 1 <= int(word) <= _MAX_SIZE for word in words):
        raise click.BadParameter(f"'{value}' is no list of sizes: 1,2,4,8")
    return tuple(dict.fromkeys(map(int, words)))


def _read_queue(_context: click.Context, _parameter: click.Parameter, value: str | None) -> tuple[Queue, ...]:
    """Parses RATE[:MS]: returns a queue with this limit (5 ms by default), and one that waits until a batch is full."""
    if value is None:
        return ()
    match = re.fullmatch(r"([0-9]{1,6}(?:\.[0-9]+)?)(?::([0-9]{1,6}(?:\.[0-9]+)?))?", value)
    if match is None or not float(match[1]):
        raise click.BadParameter(f"'{value}' is no rate: 200, or 200:5 with a limit of 5 ms")
    limited = Queue(rate_per_s=float(match[1]), most=1, wait_ms=float(match[2] or _WAIT_MS))
    return limited, msgspec.structs.replace(limited, wait_ms=None)


@as_command
def bench_command(
    subject: Annotated[Path, Argument()],
    choice: Devices,
    runs: Annotated[int | None, number("Time N runs, whatever the spread.", 1, 100_000, metavar="N")],
    seconds: Annotated[float | None, number("Run at most X seconds a device (20).", 0.1, 3600)],
    threads: Threads,
    inter_op_threads: Annotated[int, number("Nodes at once in parallel execution.", 0, 256, metavar="N", default=0)],
    execution_mode: Annotated[Literal["sequential", "parallel"] | None, Option("Default: sequential, or as tuned.")],
    against: Annotated[Path | None, Option("Run OTHER in rounds interleaved with SUBJECT.", "OTHER")],
    batches: Annotated[tuple[int, ...], Option("Batch sizes: 1,2,4,8.", "N,N", "--batch", callback=_read_sizes)],
    concurrency: Annotated[
        tuple[int, ...], Option("Runs at once in one session to time, such as 1,2,4.", "N,N", callback=_read_sizes)
    ],
    queues: Annotated[
        tuple[Queue, ...],
        Option(
            "Serve RATE requests a second in batches that start after MS (5), then in batches that wait until full.",
            "RATE[:MS]",
            "--queue",
            callback=_read_queue,
        ),
    ],
    io_binding: Annotated[
        bool, Option("Bind inputs and outputs to memory once (IO binding), in place of copying them in each run.")
    ],
    opening: ModelOpening,
    markdown: Annotated[Path | None, Option("Write Markdown too, for a pull request.", "FILE")],
    series: Annotated[Path | None, Option("Write the figures for a dashboard too (.json).", "FILE")],
    history: Annotated[Path | None, Option("Compare with the last benchmark in this file, and add this one.", "FILE")],
    max_slowdown: Annotated[float | None, number("With --history: largest ratio of the median to the last one's.", 1)],
    progress: Progress,
) -> Answer:
    """Time SUBJECT, a bundle or a model, on devices: median, p95, p99, load time, memory, and how sure that is.

    The cold start (creating the session, and its first run) is reported separately; runs count once their times are
    steady. Without --runs each device runs until its median is known to 2 % or its time is over. With --against both
    run in interleaved rounds.

    \b
    Example:
      edgekit bench bundles/model-xnnpack --on adb:R5CT1234
      edgekit bench model.onnx --history bench.sqlite --max-slowdown 1.1
      edgekit bench model.onnx --on host --dim sequence=128 --batch 1,4,8 --concurrency 1,2

    Exit code 0: something was timed, and nothing failed or is too slow. 1: otherwise. 2: usage or an input is wrong.
    """
    if inter_op_threads and execution_mode == "sequential":
        raise UsageError("--inter-op-threads run nodes side by side", hint="give --execution-mode parallel")
    effort = Effort(
        runs=runs,
        seconds=seconds or Effort().seconds,
        threads=threads,
        inter_threads=inter_op_threads,
        parallel=True if inter_op_threads else None if execution_mode is None else execution_mode == "parallel",
        io_binding=io_binding,
    )
    efforts = _list_efforts(effort, concurrency, batches, queues)
    openings = [msgspec.structs.replace(opening, batch=batch) for batch in ((1,) if queues else batches or (None,))]
    if against is not None and len(openings) * len(efforts) > 1:
        raise UsageError("--against compares in one way", hint="give --batch and --concurrency one number each")
    options.require_with(("--max-slowdown", "--history FILE"))
    options.require_places((markdown, series, history), (subject, against))
    report = bench_on(subject, choice, efforts, openings, against=against, progress=progress)
    if history is not None:
        # The report is recorded without the comparison.
        compared = compare_with_last(report, history, max_slowdown)
        record_bench(history, report)
        report = compared
    options.write_page(markdown, lambda: render_bench_markdown(report))
    options.write_page(series, lambda: to_json(timing.list_series(report)))

    def show() -> None:
        if report.runs or report.skipped:
            print_table(timing.table_bench(report))
        show_remarks(timing.list_bench_remarks(report))

    return Answer(report, show, report.succeeded)


def _list_efforts(
    effort: Effort, concurrency: Sequence[int], batches: Sequence[int], queues: Sequence[Queue]
) -> list[Effort]:
    """Returns an effort for each concurrency, or for each queue and batch size.

    Raises:
        UsageError: both queues and concurrency are given.
    """
    if not queues:
        return [msgspec.structs.replace(effort, concurrency=count) for count in concurrency or (1,)]
    if concurrency:
        raise UsageError("--queue and --concurrency are two ways to load a session", hint="give one of them")
    all_queues = [msgspec.structs.replace(queue, most=size) for size in batches or (1, 8) for queue in queues]
    # A batch of one is full with its first request.
    return [msgspec.structs.replace(effort, queue=one) for one in all_queues if one.most > 1 or one.wait_ms is not None]


@as_command
def profile_command(
    subject: Annotated[Path, Argument()],
    choice: Devices,
    against: Annotated[Path | None, Option("Say why OTHER is slower or faster.", "OTHER")],
    runs: Annotated[int | None, number("Profile N runs in each of three rounds.", 1, 1000, metavar="N")],
    seconds: Annotated[float | None, number("Start no further round after X seconds (10).", 0.1, 3600)],
    threads: Threads,
    opening: ModelOpening,
    top: Annotated[int, number("Show N rows of each table (15).", 1, 10_000, metavar="N", default=15)],
    trace: Annotated[
        Path | None,
        Option("Write the profiler's file, for Perfetto; beside trace.json a second one is trace.1.json.", "FILE"),
    ],
    html: options.HtmlFile,
    no_roofline: Annotated[bool, Option("Do not measure the machine's roofline (its peak rates).")],
    probe_again: Annotated[bool, Option("Measure the machine's roofline again.")],
    progress: Progress,
) -> Answer:
    """Say where the time of a run of SUBJECT, a bundle or a model, goes: by operator and kernel, against the roofline.

    Rounds with ONNX Runtime's profiler alternate with rounds without it, so that its own cost is known. With --against,
    or on two devices, the layers are compared, and the reasons for the difference are named.

    \b
    Example:
      edgekit profile model.onnx --html profile.html --trace trace.json
      edgekit profile int8.onnx --against float.onnx --on adb:R5CT1234

    Exit code 0: everything was profiled. 1: something failed. 2: the usage or an input is wrong.
    """
    options.require_places((trace, html), (subject, against))
    if no_roofline and probe_again:
        raise UsageError("--probe-again measures what --no-roofline leaves out", hint="give one of them")
    profile_options = ProfileOptions(
        runs=runs,
        seconds=seconds,
        threads=threads,
        roofline=not no_roofline,
        probe_again=probe_again,
        raw=trace is not None,
    )
    result = profile_on(subject, choice, profile_options, opening, against=against, progress=progress)
    if trace is not None:
        for number, raw in enumerate(one.raw for one in result.profiled if one.raw):
            write_file(trace.with_suffix(f".{number}.json") if number else trace, raw)
    script, hues = "profile.js", profiles.HUES
    options.write_page(html, lambda: make_page("profile", tables, profiles, script=script, hues=hues, run=result))
    report = result.report

    def show() -> None:
        for profile in report.profiles:
            show_line(profiles.headline_profile(profile))
            if profile.failure is None:
                print_table(*profiles.list_tables(profile, top))
                show_remarks(profiles.list_profile_remarks(profile))
        if report.comparison is not None:
            show_line(profiles.describe_profiles(report.comparison))
            show_remarks(map(profiles.describe_cause, report.comparison.causes))
            if report.comparison.pairs:
                print_table(profiles.table_pairs(report.comparison, top))
        show_remarks(profiles.list_report_remarks(report))

    return Answer(report, show, report.succeeded)


@as_command
def tune_command(
    subject: Annotated[Path, Argument()],
    choice: Devices,
    goal: Annotated[Goal, Option("What to minimize (latency).", default="latency")],
    candidates: Annotated[tuple[Path, ...], Option("Try this file too: INT8, fp16.", "FILE", "--candidate")],
    opening: ModelOpening,
    min_sqnr_db: Annotated[
        float | None,
        number(
            "Least signal-to-noise ratio in dB against the reference; default: the bundle's limit, or 30.",
            -200,
            200,
            words="--min-sqnr",
        ),
    ],
    time_budget: Annotated[float | None, options.time_budget("Limit the search to this time")],
    state: Annotated[Path | None, Option("Keep measurements in FILE: an interrupted search continues.", "FILE")],
    apply: Annotated[bool, Option("Write the settings into the bundle, for this kind of machine.")],
    html: options.HtmlFile,
    progress: Progress,
) -> Answer:
    """Find the best session settings for SUBJECT, a bundle or a model, on a device.

    Settings are timed in interleaved rounds, each in a session of its own, and their outputs are compared with the
    reference. The slower half is dropped repeatedly; the last one is adopted only if fresh rounds prove that it is
    better. Finally all adopted settings together must prove to be better than the defaults, or nothing is applied.

    \b
    Example:
      edgekit tune model.onnx --goal throughput --time-budget 2m --html tune.html
      edgekit tune bundles/model-cpu --on host --state tune.json --apply

    Exit code 0: the search ended, also without a gain. 2: the usage or an input is wrong, or the device failed.
    """
    options.require_places((html, state), (subject, *candidates))
    tuning_options = Tuning(
        goal=goal,
        budget_s=Tuning().budget_s if time_budget is None else time_budget,
        candidates=candidates,
        min_sqnr_db=min_sqnr_db,
        state=state,
        apply=apply,
    )
    report = tune_on(subject, choice, tuning_options, opening, progress=progress)
    options.write_page(html, lambda: make_page("tune", tables, timing, report=report))

    def show() -> None:
        print_table(*timing.list_tables(report))
        show_line(timing.headline_tuning(report))
        show_remarks(timing.list_tuning_remarks(report))

    return Answer(report, show)


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
    dims: options.Sizes,
    freeze: options.Freeze,
    html: options.HtmlFile,
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
    with work_folder() as work:
        progress("count the work")
        frozen = freeze_model(load_model(subject), work, freeze).path if freeze else subject
        if compiles:
            progress("compile the model as QNN does")
        report = forecast(frozen, devices, precisions, known, dims=dims, every=every, max_ms=max_ms, compiles=compiles)
    options.write_page(html, lambda: make_page("forecast", timing, report=report))

    def show() -> None:
        show_line(timing.headline_forecast(report))
        print_table(timing.table_forecast(report))
        show_remarks(timing.list_forecast_remarks(report))

    return Answer(report, show, report.verdict)
