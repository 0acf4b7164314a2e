"""Rounds as they were taken, kept in a file, so that a search that was cut off goes on where it was."""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import msgspec

from edgekit._files import open_regular, require_place, write_file
from edgekit._ort import VERSION
from edgekit.errors import UsageError
from edgekit.tune.report import Entrant, Measured

# A round has some hundred bytes an entrant, and a search a few hundred rounds.
_MOST_BYTES = 1 << 26


class Round(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that were measured one after another, each once, and the seconds that it took."""

    entrants: tuple[Entrant, ...]
    measured: tuple[Measured, ...]
    seconds: float


class _Stored(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    key: dict[str, str]
    rounds: tuple[Round, ...]


class Journal:
    """Takes rounds within a time, and keeps them; those that a file holds are not run again.

    The search asks for the same rounds in the same order as long as the measurements are the same, so that what was
    kept is simply read again. One that was cut in the middle of a round takes that round anew: its ratios hold only
    between neighbours.
    """

    def __init__(
        self,
        measure: Callable[[Entrant], Measured],
        budget_s: float,
        path: Path | None = None,
        key: Mapping[str, str] | None = None,
    ) -> None:
        self._measure, self._path = measure, path
        self.budget_s = budget_s
        self._key = {**(key or {}), "version": f"edgekit {version('edgekit-onnx')}, onnxruntime {VERSION}"}
        self._kept: tuple[Round, ...] = () if path is None else _read(path, self._key)
        self.rounds: list[Round] = []

    @property
    def seconds(self) -> float:
        """What all rounds took together."""
        return sum(one.seconds for one in self.rounds)

    @property
    def measurements(self) -> int:
        """How many sessions were measured."""
        return sum(len(one.measured) for one in self.rounds)

    def take(
        self, entrants: Sequence[Entrant], *, reserve: int = 0, until_s: float = math.inf
    ) -> Sequence[Measured] | None:
        """Measures each entrant once, in an order that is turned round each time; None where the time is over.

        Time for `reserve` more measurements is left for what comes after, and none is taken that would end behind
        `until_s` seconds.
        """
        number = len(self.rounds)
        if number < len(self._kept) and self._kept[number].entrants == tuple(entrants):
            self.rounds.append(self._kept[number])
            return self._kept[number].measured
        if not self._ends_before(self.budget_s, len(entrants) + reserve) or not self._ends_before(
            until_s, len(entrants)
        ):
            return None
        began = time.monotonic()
        places = list(range(len(entrants)))
        # What changes slowly hits all alike: nobody is always the first, which finds the machine rested.
        turned = places[number % len(places) :] + places[: number % len(places)]
        found = {place: self._measure(entrants[place]) for place in (turned if number % 2 == 0 else turned[::-1])}
        measured = tuple(found[place] for place in places)
        self.rounds.append(Round(entrants=tuple(entrants), measured=measured, seconds=time.monotonic() - began))
        if self._path is not None:
            write_file(self._path, msgspec.json.encode(_Stored(key=self._key, rounds=tuple(self.rounds))))
        return measured

    def _ends_before(self, limit_s: float, count: int) -> bool:
        each = self.seconds / self.measurements if self.rounds else 0.0
        return self.seconds + each * count <= limit_s


def _read(path: Path, key: Mapping[str, str]) -> tuple[Round, ...]:
    """Returns the rounds that a file holds for this search, none where there is no such file.

    Raises:
        UsageError: it is of another search, or no such file.
        OutputError: it cannot be written.
    """
    require_place(path)
    if not path.exists():
        return ()
    hint = f"remove '{path}' or name another file"
    try:
        with open_regular(path) as stream:
            stored = msgspec.json.decode(stream.read(_MOST_BYTES), type=_Stored)
    except OSError as error:
        raise UsageError(f"cannot read the state '{path}': {error.strerror}", hint=hint) from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UsageError(f"'{path}' is no state of a search: {error}", hint=hint) from error
    other = [name for name in key if stored.key.get(name) != key[name]]
    if other:
        raise UsageError(f"'{path}' is of a search for another {' and '.join(other)}", hint=hint)
    return stored.rounds
