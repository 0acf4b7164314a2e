"""The rules of a target as `targets/<name>/rules.toml` states them, decoded strictly.

The kinds of rule are in `rules.py` and `operators.py` in the same folder.
"""

from typing import Literal

import msgspec

from edgekit.check.rules import operators, rules
from edgekit.check.rules.units import Selector
from edgekit.errors import TargetError
from edgekit.serialize import read_toml
from edgekit.target import Target


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


Rule = (
    rules.Never | rules.Forms | rules.Dtype | rules.SameDtype | rules.Rank | rules.Static | rules.NonZero
    | rules.DimLimit | rules.Constant | rules.Computed | rules.Internal | rules.Traced | rules.Inline | rules.Attribute
    | rules.Entries | rules.Count | rules.Values | rules.Setting | rules.Quantized | rules.SameQuantization
    | rules.QuantizedOutput | rules.FiniteScale | rules.FullShape | rules.Fused | rules.Between
    | rules.Readers | operators.AxisLast | operators.AxisSize | operators.Bounds | operators.CentredPads
    | operators.ConvKernel | operators.Covered | operators.Equation | operators.GemmBias | operators.GroupedDilation
    | operators.MatMulRanks | operators.NearestKernel | operators.OwnConstants | operators.PadReach
    | operators.PaddedDepthwise | operators.PadOnGrid | operators.Rescaled | operators.ReshapeTarget
    | operators.ResizeScales | operators.RowBytes | operators.SlopeShape | operators.SplitSizes | operators.LastInNhwc
    | operators.LeftTransposed
)  # fmt: skip
"""All kinds of rule that `rules.toml` may name."""


class Provider(_Strict, frozen=True, kw_only=True):
    """What holds for every node.

    `ort` is the version of ONNX Runtime that the rules describe; rules with `ort_minor` describe older ones too.
    `domains` are the operator domains that the provider looks at (empty: it looks at the name only). `since_max` is the
    newest operator version it knows; `opset_min` and `opset_max` bound the models it looks at. The `bodies` (subgraphs)
    of control flow are never entered, placed like the main graph, or taken with their node if every node in them is
    supported ("whole"); the settings in `bodies_placed_when` have them placed. `rules` are evaluated for every unit
    before the rules of its operator. `risks` do not refuse a unit but say why session creation may fail all the same;
    `late_risks` are those of refused units that the provider may claim once the layout changed. `alone` means that no
    other provider takes what this one refuses: then there is no session. `narrowed` gives element types that the
    provider computes in another one: constants of it, and what is computed and is no output of the graph.
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
    narrowed: dict[str, str] = {}
    rules: tuple[Rule, ...] = ()
    risks: tuple[Rule, ...] = ()
    late_risks: tuple[Rule, ...] = ()


class Units(_Strict, frozen=True, kw_only=True):
    """How the provider groups Q and DQ nodes: `qdq` False means not at all; `without` and `add` change ORT's own table.

    `clip_from_ort_minor` is the ORT version from which on a unit absorbs an activation that its Q makes redundant.
    `bias_from_ort_minor` is the one from which on a Conv is no unit if its bias has another scale than input times
    weight.
    """

    qdq: bool
    clip_from_ort_minor: int = 0
    bias_from_ort_minor: int = 27
    without: tuple[str, ...] = ()
    add: dict[str, Selector] = {}


class Placing(_Strict, frozen=True, kw_only=True):
    """How supported units become partitions.

    `style` "wave" is ORT's CreateSupportedPartitions, "node" takes each node by itself.

    The provider gives a group of nodes back in three cases: it is a single node of `drop_alone`; all its nodes are of
    `drop_if_only`; or `drop_constant` is set, and the group reads only constants. Everything after a node of `stop_ops`
    is left out. An activation of `fused` is taken only right after an operator of `fusers`. A quantized unit of
    `first_input_only` cannot be built if an input other than the first comes from outside its partition: then no
    session is made.

    Operators of `host_results` leave their results in the CPU's memory. A node that reads only such results and small
    constants goes to the CPU. `host_inputs` are exceptions: by operator, the positions of inputs that the provider's
    own kernel reads from the CPU's memory.

    A computed tensor of a type of `inside_only` cannot enter or leave a partition: then no session is made.
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
    inside_only: tuple[str, ...] = ()


class Derived(_Strict, frozen=True, kw_only=True):
    """A setting computed from another: the name whose list contains the value of `parameter`, else `default`."""

    parameter: str
    names: dict[str, tuple[str, ...]]
    default: str


class Op(_Strict, frozen=True, kw_only=True):
    """Rules of some operators. Every entry that names an operator adds to its rules.

    If `domains` is empty, those of the provider hold.

    `forms` are the element types that the provider computes in, `since` the operator versions, `use` names groups of
    rules.
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
    # A misspelt group would otherwise be no rule at all, and the target would seem to take more than it can.
    for op in book.op:
        for group in op.use:
            if group not in book.groups:
                words = f"'{file}' uses group '{group}', which it does not define"
                raise TargetError(words, hint=f"add [groups] {group}")
    return book


def derive_settings(book: RuleBook, settings: dict[str, str]) -> dict[str, str]:
    """Returns the settings with the derived ones and ORT's minor version added; by default that of the rules."""
    # Rules compare whole numbers, so the minor version stands for the version: ONNX Runtime's major version is 1.
    found = {"ort_minor": settings.get("ort", book.provider.ort).split(".")[1], **settings}
    for name, derived in book.derived.items():
        value = settings.get(derived.parameter, "")
        found[name] = next((key for key, values in derived.names.items() if value in values), derived.default)
    return found
