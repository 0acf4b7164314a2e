"""The float models of a group run end to end: its golden samples, and what each member is to be built with."""

import contextlib
import math
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.golden.golden import INPUTS, OUTPUTS, Golden, write_labels
from edgekit.bundle.golden.rows import Rows, write_rows, writing_rows
from edgekit.bundle.group.pipeline import run_pipeline
from edgekit.bundle.group.wiring import Interface, Wiring
from edgekit.data.labels import Label
from edgekit.data.samples import Samples
from edgekit.data.split import SampleSets
from edgekit.errors import UsageError
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.opset import lower_model
from edgekit.target import TaskLimit
from edgekit.verify.tasks.decoders import decode_text
from edgekit.verify.tasks.tasks import find_metric

_CALIBRATION, _EVALUATION = 256, 64
# Of the first sample, before it is known how often a loop goes round.
_AT_FIRST = 8


class FloatGroup(msgspec.Struct, frozen=True, kw_only=True):
    """The members of a group as they were given, and how they are put together."""

    wiring: Wiring
    interfaces: Mapping[str, Interface]
    models: Mapping[str, Model]


class GroupSamples(msgspec.Struct, frozen=True, kw_only=True):
    """The golden samples of the whole; for each member, in a folder of its name, what it ran with."""

    golden: Golden
    folder: Path

    def find_calibration(self, member: str) -> Path:
        """Returns the samples that a member is calibrated with."""
        return self.folder / member / "calibration.npz"

    def find_evaluation(self, member: str) -> Path:
        """Returns the samples that a member is verified with."""
        return self.folder / member / "evaluation.npz"


def run_float(group: FloatGroup, sets: SampleSets, metric: TaskLimit, folder: Path) -> GroupSamples:
    """Runs every sample through the group, and keeps what each member is given, spread over samples and runs.

    Without labels, those of the golden samples are what the float models make of them.

    Raises:
        UsageError: the metric needs labels, and there are none.
        DataError: a sample cannot run, or a member is never run.
        ModelError: a model has a newer opset than this ONNX Runtime, and no form in an older one.
        RuntimeRefusal: ONNX Runtime cannot run a model.
    """
    runner = _Runner(group, folder / "lowered")
    found = GroupSamples(golden=Golden(folder=folder, samples=0, inputs=(), outputs=(), has_labels=True), folder=folder)
    with runner.recording(found.find_calibration, _CALIBRATION):
        for _ in runner.run(sets.calibration):
            pass
    labels = None if sets.labels is None else list(sets.labels)
    made: list[Label] = []
    golden = folder / "golden"
    with runner.recording(found.find_evaluation, _EVALUATION), writing_rows(golden / OUTPUTS, ragged=True) as outputs:
        for result in runner.run(sets.evaluation):
            outputs.append(result)
            if labels is None:
                made.append(_say(result, metric))
    inputs, count = write_rows(golden / INPUTS, sets.evaluation, ragged=True)
    write_labels(golden, labels or made)
    return msgspec.structs.replace(
        found,
        golden=Golden(folder=golden, samples=count, inputs=inputs, outputs=outputs.specs, has_labels=True),
    )


def _say(result: Tensors, metric: TaskLimit) -> str:
    if find_metric(metric).labels != "text":
        raise UsageError(f"metric '{metric.name}' needs labels", hint="give --eval DATA with --labels FILE")
    output = metric.output or next(iter(result))
    return decode_text(result[output], metric)


class _Runner:
    """The float models, unoptimized as the reference of a bundle is, and who writes down what they are given."""

    def __init__(self, group: FloatGroup, folder: Path) -> None:
        self._group = group
        # A member of a newer IR version or opset is lowered here as its own build does it.
        models = {name: lower_model(model, folder / name) for name, model in group.models.items()}
        self._sessions = {
            name: CpuSession(model.path, SessionSettings(level=Level.DISABLED, libraries=model.custom_ops))
            for name, model in models.items()
        }
        self._recorders: dict[str, _Recorder] = {}

    @contextlib.contextmanager
    def recording(self, find: Callable[[str], Path], limit: int) -> Generator[None]:
        """Writes what the members are given within the block."""
        with contextlib.ExitStack() as opened:
            self._recorders = {
                name: _Recorder(opened.enter_context(writing_rows(find(name), ragged=True)), limit)
                for name in self._sessions
            }
            yield

    def run(self, samples: Samples) -> Iterator[dict[str, Array]]:
        """Yields the result of each sample."""
        for place, sample in enumerate(samples):
            for recorder in self._recorders.values():
                recorder.begin(place, samples.count)
            yield from run_pipeline(self._group.wiring, self._group.interfaces, [sample], self._run_member)

    def _run_member(self, name: str, samples: Sequence[Tensors]) -> list[Tensors]:
        for sample in samples:
            self._recorders[name].take(sample)
        return [self._sessions[name].run(sample) for sample in samples]


class _Recorder:
    """Keeps about so many of a member's runs as its limit, from every sample and from early and late in each."""

    def __init__(self, rows: Rows, limit: int) -> None:
        self._rows, self._limit = rows, limit
        self._calls, self._place, self._stride = 0, 0, 1

    def begin(self, place: int, count: int) -> None:
        """Tells that a sample begins, of so many."""
        if place == 1:
            # As many runs as the first sample had, the others may have too.
            self._stride = max(1, math.ceil(self._calls * count / self._limit))
        self._place, self._calls = place, 0

    def take(self, sample: Tensors) -> None:
        """Takes what a run is given, and keeps it if it is its turn."""
        is_full = self._rows.count >= (_AT_FIRST if not self._place else 2 * self._limit)
        if not is_full and (self._calls + self._place) % self._stride == 0:
            self._rows.append(sample)
        self._calls += 1
