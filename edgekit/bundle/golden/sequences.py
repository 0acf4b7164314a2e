"""Samples of a model with state, each with the state that the float model has at its step."""

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path

import msgspec

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.golden.rows import write_rows
from edgekit.data.samples import Samples, load_samples
from edgekit.data.split import Sequences
from edgekit.model.model import Model
from edgekit.model.state import State, run_steps, settle_state
from edgekit.model.tensors import Tensors, TensorSpec


def plan_sequences(
    model: Model, given: State | None, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec], work: Path
) -> Sequences:
    """Returns how samples make sequences of a float model; `inputs` and `outputs` have the shapes of the target.

    Raises:
        UsageError: the state that is given does not fit the model.
    """
    state = settle_state(given, inputs, outputs)

    def unroll(samples: Samples, name: str) -> Samples:
        return unroll_samples(model, samples, state, inputs, work / f"{name}.steps.npz")

    return Sequences(state=state, unroll=unroll)


def unroll_samples(model: Model, samples: Samples, state: State, inputs: Sequence[TensorSpec], path: Path) -> Samples:
    """Returns the samples with the state that the float model has when it comes to them, kept in the `.npz` at `path`.

    Each is then a sample like any other: it calibrates, and what a device makes of it can be judged by itself.
    `inputs` have the shapes that the target will have.

    Raises:
        DataError: a sample changes its rank.
        RuntimeRefusal: ONNX Runtime cannot run the model.
    """
    if state.steps == 1:
        return samples
    # As the float reference runs: what comes out at a step is, to the bit, what goes in at the next.
    session = CpuSession(model.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))
    specs = {spec.name: spec for spec in inputs}

    def run(given: Sequence[Tensors]) -> Sequence[Tensors]:
        return [session.run(sample) for sample in given]

    def rows() -> Iterator[Tensors]:
        left = iter(samples)
        for _ in range(samples.count // state.steps):
            sequence = ([sample] for sample in islice(left, state.steps))
            for (given,), _ in run_steps(sequence, state.feeds, specs, run):
                yield given

    write_rows(path, rows(), ragged=True)
    return msgspec.structs.replace(samples, batches=0, read=load_samples(str(path), inputs).read)
