"""What one device did with a bundle: the facts, the gates by which they are judged, and the verdict of the run."""

import math
from collections.abc import Iterator, Mapping
from typing import Literal

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit.bench.latency import Latency
from edgekit.check.report import Placed, count_of
from edgekit.data.samples import order_for_runs
from edgekit.evidence import Evidence, Judged, Judgement, SessionReport, Verdict, join_judgements
from edgekit.quantize.accuracy.loss import DEFAULT_MAX_DROP
from edgekit.target import Thresholds
from edgekit.verify.layers.comparison import INPUT, UNSTEADY, Located
from edgekit.verify.metrics.outputs import Decibels, OutputReport, weigh_output
from edgekit.verify.task_scores import Accuracy, TaskReport, judge_task

OBSERVING = (Evidence.DEVICE, Evidence.SIMULATOR, Evidence.SAME_BINARY, Evidence.SAME_EP)
"""Kinds of evidence from the target's own provider, which show what it takes."""


class PlacementGap(msgspec.Struct, frozen=True, kw_only=True):
    """How many nodes a provider was predicted to take, and which of them ran on the CPU instead.

    `lost_macs` is their share of the model's multiply-accumulates, or of the predicted nodes if nothing multiplies;
    `nodes` names the first of them. `hidden` counts the nodes that were predicted for the CPU and are nowhere in the
    device's report: ONNX Runtime merged them into others, or the device omitted them.
    """

    predicted: int
    lost: int
    lost_macs: float
    nodes: tuple[str, ...]
    hidden: int = 0


class OtherFile(msgspec.Struct, frozen=True, kw_only=True):
    """A model file of the bundle that ran besides that of the run itself.

    `provider_nodes` counts the nodes that each provider took. `outputs` say how far a few samples were from the float
    model, and `failure` says why there are none; `crashed` means that the program of an emulator died.
    """

    file: str
    provider_nodes: dict[str, int] = {}
    outputs: tuple[OutputReport, ...] = ()
    failure: str | None = None
    crashed: bool = False


class FileReport(OtherFile, frozen=True, kw_only=True):
    """A file of another form, opened on the same device as an app would open it.

    `placed` says which nodes the provider took, or is None if that is unknown.
    """

    form: str
    placed: Placed | None = None
    load_ms: float = 0.0


class BucketReport(OtherFile, frozen=True, kw_only=True):
    """The figures of samples padded to one size: `outputs` compares them with the float model's without padding.

    `lengths` are those of the samples that ran, empty if none did.
    """

    size: int
    lengths: tuple[int, ...] = ()


class SizesReport(msgspec.Struct, frozen=True, kw_only=True):
    """The figures of samples in each size of a dimension for which a bundle has a model.

    `filled` compares the float model's outputs for samples padded to the largest size with those without padding.
    """

    dim: str
    filled: tuple[OutputReport, ...]
    sizes: tuple[BucketReport, ...]


GateName = Literal["run", "output", "metric", "placement", "costs", "session", "state", "size", "file"]


class Gate(msgspec.Struct, frozen=True, kw_only=True):
    """One criterion of a run: every reason why the run fails it, and every reason why it is not proven.

    `name` is "run", "output", "metric", "placement", "costs", "session", "state", "size" or "file"; `subject` names the
    output, the metric, the size or the file.
    """

    name: GateName
    subject: str = ""
    failures: tuple[str, ...] = ()
    unproven: tuple[str, ...] = ()


ACCEPTED_DB = -10 * math.log10(DEFAULT_MAX_DROP)
"""A signal-to-noise ratio from here on is good enough for any drift: `quantize` accepts so much noise (half a point of
the variance of values) with a model's own state."""


class Drift(msgspec.Struct, frozen=True, kw_only=True):
    """The signal-to-noise ratio of an output in dB at each step, over all sequences.

    `fed_back` is measured with the device's own state, `given` with the float model's state at each step (teacher
    forcing). None means that nothing can be measured: the float model's output is zero, or a value is not finite.
    `late_fed_back` and `late_given` are those of the second half of the steps together.
    """

    output: str
    fed_back: tuple[Decibels | None, ...]
    given: tuple[Decibels | None, ...]
    late_fed_back: Decibels | None
    late_given: Decibels | None

    @property
    def lost_db(self) -> float | None:
        """By how many dB the device's own state makes the second half of the steps worse, or None if unknown."""
        if self.late_fed_back is None or self.late_given is None:
            return None
        return max(0.0, self.late_given - self.late_fed_back)


class StateReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of a device for whole sequences, in which each step gets the device's own state.

    `outputs` hold the figures of what the app reads: outputs that are state are left out, unless all are. `drift` has
    an entry for each numeric output. `failure` says why there are no figures, None if there are; `crashed` means that
    the program of an emulator died.
    """

    sequences: int
    steps: int
    outputs: tuple[OutputReport, ...] = ()
    drift: tuple[Drift, ...] = ()
    failure: str | None = None
    crashed: bool = False

    @property
    def read(self) -> tuple[Drift, ...]:
        """The drift of the outputs that the app reads.

        Outputs that are state are left out: most of a cache is copied at each step, and a copy adds no error.
        """
        names = {output.name for output in self.outputs}
        return tuple(drift for drift in self.drift if drift.output in names)


def judge_state(report: StateReport, thresholds: Thresholds) -> Judgement:
    """Returns whether a device keeps its state well enough, with one line for each reason why not."""
    steps, most = report.steps, thresholds.max_drift_db
    if report.crashed:
        return Judgement(unproven=(f"step by step the emulator crashed, which proves nothing: {report.failure}",))
    if report.failure is not None:
        return Judgement(failures=(f"step by step the device failed: {report.failure}",))
    if not report.sequences:
        stopped = f"it stopped before one sequence of {steps} steps was whole: what its own state costs is not known"
        return Judgement(unproven=(stopped,))
    if not report.outputs:
        return Judgement(failures=("step by step nothing was compared",))
    lines = (line for output in report.outputs for line in weigh_output(output, thresholds).failures)
    failures = [f"with its own state over {steps} steps, {line}" for line in lines]
    for drift in report.read:
        late, lost = drift.late_fed_back, drift.lost_db
        if most is not None and late is not None and lost is not None and late < ACCEPTED_DB and lost > most:
            costs = f"its own state costs it {lost:.1f} dB, more than {most:g} dB"
            failures.append(f"output '{drift.output}' drifts: in the later of {steps} steps {costs}")
    return Judgement(failures=tuple(failures))


# The limit for the share of lost nodes is this many times the limit for the share of lost work: most nodes do little
# work.
_LOST_NODES = 4.0


class Cost(msgspec.Struct, frozen=True, kw_only=True):
    """The times and memory of an earlier run of a model on the same device; `source` says which run it was."""

    source: str
    latency_ms: float | None
    peak_rss_bytes: int


class RunReport(Judged, SessionReport, frozen=True, kw_only=True):
    """What one device did with the samples.

    `provider` is the one that the target promises. `provider_nodes` counts the nodes that each provider took, as
    observed by `placement_source`. `failure` is the device's own message for a run that did not finish, `log` the last
    lines of its program then; `crashed` means that the program of an emulator died, and `notes` say what the device did
    differently from an app on the target. `task` is a metric that needs labels. `reference_cost` is that of the run
    with which latency and memory are compared; if it is None, they are not judged. `outputs_sha256` is the digest of
    all outputs, or "" if some did not come back. `located` describes the layers as the device computes them, None if
    they were not looked at; `gap` the nodes that ran on the CPU although the provider was predicted to take them;
    `placed` says where all nodes are, None if that is unknown. `files` describes the other model files of the bundle,
    if the device is the runtime that an app links. `outdated` says that the ONNX Runtime of an emulator is older than
    the bundle needs, or is "": what an outdated one does not take proves nothing about an app. `steps` is how many
    samples make a sequence. `state` is the result for sequences with the device's own state, None if the model has none
    or the samples are no sequences; `sizes` is the result for each size of a bundle with buckets, None if it has none.
    """

    form: str
    samples: int = 0
    provider_nodes: Mapping[str, int] = {}
    placement_source: Literal["session", "profile", "log", "predicted"] = "predicted"
    outputs: tuple[OutputReport, ...] = ()
    accuracy: Accuracy | None = None
    latency_ms: Latency | None = None
    peak_rss_bytes: int = 0
    thresholds: Thresholds
    crashed: bool = False
    notes: tuple[str, ...] = ()
    findings: tuple[str, ...] = ()
    traps: tuple[str, ...] = ()
    task: TaskReport | None = None
    reference_cost: Cost | None = None
    log: str = ""
    outputs_sha256: str = ""
    located: Located | None = None
    gap: PlacementGap | None = None
    placed: Placed | None = None
    planned_samples: int = 0
    files: tuple[FileReport, ...] = ()
    outdated: str = ""
    steps: int = 1
    state: StateReport | None = None
    sizes: SizesReport | None = None

    def find_places(self, count: int) -> tuple[int, ...]:
        """Returns which of `count` samples ran, in the order of the run, until the time limit was reached."""
        return order_for_runs(count, self.planned_samples or self.samples, self.steps)[: self.samples]

    @property
    def observes_placement(self) -> bool:
        """True if the target's provider itself ran and showed which nodes it takes."""
        observed = self.placement_source != "predicted" and bool(self.provider_nodes)
        return self.failure is None and self.evidence in OBSERVING and observed

    @property
    def gates(self) -> tuple[Gate, ...]:
        """The criteria of the run, each with the reasons why the run does not pass it."""
        if self.crashed:
            return (Gate(name="run", unproven=_judge_end(self)),)
        limits, old = self.thresholds, bool(self.outdated)
        found = [_make_gate("run", "", Judgement(failures=_judge_end(self)), excused=old)]
        found += (_make_gate("output", output.name, weigh_output(output, limits)) for output in self.outputs)
        if limits.task is not None:
            task = Judgement() if self.failure is not None else judge_task(self.task, limits.task)
            found.append(_make_gate("metric", limits.task.name, task))
        if self.evidence in OBSERVING:
            found.append(_make_gate("placement", "", Judgement(failures=_judge_placement(self)), excused=old))
        if self.reference_cost is not None:
            found.append(Gate(name="costs", failures=tuple(_judge_cost(self, self.reference_cost))))
        if self.findings or self.outdated:
            found.append(Gate(name="session", failures=self.findings, unproven=tuple(filter(None, (self.outdated,)))))
        if self.state is not None:
            found.append(_make_gate("state", "", judge_state(self.state, limits)))
        if self.sizes is not None:
            for size in self.sizes.sizes:
                subject = f"{self.sizes.dim}={size.size}"
                judged = _judge_file(size, f"with {subject} the bundle runs '{size.file}'", self)
                if not size.lengths:
                    judged = Judgement(unproven=(f"no sample ran with {subject}",))
                found.append(_make_gate("size", subject, judged, excused=size.crashed))
        for file in self.files:
            # The few samples that it ran prove no share.
            judged = Judgement(failures=_judge_file(file, f"the bundle ships '{file.file}'", self).failures)
            found.append(_make_gate("file", file.file, judged, excused=old or file.crashed))
        return tuple(found)

    @property
    def failures(self) -> tuple[str, ...]:
        """Every reason why the run does not pass, one line each, and then possible explanations."""
        found = tuple(line for gate in self.gates for line in gate.failures)
        return (*found, *self.explanations) if found else ()

    @property
    def unproven(self) -> tuple[str, ...]:
        """Every reason why it is not proven that the run passes, one line each."""
        return tuple(line for gate in self.gates for line in gate.unproven)

    @property
    def explanations(self) -> tuple[str, ...]:
        """Possible explanations of a run that does not pass: known traps, the layer, and the padding of samples."""
        filled = () if self.sizes is None else self.sizes.filled
        padded = next((line for output in filled for line in weigh_output(output, self.thresholds).failures), None)
        changes = "padding changes the result of the float model itself, as where no mask hides it"
        padding = f"{changes}: {padded}; give the model a mask, or build it for one size"
        return (*self.traps, *_explain_layers(self.located), *(() if padded is None else (padding,)))

    @property
    def verdict(self) -> Verdict:
        """Whether the run passes, if that can be decided."""
        return Judgement(failures=self.failures, unproven=self.unproven).verdict


def _judge_end(run: RunReport) -> tuple[str, ...]:
    if run.failure is not None:
        who = "the emulator crashed, which proves nothing" if run.crashed else "the device failed"
        return (f"{who}: {run.failure}",)
    if not any(output.elements != 0 for output in run.outputs):
        return ("nothing was compared" + (": every output is empty" if run.outputs else ""),)
    return ()


def _judge_file(file: OtherFile, begin: str, run: RunReport) -> Judgement:
    """Returns the judgement on a model file that ran besides the run's own; `begin` begins each of its lines."""
    if file.failure is not None:
        return Judgement(failures=(f"{begin}, which does not run there: {file.failure}",))
    whole = join_judgements(weigh_output(output, run.thresholds) for output in file.outputs)
    failures = [f"{begin}: {line}" for line in whole.failures]
    if not any(output.elements != 0 for output in file.outputs):
        failures.append(f"{begin}: nothing was compared")
    if run.provider != CPU_PROVIDER and file.provider_nodes and not file.provider_nodes.get(run.provider):
        failures.append(f"{begin}, of which {run.provider} takes no node there")
    return Judgement(failures=tuple(failures), unproven=tuple(f"{begin}: {line}" for line in whole.unproven))


def _make_gate(name: GateName, subject: str, found: Judgement, *, excused: bool = False) -> Gate:
    """Returns a gate; an emulator that is `excused`, since it crashed or is outdated, cannot fail it.

    A newer emulator may take what this one refuses.
    """
    failures, unproven = ((), (*found.failures, *found.unproven)) if excused else (found.failures, found.unproven)
    return Gate(name=name, subject=subject, failures=failures, unproven=unproven)


def _judge_placement(run: RunReport) -> tuple[str, ...]:
    if run.provider == CPU_PROVIDER or run.failure is not None:
        return ()
    if run.placement_source == "predicted" or not run.provider_nodes:
        return (f"placement was not observed, so {run.provider} may have taken no node",)
    if not run.provider_nodes.get(run.provider):
        used = ", ".join(
            f"{provider} ({count_of(nodes, 'node')})" for provider, nodes in sorted(run.provider_nodes.items())
        )
        return (f"silent fallback: {run.provider} took no node, the run used {used}",)
    found: list[str] = []
    gap, most = run.gap, run.thresholds.max_lost_share
    # A single node on the CPU may do no harm, such as a Softmax at the end; the work that it does counts all the same.
    if gap is not None and (gap.lost_macs > most or (gap.lost > 1 and gap.lost > _LOST_NODES * most * gap.predicted)):
        names = ", ".join(f"'{name}'" for name in gap.nodes[:5]) + (", ..." if gap.lost > 5 else "")
        lost = f"{gap.lost} of the {gap.predicted} nodes that {run.provider} was predicted to take"
        found.append(f"silent fallback: {lost} ran on {CPU_PROVIDER}, {gap.lost_macs:.0%} of the work: {names}")
    # Nodes that a device does not report may not have run on the provider either.
    hidden = 0 if gap is None else gap.hidden
    left, limit = run.provider_nodes.get(CPU_PROVIDER, 0) + hidden, run.thresholds.max_cpu_nodes
    if limit is not None and left > limit:
        found.append(f"{left} nodes were left to {CPU_PROVIDER}, more than {limit}")
    return tuple(found)


def _judge_cost(run: RunReport, reference: Cost) -> Iterator[str]:
    """Yields which costs exceed the reference run's."""
    limits = run.thresholds
    pairs = (
        ("latency", run.latency_ms.median if run.latency_ms else None, reference.latency_ms, limits.max_latency_ratio),
        ("peak memory", run.peak_rss_bytes, reference.peak_rss_bytes, limits.max_memory_ratio),
    )
    for name, value, before, most in pairs:
        if not before or most is None or run.failure is not None:
            continue
        # A device that reports no figure, or an impossible one, must not pass because of that.
        if not value:
            yield f"{name} was not measured, and {reference.source} has one to compare it with"
        elif value > most * before:
            yield f"{name} is {value / before:.2f} times that of {reference.source}, more than {most:g} times"


def _explain_layers(located: Located | None) -> tuple[str, ...]:
    if located is None:
        return ()
    if located.layer is not None:
        layer = located.bad
        own = None if layer is None else layer.own_sqnr_db
        alone = "" if own is None else f": {own:.1f} dB by itself, given what it had on the device"
        causes = "" if layer is None else layer.explained
        if layer is not None and layer.op == INPUT:
            return (f"the device has other values of input '{layer.name}' than it was given{causes}",)
        words = f"the first layer that the device computes otherwise than this machine is '{located.layer}'"
        return (words + alone + causes,)
    if unsteady := tuple(note for note in located.notes if note.endswith(UNSTEADY)):
        return unsteady
    if not located.notes or located.found_by == "tensors":
        return ("each layer computes on the device what it computes on this machine: the model itself loses this much",)
    return ()
