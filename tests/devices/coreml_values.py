"""Compares edgekit's arithmetic of ML Programs with the values that coremltools infers, operation by operation.

    python tests/devices/coreml_values.py [iOS17 ...]

If all parameters of an operation are known, coremltools computes it while it converts a model (`value_inference` in its
mil/ops/defs): with Apple's own formulas, in NumPy. Parameters that a case leaves out get the default of each side, so
defaults are compared too. Every case is computed in float32 and in float16; in float16 both sides round, coremltools
after every step, edgekit once at the end. Operations for which coremltools infers nothing are listed;
tests/devices/test_devices_mil.py compares those with ONNX's operators.

Distances are in units in the last place (ULP) of the largest value of the output, because a sum whose terms cancel has
no more digits than its terms. The table holds what ONNX Runtime's Core ML provider writes, from version 1.24 on.
"""

import logging
import sys
import warnings
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from edgekit.devices.ios.compute import Operation, Program, Result, compute_program
from edgekit.devices.ios.operations import OPERATIONS
from edgekit.model.tensors import Array

OPSETS = ("iOS15", "iOS16", "iOS17", "iOS18")
DTYPES = ("float32", "float16")
MOST_ULP = 2.0
"""Two libraries differ by 1 in exp, tanh and sums; a wrong formula or default differs by thousands."""

_RANDOM = np.random.default_rng(22)
ROWS = _RANDOM.standard_normal((3, 8)).astype(np.float32)
OTHER = (_RANDOM.standard_normal((3, 8)) + 0.05).astype(np.float32)
ABOVE = (np.abs(ROWS) + 0.125).astype(np.float32)
IMAGE = _RANDOM.standard_normal((2, 4, 6, 5)).astype(np.float32)
FOUR = np.linspace(0.25, 1.75, 4, dtype=np.float32)
WHOLE = np.array([[7, -7, 3], [-3, 5, -5]], np.int32)
BY = np.array([[2, 2, -2], [2, -3, 3]], np.int32)
YES = np.array([[True, True], [False, False]])
NO = np.array([[True, False], [True, False]])

Given = dict[str, Any]

_UNARY = ("ceil", "cos", "erf", "exp", "identity", "relu", "relu6", "round", "sigmoid", "sin", "softplus", "tanh")
_BINARY = ("add", "equal", "floor_div", "maximum", "mod", "mul", "real_div", "sub")


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """The difference of both sides in one case, in units of the largest value; `problem` says what is wrong, if so."""

    kind: str
    dtype: str
    ulp: float = 0.0
    problem: str = ""


def list_cases() -> Iterator[tuple[str, Given]]:
    """Yields each operation with its parameters."""
    for kind in _UNARY:
        yield kind, {"x": 2 * ROWS}
    for kind in _BINARY:
        yield kind, {"x": ROWS, "y": OTHER}
        yield kind, {"x": ROWS, "y": OTHER[1]}
    for kind in ("floor_div", "mod", "real_div"):
        yield kind, {"x": WHOLE, "y": BY}
    for kind in ("reduce_max", "reduce_mean", "reduce_min", "reduce_prod", "reduce_sum"):
        yield kind, {"x": ROWS}
        yield kind, {"x": ROWS, "axes": [1]}
        yield kind, {"x": ROWS, "axes": [-1, 0], "keep_dims": True}
    yield "reduce_argmax", {"x": ROWS}
    yield "reduce_argmax", {"x": ROWS, "axis": 0, "keep_dims": True}
    yield from _list_products_and_moves()
    yield "inverse", {"x": ABOVE}
    yield "inverse", {"x": ABOVE, "epsilon": 0.25}
    yield "sqrt", {"x": ABOVE}
    yield "pow", {"x": ABOVE, "y": OTHER}
    for kind in ("elu", "leaky_relu"):
        yield kind, {"x": ROWS, "alpha": 0.3}
    yield "prelu", {"x": IMAGE, "alpha": FOUR}
    yield "sigmoid_hard", {"x": 4 * ROWS, "alpha": 0.3, "beta": 0.4}
    yield "clip", {"x": ROWS, "alpha": -0.5, "beta": 0.75}
    yield "gelu", {"x": ROWS}
    for mode in ("EXACT", "TANH_APPROXIMATION", "SIGMOID_APPROXIMATION"):
        yield "gelu", {"x": ROWS, "mode": mode}
    yield "select", {"cond": ROWS > 0, "a": ROWS, "b": OTHER}
    yield "logical_and", {"x": YES, "y": NO}
    yield "logical_not", {"x": YES}


def _list_products_and_moves() -> Iterator[tuple[str, Given]]:
    yield "matmul", {"x": ROWS, "y": np.ascontiguousarray(OTHER.T)}
    yield "matmul", {"x": ROWS, "y": OTHER, "transpose_y": True}
    yield "matmul", {"x": ROWS, "y": OTHER, "transpose_x": True}
    yield "linear", {"x": ROWS, "weight": OTHER}
    yield "linear", {"x": ROWS, "weight": OTHER, "bias": OTHER[0, :3]}
    yield "softmax", {"x": ROWS}
    yield "softmax", {"x": ROWS, "axis": 0}
    yield "layer_norm", {"x": ROWS, "axes": [-1]}
    yield "layer_norm", {"x": ROWS, "axes": [-1], "gamma": ROWS[0], "beta": OTHER[0], "epsilon": 0.01}
    yield "layer_norm", {"x": IMAGE, "axes": [2, 3], "gamma": IMAGE[0, 0], "beta": IMAGE[1, 1]}
    for dtype in ("fp16", "fp32", "int32", "bool"):
        yield "cast", {"x": 3 * ROWS, "dtype": dtype}
    yield "reshape", {"x": IMAGE, "shape": [2, 0, -1, 1]}
    yield "reshape", {"x": IMAGE, "shape": [-1, 30]}
    yield "expand_dims", {"x": ROWS, "axes": [0, -1]}
    yield "squeeze", {"x": ROWS[:1, None], "axes": [0]}
    yield "squeeze", {"x": ROWS[:1, None]}
    yield "transpose", {"x": IMAGE, "perm": [0, -1, 1, 2]}
    yield "concat", {"values": [ROWS, OTHER], "axis": -1}
    yield "split", {"x": ROWS, "num_splits": 4, "axis": 1}
    yield "split", {"x": ROWS, "split_sizes": [5, 3], "axis": -1}
    yield "slice_by_index", {"x": ROWS, "begin": [0, 1], "end": [2, -1]}
    yield "slice_by_index", {"x": ROWS, "begin": [0, 6], "end": [0, 1], "stride": [1, -2],
                             "begin_mask": [True, False], "end_mask": [True, False]}  # fmt: skip
    yield "slice_by_index", {"x": ROWS, "begin": [-1, 2], "end": [3, 8], "squeeze_mask": [True, False]}
    yield "slice_by_size", {"x": ROWS, "begin": [1, 2], "size": [-1, 3]}
    for mode in ("constant", "reflect", "replicate"):
        yield "pad", {"x": ROWS, "pad": [0, 0, 2, 1], "mode": mode}
    yield "pad", {"x": IMAGE, "pad": [1, 2, 0, 3], "constant_val": 0.5}
    yield "gather", {"x": ROWS, "indices": np.array([2, 0], np.int32)}
    yield "gather", {"x": ROWS, "indices": np.array([[7, 0], [1, 1]], np.int32), "axis": 1}
    yield "shape", {"x": IMAGE}
    yield "tile", {"x": ROWS, "reps": [2, 3]}


def list_inferred(opset: str) -> frozenset[str]:
    """Returns edgekit's operations whose values coremltools infers in an opset."""
    import coremltools  # noqa: PLC0415 - the judge and its tests need none
    from coremltools.converters.mil.mil.operation import Operation as Base  # noqa: PLC0415
    from coremltools.converters.mil.mil.ops.registry import SSAOpRegistry  # noqa: PLC0415

    version = getattr(coremltools.target, opset)
    classes = {kind: SSAOpRegistry.core_ops[kind][version] for kind in OPERATIONS}
    return frozenset(kind for kind, one in classes.items() if one.value_inference is not Base.value_inference)


def infer(kind: str, given: Given, opset: str) -> tuple[Array, ...]:
    """Returns the result that coremltools infers for an operation.

    Raises:
        ValueError: coremltools refuses the parameters, or infers nothing of them.
    """
    import coremltools  # noqa: PLC0415
    from coremltools.converters.mil import Builder  # noqa: PLC0415
    from coremltools.converters.mil.mil import Function  # noqa: PLC0415

    with Function({}, opset_version=getattr(coremltools.target, opset)):
        found: Any = getattr(Builder, kind)(**given)
    results = list(found) if isinstance(found, list | tuple) else [found]
    if any(one.val is None for one in results):
        raise ValueError("coremltools infers no value")
    return tuple(np.asarray(one.val) for one in results)


def compute(kind: str, given: Given, theirs: tuple[Array, ...]) -> tuple[Array, ...]:
    """Returns edgekit's result for an operation, declared in the element types of `theirs`.

    Raises:
        ValueError: it cannot be computed.
    """
    texts = {name: value for name, value in given.items() if isinstance(value, str)}
    lists = {name: value if name == "values" else [value] for name, value in given.items() if name not in texts}
    inputs = {name: tuple(f"{name}{index}" for index in range(len(parts))) for name, parts in lists.items()}
    feeds = {f"{name}{index}": np.asarray(part) for name, parts in lists.items() for index, part in enumerate(parts)}
    results = tuple(
        Result(name=f"y{index}", dtype=value.dtype.type, shape=value.shape) for index, value in enumerate(theirs)
    )
    program = Program(
        opset="CoreML7",
        inputs=tuple(Result(name=name, dtype=feed.dtype.type, shape=feed.shape) for name, feed in feeds.items()),
        outputs=tuple(result.name for result in results),
        operations=(Operation(kind=kind, name=kind, inputs=inputs, constants=texts, results=results),),
    )
    found = compute_program(program, feeds)
    return tuple(found[result.name] for result in results)


def compare(kind: str, dtype: str, ours: tuple[Array, ...], theirs: tuple[Array, ...]) -> Row:
    """Returns the difference between the results of both sides."""
    row = Row(kind=kind, dtype=dtype)
    for mine, other in zip(ours, theirs, strict=True):
        if mine.shape != other.shape:
            return msgspec.structs.replace(row, problem=f"shape {mine.shape}, coremltools {other.shape}")
        apart = float(np.max(np.abs(mine.astype(np.float64) - other.astype(np.float64))))
        real = np.issubdtype(other.dtype, np.floating)
        ulp = apart / float(np.spacing(np.max(np.abs(other)))) if real else apart and np.inf
        if not ulp <= MOST_ULP:
            row = msgspec.structs.replace(row, problem="too far apart")
        row = msgspec.structs.replace(row, ulp=max(row.ulp, ulp))
    return row


def compare_case(kind: str, given: Given, dtype: str, opset: str) -> Row:
    """Computes one case on both sides."""
    given = {name: _as_dtype(value, dtype) for name, value in given.items()}
    try:
        theirs = infer(kind, given, opset)
        return compare(kind, dtype, compute(kind, given, theirs), theirs)
    except (ValueError, TypeError, LookupError) as error:
        return Row(kind=kind, dtype=dtype, problem=str(error).strip().splitlines()[0][:120])


def _as_dtype(value: Any, dtype: str) -> Any:
    if isinstance(value, list) and isinstance(value[0], np.ndarray):
        return [part.astype(dtype) for part in value]
    if isinstance(value, float) or (isinstance(value, np.ndarray) and value.dtype == np.float32):
        return np.asarray(value).astype(dtype)[()]
    return value


def compare_all(opset: str) -> Iterator[Row]:
    """Yields each case of an opset in each element type, and the operations without a case."""
    inferred = list_inferred(opset)
    cases = [(kind, given) for kind, given in list_cases() if kind in inferred]
    for kind, given in cases:
        for dtype in DTYPES:
            yield compare_case(kind, given, dtype, opset)
    for kind in sorted(inferred - {kind for kind, _ in cases}):
        yield Row(kind=kind, dtype="", problem="no case of it")


def main() -> int:
    """Compares the opsets that the command names, by default all; returns 1 if an operation is too far off."""
    opsets = tuple(sys.argv[1:]) or OPSETS
    # coremltools says of each library that only a Mac has that it is missing, and NumPy of each infinity.
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    rows = [row for opset in opsets for row in compare_all(opset)]
    kinds = {row.kind for row in rows}
    print(f"coremltools infers nothing of: {', '.join(sorted(OPERATIONS.keys() - kinds))}")
    wrong = sorted({f"{row.kind} ({row.dtype}): {row.problem}" for row in rows if row.problem})
    told = f"{len(kinds)} operations, {len(rows)} comparisons in {', '.join(opsets)}; {len(wrong)} too far apart"
    print(*wrong, told, sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
