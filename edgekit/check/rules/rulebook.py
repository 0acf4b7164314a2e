"""The rules of a target as `targets/<name>/rules.toml` holds them, decoded strictly.

The kinds of rule are in `rules.py` and `operators.py` beside it.
"""

from typing import Literal

import msgspec

from edgekit.check.rules.operators import (
    AxisLast,
    Bounds,
    ConvKernel,
    GemmBias,
    GroupedDilation,
    MatMulRanks,
    PadReach,
    ReshapeTarget,
    ResizeScales,
    SlopeShape,
    SplitSizes,
)  # fmt: skip
from edgekit.check.rules.rules import (
    Attribute,
    Between,
    Computed,
    Constant,
    Count,
    DimLimit,
    Dtype,
    EqualEntries,
    FiniteScale,
    Forms,
    GraphEdge,
    Inline,
    Internal,
    KnownShape,
    Length,
    Mirrored,
    Never,
    NonZero,
    Quantized,
    QuantizedOutput,
    Rank,
    Readers,
    SameDtype,
    SameQuantization,
    Setting,
    Static,
    Traced,
    Values,
)  # fmt: skip
from edgekit.check.rules.units import Selector
from edgekit.errors import TargetError
from edgekit.serialize import read_toml
from edgekit.target import Target


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


Rule = (
    Never | Forms | Dtype | SameDtype | Rank | Static | KnownShape | NonZero | DimLimit | Constant | Computed
    | Internal | Traced | Inline | Attribute | Length | EqualEntries | Mirrored | Count | Values | Setting | Bounds
    | Quantized | SameQuantization | QuantizedOutput | FiniteScale | GroupedDilation | GraphEdge | Between | Readers
    | GemmBias | MatMulRanks | ReshapeTarget | SplitSizes | ResizeScales | SlopeShape | ConvKernel | PadReach
    | AxisLast
)  # fmt: skip
"""Every kind of rule that `rules.toml` may name."""


class Provider(_Strict, frozen=True, kw_only=True):
    """What holds for every node.

    `ort` is the version of ONNX Runtime that the rules describe; rules with `ort_minor` also tell of older ones.
    `domains` are the operator domains it looks at (empty: it looks at the name only). `since_max` is the newest
    operator version it knows, `opset_min` and `opset_max` the models it looks at. `bodies` of control flow are never
    entered, placed like the main graph, or taken with their node when every node in them is supported ("whole");
    settings of `bodies_placed_when` have them placed.
    `rules` are evaluated for every unit before its own. `risks` are those that do not refuse a unit but say why the
    session may fail all the same; `late_risks` those of units that are not taken, but may be claimed once the layout
    changed. `alone` means that no other provider takes what it refuses: then there is no session.
    """

    name: str
    ort: str
    source: str
    domains: tuple[str, ...] = ()
    since_max: int = 10_000
    opset_min: int = 0
    opset_max: int = 10_000
    bodies: Literal["never", "placed", "whole"] = "never"
    bodies_placed_when: dict[str, tuple[str, ...]] = {}
    alone: bool = False
    rules: tuple[Rule, ...] = ()
    risks: tuple[Rule, ...] = ()
    late_risks: tuple[Rule, ...] = ()


class Units(_Strict, frozen=True, kw_only=True):
    """How it groups Q and DQ nodes: `qdq` False means not at all; `without` and `add` change ORT's own table.

    `clip_from_ort_minor` is the ORT since which a unit absorbs an activation that its Q makes redundant,
    `bias_from_ort_minor` the one since which a Conv is none whose bias has another scale than input times weight.
    """

    qdq: bool
    clip_from_ort_minor: int = 0
    bias_from_ort_minor: int = 27
    without: tuple[str, ...] = ()
    add: dict[str, Selector] = {}


class Placing(_Strict, frozen=True, kw_only=True):
    """How supported units become partitions.

    `style` "wave" is ORT's CreateSupportedPartitions, "node" takes each node by itself. Groups are given back when they
    are one node of `drop_alone`, when all their nodes are of `drop_if_only`, or when no input of theirs is computed and
    `drop_constant` is set. Everything after a node of `stop_ops` is left out. `fused` are activations taken only with
    the operator in `fusers` that feeds them. Quantized units of `first_input_only` cannot be built where an input
    behind their first comes from outside their partition: then no session is made. Results of `host_results` lie in the
    CPU's memory; nodes that read only those and small constants go to the CPU, unless the kernel reads that input there
    (`host_inputs`, positions by operator).
    """

    style: Literal["wave", "node"]
    stop_ops: tuple[str, ...] = ()
    drop_alone: tuple[str, ...] = ()
    drop_if_only: tuple[str, ...] = ()
    drop_constant: bool = False
    fused: tuple[str, ...] = ()
    fusers: tuple[str, ...] = ()
    first_input_only: tuple[str, ...] = ()
    host_results: tuple[str, ...] = ()
    host_inputs: dict[str, tuple[int, ...]] = {}


class Derived(_Strict, frozen=True, kw_only=True):
    """A parameter computed from another: the name whose list holds the value of `parameter`, else `default`."""

    parameter: str
    names: dict[str, tuple[str, ...]]
    default: str


class Op(_Strict, frozen=True, kw_only=True):
    """Rules of some operators; every entry that names an operator adds to its rules.

    `domains` empty means those of the provider.

    `forms` are the element types it computes in, `since` the operator versions, `use` names groups of rules.
    """

    types: tuple[str, ...]
    domains: tuple[str, ...] = ()
    since: tuple[int, int] = (1, 10_000)
    forms: tuple[str, ...] = ()
    use: tuple[str, ...] = ()
    rules: tuple[Rule, ...] = ()
    source: str = ""


class RuleBook(_Strict, frozen=True, kw_only=True):
    """All rules of a target."""

    provider: Provider
    units: Units
    placing: Placing
    derived: dict[str, Derived] = {}
    groups: dict[str, tuple[Rule, ...]] = {}
    op: tuple[Op, ...]


def load_rules(target: Target) -> RuleBook:
    """Returns the rules in the target's folder.

    Raises:
        TargetError: `rules.toml` is missing or malformed, or names a group of rules that it does not define.
    """
    file = target.folder / "rules.toml"
    keys = "compare it with a target that edgekit ships"
    book = read_toml(file, RuleBook, hint="a target needs a rules.toml", keys=keys, error=TargetError)
    # A misspelt group would otherwise be no rule at all, and the target would take more than it can.
    for op in book.op:
        for group in op.use:
            if group not in book.groups:
                raise TargetError(
                    f"'{file}' uses group '{group}', which it does not define", hint=f"add [groups] {group}"
                )
    return book


def derive_settings(book: RuleBook, settings: dict[str, str]) -> dict[str, str]:
    """Returns the settings with the derived ones added, and the minor version of ORT, by default the rules' own."""
    # Rules compare whole numbers, so the minor version stands for the version: the major one of ONNX Runtime is 1.
    found = {"ort_minor": settings.get("ort", book.provider.ort).split(".")[1], **settings}
    for name, derived in book.derived.items():
        value = settings.get(derived.parameter, "")
        found[name] = next((key for key, values in derived.names.items() if value in values), derived.default)
    return found
