"""Where outputs list detections: of graphs that suppress and rank boxes themselves."""

from typing import Annotated, Literal, get_args

import msgspec

Code = Literal["corners", "middle and size"]
CODES: tuple[Code, ...] = get_args(Code)
"""How four numbers are a box."""


class Column(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number of each row: a column of an output of rows."""

    output: str
    index: Annotated[int, msgspec.Meta(ge=0)]


class ListColumns(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Where a list holds the first of four columns of boxes, scores in falling order, and classes, if it has any."""

    boxes: Column
    score: Column
    kind: Column | None
    code: Code

    @property
    def outputs(self) -> frozenset[str]:
        """The outputs that are read."""
        return frozenset(each.output for each in (self.boxes, self.score, self.kind) if each is not None)
