"""The plans that a search tried, stored in a file, so that an interrupted search can continue."""

from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, read_search, write_file
from edgekit._ort import VERSION
from edgekit.errors import UsageError
from edgekit.model.model import Model
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.plan import QuantPlan
from edgekit.target import Precision, Target

MAX_STATE_BYTES = 1 << 28
"""A larger file was not written by edgekit: a plan takes about 100 bytes a tensor, and a search tries 9 plans."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tried plan, with the name of its step and its predicted loss.

    `taken_macs` is the share of the MACs that the target's provider takes, `integer_macs` the share that is computed in
    integers. `is_whole` is False if the loss is predicted over a part of the samples, which was enough to see that
    another plan is better.
    """

    step: str
    plan: QuantPlan
    prediction: Prediction
    taken_macs: float
    integer_macs: float = 1.0
    is_whole: bool = True


class State(msgspec.Struct, frozen=True, kw_only=True):
    """The trials of an interrupted search, their file, and the facts that identify the search."""

    path: Path
    key: dict[str, str]
    trials: tuple[Trial, ...]

    def write(self, trials: Sequence[Trial]) -> None:
        """Writes the trials so far."""
        stored = _Stored(key=self.key, trials=tuple(trials), sha256=_digest(trials))
        write_file(self.path, msgspec.json.encode(stored, order="sorted"))


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The contents of a state's file; `sha256` is the digest of the trials."""

    key: dict[str, str]
    trials: tuple[Trial, ...]
    sha256: str


def open_state(
    path: Path, model: Model, samples_sha256: str, target: Target, precision: Precision, facts: Mapping[str, str]
) -> State:
    """Returns the state in a file for this search; it has no trials if there is no file yet.

    `facts` holds what else a search depends on, such as the labels that measure the drop.

    Raises:
        UsageError: the file holds no state, was changed, or belongs to another search.
        OutputError: it cannot be written.
    """
    key = {
        "model": model.sha256,
        "samples": samples_sha256,
        "target": target.name,
        "precision": precision,
        "settings": ",".join(f"{name}={value}" for name, value in sorted(target.settings.items())),
        **facts,
        "version": f"edgekit {version('edgekit-onnx')}, onnxruntime {VERSION}",
    }
    stored = read_search(path, key, _Stored, MAX_STATE_BYTES)
    if stored is None:
        return State(path=path, key=key, trials=())
    if stored.sha256 != _digest(stored.trials):
        raise UsageError(f"'{path}' was changed after it was written", hint=f"remove '{path}' or name another file")
    return State(path=path, key=key, trials=stored.trials)


def _digest(trials: Sequence[Trial]) -> str:
    return digest_bytes(msgspec.json.encode(tuple(trials), order="sorted"))
