"""Where the loss comes from: the same samples through every step from the source model to the device."""

from collections.abc import Iterator, Mapping
from pathlib import Path

import msgspec

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import read_inputs, read_labels, read_outputs
from edgekit.errors import ModelError, RuntimeRefusal
from edgekit.evidence import Evidence
from edgekit.model import Model
from edgekit.samples import Samples, select_samples, spread_indices
from edgekit.tensors import Tensors
from edgekit.verify.accuracy import measure_accuracy
from edgekit.verify.compare import compare_outputs
from edgekit.verify.layers import compare_layers, find_first_bad
from edgekit.verify.report import AttributionStep, OutputReport, RunReport, Step, VerifyReport

_LOCATING_SAMPLES = 4


class _Question(msgspec.Struct, frozen=True, kw_only=True):
    inputs: Samples
    reference: Samples
    labels: tuple[int, ...] | None
    output: str


def explain_report(bundle: Bundle, report: VerifyReport, models: Mapping[Step, Model]) -> VerifyReport:
    """Returns the report with the loss attributed and, where it does not pass, the first bad layer named.

    `models` holds the models that the bundle was made from, under "prepare" and, for integer precisions, "quantize".

    Raises:
        RuntimeRefusal: ONNX Runtime cannot run one of the models.
    """
    explained = attribute_loss(bundle, report, models)
    if report.passed or not {"prepare", "quantize"} <= models.keys():
        return explained
    few = select_samples(read_inputs(bundle.golden), spread_indices(bundle.manifest.golden.samples, _LOCATING_SAMPLES))
    try:
        bad = find_first_bad(compare_layers(models["prepare"], models["quantize"], few))
    except ModelError:
        return explained
    return msgspec.structs.replace(explained, first_bad_layer=None if bad is None else bad.name)


def attribute_loss(bundle: Bundle, report: VerifyReport, models: Mapping[Step, Model]) -> VerifyReport:
    """Returns the report with the loss of the best run split over the steps that led to it.

    `models` holds the models that the bundle was made from, under "prepare" and "quantize"; they run here with every
    optimisation off, on the samples of that run. The bundle's file of ORT format runs on this machine's CPU provider
    as the step "convert". The figures are those of the output that lost most. A report without a measured run is
    returned as it is.
    """
    run = min((run for run in report.runs if _worst_output(run)), key=_rank, default=None)
    if run is None:
        return report
    question = _ask(bundle, run)
    steps: list[AttributionStep] = []
    for step, session in _open_steps(bundle, run, models):
        got = _run_samples(session, question.inputs)
        found = next(item for item in compare_outputs(question.reference, got) if item.name == question.output)
        accuracy = None if question.labels is None else measure_accuracy(question.reference, got, question.labels)
        steps.append(_describe(step, found, None if accuracy is None else accuracy.got))
    last: Step = "device" if run.evidence == Evidence.DEVICE else "provider"
    final = next(item for item in run.outputs if item.name == question.output)
    steps.append(_describe(last, final, None if run.accuracy is None else run.accuracy.got))
    return msgspec.structs.replace(report, attribution=share_noise(steps))


def share_noise(steps: list[AttributionStep]) -> tuple[AttributionStep, ...]:
    """Returns the steps with the part of the final error energy that each added; the parts sum to one.

    The energy of the error relative to the signal is 10^(-SQNR/10). A step that cannot be measured has no part, and
    none has if the end is as good as the source.
    """
    if not steps or steps[-1].sqnr_db is None:
        return tuple(steps)
    final = 10.0 ** (-steps[-1].sqnr_db / 10.0)
    before, shared = 0.0, list[AttributionStep]()
    for step in steps:
        if step.sqnr_db is None:
            shared.append(step)
            continue
        energy = 10.0 ** (-step.sqnr_db / 10.0)
        shared.append(msgspec.structs.replace(step, noise_share=(energy - before) / final))
        before = energy
    return tuple(shared)


def _rank(run: RunReport) -> int:
    return list(Evidence).index(run.evidence)


def _worst_output(run: RunReport) -> OutputReport | None:
    measured = [(output.sqnr_db, output.name, output) for output in run.outputs if output.sqnr_db is not None]
    return min(measured, key=lambda item: item[:2])[2] if measured else None


def _ask(bundle: Bundle, run: RunReport) -> _Question:
    indices = spread_indices(bundle.manifest.golden.samples, run.samples)
    labels = read_labels(bundle.golden)
    worst = _worst_output(run)
    return _Question(
        inputs=select_samples(read_inputs(bundle.golden), indices),
        reference=select_samples(read_outputs(bundle.golden), indices),
        labels=None if labels is None else tuple(labels[index] for index in indices),
        output="" if worst is None else worst.name,
    )


def _open_steps(bundle: Bundle, run: RunReport, models: Mapping[Step, Model]) -> Iterator[tuple[Step, CpuSession]]:
    steps: tuple[Step, ...] = ("prepare", "quantize")
    for step in steps:
        if step in models:
            yield step, CpuSession(models[step].path, SessionSettings(level=Level.DISABLED))
    converted = _find_converted(bundle, run)
    if converted is None:
        return
    try:
        session = CpuSession(converted, SessionSettings(config=dict(bundle.manifest.session_config)))
    except RuntimeRefusal:
        return
    yield "convert", session


def _find_converted(bundle: Bundle, run: RunReport) -> Path | None:
    """Returns the file of ORT format that the run used, or else that the bundle holds."""
    names = bundle.manifest.forms
    files: dict[str, str] = {form: names[form][0] for form in names if names[form][0].endswith(".ort")}
    chosen = files.get(run.form, next(iter(files.values()), None))
    return None if chosen is None else bundle.folder / chosen


def _run_samples(session: CpuSession, inputs: Samples) -> Samples:
    def read() -> Iterator[Tensors]:
        for sample in inputs:
            yield session.run(sample)

    return Samples(source=inputs.source, count=inputs.count, read=read)


def _describe(step: Step, found: OutputReport, accuracy: float | None) -> AttributionStep:
    return AttributionStep(step=step, sqnr_db=found.sqnr_db, top1_agreement=found.top1_agreement, accuracy=accuracy)
