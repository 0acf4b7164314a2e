"""What verification found: facts and thresholds, and the verdict computed from them, once."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.bench.latency import Latency
from edgekit.data.samples import spread_indices
from edgekit.evidence import Evidence
from edgekit.target import Thresholds
from edgekit.verify.facts import OBSERVING, FileReport, Gate, Located, PlacementGap
from edgekit.verify.layers.comparison import LayerReport
from edgekit.verify.layers.outliers import judge_layers
from edgekit.verify.metrics.outputs import OutputReport, judge_output
from edgekit.verify.tasks.accuracy import Accuracy
from edgekit.verify.tasks.scores import TaskReport, judge_task

Step = Literal["prepare", "quantize", "convert", "provider", "device"]

_ADVICE: dict[str, str] = {
    "prepare": "the prepared model is not the source model; compare them with edgekit compare SOURCE PREPARED --layers",
    "quantize": "try int16 or another --method, more or other calibration data, or leave the worst layers in float",
    "convert": "ONNX Runtime's fused kernels differ; convert at a lower --level",
    "provider": "it rounds otherwise (half precision, kernels of its own); leave nodes where it matters to the CPU",
    "device": "the device computes otherwise than its emulator; compare driver and runtime versions",
}
# So many times the share of the work that may be lost, the share of the nodes may: most of them do little.
_LOST_NODES = 4.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """What an earlier run of a model on the same device took; `source` says which run that was."""

    source: str
    latency_ms: float | None
    peak_rss_bytes: int


class RunReport(msgspec.Struct, frozen=True, kw_only=True):
    """What one device did with the samples.

    `provider` is the one that the target promises, `provider_nodes` counts the nodes that each provider took, as
    observed by `placement_source`. `failure` is the device's own word for a run that did not come to its end, `log` the
    last words of its program then, and `notes` what it did otherwise than an app on the target. `task` is a metric that
    needs labels. `reference_cost` is that of the run that latency and memory are held against, None where there is
    none: then they are not judged. `outputs_sha256` is of everything that came back, "" where not all of it did.
    `located` tells of the layers as the device computes them, None where they were not looked at; `gap` of what ran on
    the CPU although the provider was predicted to take it, None where that is not known. `files` tells of the model
    files that the bundle ships beside the one that ran, where the device is the runtime that an app links.
    """

    device: str
    evidence: Evidence
    provider: str
    form: str
    samples: int
    provider_nodes: dict[str, int]
    placement_source: Literal["session", "profile", "log", "predicted"]
    outputs: tuple[OutputReport, ...]
    accuracy: Accuracy | None
    latency_ms: Latency | None
    load_ms: float
    peak_rss_bytes: int
    versions: dict[str, str]
    thresholds: Thresholds
    failure: str | None
    notes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    traps: tuple[str, ...] = ()
    task: TaskReport | None = None
    reference_cost: Cost | None = None
    log: str = ""
    outputs_sha256: str = ""
    located: Located | None = None
    gap: PlacementGap | None = None
    planned_samples: int = 0
    files: tuple[FileReport, ...] = ()

    def find_places(self, count: int) -> tuple[int, ...]:
        """Returns which of `count` samples ran, in their order: spread evenly, up to where the time was over."""
        return spread_indices(count, self.planned_samples or self.samples)[: self.samples]

    @property
    def observes_placement(self) -> bool:
        """True if the target's provider itself ran and told what it took."""
        observed = self.placement_source != "predicted" and bool(self.provider_nodes)
        return self.failure is None and self.evidence in OBSERVING and observed

    @property
    def gates(self) -> tuple[Gate, ...]:
        """What the run is judged by, each with the reasons why it does not pass there."""
        outputs = (
            Gate(name="output", subject=output.name, failures=judge_output(output, self.thresholds))
            for output in self.outputs
        )
        limit = self.thresholds.task
        task = () if self.failure is not None or limit is None else judge_task(self.task, limit)
        others = (
            None if limit is None else Gate(name="metric", subject=limit.name, failures=task),
            Gate(name="placement", failures=_judge_placement(self)) if self.evidence in OBSERVING else None,
            Gate(name="costs", failures=tuple(_judge_cost(self))) if self.reference_cost else None,
            Gate(name="session", failures=self.findings) if self.findings else None,
        )
        files = (Gate(name="file", subject=file.file, failures=_judge_file(file, self)) for file in self.files)
        return (Gate(name="run", failures=_judge_end(self)), *outputs, *filter(None, others), *files)

    @property
    def failures(self) -> tuple[str, ...]:
        """Every reason why the run does not pass, one line each, and then what explains them."""
        found = tuple(line for gate in self.gates for line in gate.failures)
        return (*found, *self.explanations) if found else ()

    @property
    def explanations(self) -> tuple[str, ...]:
        """What may explain that a run does not pass: known traps, and the layer."""
        return (*self.traps, *_explain_layers(self.located))

    @property
    def passed(self) -> bool:
        """True if there is no reason why not."""
        return not self.failures


class SkippedDevice(msgspec.Struct, frozen=True, kw_only=True):
    """A device that did not run, why, and the command that installs it (None where nothing on this machine can)."""

    device: str
    reason: str
    command: str | None


class AttributionStep(msgspec.Struct, frozen=True, kw_only=True):
    """How far the model is from the source model after one step of the pipeline, and the loss since the step before.

    `sqnr_db` and `top1_agreement` are against the source model and taken from its worst output; `noise_share` is the
    part of the final error energy that this step added, negative where it took some away. `top1_loss` and
    `accuracy_loss` are what the step cost; over all steps they sum to the whole loss.
    """

    step: Step
    sqnr_db: float | None
    top1_agreement: float | None
    accuracy: float | None
    noise_share: float | None = None
    top1_loss: float | None = None
    accuracy_loss: float | None = None


class DeviceFigures(msgspec.Struct, frozen=True, kw_only=True):
    """One device beside others: its worst output, its accuracy, its times, and what its provider took.

    `same_as` names the first device before it that gave the same outputs to the bit.
    """

    device: str
    evidence: Evidence
    passed: bool
    sqnr_db: float | None
    top1_agreement: float | None
    accuracy: float | None
    latency_ms: Latency | None
    nodes_taken: int
    nodes: int
    peak_rss_bytes: int
    same_as: str | None


class VerifyReport(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a bundle does on its devices what the float model does.

    It passes if at least one device ran, every device that ran passed, and the provider takes enough of the work to be
    worth its while; a skipped device proves nothing. `taken_macs` is the predicted share of that work. The sizes are
    those of the file that an app loads and of the float model. `bundle_sha256` is the digest of the bundle's manifest.
    `layers` are those of the quantized model against the float one, where both were at hand.
    `attributed_device` is the device of the run that the attribution explains. `ancestry` holds the sha256 of model and
    data, `regressions` what is worse than in the last good run of the same model and target. `machine` describes the
    one that edgekit ran on, where emulators and simulators ran too. `alterations` say what in the bundle's model is not
    as it was built, `notes` what was left out, and why. `required` names the devices that had to run. `differences` say
    how far apart devices of one kind lie, which differ in their CPU.
    """

    bundle: str
    target: str
    runs: tuple[RunReport, ...]
    skipped: tuple[SkippedDevice, ...]
    taken_macs: float = 1.0
    min_taken_macs: float = 0.0
    attribution: tuple[AttributionStep, ...] = ()
    first_bad_layer: str | None = None
    layers: tuple[LayerReport, ...] = ()
    attributed_device: str | None = None
    bundle_sha256: str = ""
    size_bytes: int = 0
    source_size_bytes: int = 0
    max_size_bytes: int | None = None
    max_size_share: float | None = None
    needs_placement: bool = False
    ancestry: dict[str, str] = {}
    regressions: tuple[str, ...] = ()
    machine: dict[str, str] = {}
    alterations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    differences: tuple[str, ...] = ()

    def list_figures(self) -> tuple[DeviceFigures, ...]:
        """Returns the devices that ran, in their order, each with its worst figures."""
        first: dict[str, str] = {}
        for run in self.runs:
            first.setdefault(run.outputs_sha256, run.device)
        return tuple(_describe_device(run, first) for run in self.runs)

    @property
    def comparison(self) -> tuple[DeviceFigures, ...]:
        """The devices that ran, side by side; empty where there is only one."""
        return self.list_figures() if len(self.runs) > 1 else ()

    @property
    def advice(self) -> str | None:
        """What to do about the step that loses the most, None where the loss was not attributed."""
        shares = [(step.noise_share, step.step) for step in self.attribution if step.noise_share is not None]
        if not shares:
            return None
        share, step = max(shares)
        # Of what was added: a later step may take some of it back.
        added = sum(part for part, _ in shares if part > 0)
        lost = next((found.accuracy_loss for found in self.attribution if found.step == step), None)
        cost = f" and {100 * lost:.1f} points of accuracy" if lost else ""
        where = f", first in layer '{self.first_bad_layer}'" if self.first_bad_layer and step == "quantize" else ""
        part = share / added if added else 0.0
        return f"{part:.0%} of the error{cost} comes from the step '{step}'{where}: {_ADVICE[step]}"

    @property
    def passed(self) -> bool:
        """True if at least one device ran, every one that ran passed, and nothing else speaks against it."""
        return bool(self.runs) and all(run.passed for run in self.runs) and not self.failures

    @property
    def failures(self) -> tuple[str, ...]:
        """What speaks against the bundle as a whole, one line each; what speaks against a run stands there."""
        found: list[str] = []
        if self.needs_placement and not any(run.observes_placement for run in self.runs):
            found.append("no run observed what the provider takes: verify on a device, or where the provider runs here")
        if not self.taken_macs >= self.min_taken_macs:
            found.append(f"the provider takes {self.taken_macs:.0%} of the work, less than {self.min_taken_macs:.0%}")
        if self.max_size_bytes is not None and self.size_bytes > self.max_size_bytes:
            found.append(f"the model has {self.size_bytes} bytes, more than {self.max_size_bytes}")
        most = self.max_size_share
        if most is not None and self.size_bytes > most * self.source_size_bytes:
            share = self.size_bytes / max(1, self.source_size_bytes)
            found.append(f"the model has {share:.0%} of the float model's size, more than {most:.0%}")
        absent = _judge_required(self.required, self.runs, self.skipped)
        return (*found, *absent, *judge_layers(self.layers), *self.alterations, *self.regressions)

    @property
    def evidence(self) -> Evidence | None:
        """The best evidence among the runs that passed, None if no run passed."""
        order = list(Evidence)
        return min((run.evidence for run in self.runs if run.passed), key=order.index, default=None)


def _describe_device(run: RunReport, first: Mapping[str, str]) -> DeviceFigures:
    sqnr = [output.sqnr_db for output in run.outputs if output.sqnr_db is not None]
    top1 = [output.top1_agreement for output in run.outputs if output.top1_agreement is not None]
    origin = first[run.outputs_sha256] if run.outputs_sha256 else run.device
    return DeviceFigures(
        device=run.device,
        evidence=run.evidence,
        passed=run.passed,
        sqnr_db=min(sqnr, default=None),
        top1_agreement=min(top1, default=None),
        accuracy=None if run.accuracy is None else run.accuracy.got,
        latency_ms=run.latency_ms,
        nodes_taken=run.provider_nodes.get(run.provider, 0),
        nodes=sum(run.provider_nodes.values()),
        peak_rss_bytes=run.peak_rss_bytes,
        same_as=None if origin == run.device else origin,
    )


def recheck_report(report: VerifyReport, thresholds: Thresholds) -> VerifyReport:
    """Returns the same facts under other thresholds; nothing runs again."""
    runs = tuple(msgspec.structs.replace(run, thresholds=thresholds) for run in report.runs)
    return msgspec.structs.replace(
        report,
        runs=runs,
        min_taken_macs=thresholds.min_taken_macs,
        max_size_bytes=thresholds.max_size_bytes,
        max_size_share=thresholds.max_size_share,
        needs_placement=thresholds.needs_placement,
    )


def require_devices(report: VerifyReport, names: Sequence[str]) -> VerifyReport:
    """Returns the report in which it is a failure that one of these devices did not run.

    A name is that of a device, or of its kind: "qnn-htp-sim" stands for "qnn-htp-sim:v73" too.
    """
    return msgspec.structs.replace(report, required=tuple(dict.fromkeys((*report.required, *names))))


def _judge_required(names: Sequence[str], runs: Sequence[RunReport], skipped: Sequence[SkippedDevice]) -> Iterator[str]:
    for name in names:
        if not any(_is_named(run.device, name) for run in runs):
            reason = next((skip.reason for skip in skipped if _is_named(skip.device, name)), "nothing named it")
            yield f"device '{name}' was asked for and did not run: {reason}"


def _is_named(device: str, name: str) -> bool:
    return device == name or device.startswith(f"{name}:")


def _judge_end(run: RunReport) -> tuple[str, ...]:
    if run.failure is not None:
        return (f"the device failed: {run.failure}",)
    if not any(output.elements != 0 for output in run.outputs):
        return ("nothing was compared" + (": every output is empty" if run.outputs else ""),)
    return ()


def _judge_file(file: FileReport, run: RunReport) -> tuple[str, ...]:
    if file.failure is not None:
        return (f"the bundle ships '{file.file}', which does not run there: {file.failure}",)
    if run.provider != CPU_PROVIDER and file.provider_nodes and not file.provider_nodes.get(run.provider):
        return (f"the bundle ships '{file.file}', of which {run.provider} takes no node there",)
    lines = (line for output in file.outputs for line in judge_output(output, run.thresholds))
    return tuple(f"'{file.file}': {line}" for line in lines)


def _judge_placement(run: RunReport) -> tuple[str, ...]:
    if run.evidence not in OBSERVING or run.provider == CPU_PROVIDER or run.failure is not None:
        return ()
    if run.placement_source == "predicted" or not run.provider_nodes:
        return (f"placement was not observed, so {run.provider} may have taken no node",)
    if not run.provider_nodes.get(run.provider):
        return (f"silent fallback: {run.provider} took no node, the run used {_name_counts(run.provider_nodes)}",)
    found: list[str] = []
    gap, most = run.gap, run.thresholds.max_lost_share
    # One node may fall back without harm, as a Softmax at the end does; the work that it does counts all the same.
    if gap is not None and (gap.lost_macs > most or (gap.lost > 1 and gap.lost > _LOST_NODES * most * gap.predicted)):
        names = ", ".join(f"'{name}'" for name in gap.nodes[:5]) + (", ..." if gap.lost > 5 else "")
        lost = f"{gap.lost} of the {gap.predicted} nodes that {run.provider} was predicted to take"
        found.append(f"silent fallback: {lost} ran on {CPU_PROVIDER}, {gap.lost_macs:.0%} of the work: {names}")
    # What a device does not tell of may not lie on the provider either.
    hidden = 0 if gap is None else gap.hidden
    left, limit = run.provider_nodes.get(CPU_PROVIDER, 0) + hidden, run.thresholds.max_cpu_nodes
    if limit is not None and left > limit:
        found.append(f"{left} nodes were left to {CPU_PROVIDER}, more than {limit}")
    return tuple(found)


def _judge_cost(run: RunReport) -> Iterator[str]:
    """Yields what is slower or larger than the reference run; a run without one is not judged."""
    reference, limits = run.reference_cost, run.thresholds
    if reference is None:
        return
    pairs = (
        ("latency", run.latency_ms.median if run.latency_ms else None, reference.latency_ms, limits.max_latency_ratio),
        ("peak memory", run.peak_rss_bytes, reference.peak_rss_bytes, limits.max_memory_ratio),
    )
    for name, value, before, most in pairs:
        if not before or most is None or run.failure is not None:
            continue
        # A device that gives none, or one that cannot be, must not pass on that.
        if not value:
            yield f"{name} was not measured, and {reference.source} has one to hold it against"
        elif value > most * before:
            yield f"{name} is {value / before:.2f} times that of {reference.source}, more than {most:g} times"


def _explain_layers(located: Located | None) -> tuple[str, ...]:
    if located is None:
        return ()
    if located.layer is not None:
        layer = next((layer for layer in located.layers if layer.name == located.layer), None)
        own = None if layer is None else layer.own_sqnr_db
        alone = "" if own is None else f": {own:.1f} dB by itself, given what it had on the device"
        return (f"the first layer that the device computes otherwise than this machine is '{located.layer}'{alone}",)
    if not located.notes or located.found_by == "tensors":
        return ("each layer computes there what it computes on this machine: the loss is in the model, not the device",)
    return ()


def _name_counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{provider} ({nodes} nodes)" for provider, nodes in sorted(counts.items()))
