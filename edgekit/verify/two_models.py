"""Compares any two models on the same samples, by their outputs and layer by layer."""

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import Any

import msgspec

from edgekit._files import work_folder
from edgekit.data.samples import Samples, keep_small, map_samples
from edgekit.data.sets import Label
from edgekit.devices.device import Device
from edgekit.devices.observe import open_job
from edgekit.evidence import Judgement, Verdict, join_judgements
from edgekit.graph.graph import read_graph
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors, TensorSpec
from edgekit.quantize.accuracy.output_kinds import KIND_SAMPLES, read_output_kinds
from edgekit.serialize import NotebookPage
from edgekit.target import Target, TaskLimit, Thresholds
from edgekit.verify.layers.comparison import LayerReport, Located, compare_layers, name_first_bad
from edgekit.verify.layers.matching import adapt_sample, run_unoptimized
from edgekit.verify.layers.on_device import find_device_layer
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import OutputReport, weigh_output
from edgekit.verify.task_metrics import measure_task
from edgekit.verify.task_scores import TaskReport, judge_task

LIMITS = Thresholds(min_cosine=0.97, min_top1_agreement=0.9, min_sqnr_db=12.0, granted_samples=1)
"""How far model `b` may be from model `a` by default: what targets ask of an 8-bit model."""


class ModelComparison(NotebookPage, msgspec.Struct, frozen=True, kw_only=True):
    """How far model `b` is from model `a`; `layers` is empty and `task` None unless asked for.

    `renamed` holds those inputs and outputs of `b` that were matched to those of `a` by position, because no names
    agree. The outputs are judged by what they are for, as `verify` judges those of a bundle. `device` ran model `b`,
    None for this machine without optimisation; `failure` says why it did not run, and `located` is the first layer that
    it computes differently from this machine.
    """

    a: str
    b: str
    samples: int
    outputs: tuple[OutputReport, ...]
    layers: tuple[LayerReport, ...]
    task: TaskReport | None = None
    task_limit: TaskLimit | None = None
    device: str | None = None
    failure: str | None = None
    located: Located | None = None
    renamed: dict[str, str] = {}

    @property
    def first_bad_layer(self) -> str | None:
        """The first layer whose own error stands out, or None if none does or none was compared."""
        return name_first_bad(self.layers) if self.located is None else self.located.layer

    def weigh(self, min_sqnr_db: float | None = None) -> Judgement:
        """Returns why `b` does not do what `a` does, or why that is open; a given SQNR limit counts too."""
        if self.failure is not None or not self.outputs:
            return Judgement(failures=(f"the device failed: {self.failure}" if self.failure else "nothing came back",))
        limits = limit_ratio(min_sqnr_db)
        outputs = (weigh_output(output, limits) for output in self.outputs)
        return join_judgements((*outputs, judge_task(self.task, self.task_limit)))

    def judge(self, min_sqnr_db: float | None) -> Verdict:
        """Returns whether `b` does what `a` does, and the metric keeps its limit."""
        return self.weigh(min_sqnr_db).verdict


def limit_ratio(min_sqnr_db: float | None) -> Thresholds:
    """Returns the thresholds of outputs; an SQNR limit, if given, counts in addition to what the outputs are for."""
    if min_sqnr_db is None:
        return LIMITS
    return msgspec.structs.replace(LIMITS, min_sqnr_db=min_sqnr_db, named=("min_sqnr_db",))


def compare_models(
    a: Model,
    b: Model,
    samples: Samples,
    on: tuple[Device, Target] | None = None,
    *,
    layers: bool = False,
    task: tuple[TaskLimit, Sequence[Label]] | None = None,
) -> ModelComparison:
    """Returns how far model `b` is from model `a`: both run here without optimisation, or `b` runs `on` a device.

    Floats are cast if the two models have different float types. Inputs or outputs without a common name are matched by
    position. On a device, `layers` means that the first layer is looked for that it computes differently from this
    machine: by the tensors inside; if the device cannot return these, model `b` is cut into parts. `task` is a metric
    and the label of each sample.

    Raises:
        DataError: the labels or the outputs of `a` are nothing that the metric reads.
        DeviceError: the device is not there.
        MissingExtraError: the metric needs a package that is not installed.
        ModelError: the layers were asked for, and the models have none in common.
        UsageError: the samples do not fit a model.
        RuntimeRefusal: ONNX Runtime cannot run a model.
    """
    inputs, outputs = _pair_names(a.inputs, b.inputs), _pair_names(a.outputs, b.outputs)
    # Samples that hold the inputs of both models under each one's names.
    both = map_samples(samples, lambda given: {**given, **{b: given[a] for b, a in inputs.items() if a in given}})
    # An input of another name, type or shape is refused here; otherwise it would look like a fault of an output.
    adapt_sample(next(iter(both), {}), b)
    wanted = keep_small(run_unoptimized(a, both))
    dtypes = {name: value.dtype for name, value in next(iter(wanted), dict[str, Array]()).items()}

    def adapt(row: Tensors) -> Tensors:
        """Returns the outputs of `b` by the names in `a`, with floats in the float types of `a`."""
        named = {outputs.get(name, name): value for name, value in row.items()}
        floats = {name for name, value in named.items() if value.dtype.kind == "f" and name in dtypes}
        cast = {name: named[name].astype(dtypes[name]) for name in floats if dtypes[name].kind == "f"}
        return {**named, **cast}

    with work_folder() as work:
        facts: dict[str, Any] = {}
        if on is None:
            found = run_unoptimized(b, both)
        else:
            device, target = on
            job = open_job(b, target, map_samples(both, lambda sample: adapt_sample(sample, b)))
            run = device.run_job(job, work / "run")
            found, facts = run.outputs, {"device": device.name, "failure": run.failure}
            facts["located"] = find_device_layer(device, job, work / "layers") if layers else None
        adapted = keep_small(map_samples(found, adapt, source=found.source))
        if task is not None:
            limit, labels = task
            facts |= {"task_limit": limit, "task": measure_task(limit, wanted, adapted, labels)}
        return ModelComparison(
            a=a.name,
            b=b.name,
            samples=samples.count,
            outputs=_compare_outputs(a, b, wanted, adapted, outputs),
            layers=compare_layers(a, b, both) if layers and on is None else (),
            renamed={**inputs, **outputs},
            **facts,
        )


def _compare_outputs(
    a: Model, b: Model, wanted: Samples, found: Samples, renamed: Mapping[str, str]
) -> tuple[OutputReport, ...]:
    """Returns how far the outputs are apart, with a mismatch for each whose position differs between the models.

    Lookup by name still works, but apps may read outputs by position. If not all names agree, positions are not
    compared. What the outputs are for is judged by those of `a` for the first samples.
    """
    few = list(islice(wanted, KIND_SAMPLES))
    outputs = compare_outputs(wanted, found, read_output_kinds(read_graph(a), few, {}) if few else {})
    names, others = [spec.name for spec in a.outputs], [renamed.get(spec.name, spec.name) for spec in b.outputs]
    absent = {name: f"is no output of '{b.path}', which has {', '.join(others)}" for name in {*names} - {*others}}
    moved: dict[str, str] = {}
    if sorted(names) == sorted(others):
        pairs = ((name, others.index(name), place) for place, name in enumerate(names))
        moved = {name: f"is output {at}, in the reference {place}" for name, at, place in pairs if at != place}
    faults = {each.name: absent.get(each.name) or each.mismatch or moved.get(each.name) for each in outputs}
    return tuple(msgspec.structs.replace(each, mismatch=faults[each.name]) for each in outputs)


def _pair_names(of_a: Sequence[TensorSpec], of_b: Sequence[TensorSpec]) -> dict[str, str]:
    """Returns the names in `a` by those in `b`, if both have as many and none is equal."""
    is_other = len(of_a) == len(of_b) and {spec.name for spec in of_a}.isdisjoint(spec.name for spec in of_b)
    return {theirs.name: mine.name for mine, theirs in zip(of_a, of_b, strict=True)} if is_other else {}
