"""Plans that a search tried, kept in a file, so that one that was interrupted goes on."""

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
"""What is larger was not written here: a plan has about 100 bytes a tensor, and a search tries 7."""


class Trial(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One plan that was tried: how it was made, what it costs, and the share of work that the target takes of it.

    `integer_macs` is the share of the work that is done in integers, 1.0 if everything is.
    """

    step: str
    plan: QuantPlan
    prediction: Prediction
    taken_macs: float
    integer_macs: float = 1.0


class State(msgspec.Struct, frozen=True, kw_only=True):
    """What a search that was interrupted had tried, the file where it is kept, and what it was a search for."""

    path: Path
    key: dict[str, str]
    trials: tuple[Trial, ...]

    def write(self, trials: Sequence[Trial]) -> None:
        """Writes what was tried so far."""
        stored = _Stored(key=self.key, trials=tuple(trials), sha256=_digest(trials))
        write_file(self.path, msgspec.json.encode(stored, order="sorted"))


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the file of a state holds; `sha256` is that of the trials."""

    key: dict[str, str]
    trials: tuple[Trial, ...]
    sha256: str


def open_state(
    path: Path, model: Model, samples_sha256: str, target: Target, precision: Precision, facts: Mapping[str, str]
) -> State:
    """Returns what the file of a state holds for this search, nothing where there is none yet.

    `facts` says what else a search depends on, such as the labels by which the drop is measured.

    Raises:
        UsageError: the file holds no state, was changed, or is of another search.
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
