"""Computes an ML Program, operation by operation, in the precision that it declares.

Where it says half precision, an operation reads halves, computes and sums in float32, and gives halves: Core ML lets
its GPU sum in half precision only where `AllowLowPrecisionAccumulationOnGPU` asks for it.
"""

from collections.abc import Callable, Mapping

import numpy as np

from edgekit.devices.ios.mil.operations import ELEMENTWISE, LAYOUT, REDUCTIONS, Arguments, as_computed
from edgekit.devices.ios.mil.program import Operation, Program, Result, Value
from edgekit.devices.ios.mil.windows import RESIZING, WINDOWS
from edgekit.model.tensors import Array, Tensors

OPERATIONS: Mapping[str, Callable[[Arguments], Array | tuple[Array, ...]]] = {
    **ELEMENTWISE,
    **LAYOUT,
    **REDUCTIONS,
    **RESIZING,
    **WINDOWS,
}
"""What can be computed, by the name of the operation in MIL."""


class UnknownOperationError(ValueError):
    """An operation that edgekit does not compute, with its name."""


def require_known(program: Program) -> None:
    """Refuses a program with an operation that is not computed here.

    Raises:
        UnknownOperationError: it holds one.
    """
    for operation in program.operations:
        if operation.kind != "const" and operation.kind not in OPERATIONS:
            raise UnknownOperationError(
                f"operation '{operation.kind}' of '{operation.name}' is not computed by edgekit"
            )


def compute_program(program: Program, inputs: Tensors) -> dict[str, Array]:
    """Returns the outputs of a program for its inputs, by name.

    Raises:
        UnknownOperationError: it holds an operation that is not computed here.
        ValueError: an input is missing, or an operation cannot be computed; the message names it.
    """
    values: dict[str, Value] = {}
    for entry in program.inputs:
        if entry.name not in inputs:
            raise ValueError(f"input '{entry.name}' is missing")
        values[entry.name] = _store(inputs[entry.name], entry)
    left = _count_readers(program)
    # Infinities and what comes of them are results too: a half ends at 65504.
    with np.errstate(all="ignore"):
        for operation in program.operations:
            try:
                values.update(_compute(operation, values))
            except UnknownOperationError:
                raise
            except (ValueError, LookupError, TypeError) as error:
                raise ValueError(f"{operation.kind} '{operation.name}': {error}") from error
            for name in {name for names in operation.inputs.values() for name in names}:
                left[name] -= 1
                if left[name] == 0:
                    del values[name]
    return {name: value for name in program.outputs if isinstance(value := values[name], np.ndarray)}


def _count_readers(program: Program) -> dict[str, int]:
    """Returns how many operations read each value; outputs are read once more, by whoever asked."""
    left = dict.fromkeys(program.outputs, 1)
    for operation in program.operations:
        for name in {name for names in operation.inputs.values() for name in names}:
            left[name] = left.get(name, 0) + 1
    return left


def _compute(operation: Operation, values: Mapping[str, Value]) -> dict[str, Value]:
    if operation.kind == "const":
        return {operation.results[0].name: operation.constants["val"]}
    if operation.kind not in OPERATIONS:
        raise UnknownOperationError(f"operation '{operation.kind}' of '{operation.name}' is not computed by edgekit")
    given: dict[str, tuple[Value, ...]] = {name: (value,) for name, value in operation.constants.items()}
    given |= {name: tuple(values[source] for source in sources) for name, sources in operation.inputs.items()}
    arguments = Arguments(
        {
            name: tuple(value if isinstance(value, str) else as_computed(value) for value in parts)
            for name, parts in given.items()
        }
    )
    found = OPERATIONS[operation.kind](arguments)
    parts = found if isinstance(found, tuple) else (found,)
    return {result.name: _store(part, result) for result, part in zip(operation.results, parts, strict=True)}


def _store(value: Array, result: Result) -> Array:
    """Returns a value in the element type that the program declares for it."""
    return np.asarray(value) if result.dtype is None else np.asarray(value).astype(result.dtype, copy=False)
