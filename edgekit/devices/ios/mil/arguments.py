"""What an operation of an ML Program is given: its parameters by name, with the defaults of MIL's documentation."""

from collections.abc import Mapping

import msgspec
import numpy as np

from edgekit.model.tensors import Array


class Arguments(msgspec.Struct, frozen=True):
    """The parameters of one operation; half precision has become float32, in which it is computed."""

    values: Mapping[str, tuple[Array | str, ...]]

    def tensor(self, name: str) -> Array:
        """Returns a tensor.

        Raises:
            ValueError: there is none of that name.
        """
        found = self.values.get(name, ())
        if len(found) != 1 or isinstance(found[0], str):
            raise ValueError(f"its parameter {name} is missing")
        return found[0]

    def tensors(self, name: str) -> tuple[Array, ...]:
        """Returns a list of tensors."""
        return tuple(value for value in self.values.get(name, ()) if not isinstance(value, str))

    def find(self, name: str) -> Array | None:
        """Returns a tensor that may be absent."""
        return self.tensor(name) if name in self.values else None

    def number(self, name: str, default: float | None = None) -> float:
        """Returns a single number.

        Raises:
            ValueError: it is missing, and MIL has no default for it.
        """
        if default is not None and name not in self.values:
            return default
        return float(self.tensor(name).reshape(-1)[0])

    def whole(self, name: str, default: int) -> int:
        """Returns a single whole number."""
        return int(self.number(name, default))

    def flag(self, name: str, *, default: bool = False) -> bool:
        """Returns a single truth."""
        return bool(self.number(name, default))

    def wholes(self, name: str) -> tuple[int, ...] | None:
        """Returns whole numbers, None where they are absent."""
        found = self.find(name)
        return None if found is None else tuple(int(value) for value in found.reshape(-1))

    def text(self, name: str, default: str) -> str:
        """Returns a word."""
        (found,) = self.values.get(name, (default,))
        return found if isinstance(found, str) else default


def as_computed(value: Array) -> Array:
    """Returns a tensor in the precision that is computed in: float32 for halves."""
    return value.astype(np.float32) if value.dtype == np.float16 else value
