"""The kinds of rule, as `targets/<name>/rules.toml` spells them, and what each refuses.

A rule is one line of data with a `kind`; its `refuse` returns why a unit does not meet it. Without `when` it holds for
every unit of its operator. Rules for the meaning of single operators are in `operators.py`.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Literal, cast

import msgspec
import numpy as np

from edgekit.check.rules.units import Operand, Unit, read_parameters
from edgekit.graph.graph import Graph, Node, Shape
from edgekit.model.tensors import Array

Scalar = bool | int | float | str
Entry = Scalar | tuple[Scalar, ...]
Side = Literal["inputs", "outputs"]


def _read_number(settings: Mapping[str, str], name: str) -> int:
    text = settings.get(name, "")
    return int(text) if text.isdecimal() else 0


class Subject(msgspec.Struct, frozen=True, kw_only=True):
    """A unit in its graph, and the target's settings that it is judged by."""

    graph: Graph
    unit: Unit
    settings: dict[str, str]

    def number(self, name: str) -> int:
        """Returns a setting as a number, or 0 if it is not a number."""
        return _read_number(self.settings, name)

    def array(self, position: int) -> Array | None:
        """Returns the value of an input if it is a small constant, else None."""
        return self.graph.array(self.unit.inputs[position].name) if self.unit.has_input(position) else None

    def shape(self, position: int) -> Shape | None:
        """Returns the shape of an input, or None if it is absent or its rank is unknown."""
        return self.unit.inputs[position].shape if self.unit.has_input(position) else None

    def operands(self, at: tuple[int, ...] = (), of: Side = "inputs") -> Iterator[tuple[str, Operand]]:
        """Yields the present inputs or outputs at these positions, each with its name for messages.

        No position means all of them.
        """
        for position, operand in enumerate(self.unit.inputs if of == "inputs" else self.unit.outputs):
            if operand.name and (not at or position in at):
                yield f"{of[:-1]} {position}", operand


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class When(_Strict, frozen=True, kw_only=True):
    """The condition of a rule: every given field must hold.

    `settings`, `below` and `at_least` compare the target's settings and `ort_minor`, the 31 of ORT 1.31. `attribute`
    compares the node's attributes; an absent one meets only `attribute_absent`. `dtypes` and `ranks` give the types and
    ranks of inputs by position, and `single` the inputs that must hold one element. `since` gives the versions of the
    operator. One of the operators in `fed_by` must make an input, one of those in `feeds` must read an output. `enters`
    says whether an input must be one of the graph, `leaves` whether an output must be.
    """

    settings: dict[str, tuple[str, ...]] = {}
    below: dict[str, int] = {}
    at_least: dict[str, int] = {}
    forms: tuple[str, ...] = ()
    quantized: bool | None = None
    attribute: dict[str, tuple[Entry, ...]] = {}
    attribute_absent: tuple[str, ...] = ()
    dtypes: dict[str, tuple[str, ...]] = {}
    ranks: dict[str, tuple[int, ...]] = {}
    single: tuple[int, ...] = ()
    present: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    inputs_min: int = 0
    since_min: int = 0
    since_max: int = sys.maxsize
    ops: tuple[str, ...] = ()
    except_ops: tuple[str, ...] = ()
    fed_by: tuple[str, ...] = ()
    feeds: tuple[str, ...] = ()
    enters: bool | None = None
    leaves: bool | None = None

    def may_hold(self, op: str, settings: Mapping[str, str]) -> bool:
        """Returns False if it holds for no unit of this operator under these settings."""
        return (
            op not in self.except_ops
            and (not self.ops or op in self.ops)
            and all(settings.get(name) in allowed for name, allowed in self.settings.items())
            and all(_read_number(settings, name) < limit for name, limit in self.below.items())
            and all(_read_number(settings, name) >= limit for name, limit in self.at_least.items())
        )

    def holds(self, subject: Subject) -> bool:
        """Returns True if every field of the condition holds for the unit."""
        unit, node, producers = subject.unit, subject.unit.node, subject.graph.producers
        if not self.may_hold(node.op_type, subject.settings):
            return False
        names = [operand.name for operand in unit.inputs] if self.fed_by else ()
        makers = {producers[name].op_type for name in names if name in producers}
        made = [operand.name for operand in unit.outputs] if self.feeds else ()
        readers = {reader.op_type for name in made for reader in subject.graph.readers(name)}
        return (
            self.since_min <= node.since <= self.since_max
            and (not self.forms or unit.form in self.forms)
            and all(node.attributes.get(name) in allowed for name, allowed in self.attribute.items())
            and not any(name in node.attributes for name in self.attribute_absent)
            and self.quantized in {None, any(operand.is_quantized for operand in unit.inputs)}
            and len(unit.inputs) >= self.inputs_min
            and all(unit.has_input(at) for at in self.present)
            and not any(unit.has_input(at) for at in self.absent)
            and all(
                unit.has_input(int(at)) and unit.inputs[int(at)].dtype in dtypes for at, dtypes in self.dtypes.items()
            )
            and all(
                (shape := subject.shape(int(at))) is not None and len(shape) in ranks
                for at, ranks in self.ranks.items()
            )
            # An unknown shape, and one of rank 0, does not count as a single element: (0,) never equals {1}.
            and all(unit.has_input(at) and set(unit.inputs[at].shape or (0,)) == {1} for at in self.single)
            and (not self.fed_by or not makers.isdisjoint(self.fed_by))
            and (not self.feeds or not readers.isdisjoint(self.feeds))
            and self.enters in {None, any(operand.name in subject.graph.inputs for operand in unit.inputs)}
            and self.leaves in {None, any(operand.name in subject.graph.outputs for operand in unit.outputs)}
        )


_ALWAYS = When()


class BaseRule(_Strict, frozen=True, kw_only=True, tag_field="kind"):
    """Fields of every rule: `note` is added to the reason; `fatal` means that no session can be made at all.

    A `fatal` rule counts if no other rule leaves the node to the CPU. One that `crashes` ends the process while the
    provider looks at the node, so rules listed after it are never reached. A `soft` rule refuses nothing: the node is
    taken, and the reason says how it computes instead of in integers.
    """

    when: When = _ALWAYS
    note: str = ""
    fatal: bool = False
    crashes: bool = False
    soft: bool = False

    def refuse(self, subject: Subject) -> str | None:
        """Returns why the rule refuses the unit, or None if it does not or if its condition does not hold."""
        if self.when is not _ALWAYS and not self.when.holds(subject):
            return None
        reason = next(self._reasons(subject), None)
        return f"{reason} ({self.note})" if reason and self.note else reason

    def _reasons(self, subject: Subject) -> Iterator[str]:
        """Yields why the unit does not meet the rule, regardless of its condition; the first reason counts."""
        raise NotImplementedError


class OperandRule(BaseRule, frozen=True, kw_only=True):
    """Base of the rules about each present input or output at the positions `at`; no position means all."""

    of: Side = "inputs"
    at: tuple[int, ...] = ()

    def _reasons(self, subject: Subject) -> Iterator[str]:
        for what, operand in subject.operands(self.at, self.of):
            yield from self._judge(subject, what, operand)

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        """Yields why an operand, which messages call `what`, does not meet the rule."""
        raise NotImplementedError


class Never(BaseRule, frozen=True, kw_only=True, tag="never"):
    """Refuses every unit that meets the condition; `text` is the reason."""

    text: str

    def _reasons(self, subject: Subject) -> Iterator[str]:  # noqa: ARG002 - as every rule
        yield self.text


class Forms(BaseRule, frozen=True, kw_only=True, tag="forms"):
    """The element types that the provider computes in: only the allowed ones, or all but the refused ones."""

    allowed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()

    def _reasons(self, subject: Subject) -> Iterator[str]:
        form = subject.unit.form
        dtype = form.removeprefix("qdq-")
        quantized = [name.removeprefix("qdq-") for name in self.allowed if name.startswith("qdq-")]
        if form not in self.refused and (not self.allowed or form in self.allowed):
            return
        if form == "unknown":
            yield "the element type of its input is unknown"
        elif form == dtype:
            plain = [name for name in self.allowed if not name.startswith("qdq-")]
            yield f"its input is {dtype}" + (f"; only {join(plain)} is taken" if plain else ", which is not taken")
        elif quantized or not self.allowed:
            yield f"activations are {dtype}" + (f"; quantized, only {join(quantized)} is taken" if quantized else "")
        else:
            yield f"it is quantized ({dtype}) and there is no quantized form of it"


class Dtype(OperandRule, frozen=True, kw_only=True, tag="dtype"):
    """Element types of inputs or outputs: only the allowed ones, or all but the refused ones.

    With `stored` it is the type in the model, even if the provider computes in another one (`Provider.narrowed`).
    """

    allowed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()
    stored: bool = False

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        dtype = subject.graph.value(operand.name).dtype if self.stored else operand.dtype
        if dtype in self.refused or (self.allowed and dtype not in self.allowed):
            only = f"; only {join(self.allowed)} is taken" if self.allowed else ", which is not taken"
            yield f"{what} is {dtype or 'of unknown type'}{only}"


class SameDtype(BaseRule, frozen=True, kw_only=True, tag="same_dtype"):
    """Inputs that must share one element type."""

    at: tuple[int, ...]

    def _reasons(self, subject: Subject) -> Iterator[str]:
        found = sorted({str(operand.dtype) for _, operand in subject.operands(self.at)})
        if len(found) > 1:
            yield f"its inputs have different types: {join(found)}"


class Rank(OperandRule, frozen=True, kw_only=True, tag="rank"):
    """Ranks allowed for inputs or outputs.

    With `unless_fused`, six axes are allowed between a Reshape, a Transpose and a Reshape that QNN computes with fewer.
    """

    min: int = 0
    max: int = sys.maxsize
    allowed: tuple[int, ...] = ()
    unless_fused: bool = False

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        rank = None if operand.shape is None else len(operand.shape)
        if rank is not None and self.min <= rank <= self.max and (not self.allowed or rank in self.allowed):
            return
        if self.unless_fused and is_fused_transpose(subject.graph, subject.unit.node, self.of):
            return
        if rank is None:
            yield f"the rank of {what} is unknown"
        elif self.allowed and rank not in self.allowed:
            yield f"rank {rank} of {what} is not {' or '.join(map(str, self.allowed))}"
        else:
            yield f"rank {rank} of {what} is {f'above {self.max}' if rank > self.max else f'below {self.min}'}"


class FullShape(OperandRule, frozen=True, kw_only=True, tag="full_shape"):
    """Inputs that must not be broadcast: each has as many elements as the output."""

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        made, shape = subject.unit.outputs[0].shape, operand.shape
        # ONNX broadcasts to the same number of axes.
        if shape is not None and made is not None and (1,) * (len(made) - len(shape)) + shape != made:
            yield f"{what} is broadcast, from {list(shape)} to {list(made)}"


class Fused(BaseRule, frozen=True, kw_only=True, tag="fused"):
    """Refuses a node at the end of a chain that the provider fuses; `text` is the reason.

    The chain has the operators `ops`; the node reads the last of them at the last position of `at`, and so on upwards.
    """

    ops: tuple[str, ...]
    at: tuple[int, ...]
    text: str

    def _reasons(self, subject: Subject) -> Iterator[str]:
        node = subject.unit.node
        for op, position in zip(reversed(self.ops), reversed(self.at), strict=True):
            maker = subject.graph.producers.get(node.input[position]) if node.has_input(position) else None
            if maker is None or maker.op_type != op:
                return
            node = maker
        yield self.text


class Static(OperandRule, frozen=True, kw_only=True, tag="static"):
    """Dimensions that must be known, all if none are listed; negative ones count from the end.

    With an empty list only the rank must be known.
    """

    dims: tuple[int, ...] | None = None

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:  # noqa: ARG002 - as every rule
        if operand.shape is None:
            yield f"the shape of {what} is unknown"
            return
        rank = len(operand.shape)
        for dim in range(rank) if self.dims is None else self.dims:
            if -rank <= dim < rank and operand.shape[dim] is None:
                yield f"dimension {dim % rank} of {what} is dynamic"


class NonZero(OperandRule, frozen=True, kw_only=True, tag="nonzero"):
    """Inputs or outputs that must have no dimension of 0."""

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:  # noqa: ARG002 - as every rule
        if 0 in (operand.shape or ()):
            yield f"{what} has a dimension of 0"


class DimLimit(BaseRule, frozen=True, kw_only=True, tag="dim_limit"):
    """The largest dimension allowed for inputs and, if asked for, outputs."""

    at: tuple[int, ...]
    outputs: bool = False
    max: int

    def _reasons(self, subject: Subject) -> Iterator[str]:
        for what, operand in (*subject.operands(self.at), *(subject.operands((), "outputs") if self.outputs else ())):
            largest = max((dim or 0 for dim in operand.shape or ()), default=0)
            if largest > self.max:
                yield f"a dimension of {what} is {largest}, above {self.max}"


class Constant(BaseRule, frozen=True, kw_only=True, tag="constant"):
    """Inputs that must be constants if present; `required` refuses a missing one too.

    `through_dq` and `through_cast` also accept a constant behind such a node: a session folds the Cast of a constant
    before it asks the provider, and QNN takes the DQ of a quantized constant with it.
    """

    at: tuple[int, ...]
    required: bool = False
    through_dq: bool = False
    through_cast: bool = False

    def _reasons(self, subject: Subject) -> Iterator[str]:
        unit, graph = subject.unit, subject.graph
        through = {"DequantizeLinear": self.through_dq, "Cast": self.through_cast}
        for at in self.at:
            if not unit.has_input(at):
                if self.required:
                    yield f"input {at} is missing"
                continue
            name = unit.inputs[at].name
            maker = graph.producers.get(name)
            if maker is not None and through.get(maker.op_type):
                name = maker.input[0]
            if name not in graph.constants:
                yield f"input {at} is computed; it must be a constant"


class Computed(OperandRule, frozen=True, kw_only=True, tag="computed"):
    """Inputs that must not be constants."""

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        if operand.name in subject.graph.constants:
            yield f"{what} is a constant; it must be computed"


class Inline(BaseRule, frozen=True, kw_only=True, tag="inline"):
    """Constants that must be in the model file itself (no external data), as NNAPI requires."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        for operand in (*subject.unit.inputs, *subject.unit.outputs):
            for name in (operand.name, operand.scale, operand.zero_point):
                if name and subject.graph.is_external(name):
                    yield f"constant '{name}' lies in an external file"


class Count(BaseRule, frozen=True, kw_only=True, tag="count"):
    """How many inputs or outputs must be present."""

    of: Side
    min: int = 0
    max: int = sys.maxsize

    def _reasons(self, subject: Subject) -> Iterator[str]:
        found = len(list(subject.operands((), self.of)))
        if found > self.max:
            yield f"it has {found} {self.of}; at most {self.max} can be taken"
        if found < self.min:
            yield f"it has {found} {self.of}; at least {self.min} are needed"


class Values(BaseRule, frozen=True, kw_only=True, tag="values"):
    """Bounds for the entries of a constant input, and for their number."""

    at: int
    min: float = float("-inf")
    max: float = float("inf")
    max_length: int = 1_000_000
    min_length: int = 0

    def _reasons(self, subject: Subject) -> Iterator[str]:
        array = subject.array(self.at)
        if array is not None and not self.min_length <= array.size <= self.max_length:
            yield f"input {self.at} has {array.size} entries; {self.min_length} to {self.max_length} are taken"
        for entry in array.reshape(-1).tolist() if array is not None else ():
            if not self.min <= entry <= self.max:
                yield f"input {self.at} holds {entry}, outside {self.min:g} to {self.max:g}"


class Attribute(BaseRule, frozen=True, kw_only=True, tag="attribute"):
    """The values allowed for an attribute, `default` being that of an absent one; `absent` requires its absence."""

    name: str
    default: Entry | None = None
    allowed: tuple[Entry, ...] = ()
    refused: tuple[Entry, ...] = ()
    absent: bool = False

    def _reasons(self, subject: Subject) -> Iterator[str]:
        if (value := subject.unit.node.attributes.get(self.name, self.default)) is None:
            return
        if self.absent:
            yield f"attribute '{self.name}' is not taken"
        elif value in self.refused or (self.allowed and value not in self.allowed):
            wanted = f"; it must be {' or '.join(map(_show, self.allowed))}" if self.allowed else ", which is not taken"
            yield f"attribute '{self.name}' is {_show(value)}{wanted}"


class Entries(BaseRule, frozen=True, kw_only=True, tag="entries"):
    """The entries of a list attribute: how many (`length`), and whether all are equal, or all `value`.

    With `mirrored` the second half must equal the first, such as pads that are the same on both sides. An absent
    attribute has no entries.
    """

    name: str
    length: int | None = None
    equal: bool = False
    value: int | None = None
    mirrored: bool = False

    def _reasons(self, subject: Subject) -> Iterator[str]:
        value = subject.unit.node.entries(self.name) or ()
        half = len(value) // 2
        if self.length not in {None, len(value)}:
            yield f"attribute '{self.name}' has {len(value)} entries; it must have {self.length}"
        if self.mirrored and value[:half] != value[half:]:
            yield f"attribute '{self.name}' is {_show(value)}; its halves must be equal"
        if (self.equal and len(set(value)) > 1) or (self.value is not None and set(value) - {self.value}):
            wanted = "equal" if self.value is None else self.value
            yield f"attribute '{self.name}' is {_show(value)}; its entries must be {wanted}"


class Setting(BaseRule, frozen=True, kw_only=True, tag="setting"):
    """A setting of the target that must be at least `min`, or one of `allowed`."""

    name: str
    min: int = 0
    allowed: tuple[str, ...] = ()

    def _reasons(self, subject: Subject) -> Iterator[str]:
        found = subject.settings.get(self.name, "")
        if self.allowed and found not in self.allowed:
            yield f"it needs {self.name} {' or '.join(self.allowed)}, not {found}"
        if not self.allowed and subject.number(self.name) < self.min:
            yield f"it needs {self.name} {self.min} or newer, not {found}"


class Between(BaseRule, frozen=True, kw_only=True, tag="between"):
    """Taken only in a pattern that the provider fuses: a producer and a consumer must be one of these.

    Examples are Core ML's Cast after ArgMax and QNN's Erf inside Gelu: alone they have no builder.
    """

    pattern: str
    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()

    def _reasons(self, subject: Subject) -> Iterator[str]:
        graph, node = subject.graph, subject.unit.node
        before = {graph.producers[name].op_type for name in node.input if name in graph.producers}
        after = {reader.op_type for name in node.output for reader in graph.consumers.get(name, ())}
        for wanted, found in ((self.producers, before), (self.consumers, after)):
            if wanted and found.isdisjoint(wanted):
                yield f"{node.op_type} is taken only as part of {self.pattern}"


class Readers(BaseRule, frozen=True, kw_only=True, tag="readers"):
    """Refuses an output that several nodes read if one of them is `op` with these attributes.

    Core ML fuses ArgMax with the Cast after it, and cannot if other nodes read the indices (argmax_op_builder.cc).
    """

    op: str
    attribute: dict[str, Entry] = {}

    def _reasons(self, subject: Subject) -> Iterator[str]:
        graph = subject.graph
        readers = [reader for name in subject.unit.node.output for reader in graph.consumers.get(name, ())]
        for reader in readers if len(readers) > 1 else ():
            given = reader.attributes
            if reader.op_type == self.op and all(given.get(name) == value for name, value in self.attribute.items()):
                yield f"{self.op} '{reader.name}' reads its result, and so do others"


class Internal(OperandRule, frozen=True, kw_only=True, tag="internal"):
    """Inputs that an operator on quantized values computes: a quantization is known only inside a partition."""

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        name, producers = operand.name, subject.graph.producers
        while name in producers and "QLinear" not in producers[name].op_type:
            before = producers[name].input[0]
            name = before if subject.graph.value(before).dtype == operand.dtype else ""
        if name not in producers:
            yield f"{what} is {operand.dtype}, and its quantization is not known inside the partition"


class Traced(OperandRule, frozen=True, kw_only=True, tag="traced"):
    """Quantized inputs must come from a Q or a graph input: an integer node in between loses scale and zero point.

    An operator in `sources` counts as a Q. One operator in `through` may lie between, and so may any operator that does
    not change the shape, unless `any_shape` is set. In QNN an integer Reshape between Q and DQ loses them, as was seen
    on three TFLite conversions (targets/qnn/NOTES.md).
    """

    at: tuple[int, ...] = (0,)
    through: tuple[str, ...] = ()
    sources: tuple[str, ...] = ()
    any_shape: bool = False

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        graph = subject.graph
        maker = graph.producers.get(operand.name) if operand.is_quantized else None
        if maker is not None and maker.op_type in self.through:
            maker = graph.producers.get(maker.input[0])
        if maker is None or maker.op_type in {"QuantizeLinear", *self.sources}:
            return
        if self.any_shape or graph.value(maker.input[0]).shape != graph.value(maker.output[0]).shape:
            yield f"{what} comes from {maker.op_type} on plain integers, which loses its quantization"


class Quantized(OperandRule, frozen=True, kw_only=True, tag="quantized"):
    """Quantization parameters required of inputs or outputs: constant, per tensor or per channel, zero point.

    `scalar` requires each scale and zero point to be a scalar and not a list of one, `many` a scale for each channel,
    `symmetric` zero points in the middle of the type where there are several, `least_scale` no smaller scale.
    """

    per_channel: bool = False
    many: bool = False
    symmetric: bool = False
    scalar: bool = False
    axis: int | None = None
    zero_point: int | None = None
    scale: float | None = None
    tolerance: float = 0.0
    least_scale: float = 0.0

    def _judge(self, subject: Subject, what: str, operand: Operand) -> Iterator[str]:
        if not operand.is_quantized:
            return
        graph = subject.graph
        names = [name for name in (operand.scale, operand.zero_point) if name]
        if any(name not in graph.constants for name in names):
            yield f"the scale or zero point of {what} is computed; it must be a constant"
        if self.scalar and any(graph.value(name).shape != () for name in names):
            yield f"the scale or zero point of {what} is a list; it must be a scalar"
        # Counted by shape, because large constants are loaded without their data here.
        scales = graph.value(names[0]).elements
        if scales == 1 and self.many:
            yield f"{what} has one scale; it must have one for each channel"
        if scales != 1 and not self.per_channel:
            form = "in blocks" if len(graph.value(names[0]).shape or ()) > 1 else "per channel"
            yield f"{what} is quantized {form} ({scales} scales); only per tensor is taken"
        size = dict(enumerate(operand.shape or ())).get(self.axis or 0)
        if self.axis is not None and operand.shape is not None and scales not in {1, size}:
            yield f"{what} has {scales} scales; per channel they go along axis {self.axis}, of size {size}"
        parameters = read_parameters(graph, operand)
        scale, zero = (part.reshape(-1).tolist() for part in parameters) if parameters else ([], [])
        for point in [each for each in zero if self.zero_point is not None and each != self.zero_point][:1]:
            yield f"the zero point of {what} is {point}; it must be {self.zero_point}"
        middle = 128 if operand.dtype == "uint8" else 0
        for point in [each for each in zero if self.symmetric and scales != 1 and each != middle][:1]:
            yield f"a zero point of {what} per channel is {point}; all must be {middle}"
        off = [each for each in scale if self.scale is not None and abs(each - self.scale) > self.tolerance]
        for entry in off[:1]:
            yield f"the scale of {what} is {entry:.6g}; it must be {self.scale:g}"
        if min(scale, default=math.inf) < self.least_scale:
            yield f"the scale of {what} is {min(scale):.6g}, below {self.least_scale:.6g}"


class SameQuantization(BaseRule, frozen=True, kw_only=True, tag="same_quantization"):
    """All inputs and output 0 must have equal scales and zero points."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        operands = [operand for operand in (*subject.unit.inputs, *subject.unit.outputs[:1]) if operand.is_quantized]
        read = (read_parameters(subject.graph, operand) for operand in operands)
        if len({tuple(float(part.reshape(-1)[0]) for part in parameters) for parameters in read if parameters}) > 1:
            yield "inputs and output have different scales or zero points; they must be equal"


class FiniteScale(BaseRule, frozen=True, kw_only=True, tag="finite_scale"):
    """Every constant scale must be a finite number.

    QNN accepts an infinite scale and then fails to compose its graph (targets/qnn/NOTES.md, found on the simulator).
    """

    def _reasons(self, subject: Subject) -> Iterator[str]:
        unit = subject.unit
        names = [operand.scale for operand in (*unit.inputs, *unit.outputs) if operand.scale]
        names += list(unit.node.input[1:2]) if unit.node.op_type in {"QuantizeLinear", "DequantizeLinear"} else []
        for name in names:
            scale = subject.graph.array(name)
            if scale is not None and not np.isfinite(scale).all():
                yield f"the scale '{name}' is {float(scale.reshape(-1)[0]):g}, no finite number"


class QuantizedOutput(BaseRule, frozen=True, kw_only=True, tag="quantized_output"):
    """The output of a quantized unit must be quantized too."""

    def _reasons(self, subject: Subject) -> Iterator[str]:
        if not subject.unit.outputs[0].is_quantized:
            yield "its inputs are quantized but its output is not"


_RESHAPED = ("Reshape", "Transpose", "Reshape")
# Space to depth, for both orders of the new channels.
_TO_DEPTH = ((0, 3, 5, 1, 2, 4), (0, 1, 3, 5, 2, 4))


def is_fused_transpose(graph: Graph, node: Node, side: Side) -> bool:
    """Returns True if this side of a node is inside a Reshape, Transpose and Reshape of six axes that QNN fuses.

    Each is read only by the next; Q and DQ are skipped. An axis of one element that the Transpose leaves in place is
    dropped (reshape_transpose_rank5.cc of onnxruntime-qnn); space to depth is one operator, from 4 axes to 4.
    """

    def walk(step: Callable[[Node], Node | None], count: int) -> list[Node]:
        found, at = list[Node](), step(node)
        while at is not None and len(found) < count:
            found += [at] if at.op_type not in {"QuantizeLinear", "DequantizeLinear"} else []
            at = step(at)
        return found

    edge = 0 if side == "inputs" else len(_RESHAPED) - 1
    for place in (place for place, op in enumerate(_RESHAPED) if op == node.op_type and place != edge):
        before = walk(lambda each: graph.producers.get(each.input[0]), place)
        after = walk(lambda each: only_reader(graph, each.output[0]), len(_RESHAPED) - place - 1)
        chain = (*reversed(before), node, *after)
        if tuple(each.op_type for each in chain) == _RESHAPED:
            names = (chain[0].input[0], *(each.output[0] for each in chain))
            # An open size, which another rule refuses, counts as 0.
            shapes = (tuple(dim or 0 for dim in graph.value(name).shape or ()) for name in names)
            given, wide, turned, made = shapes
            order = chain[1].entries("perm") or ()
            if order in _TO_DEPTH:
                return len(made) == 4 and given == (*wide[:2], math.prod(wide[2:4]), math.prod(wide[4:]))
            kept = [axis for axis in range(6) if wide[axis : axis + 1] == turned[axis : axis + 1] == (1,)]
            # Only the first such axis is looked at.
            return len(wide) == len(order) == 6 and bool(kept) and order[kept[0]] == kept[0]
    return False


def only_reader(graph: Graph, name: str) -> Node | None:
    """Returns the node that alone reads a value, by one of its inputs."""
    readers = graph.consumers.get(name, ())
    return readers[0] if len(readers) == 1 else None


def _show(value: object) -> str:
    return f"[{join(cast('tuple[object, ...]', value))}]" if isinstance(value, tuple) else str(value)


def join(values: Iterable[object]) -> str:
    """Returns values as a list in words."""
    return ", ".join(map(str, values))
