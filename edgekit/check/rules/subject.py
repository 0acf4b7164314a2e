"""What a rule is asked about: a unit, the graph around it, and the target's parameters."""

from collections.abc import Iterator
from typing import Literal

import msgspec

from edgekit.check.rules.units import Operand, Unit
from edgekit.graph.graph import Graph, Shape
from edgekit.model.tensors import Array


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A unit in its graph, judged for a target with these settings."""

    graph: Graph
    unit: Unit
    settings: dict[str, str]

    def number(self, name: str) -> int:
        """Returns a parameter as a number; 0 if it is none."""
        text = self.settings.get(name, "")
        return int(text) if text.isdecimal() else 0

    def array(self, position: int) -> Array | None:
        """Returns the value of an input that is a small constant, else None."""
        return self.graph.array(self.unit.inputs[position].name) if self.unit.has_input(position) else None

    def shape(self, position: int) -> Shape | None:
        """Returns the shape of an input, None if it is absent or its rank unknown."""
        return self.unit.inputs[position].shape if self.unit.has_input(position) else None


def choose_operands(
    unit: Unit, at: tuple[int, ...], of: Literal["inputs", "outputs"] = "inputs"
) -> Iterator[tuple[int, Operand]]:
    """Yields the inputs or outputs at these positions that are present; no position means all of them."""
    for position, operand in enumerate(unit.inputs if of == "inputs" else unit.outputs):
        if operand.name and (not at or position in at):
            yield position, operand
