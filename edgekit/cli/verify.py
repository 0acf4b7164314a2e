"""Commands that compare with a reference: verify, with limits in place of those of the target, runs and compare."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import click
import msgspec
from rich.text import Text

from edgekit._files import require_place, work_folder, write_file
from edgekit.bench.history import list_benches
from edgekit.bundle.checks import bundled_task
from edgekit.bundle.manifest import Manifest
from edgekit.bundle.multi import opened_any, opened_bundle
from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, From, Option, as_command, number, subcommand
from edgekit.cli.options import Devices, Metric, MetricDrop, Required, add_required
from edgekit.cli.release import describe_attested
from edgekit.cli.screen import print_table, show_line, show_lines, show_remarks
from edgekit.convert.ort_form import Cpu
from edgekit.data.data_check import find_missing, refusing_bad
from edgekit.data.images import load_preprocess
from edgekit.data.samples import limit_samples, load_samples, spread_indices
from edgekit.data.sets import read_task_labels
from edgekit.devices.find import default_target, find_device, load_target_here
from edgekit.errors import UsageError
from edgekit.graph.graph import view_model
from edgekit.jobs.convert import FormatReport, compare_formats
from edgekit.machine import host_cpu
from edgekit.model.external import skim_model
from edgekit.model.model import load_model
from edgekit.prepare.clean import make_runnable
from edgekit.prepare.shapes import size_inputs
from edgekit.progress import Progress
from edgekit.recipe import Recipe, load_metric
from edgekit.report import text
from edgekit.report.ci import render_junit, render_markdown
from edgekit.report.html import Picture, draw_worst, render_page
from edgekit.report.tables import format_bytes, format_or_dash, format_sqnr, format_times, make_table
from edgekit.target import TaskLimit, Thresholds
from edgekit.verify.history import compare_with_baseline, diff_runs, find_last_good, list_runs, read_run, record_report
from edgekit.verify.on_devices import RunFiles, open_inputs, verify_on, verify_with
from edgekit.verify.report import VerifyReport, read_report, recheck_report, require_devices
from edgekit.verify.task_metrics import find_metric
from edgekit.verify.two_models import ModelComparison, compare_models


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits given as options, by their names in `Thresholds`; None if an option was not given.

    `metric` names a metric of the task; `max_metric_drop` and `min_metric_share` are its limits.
    """

    min_cosine: Annotated[float | None, number("Least cosine of an output.", -1, 1)]
    min_sqnr_db: Annotated[float | None, number("Least signal-to-noise ratio in dB.", -200, 200, words="--min-sqnr")]
    min_top1_agreement: Annotated[
        float | None,
        number("Least share of samples whose top-1 agrees (of integers: of equal elements).", 0, 1, words="--min-top1"),
    ]
    gate: Annotated[
        Literal["estimate", "bound"] | None,
        Option("Judge by the measured figures (estimate) or by their 95 % intervals (bound), also of the metric."),
    ]
    max_cpu_nodes: Annotated[int | None, number("Largest number of nodes left to the CPU.", 0, metavar="N")]
    max_lost_share: Annotated[
        float | None,
        number("Largest share of work on the CPU that the rules predicted for the provider.", 0, 1, words="--max-lost"),
    ]
    needs_placement: Annotated[
        bool | None, Option("Fail if no run observed which nodes the provider takes.", is_flag=True, default=None)
    ]
    max_latency_ratio: Annotated[float | None, number("Largest ratio of the latency to that of the earlier run.", 0)]
    max_memory_ratio: Annotated[float | None, number("Largest ratio of the memory to that of the earlier run.", 0)]
    max_size_bytes: Annotated[int | None, number("Largest size of the model.", 0, words="--max-size", metavar="BYTES")]
    metric: Metric
    max_metric_drop: MetricDrop
    min_metric_share: Annotated[float | None, number("Least share of the float model's metric.", 0, 1)]

    def find_task(self, manifest: Manifest) -> TaskLimit | None:
        """Returns the metric to measure: that of --metric, else that of the bundle, with the limits of the options.

        Raises:
            UsageError: the bundle's metric is a function, which must be named by --metric, or there are limits of a
                metric and no metric.
        """
        return self._limit(bundled_task(manifest) if self.metric is None else load_metric(self.metric))

    def apply(self, thresholds: Thresholds) -> Thresholds:
        """Returns the thresholds with the limits of the options; with --min-top1 no further samples may differ.

        Raises:
            UsageError: there are limits of a metric and no metric.
        """
        given = {name: it for name in Thresholds.__struct_fields__ if (it := getattr(self, name, None)) is not None}
        if self.min_top1_agreement is not None:
            # The granted samples belong to the target's own limit.
            given["granted_samples"] = 0
        task = thresholds.task if self.metric is None else load_metric(self.metric)
        named = tuple(dict.fromkeys((*thresholds.named, *given)))
        return msgspec.structs.replace(thresholds, task=self._limit(task), **given, named=named)

    def _limit(self, task: TaskLimit | None) -> TaskLimit | None:
        given = {"max_drop": self.max_metric_drop, "min_share": self.min_metric_share, "gate": self.gate}
        changes = {name: value for name, value in given.items() if value is not None}
        if task is None and changes.keys() - {"gate"}:
            words = "--max-metric-drop and --min-metric-share limit a metric, and none is named"
            raise UsageError(words, hint="add --metric NAME, such as top1")
        return None if task is None else msgspec.structs.replace(task, **changes)


_OF_DATA = "--preprocess --labels --reference --samples"
_OF_RUN = "--import --run-key --export --sign-run"


@as_command
def verify_command(
    bundle: Annotated[Path | None, Argument()],
    devices: Devices,
    require: Required,
    data: Annotated[str | None, Option("Verify with these samples, not the golden ones; needs --reference.", "DATA")],
    preprocess: options.PreprocessFile,
    labels: Annotated[Path | None, Option("The class of each --data sample.", "FILE")],
    reference: Annotated[Path | None, Option("The float model that the bundle was built from.", "MODEL")],
    samples: options.SampleCount,
    recorded: Annotated[tuple[Path, ...], Option("Judge a run that was exported.", "FILE", "--import")],
    run_key: Annotated[Path | None, Option("Refuse an imported run that this public key did not sign.", "FILE")],
    export: Annotated[Path | None, Option("Write the run of the device as a file, to judge elsewhere.", "FILE")],
    sign_key: Annotated[Path | None, Option("Sign it with this private key (PEM).", "FILE", "--sign-run")],
    layers: Annotated[bool, Option("Compare each layer on the device with this machine, even where outputs agree.")],
    recheck: Annotated[Path | None, Option("Judge this verify.json again; nothing runs.", "FILE")],
    key: options.PublicKey,
    target: Annotated[str | None, Option("Which variant of a bundle of several targets.", "NAME")],
    files_only: Annotated[bool, Option("Check the files and the signature; nothing runs.")],
    limits: Annotated[Limits, From(Limits)],
    baseline: Annotated[Path | None, Option("Compare with the run in this verify.json.", "FILE")],
    history: Annotated[Path | None, Option("Compare with the last good run in this file, and add this one.", "FILE")],
    junit: Annotated[Path | None, Option("Write the result as JUnit XML too.", "FILE")],
    html: Annotated[Path | None, Option("Write the result as an HTML page too.", "FILE")],
    markdown: Annotated[Path | None, Option("Write the result as Markdown too, for a pull request.", "FILE")],
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Run BUNDLE (a folder, .zip or .tar) on devices and compare with the float model.

    A run with the golden samples is written into the bundle's verify.json, under the bundle's own thresholds. The
    limits here count for this judgement only; --data and --recheck leave verify.json alone, and nothing is written into
    an archive. Without --on and --on-file it runs on the devices that the target names; several run at once and
    are compared. A device that is not there is skipped, unless it is named by --require; with CI=true in the
    environment, as continuous integration sets it, every device named by --on or --on-file is.

    With --key, BUNDLE is refused before anything runs unless that key signed every file in it, in an archive too;
    without it no signature is looked at. A signature says what its maker verified; this command verifies again.

    \b
    Example:
      edgekit verify bundles/model-qnn --require qnn-htp-sim --junit verify.xml
      edgekit verify bundles/model-xnnpack --on android --set phone=pixel-6
      edgekit verify bundles/model-coreml --on coreml --export mac.run
      edgekit verify bundles/model-coreml --import mac.run
      edgekit verify bundles/model-xnnpack --on adb:R5CT1234 --on-file devices.toml --html lab.html
      edgekit verify bundles/model-qnn --data eval.npz --labels eval.npy --reference model.onnx --metric top1
      edgekit verify --recheck bundles/model-qnn/verify.json --min-cosine 0.99
      edgekit verify model.zip --target nnapi --key release.pem.pub --files-only

    Exit code 0: at least one device ran and each that ran passed. 1: one failed. 2: the usage or an input is wrong. 3:
    nothing speaks against the bundle, but it is not proven: no device ran, there are too few samples for an interval,
    or an emulator is too old to tell. --accept-unproven makes 0 of 3.
    """
    # Options that would have no effect are errors: a limit that is silently ignored would let a failure pass.
    _check_options()
    if files_only:
        unused = "--on --on-file --set --data --layers --baseline --history --junit --html --markdown"
        options.refuse_unused(unused, "--files-only runs nothing")
        if bundle is None:
            raise UsageError("--files-only needs a BUNDLE", hint="give its folder or archive")
        return _check_files(bundle, key)
    places = {"--junit": junit, "--html": html, "--markdown": markdown, "--history": history, "--export": export}
    for option, place in places.items():
        # A report in the bundle is a file that the manifest does not list: the bundle could not be opened again.
        if bundle is not None and place is not None and place.resolve().is_relative_to(bundle.resolve()):
            raise UsageError(f"{option} '{place}' lies in the bundle", hint="write it beside the bundle")
        if place is not None:
            require_place(place)
    # Before the run, which may write over it.
    earlier = None if baseline is None else read_report(baseline)
    pictures: Sequence[Picture] = ()
    if recheck is not None:
        report = read_report(recheck)
    else:
        with opened_bundle(bundle or Path(), key=key, target=target) as opened:
            task, choice = limits.find_task(opened.manifest), add_required(devices, require)
            given_data = None if data is None else options.read_data(data, preprocess, labels=labels)
            if given_data is None or reference is None:
                files = RunFiles(recorded=recorded, run_key=run_key, export=export, sign_key=sign_key)
                report = verify_on(opened, choice, progress, task=task, layers=layers, files=files)
            else:
                report = verify_with(
                    opened, reference, given_data, choice, progress, samples=samples, task=task, layers=layers
                )
            # The page shows the worst samples, if they can be read.
            inputs = None if html is None else open_inputs(opened, given_data, samples)
            pictures = () if inputs is None else draw_worst(inputs, report)
    # GitHub, GitLab and CircleCI set CI: there a skipped device would not be noticed, so it is a failure.
    in_ci = os.environ.get("CI", "").lower() in {"1", "true"} and (devices.names or devices.file is not None)
    report = require_devices(report, (*require, *(skip.device for skip in report.skipped if in_ci)))
    if report.runs:
        # Only this report is judged by the limits of the options, not the bundle's verify.json.
        report = recheck_report(report, limits.apply(report.runs[0].thresholds))
    if earlier is not None:
        report = compare_with_baseline(report, earlier, str(baseline))
    elif history is not None and (last := find_last_good(history, report)) is not None:
        report = compare_with_baseline(report, last.report, f"run {last.id}")
    # After the comparison, so that a run is not compared with itself.
    if history is not None:
        record_report(history, report)
    if junit is not None:
        write_file(junit, render_junit((report,), accept_unproven=accept_unproven))
    options.write_page(html, lambda: render_page(report, pictures))
    options.write_page(markdown, lambda: render_markdown((report,)))
    return Answer(report, lambda: show_verify(report), report.verdict, accept_unproven)


def _check_options() -> None:
    given = options.list_given()
    if ("bundle" in given) == ("--recheck" in given):
        raise UsageError("give either a BUNDLE to run or --recheck FILE", hint="edgekit verify --help shows both")
    if "--recheck" in given:
        unused = f"--on --on-file --set --require {_OF_RUN} --layers --key --target --data {_OF_DATA}"
        options.refuse_unused(unused, "--recheck runs nothing")
    options.require_with(("--run-key", "--import FILE"), ("--sign-run", "--export FILE"))
    if "--data" in given:
        options.refuse_unused(_OF_RUN, "a run as a file is one with the golden samples")
        options.require_with(("--data", "--reference MODEL"))
    else:
        options.refuse_unused(_OF_DATA, "the golden samples and their labels are in the bundle; --data gives others")
    comparisons = {"--baseline", "--history"} & {*given}
    if {"--max-latency-ratio", "--max-memory-ratio"} & {*given} and not comparisons:
        raise UsageError("a ratio needs an earlier run to compare with", hint="give --baseline FILE or --history FILE")
    if len(comparisons) > 1:
        raise UsageError("--baseline and --history both name an earlier run to compare with", hint="give one of them")


def _check_files(bundle: Path, key: Path | None) -> Answer:
    """Returns the answer for an intact bundle.

    Raises:
        BundleError: a file or the signature is not as it should be.
    """
    with opened_any(bundle, key=key) as found:
        attested = found.attested
        facts = {"bundle": bundle, "whole": True, "sha256": found.sha256, "signed": attested is not None}
        signed = f"signed with that key: {describe_attested(attested)}" if attested else "signature not checked"
        line = f"{bundle} is whole ({found.sha256}), {signed}"
    return Answer({**facts, "attested": attested}, lambda: show_line(line))


def show_verify(report: VerifyReport) -> None:
    """Prints a verification: the tables, the reason for its verdict, the remarks."""
    if report.chance:
        print_table(Text(report.chance, "bold"))
    print_table(text.table_verify(report))
    if len(report.runs) > 1:
        print_table(text.table_device_figures(report))
    if report.verdict != "pass":
        show_line(text.headline_verify(report))
    show_remarks(text.list_verify_remarks(report))
    show_line(f"{report.bundle}: {report.verdict}")


History = Annotated[Path, Option("What verify or bench --history wrote.", "FILE")]


@click.group
def runs_command() -> None:
    """List, show or compare the verifications that `edgekit verify --history FILE` recorded.

    \b
    Example:
      edgekit runs diff 3 4 --history verify.sqlite
    """


@subcommand(runs_command, "list")
def list_command(history: History, bundle: Annotated[str | None, Option("Those of this bundle.", "NAME")]) -> Answer:
    """List the verifications, oldest first."""
    runs = list_runs(history, bundle=bundle)
    names = ("id", "time", "bundle", "target", "passed", "verdict")
    lines = [f"{run.id}  {run.time}  {run.bundle}  {run.verdict}" for run in runs]
    none = f"no verification of '{bundle}' is recorded" if bundle else "no verification is recorded"
    facts = [{name: getattr(run, name) for name in names} for run in runs]
    return Answer({"runs": facts}, lambda: show_lines(lines or [none]))


@subcommand(runs_command, "bench")
def bench_command(
    history: History, subject: Annotated[str | None, Option("Only those of this bundle or model.", "NAME")]
) -> Answer:
    """List the benchmarks that `edgekit bench --history FILE` recorded, oldest first."""
    benches = list_benches(history, subject=subject)
    lines = [] if benches else ["no benchmark is recorded"]
    for one in benches:
        for run in one.report.runs:
            time = run.failure or f"{run.median_ms:.3g} ms, 95 % {run.interval_ms[0]:.3g} to {run.interval_ms[1]:.3g}"
            lines.append(f"{one.id}  {one.time}  {one.subject}  {run.device}  batch {run.batch}  {time}")
    return Answer({"benches": benches}, lambda: show_lines(lines))


@subcommand(runs_command, "show")
def show_command(number: Annotated[int, Argument()], history: History) -> Answer:
    """Show one verification. Exit code 1: it failed. 3: it is not proven."""
    run = read_run(history, number)
    return Answer(run, lambda: show_verify(run.report), run.verdict)


@subcommand(runs_command, "diff")
def diff_command(before: Annotated[int, Argument()], now: Annotated[int, Argument()], history: History) -> Answer:
    """Say what was different about two verifications. Exit code 1: something became worse."""
    found = diff_runs(read_run(history, before), read_run(history, now))
    count = len(found.regressions)
    lines = [*(f"changed: {change}" for change in found.changes), *(f"worse: {line}" for line in found.regressions)]
    lines.append(f"{count} figures became worse" if count else "nothing became worse")
    return Answer(found, lambda: show_lines(lines), not count)


@as_command
def compare_command(
    a: Annotated[Path, Argument()],
    b: Annotated[Path | None, Argument()],
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    samples: options.SampleCount,
    formats: Annotated[bool, Option("In place of B: quantize A in each format, and compare all with A in one table.")],
    cpu: Annotated[Cpu | None, Option("With --formats: whose kernels. Default: this machine's.")],
    dims: options.Sizes,
    freeze: options.Freeze,
    layers: Annotated[bool, Option("Compare layer by layer, through Q and DQ nodes.")],
    min_sqnr: Annotated[float | None, number("Fail below this signal-to-noise ratio in dB.", -200, 200)],
    device: Annotated[str | None, Option("Run B on this device; --layers then compares its layers.", "DEVICE", "--on")],
    target: Annotated[str | None, Option("Whose session options open B, or auto. Default: nnapi, or its own.", "NAME")],
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
            allowed = "--data, --preprocess, --samples, --cpu, --dim, --shape, --freeze"
            words = f"give a second model, or --formats with only {allowed}"
            raise UsageError(words, hint="edgekit compare MODEL --formats --data DATA")
        recipe = Recipe(dims=dims, freeze=freeze, samples=samples)
        formats_report = compare_formats(a, options.read_data(data, preprocess), recipe, cpu or host_cpu(), progress)
        return Answer(formats_report, lambda: _show_formats(formats_report))
    if (metric is None) != (labels is None) or (max_metric_drop is not None and metric is None):
        raise UsageError("--metric, with or without --max-metric-drop, goes with --labels", hint="give both")
    if target and device is None:
        raise UsageError("--target says how a device opens B", hint="give --on DEVICE too, or leave it out")
    options.require_places((html,), ())
    with work_folder() as work:
        first = make_runnable(load_model(a, custom_ops=custom_ops), work / "a", freeze)
        inputs = size_inputs(first.inputs, dims, may_stay_open=True)
        all_samples = load_samples(data, inputs, load_preprocess(preprocess) if preprocess else None, idle=freeze)
        samples_to_compare = refusing_bad(
            limit_samples(all_samples, samples), find_missing(view_model(skim_model(first.path)))
        )
        second = load_model(b, custom_ops=custom_ops)
        # An input of A that is frozen may be a constant in B already.
        shared_constants = {spec.name: freeze[spec.name] for spec in second.inputs if spec.name in freeze}
        second = make_runnable(second, work / "b", shared_constants)
        progress(f"compare on {samples_to_compare.count} samples")
        on, task = None, None
        if device is not None:
            opening_target = load_target_here(target) if target else default_target(device, first="nnapi")
            on = find_device(device, opening_target), opening_target
        if metric is not None and labels is not None:
            limit = load_metric(metric)
            if max_metric_drop is not None:
                limit = msgspec.structs.replace(limit, max_drop=max_metric_drop)
            known = read_task_labels(labels, find_metric(limit).labels, all_samples)
            task = limit, [known[index] for index in spread_indices(all_samples.count, samples_to_compare.count)]
        report = compare_models(first, second, samples_to_compare, on, layers=layers, task=task)
    if html is not None:
        page = render_page(report, draw_worst(samples_to_compare, report), min_sqnr_db=min_sqnr)
        write_file(html, page.encode())
    return Answer(report, lambda: show_comparison(report, min_sqnr), report.judge(min_sqnr), accept_unproven)


def _show_formats(report: FormatReport) -> None:
    """Prints the formats of a model side by side."""
    table = make_table("format", "size", "SQNR", "same first class", "load", "p50", "time of float's")
    for row in report.rows:
        if row.note:
            table.add_row(row.name, "-", row.note)
            continue
        figures = (format_sqnr(row.sqnr_db), format_or_dash(row.agreement, "{:.1%}"))
        table.add_row(row.name, format_bytes(row.size_bytes), *figures, *format_times(row))
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
