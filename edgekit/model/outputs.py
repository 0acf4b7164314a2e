"""The meaning of outputs: as the user states it, and which columns of a list of detections hold what."""

from collections.abc import Mapping
from typing import Annotated, Literal, get_args

import msgspec

from edgekit.errors import UsageError, require_known
from edgekit.model.model import Model
from edgekit.model.tensors import TensorSpec

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


OutputKind = Literal["classes", "map", "sequence", "labels", "image", "embedding", "values", "scores"]
"""What an output is.

classes: scores of the classes of one decision. map: of many independent decisions, such as pixels or boxes. sequence:
of the steps of one answer, such as the letters of a word. labels: the decided classes themselves (ArgMax). image: an
image. embedding: a vector that is compared with others by its direction, such as a face's. values: other numbers, such
as boxes. scores: logits of independent classes, to which the app applies the sigmoid.
"""


MeasuredKind = Literal["classes", "map", "sequence", "labels", "image", "embedding", "values"]


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


def check_outputs(stated: Mapping[str, OutputKind | StatedOutput], model: Model) -> dict[str, StatedOutput]:
    """Returns what the user states of the outputs of a model, by name.

    Raises:
        UsageError: there is no such output, or it cannot be what is stated.
    """
    specs = {spec.name: spec for spec in model.outputs}
    found: dict[str, StatedOutput] = {}
    for name, given in stated.items():
        require_known(name, specs, f"[outputs] names '{name}', which is no output of '{model.path.name}'")
        found[name] = given if isinstance(given, StatedOutput) else StatedOutput(kind=given)
        if complaint := _find_complaint(specs[name], found[name]):
            hint = f'kinds are {", ".join(get_args(OutputKind))}; with an axis: {{kind = "map", axis = 1}}'
            raise UsageError(f"[outputs] says that '{name}' is {found[name].kind}, but {complaint}", hint=hint)
    return found


def _find_complaint(spec: TensorSpec, stated: StatedOutput) -> str:
    if (stated.kind == "labels") != spec.dtype.startswith(("int", "uint")):
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
