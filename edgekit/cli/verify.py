"""`edgekit verify`, and the limits on the command line that replace those of the target."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated

import click
import msgspec

from edgekit._files import require_place, write_file
from edgekit.bundle.checks import bundled_task
from edgekit.bundle.manifest import Manifest
from edgekit.bundle.multi import opened_any, opened_bundle
from edgekit.cli import options
from edgekit.cli.declare import Argument, From, Option, as_command, number
from edgekit.cli.main import YES
from edgekit.cli.options import Metric, MetricDrop
from edgekit.cli.release import describe_attested
from edgekit.cli.screen import show_json, show_line, showing_progress
from edgekit.cli.subjects import Devices, Required, add_required
from edgekit.cli.terminal import show_verify
from edgekit.data.images import load_preprocess
from edgekit.errors import UsageError
from edgekit.progress import Progress
from edgekit.recipe import Data, load_metric
from edgekit.report.ci import render_junit, render_markdown
from edgekit.report.pages.charts import Picture, draw_worst
from edgekit.report.pages.html import render_verify
from edgekit.target import TaskLimit, Thresholds
from edgekit.verify.history import compare_with_baseline, find_last_good, record_report
from edgekit.verify.on_devices import RunFiles, open_inputs, verify_on, verify_with
from edgekit.verify.report import VerifyReport, read_report, recheck_report, require_devices


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits by the names that they have in `Thresholds`; None where the option was not given.

    `metric` names a metric of the task; `max_metric_drop` and `min_metric_share` are its limits.
    """

    min_cosine: Annotated[float | None, number("Least cosine of an output.", click.FloatRange(-1, 1))]
    min_sqnr_db: Annotated[
        float | None, number("Least signal-to-noise ratio in dB.", click.FloatRange(-200, 200), "--min-sqnr")
    ]
    min_top1_agreement: Annotated[
        float | None,
        number(
            "Least share of samples whose top-1 agrees (of integer outputs: of equal elements).",
            click.FloatRange(0, 1),
            "--min-top1",
        ),
    ]
    gate: Annotated[
        str | None,
        Option(
            "Judge by the measured figures (estimate) or by their 95 % intervals (bound), also of the metric.",
            type=click.Choice(["estimate", "bound"]),
        ),
    ]
    max_cpu_nodes: Annotated[
        int | None, Option("Largest number of nodes left to the CPU.", "N", type=click.IntRange(min=0))
    ]
    max_lost_share: Annotated[
        float | None,
        number(
            "Largest share of work that ran on the CPU although the rules predicted the provider.",
            click.FloatRange(0, 1),
            "--max-lost",
        ),
    ]
    needs_placement: Annotated[
        bool | None, Option("Fail if no run observed which nodes the provider takes.", is_flag=True, default=None)
    ]
    max_latency_ratio: Annotated[
        float | None, number("Largest ratio of the latency to that of the earlier run.", click.FloatRange(min=0))
    ]
    max_memory_ratio: Annotated[
        float | None, number("Largest ratio of the memory to that of the earlier run.", click.FloatRange(min=0))
    ]
    max_size_bytes: Annotated[
        int | None, Option("Largest size of the model file.", "BYTES", "--max-size", type=click.IntRange(min=0))
    ]
    metric: Metric
    max_metric_drop: MetricDrop
    min_metric_share: Annotated[
        float | None, number("Least share of the float model's metric.", click.FloatRange(0, 1))
    ]

    def find_task(self, manifest: Manifest) -> TaskLimit | None:
        """Returns the metric to measure: the one that was named, else that of the bundle, with the limits given.

        Raises:
            UsageError: the bundle asks for a function of somebody's own.
        """
        return self._limit(bundled_task(manifest) if self.metric is None else load_metric(self.metric))

    def apply(self, thresholds: Thresholds) -> Thresholds:
        """Returns the thresholds with the limits that were given; a share that the user names grants no sample more."""
        given = {
            name: getattr(self, name) for name in Thresholds.__struct_fields__ if getattr(self, name, None) is not None
        }
        if self.min_top1_agreement is not None:
            # The samples that may differ were granted for the target's own share.
            given["granted_samples"] = 0
        task = thresholds.task if self.metric is None else load_metric(self.metric)
        named = tuple(dict.fromkeys((*thresholds.named, *given)))
        return msgspec.structs.replace(thresholds, task=self._limit(task), **given, named=named)

    def _limit(self, task: TaskLimit | None) -> TaskLimit | None:
        given = {"max_drop": self.max_metric_drop, "min_share": self.min_metric_share, "gate": self.gate}
        set_ones = {name: value for name, value in given.items() if value is not None}
        return None if task is None else msgspec.structs.replace(task, **set_ones)


def _choose_files(
    recorded: Annotated[tuple[Path, ...], Option("Judge a run that was exported.", "FILE", "--import")],
    run_key: Annotated[Path | None, Option("Refuse an imported run that this public key did not sign.", "FILE")],
    export: Annotated[Path | None, Option("Write the run of the device as a file, to judge elsewhere.", "FILE")],
    sign_key: Annotated[Path | None, Option("Sign it with this private key (PEM).", "FILE", "--sign-run")],
) -> RunFiles:
    return RunFiles(recorded=recorded, run_key=run_key, export=export, sign_key=sign_key)


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be judged, as the options say it."""

    bundle: Annotated[Path | None, Argument()]
    devices: Devices
    require: Required
    data: Annotated[str | None, Option("Verify with these samples, not the golden ones; needs --reference.", "DATA")]
    preprocess: options.PreprocessFile
    labels: Annotated[Path | None, Option("The class of each --data sample.", "FILE")]
    reference: Annotated[Path | None, Option("The float model that the bundle was built from.", "MODEL")]
    samples: options.SampleCount
    files: Annotated[RunFiles, From(_choose_files)]
    layers: Annotated[bool, Option("Compare each layer on the device with this machine, even where the outputs agree.")]
    recheck: Annotated[Path | None, Option("Judge this verify.json again; nothing runs.", "FILE")]
    key: options.PublicKey
    target: Annotated[str | None, Option("Which variant of a bundle of several targets.", "NAME")]
    files_only: Annotated[bool, Option("Check the files and the signature; nothing runs.")]


class _Before(msgspec.Struct, frozen=True, kw_only=True):
    """The run that this one is compared with."""

    baseline: Annotated[Path | None, Option("Compare with the run in this verify.json.", "FILE")]
    history: Annotated[Path | None, Option("Compare with the last good run in this file, and add this one.", "FILE")]


class _Places(msgspec.Struct, frozen=True, kw_only=True):
    """Where the result goes beside the terminal."""

    junit: Annotated[Path | None, Option("Write the result as JUnit XML too.", "FILE")]
    html: Annotated[Path | None, Option("Write the result as an HTML page too.", "FILE")]
    markdown: Annotated[Path | None, Option("Write the result as Markdown too, for a pull request.", "FILE")]


@as_command
def command(
    question: Annotated[_Question, From(_Question)],
    limits: Annotated[Limits, From(Limits)],
    before: Annotated[_Before, From(_Before)],
    places: Annotated[_Places, From(_Places)],
    accept_unproven: options.AcceptUnproven,
    as_json: options.Json,
    volume: options.Volume,
) -> int:
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
    # Options that would have no effect are refused: a limit that is silently ignored passes what it should stop.
    _check_options(question, limits, before)
    if question.files_only:
        return _check_files(question, before, places, as_json=as_json)
    _check_places(question, before, places)
    # Before the run, which may write over it.
    baseline = None if before.baseline is None else read_report(before.baseline)
    with showing_progress(volume) as progress:
        report, pictures = _answer(question, limits, progress, draws=places.html is not None)
        report = _judge(report, question, limits, before, baseline)
    # After the comparison, so that a run is never held against itself.
    if before.history is not None:
        record_report(before.history, report)
    if places.junit is not None:
        write_file(places.junit, render_junit((report,), accept_unproven=accept_unproven))
    if places.html is not None:
        write_file(places.html, render_verify(report, pictures).encode())
    if places.markdown is not None:
        write_file(places.markdown, render_markdown((report,)).encode())
    show_json(report) if as_json else show_verify(report)
    return options.exit_code(report.verdict, accept_unproven=accept_unproven)


def _check_options(question: _Question, limits: Limits, before: _Before) -> None:
    if (question.bundle is None) == (question.recheck is None):
        raise UsageError("give either a BUNDLE to run or --recheck FILE", hint="edgekit verify --help shows both")
    of_data = {
        "--preprocess": question.preprocess,
        "--labels": question.labels,
        "--reference": question.reference,
        "--samples": question.samples,
    }
    files, layers = question.files, question.layers or None
    of_run = {
        "--import": files.recorded or None,
        "--run-key": files.run_key,
        "--export": files.export,
        "--sign-run": files.sign_key,
    }
    if files.run_key is not None and not files.recorded:
        raise UsageError("--run-key is the key of an imported run", hint="add --import FILE")
    if files.sign_key is not None and files.export is None:
        raise UsageError("--sign-run signs an exported run", hint="add --export FILE")
    if question.recheck is not None:
        of_device = {**_list_chosen(question), "--require": question.require or None}
        of_bundle = {**of_device, **of_run, "--layers": layers, "--key": question.key, "--target": question.target}
        _refuse({**of_bundle, "--data": question.data, **of_data}, "--recheck runs nothing")
    elif question.data is not None:
        _refuse(of_run, "a run as a file is one with the golden samples")
    if question.recheck is None and question.data is None:
        _refuse(of_data, "the golden samples stand in the bundle with their labels; --data gives others")
    if question.data is not None and question.reference is None:
        raise UsageError("--data needs --reference MODEL", hint="the float model that the bundle was built from")
    ratio = limits.max_latency_ratio is not None or limits.max_memory_ratio is not None
    if ratio and before.baseline is None and before.history is None:
        raise UsageError("a ratio needs a run to hold this one against", hint="give --baseline FILE or --history FILE")
    if before.baseline is not None and before.history is not None:
        raise UsageError("--baseline and --history both name a run to hold this one against", hint="give one of them")


def _list_chosen(question: _Question) -> dict[str, object]:
    chosen = question.devices
    return {"--on": chosen.names or None, "--on-file": chosen.file, "--set": chosen.settings or None}


def _refuse(given: Mapping[str, object], reason: str) -> None:
    for option, value in given.items():
        if value is not None:
            raise UsageError(f"{option} means nothing here", hint=reason)


def _check_places(question: _Question, before: _Before, places: _Places) -> None:
    """Refuses a report where none can be written, or in the bundle: with a file too many that cannot be opened."""
    chosen = {f"--{name}": getattr(places, name) for name in _Places.__struct_fields__}
    for option, place in {**chosen, "--history": before.history, "--export": question.files.export}.items():
        bundle = question.bundle
        # A report in the bundle is a file that the manifest does not list.
        if bundle is not None and place is not None and place.resolve().is_relative_to(bundle.resolve()):
            raise UsageError(f"{option} '{place}' lies in the bundle", hint="write it beside the bundle")
        if place is not None:
            require_place(place)


def _answer(
    question: _Question, limits: Limits, progress: Progress, *, draws: bool
) -> tuple[VerifyReport, Sequence[Picture]]:
    """Returns the report, and pictures of the worst samples if it is drawn and the samples are at hand."""
    if question.recheck is not None:
        return read_report(question.recheck), ()
    data = None
    if question.data is not None:
        preprocess = load_preprocess(question.preprocess) if question.preprocess else None
        data = Data(source=question.data, labels=question.labels, preprocess=preprocess)
    with opened_bundle(question.bundle or Path(), key=question.key, target=question.target) as bundle:
        task, choice = limits.find_task(bundle.manifest), add_required(question.devices, question.require)
        if data is None or question.reference is None:
            report = verify_on(bundle, choice, progress, task=task, layers=question.layers, files=question.files)
        else:
            report = verify_with(
                bundle,
                question.reference,
                data,
                choice,
                samples=question.samples,
                task=task,
                layers=question.layers,
                progress=progress,
            )
        inputs = open_inputs(bundle, data, question.samples) if draws else None
        return report, () if inputs is None else draw_worst(inputs, report)


def _check_files(question: _Question, before: _Before, places: _Places, *, as_json: bool) -> int:
    """Says that the bundle is whole; one that is not raises an error."""
    reports = {f"--{name}": getattr(places, name) for name in _Places.__struct_fields__}
    others = {**_list_chosen(question), "--data": question.data}
    judged = {"--layers": question.layers or None, "--baseline": before.baseline, "--history": before.history}
    _refuse({**others, **judged, **reports}, "--files-only runs nothing")
    if question.bundle is None:
        raise UsageError("--files-only needs a BUNDLE", hint="give its folder or archive")
    with opened_any(question.bundle, key=question.key) as found:
        said = found.attested
        facts = {"bundle": question.bundle, "whole": True, "sha256": found.sha256, "signed": said is not None}
        signed = f"signed with that key: {describe_attested(said)}" if said else "signature not checked"
        show_json({**facts, "attested": said}) if as_json else show_line(
            f"{question.bundle} is whole ({found.sha256}), {signed}"
        )
    return YES


def _judge(
    report: VerifyReport, question: _Question, limits: Limits, before: _Before, baseline: VerifyReport | None
) -> VerifyReport:
    """Returns the report under the limits that were given; those that were not are as they were."""
    named = question.devices.names or question.devices.file is not None
    # GitHub, GitLab and CircleCI set it: nobody reads there what was skipped, so that it is a failure.
    in_ci = os.environ.get("CI", "").lower() in {"1", "true"}
    skipped = [skip.device for skip in report.skipped if named and in_ci]
    report = require_devices(report, (*question.require, *skipped))
    if report.runs:
        # Judged again from the figures: limits given here leave the bundle's own evidence as it was written.
        report = recheck_report(report, limits.apply(report.runs[0].thresholds))
    if baseline is not None:
        return compare_with_baseline(report, baseline, str(before.baseline))
    last = None if before.history is None else find_last_good(before.history, report)
    return report if last is None else compare_with_baseline(report, last.report, f"run {last.id}")
