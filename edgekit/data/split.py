"""Reads samples, splits them into those for calibration and those for verification, and checks them, in one pass."""

from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import msgspec

from edgekit.data.data_check import FEW_SAMPLES, SampleFacts, check_samples, refusing_bad
from edgekit.data.images import Preprocess
from edgekit.data.labels import Label, LabelKind, read_task_labels
from edgekit.data.samples import Samples, limit_samples, load_samples, select_samples, spread_sequences
from edgekit.errors import DataError
from edgekit.model.state import State, first_state
from edgekit.model.tensors import TensorSpec

# Without separate data for verification, one sample in four is held out of calibration for it.
_GOLDEN_SHARE = 4
# The most golden samples: they go into the bundle, and each device of a verification runs them all.
_MAX_GOLDEN_SAMPLES = 64
_MAX_GOLDEN_BYTES = 256 << 20


class SampleSets(msgspec.Struct, frozen=True, kw_only=True):
    """Samples for calibration, whose `facts` are known, and samples for verification, with their `labels`.

    `given` are those for verification as the data hold them, before state or padding was added.
    """

    calibration: Samples
    facts: SampleFacts
    evaluation: Samples
    given: Samples
    labels: Sequence[Label] | None


class Sequences(msgspec.Struct, frozen=True, kw_only=True):
    """How samples form sequences, and how each step gets the state that the float model has at that point.

    `unroll` gets samples and a name for its result; it may also pad samples to a size.
    """

    state: State = State()
    unroll: Callable[[Samples, str], Samples] = lambda samples, _: samples

    @property
    def computed(self) -> Collection[str]:
        """The inputs that come from the float model and not from the data."""
        return self.state.feeds if self.state.steps > 1 else ()


def read_sample_sets(
    inputs: Sequence[TensorSpec],
    source: str,
    *,
    evaluation: str | None = None,
    labels: tuple[Path, LabelKind] | None = None,
    preprocess: Preprocess | None = None,
    most: int | None = None,
    idle: Collection[str] = (),
    sequences: Sequences | None = None,
) -> SampleSets:
    """Returns the samples of `source` for the inputs of a model, at most `most` of them for calibration.

    Without `evaluation` some of them are held out for verification. `labels` (a file, and the kind that a metric needs)
    belong to the samples for verification; a bad sample among these raises an error only when it is read. Arrays named
    in `idle` are ignored. With `sequences` samples stay together in whole sequences, and get their state.

    Raises:
        DataError: a file cannot be read, does not fit the inputs, holds part of a sequence, or has another number of
            labels than samples.
    """
    sequences = sequences or Sequences()
    steps = sequences.state.steps
    samples = load_sequences(source, inputs, sequences.state, preprocess, idle=idle)
    if evaluation is None:
        samples, held_out = _hold_out(samples, steps)
    else:
        held_out = load_sequences(evaluation, inputs, sequences.state, preprocess, idle=idle)
    limited = limit_samples(samples, most, steps)
    samples = sequences.unroll(limited, "calibration")
    # Held-out samples have the same source: nothing to compare. Padded samples, and those with state, differ from it.
    golden = limit_samples(held_out, FEW_SAMPLES, steps) if evaluation is not None and samples is limited else None
    return SampleSets(
        calibration=samples,
        facts=check_samples(samples, computed=sequences.computed, golden=golden),
        evaluation=refusing_bad(sequences.unroll(held_out, "evaluation")),
        given=held_out,
        labels=None if labels is None else read_task_labels(*labels, held_out),
    )


def load_sequences(
    source: str,
    inputs: Sequence[TensorSpec],
    state: State,
    preprocess: Preprocess | None = None,
    *,
    idle: Collection[str] = (),
) -> Samples:
    """Opens samples that form whole sequences; state inputs that the data lack are zero.

    Raises:
        DataError: the source cannot be read, does not fit the inputs, or holds part of a sequence.
    """
    absent = {spec.name: first_state(spec) for spec in inputs if spec.name in state.feeds} if state.steps > 1 else {}
    samples = load_samples(source, inputs, preprocess, idle=idle, absent=absent)
    if samples.count % state.steps:
        words = f"'{source}' holds {samples.count} samples, which make no whole sequences of {state.steps} steps"
        fitting = samples.count // state.steps * state.steps or state.steps
        raise DataError(words, hint=f"give {fitting} samples, or other steps")
    return samples


def _hold_out(samples: Samples, steps: int) -> tuple[Samples, Samples]:
    """Returns the samples for calibration and those for verification: disjoint, unless there is only one sequence."""
    if samples.count == steps:
        return samples, samples
    size_bytes = max(1, sum(value.nbytes for value in next(iter(samples)).values()))
    most = min(_MAX_GOLDEN_SAMPLES, max(1, _MAX_GOLDEN_BYTES // size_bytes))
    kept = spread_sequences(samples.count, min(most, max(1, samples.count // _GOLDEN_SHARE)), steps)
    others = sorted(set(range(samples.count)) - set(kept))
    return select_samples(samples, others), select_samples(samples, kept)
