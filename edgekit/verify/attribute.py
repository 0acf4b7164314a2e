"""Attributes the loss of accuracy to steps: the same samples run through each step from source model to device."""

from collections.abc import Mapping, Sequence
from functools import partial

import msgspec

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import KnownOutputs, read_classes, read_inputs, read_outputs
from edgekit.data.samples import keep_small, map_samples, select_samples
from edgekit.errors import RuntimeRefusal
from edgekit.evidence import Evidence
from edgekit.model.model import Model
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT
from edgekit.verify.report import AttributionStep, Step, VerifyReport
from edgekit.verify.run_report import RunReport
from edgekit.verify.task_scores import Accuracy, measure_accuracy

# This wording must not change: reports of earlier verifications contain it, and their note is then not repeated.
_HISTORY = "what an earlier verification found"


def attribute_loss(
    bundle: Bundle, report: VerifyReport, models: Mapping[Step, Model], known: Mapping[Step, KnownOutputs] | None = None
) -> VerifyReport:
    """Returns the report, with the loss of its best run divided among the steps from source model to device.

    `models` holds the models that the bundle was made from, under "prepare" and "quantize", in this order; they run
    here with every optimisation off, on the samples of that run. The bundle's file of ORT format (the one that the run
    used, else the first) runs on this machine's CPU provider as the step "convert". `known` holds outputs that models
    gave before; new ones are added. The figures are those of the output that lost most. A report without a measured run
    is returned unchanged.
    """
    measured_runs = [(run, worst) for run in report.runs if (worst := _worst_output(run)) is not None]
    if not measured_runs:
        return report
    run, worst = min(measured_runs, key=lambda each: each[0].evidence.rank)
    indices = run.find_places(bundle.manifest.golden.samples)
    inputs = select_samples(read_inputs(bundle.golden), indices)
    reference = select_samples(read_outputs(bundle.golden), indices)
    classes = read_classes(bundle.golden)
    labels = None if classes is None else [classes[index] for index in indices]
    steps, notes = list[AttributionStep](), report.notes

    def add(step: Step, session: CpuSession) -> None:
        earlier = (known or {}).get(step)
        # Small outputs are kept in memory, because they are read more than once.
        got = keep_small(map_samples(inputs, session.run if earlier is None else partial(earlier.run, session)))
        found = next(item for item in compare_outputs(reference, got) if item.name == worst.name)
        steps.append(_describe(step, found, None if labels is None else measure_accuracy(reference, got, labels)))

    for step, model in models.items():
        add(step, CpuSession(model.path, SessionSettings(level=Level.DISABLED, threads=1)))
    forms = bundle.manifest.forms.items()
    if files := {str(form): names[0] for form, names in forms if names[0].endswith(".ort")}:
        converted = bundle.folder / files.get(run.form, next(iter(files.values())))
        try:
            session = CpuSession(converted, SessionSettings(config=dict(bundle.manifest.session_config), threads=1))
        except RuntimeRefusal as error:
            reason = error.message.replace(f"{converted.parent}/", "")
            notes = (*notes, f"the step 'convert' is not part of the attribution: {reason}")
        else:
            add("convert", session)
    steps.append(_describe("device" if run.evidence == Evidence.DEVICE else "provider", worst, run.accuracy))
    shared = share_loss(steps, None if run.accuracy is None else run.accuracy.reference)
    return msgspec.structs.replace(report, attribution=shared, attributed_device=run.device, notes=notes)


def keep_attribution(report: VerifyReport, known: VerifyReport | None) -> VerifyReport:
    """Returns the report with the attribution of an earlier report of the same bundle.

    If the report has a run on the device that was explained, the last step is updated; a run on a real device adds the
    step "device" to what an emulator showed. A note says that the rest is history and no part of the verdict.
    """
    if known is None or not known.attribution or report.attribution:
        return report
    steps = list(known.attribution)
    explained = known.attributed_device
    again = next((run for run in report.runs if run.device == explained and _worst_output(run)), None)
    real = next((run for run in report.runs if run.evidence == Evidence.DEVICE and _worst_output(run)), None)
    renewed: tuple[tuple[RunReport | None, Step], ...] = ((again, steps[-1].step), (real, "device"))
    for run, step in renewed:
        found = None if run is None else _worst_output(run)
        if run is not None and found is not None:
            steps = [kept for kept in steps if kept.step != step]
            steps.append(_describe(step, found, run.accuracy))
            explained = run.device
    # The accuracy of the source model on the samples that the steps were measured on: other runs may have had other
    # samples.
    first = known.attribution[0]
    source = None if first.accuracy is None or first.accuracy_loss is None else first.accuracy + first.accuracy_loss
    shared = share_loss(steps, source)
    kept = msgspec.structs.replace(report, attribution=shared, attributed_device=explained)
    lines = [line for line in (*report.notes, *known.notes) if _HISTORY not in line]
    if kept.advice:
        lines.append(f"{kept.advice} ({_HISTORY}, as the bundle's verify.json tells it)")
    return msgspec.structs.replace(kept, notes=tuple(dict.fromkeys(lines)))


def share_loss(steps: Sequence[AttributionStep], accuracy: float | None = None) -> tuple[AttributionStep, ...]:
    """Returns the steps with what each added to the loss: the parts sum to the whole.

    The energy of the error relative to the signal is 10^(-SQNR/10); `noise_share` is the part of the final energy. The
    loss of agreement counts from 1, that of accuracy from `accuracy`, which the source model reaches. A step that could
    not be measured gets no part. If the last step could not be measured, no step gets a part of the noise.
    """
    if not steps:
        return ()
    last = steps[-1].sqnr_db
    # An error of 1e-5 of the signal is what float32 itself leaves if sums run in another order: no step is its cause.
    final = None if last is None or last >= DB_LIMIT / 2 else 10.0 ** (-last / 10.0)
    noise, agreement, shared = 0.0, 1.0, list[AttributionStep]()
    for step in steps:
        changes: dict[str, float | None] = {"noise_share": None, "top1_loss": None, "accuracy_loss": None}
        if step.sqnr_db is not None and final is not None:
            energy = 10.0 ** (-step.sqnr_db / 10.0)
            changes["noise_share"] = (energy - noise) / final
            noise = energy
        if step.top1_agreement is not None:
            changes["top1_loss"] = agreement - step.top1_agreement
            agreement = step.top1_agreement
        if step.accuracy is not None and accuracy is not None:
            changes["accuracy_loss"] = accuracy - step.accuracy
            accuracy = step.accuracy
        shared.append(msgspec.structs.replace(step, **changes))
    return tuple(shared)


def _worst_output(run: RunReport) -> OutputReport | None:
    judged = [output for output in run.outputs if not output.is_state]
    measured = [(output.sqnr_db, output.name, output) for output in judged if output.sqnr_db is not None]
    return min(measured, key=lambda item: item[:2])[2] if measured else None


def _describe(step: Step, found: OutputReport, accuracy: Accuracy | None) -> AttributionStep:
    right = None if accuracy is None else accuracy.got
    return AttributionStep(step=step, sqnr_db=found.sqnr_db, top1_agreement=found.top1_agreement, accuracy=right)
