"""Samples read, split into those that calibrate and those that verify, and judged, in one visit."""

from collections.abc import Collection, Sequence
from pathlib import Path

import msgspec

from edgekit.data.data_check import SampleFacts, check_samples, refusing_bad
from edgekit.data.images import Preprocess
from edgekit.data.labels import Label, LabelKind, read_task_labels
from edgekit.data.samples import Samples, limit_samples, load_samples, select_samples, spread_indices
from edgekit.model.tensors import TensorSpec

# Without data of its own for verification, one sample in four is kept from calibration and verifies.
_GOLDEN_SHARE = 4
# They go into the bundle, and each device of a verification runs them all.
_MAX_GOLDEN_SAMPLES = 64


class SampleSets(msgspec.Struct, frozen=True, kw_only=True):
    """Samples to calibrate with, whose `facts` are known, and samples to verify with, and their `labels`."""

    calibration: Samples
    facts: SampleFacts
    evaluation: Samples
    labels: Sequence[Label] | None


def read_sample_sets(
    inputs: Sequence[TensorSpec],
    source: str,
    *,
    evaluation: str | None = None,
    labels: Path | None = None,
    kind: LabelKind = "class",
    preprocess: Preprocess | None = None,
    most: int | None = None,
    idle: Collection[str] = (),
) -> SampleSets:
    """Returns the samples of `source` for the inputs of a model, at most so many as `most` to calibrate with.

    Without `evaluation` some of them are held out to verify with. `labels`, of the `kind` that a metric wants, are
    those of the samples to verify with. Bad samples of these raise when they are read. Arrays named in `idle` are
    passed over.

    Raises:
        DataError: a file cannot be read, does not fit the inputs, or has another number of labels than samples.
    """
    samples = load_samples(source, inputs, preprocess, idle=idle)
    if evaluation is None:
        samples, held_out = _hold_out(samples)
    else:
        held_out = load_samples(evaluation, inputs, preprocess, idle=idle)
    samples = limit_samples(samples, most)
    return SampleSets(
        calibration=samples,
        facts=check_samples(samples),
        evaluation=refusing_bad(held_out),
        labels=None if labels is None else read_task_labels(labels, kind, held_out),
    )


def _hold_out(samples: Samples) -> tuple[Samples, Samples]:
    """Returns the samples to calibrate with and those to verify with: apart, unless there is only one."""
    if samples.count == 1:
        return samples, samples
    kept = spread_indices(samples.count, min(_MAX_GOLDEN_SAMPLES, max(1, samples.count // _GOLDEN_SHARE)))
    others = sorted(set(range(samples.count)) - set(kept))
    return select_samples(samples, others), select_samples(samples, kept)
