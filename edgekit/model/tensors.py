"""Tensor names, types and shapes, the arrays that fit them, and the meaning of outputs, as the user may state it."""

import threading
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, get_args

import msgspec
import numpy as np
import numpy.typing as npt

from edgekit.errors import UsageError, require_known

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]
"""One sample: an array for each tensor name."""

MAX_HALF = 65504.0
"""The largest finite float16 (IEEE 754-2008, binary16)."""

PARSER_LOCK = threading.Lock()
"""A lock to hold while reading .npy or .npz files, or parsing Python into a syntax tree.

numpy parses the header of an array as Python, and Python up to 3.11.9 has one counter of the depth of syntax trees for
all threads: "SystemError: AST constructor recursion depth mismatch" if the garbage collector switches to another thread
in the middle. That is rare, except in a Dask worker, whose callbacks of the collector are Python.
"""

DTYPES: dict[str, type[np.generic]] = {
    "float32": np.float32, "float64": np.float64, "float16": np.float16,
    "int8": np.int8, "uint8": np.uint8, "int16": np.int16, "uint16": np.uint16,
    "int32": np.int32, "uint32": np.uint32, "int64": np.int64, "uint64": np.uint64,
    "bool": np.bool_, "string": np.str_,
}  # fmt: skip


class TensorSpec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Name, element type and shape of a model input or output.

    `dtype` is numpy's name ("float32", "string", ...), or "sequence" or "map" for values that are no tensor. In `shape`
    a known dimension is an int, a named one its name, an unnamed unknown one None. `shape` is None if not even the rank
    is known.
    """

    name: str
    dtype: str
    shape: tuple[int | str | None, ...] | None

    @property
    def is_static(self) -> bool:
        """True if every dimension is a known number."""
        return self.shape is not None and all(isinstance(dim, int) for dim in self.shape)

    @property
    def is_tensor(self) -> bool:
        """True if the value is a tensor of a type that edgekit supports."""
        return self.dtype in DTYPES

    def name_axes(self) -> dict[int, str]:
        """Returns what `--dim` calls each axis without a number: its own name, or `NAME:AXIS` where it has none."""
        dims = enumerate(self.shape or ())
        return {axis: dim or f"{self.name}:{axis}" for axis, dim in dims if not isinstance(dim, int)}

    def __str__(self) -> str:
        dims = "?" if self.shape is None else ",".join("?" if dim is None else str(dim) for dim in self.shape)
        return f"{self.name}: {self.dtype}[{dims}]"


def name_dim(text: str) -> str | None:
    """Returns the name of a dimension, None for a placeholder without a letter such as "?".

    Paddle's exporters write "?" for every dimension that is not known, so height and width would be one dimension.
    """
    return text if any(char.isalpha() for char in text) else None


def flatten_value(name: str, value: Any) -> dict[str, Array]:
    """Returns an output of ONNX Runtime as tensors; a tensor is returned as it is.

    A map `y` becomes `y.keys` and `y.values`, a sequence `y.length` and `y[0]`, `y[1]`, ...; a sequence of maps with
    the same keys, as ZipMap gives, one `y.keys` and a row of `y.values` for each. `devices/standalone/ort_runner.py`
    does the same in its process.
    """
    kind: str = type(value).__name__
    if kind == "dict":
        items: dict[Any, Any] = value
        return {f"{name}.keys": _as_array(list(items)), f"{name}.values": _as_array(list(items.values()))}
    if kind == "list":
        entries: list[Any] = value
        maps: list[dict[Any, Any]] = [entry for entry in entries if isinstance(entry, dict)]
        # ZipMap, with which scikit-learn exports classifiers, gives a dict for each row.
        if maps and len(maps) == len(entries) and all(list(entry) == list(maps[0]) for entry in maps):
            rows = [list(entry.values()) for entry in maps]
            return {f"{name}.keys": _as_array(list(maps[0])), f"{name}.values": _as_array(rows)}
        flat = {f"{name}.length": np.array(len(entries), np.int64)}
        for index, entry in enumerate(entries):
            flat |= flatten_value(f"{name}[{index}]", entry)
        return flat
    return {name: np.asarray(value)}


def _as_array(items: list[Any]) -> Array:
    value = np.asarray(items)
    if value.dtype.kind == "U":
        return value.astype(object)
    # Python's floats become doubles, though ONNX Runtime's map held float32.
    return value.astype(np.float32) if value.dtype == np.float64 else value


def is_numeric(value: Array) -> bool:
    """Returns True for floats and for integers of 8 or 16 bits, whose differences are meaningful."""
    # Wider integers are mostly indices, classes and counts: an error of two is not twice as bad as an error of one.
    return value.dtype.kind == "f" or (value.dtype.kind in "iu" and value.dtype.itemsize <= 2)


def is_text(value: Array) -> bool:
    """Returns True for strings, as ONNX Runtime returns them (objects) and as files hold them."""
    return value.dtype.kind in "UO"


def ranks_classes(value: Array) -> bool:
    """Returns True for a numeric output with one axis longer than 1, such as [1, 1000] or [1, 1000, 1, 1]."""
    return is_numeric(value) and value.size > 1 and max(value.shape, default=1) == value.size


def shape_matches(shape: Sequence[int], spec: TensorSpec) -> bool:
    """Returns True if an array of this shape fits the spec; an unknown dimension fits any size."""
    if spec.shape is None:
        return True
    pairs = zip(shape, spec.shape, strict=False)
    return len(shape) == len(spec.shape) and all(not isinstance(want, int) or want == got for got, want in pairs)


Code = Literal["corners", "middle and size"]
CODES: tuple[Code, ...] = get_args(Code)
"""How four numbers encode a box: two opposite corners, or the center with width and height."""


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A column of an output that has a row for each detection."""

    output: str
    index: Annotated[int, msgspec.Meta(ge=0)]


class ListColumns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The columns of a list of detections, sorted by falling score.

    `boxes` is the first of four columns, in the encoding `code`; `kind` holds the classes, None if there are none.
    """

    boxes: Column
    score: Column
    kind: Column | None
    code: Code

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs that these columns belong to."""
        return frozenset(each.output for each in (self.boxes, self.score, self.kind) if each is not None)


OutputKind = Literal[
    "classes", "map", "sequence", "tokens", "heatmaps", "labels", "image", "embedding", "values", "scores"
]
"""What an output is.

classes: scores of the classes of one decision. map: of many independent decisions, such as pixels or boxes. sequence:
of the steps of one answer, such as the letters of a word. tokens: of each token of a text, such as the next word or a
tag. heatmaps: maps whose highest places are asked for, such as one for each joint of a body. labels: the decided
classes themselves (ArgMax). image: an image. embedding: a vector that is compared with others by its direction, such as
a face's. values: other numbers, such as boxes. scores: logits of independent classes, to which the app applies the
sigmoid.
"""


MeasuredKind = Literal["classes", "map", "sequence", "tokens", "heatmaps", "labels", "image", "embedding", "values"]


class Reading(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How an output is evaluated: its kind (see `OutputKind`), the axis of its classes, and its activation.

    `axis` of "values" is that of the channels, taken to be the shortest. `squash` is the activation to apply to the
    scores, "" for none. `other` is a second possible kind, with `other_axis`, where neither the graph nor the values
    decide and the user states nothing; "" where the kind is clear.
    """

    kind: MeasuredKind
    axis: int = 0
    squash: str = ""
    other: MeasuredKind | Literal[""] = ""
    other_axis: int = 0


class StatedOutput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What the user says that an output is; `axis` is that of its classes or channels, None to find it."""

    kind: OutputKind
    axis: int | None = None


def check_outputs(
    stated: Mapping[str, OutputKind | StatedOutput], outputs: Sequence[TensorSpec], file: str
) -> dict[str, StatedOutput]:
    """Returns what the user states of the outputs of the model `file`, by name.

    Raises:
        UsageError: there is no such output, or it cannot be what is stated.
    """
    specs = {spec.name: spec for spec in outputs}
    found: dict[str, StatedOutput] = {}
    for name, given in stated.items():
        require_known(name, specs, f"[outputs] names '{name}', which is no output of '{file}'")
        found[name] = given if isinstance(given, StatedOutput) else StatedOutput(kind=given)
        if complaint := _find_complaint(specs[name], found[name]):
            hint = f'kinds are {", ".join(get_args(OutputKind))}; with an axis: {{kind = "map", axis = 1}}'
            raise UsageError(f"[outputs] says that '{name}' is {found[name].kind}, but {complaint}", hint=hint)
    return found


def _find_complaint(spec: TensorSpec, stated: StatedOutput) -> str:
    if (stated.kind == "labels") != spec.dtype.startswith(("int", "uint", "str")):
        return f"it is {spec.dtype}"
    if stated.axis is not None and stated.kind in {"labels", "image"}:
        return "that has no axis of classes"
    rank = None if spec.shape is None else len(spec.shape)
    if rank is None or stated.kind == "labels":
        return ""
    if stated.kind == "embedding" and sum(size != 1 for size in spec.shape or ()) > 1:
        return "it is more than one vector"
    if stated.kind == "image" and rank not in {3, 4}:
        return f"it has {rank} axes"
    if stated.axis is not None and not -rank <= stated.axis < rank:
        return f"it has no axis {stated.axis}"
    return "" if rank else "it is one number"
