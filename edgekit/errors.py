"""The errors a user can meet.

EdgekitError
 ├── UsageError      an option or an argument that is wrong
 ├── ModelError      a model file that cannot be read, or that edgekit cannot handle
 ├── DataError       sample inputs or labels that do not fit the model
 ├── TargetError     a target folder or a target parameter that is wrong
 ├── RuntimeRefusal  ONNX Runtime refused a model or a run
 ├── DeviceError     a device, an emulator or a child process that is missing, died or timed out
 │    └── CrashError   a program that ended by a signal
 ├── BundleError     a bundle that is incomplete, altered or unsafe
 ├── OutputError     a file or folder that cannot be written
 └── MissingExtraError  an optional package that is not installed
"""

import contextlib
import difflib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, TypeVar

_Entry = TypeVar("_Entry")


class EdgekitError(Exception):
    """Something the user can mend: the message says what is wrong, the hint says what to do next."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint

    def __str__(self) -> str:
        return f"{self.message} ({self.hint})"


class UsageError(EdgekitError):
    """An option or an argument is wrong."""


class ModelError(EdgekitError):
    """A model file cannot be read, or edgekit cannot handle what is in it."""


class DataError(EdgekitError):
    """Sample inputs or labels do not fit the model."""


class TargetError(EdgekitError):
    """A target folder or a target parameter is wrong."""


class RuntimeRefusal(EdgekitError):  # noqa: N818 - a refusal is what it is; RuntimeError is Python's word
    """ONNX Runtime refused a model or a run; `nodes` are those that a compiler of whole models does not take."""

    def __init__(self, message: str, *, hint: str, nodes: Iterable[str] = ()) -> None:
        super().__init__(message, hint=hint)
        self.nodes = frozenset(nodes)


class DeviceError(EdgekitError):
    """A device, an emulator or a child process is missing, died or timed out."""


class CrashError(DeviceError):
    """An emulator's program was ended by a signal, which proves nothing about the device."""


class BundleError(EdgekitError):
    """A bundle is incomplete, altered or unsafe."""


class OutputError(EdgekitError):
    """A file or folder cannot be written."""


class MissingExtraError(EdgekitError):
    """An optional package is not installed."""


@contextlib.contextmanager
def reraised(
    caught: type[Exception] | tuple[type[Exception], ...], error: EdgekitError, *, quote: bool = False
) -> Generator[None]:
    """Raises `error`, which the user can mend, if the block raises an exception of the types `caught`.

    With `quote`, its message ends with that of the exception.
    """
    try:
        yield
    except caught as fault:
        if quote:
            error = type(error)(f"{error.message}: {quote_error(fault)}", hint=error.hint)
        raise error from fault


@contextlib.contextmanager
def reading(what: str, kind: type[EdgekitError], hint: str) -> Generator[None]:
    """Raises an error of the given kind, with the system's reason, if the block cannot read `what`: an OSError."""
    try:
        yield
    except OSError as error:
        raise kind(f"cannot read {what}: {error.strerror}", hint=hint) from error


FAILURES: tuple[type[Exception], ...] = (ArithmeticError, ValueError, ModelError, RuntimeRefusal, DeviceError)
"""The exceptions after which an optional step is left out: numbers that it cannot compute with (numpy's LinAlgError is
a ValueError), or a model that ONNX Runtime or a device refuses. Errors that the user must mend are not among them."""


# A graph may have thousands of tensors, and a provider hundreds of operators: too many for a message.
_MOST_NAMES = 40


def suggest_name(word: str, valid: Iterable[str]) -> str:
    """Returns a hint for a misspelled word: the nearest valid name, or a list of the first valid names."""
    names = sorted(valid)
    # NNAPI is nnapi.
    spellings = {name.casefold(): name for name in names}
    if near := difflib.get_close_matches(word.casefold(), spellings, n=1, cutoff=0.5):
        return f"did you mean '{spellings[near[0]]}'?"
    more = f" and {len(names) - _MOST_NAMES} more" if len(names) > _MOST_NAMES else ""
    return f"valid: {', '.join(names[:_MOST_NAMES])}{more}" if names else "there is nothing to choose from"


def require_known(name: str, valid: Iterable[str], words: str, kind: type[EdgekitError] = UsageError) -> None:
    """Refuses a name that the user wrote if it is not among the valid ones; the hint is the nearest of them.

    Raises:
        UsageError: it is not (or the given `kind`), which `words` say.
    """
    names = frozenset(valid)
    if name not in names:
        raise kind(words, hint=suggest_name(name, names))


def look_up(table: Mapping[Any, _Entry], name: str, words: str, kind: type[EdgekitError] = UsageError) -> _Entry:
    """Returns the entry of a table with a name that the user wrote.

    Raises:
        UsageError: there is none (or the given `kind`), which `words` say.
    """
    require_known(name, table, words, kind)
    return table[name]


def quote_error(error: Exception) -> str:
    """Returns the message of another library's exception as a line of at most 300 letters: it may quote a model."""
    return " ".join(str(error).split())[:300]
