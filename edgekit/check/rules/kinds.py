"""The kinds of rule, as `targets/<name>/rules.toml` spells them; `rules.py` beside it has one function for each.

A rule is one line of data with a `kind`. Without `when` it is evaluated for every unit of its operator.
"""

from typing import Literal

import msgspec

Scalar = bool | int | float | str
Entry = Scalar | tuple[Scalar, ...]


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class When(_Strict, frozen=True, kw_only=True):
    """The condition of a rule: every field given must hold.

    `settings`, `below` and `at_least` look at the target's parameters and at `ort_minor`, the 31 of ORT 1.31;
    `attribute` at the node's attributes (an absent one meets only `attribute_absent`), `dtypes` and `ranks` at inputs
    by position, `single` at inputs that hold one element, `since` at its version, `fed_by` at
    the operators of which one makes an input, `leaves` at whether an output is one of the graph.
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
    since_max: int = 10_000
    ops: tuple[str, ...] = ()
    except_ops: tuple[str, ...] = ()
    fed_by: tuple[str, ...] = ()
    leaves: bool | None = None


class _Rule(_Strict, frozen=True, kw_only=True, tag_field="kind"):
    """Fields of every rule: `note` is added to the reason; `fatal` means that the session cannot be made at all.

    A `fatal` rule counts where no other rule leaves the node to the CPU. One that `crashes` ends the process while the
    provider looks at the node: rules listed after it are never reached. A `soft` rule refuses nothing: the node is
    taken, and the reason says how it runs, otherwise than in integers.
    """

    when: When = When()
    note: str = ""
    fatal: bool = False
    crashes: bool = False
    soft: bool = False


class Never(_Rule, frozen=True, kw_only=True, tag="never"):
    """Refuses whatever meets the condition; `text` is the reason."""

    text: str


class Forms(_Rule, frozen=True, kw_only=True, tag="forms"):
    """The element types it computes in: those allowed, or all but those refused."""

    allowed: tuple[str, ...] = ()
    refused: tuple[str, ...] = ()


class Dtype(_Rule, frozen=True, kw_only=True, tag="dtype"):
    """Element types of inputs or outputs by position; an absent one passes."""

    of: Literal["inputs", "outputs"] = "inputs"
    at: tuple[int, ...]
    allowed: tuple[str, ...]


class SameDtype(_Rule, frozen=True, kw_only=True, tag="same_dtype"):
    """Inputs that must share one element type."""

    at: tuple[int, ...]


class Rank(_Rule, frozen=True, kw_only=True, tag="rank"):
    """Ranks of inputs or outputs by position; no position means all.

    A node inside a chain of the operators in `unless_chain`, one after the other, passes: the provider fuses it.
    """

    of: Literal["inputs", "outputs"] = "inputs"
    at: tuple[int, ...] = ()
    min: int = 0
    max: int = 100
    allowed: tuple[int, ...] = ()
    unless_chain: tuple[str, ...] = ()


class Static(_Rule, frozen=True, kw_only=True, tag="static"):
    """Dimensions that must be known: those listed, counted from the end if negative, or all; no position means all."""

    of: Literal["inputs", "outputs"] = "inputs"
    at: tuple[int, ...] = ()
    dims: tuple[int, ...] = ()


class KnownShape(_Rule, frozen=True, kw_only=True, tag="known_shape"):
    """Inputs whose rank must be known; no position means all."""

    at: tuple[int, ...] = ()


class NonZero(_Rule, frozen=True, kw_only=True, tag="nonzero"):
    """Inputs or outputs that must have no dimension of 0; no position means all."""

    of: Literal["inputs", "outputs"] = "inputs"
    at: tuple[int, ...] = ()


class DimLimit(_Rule, frozen=True, kw_only=True, tag="dim_limit"):
    """The largest dimension of inputs and, if asked for, outputs."""

    at: tuple[int, ...]
    outputs: bool = False
    max: int


class Constant(_Rule, frozen=True, kw_only=True, tag="constant"):
    """Inputs that must be constants when present; `required` refuses a missing one too.

    `through_dq` and `through_cast` look through such a node: it is folded, or taken with the constant.
    """

    at: tuple[int, ...]
    required: bool = False
    through_dq: bool = False
    through_cast: bool = False


class Computed(_Rule, frozen=True, kw_only=True, tag="computed"):
    """Inputs that must not be constants."""

    at: tuple[int, ...]


class Internal(_Rule, frozen=True, kw_only=True, tag="internal"):
    """Inputs that an earlier node must produce, because the values' quantization is known only inside a partition."""

    at: tuple[int, ...] = ()


class Traced(_Rule, frozen=True, kw_only=True, tag="traced"):
    """Quantized inputs must come from a Q or a graph input: a plain integer node in between loses the quantization.

    `through` lists operators that do not, nor does one that leaves the shape as it is.
    """

    at: tuple[int, ...] = (0,)
    through: tuple[str, ...] = ()


class Inline(_Rule, frozen=True, kw_only=True, tag="inline"):
    """Constants that must lie in the model file itself."""


class Attribute(_Rule, frozen=True, kw_only=True, tag="attribute"):
    """The values an attribute may have, `default` being what its absence means; `absent` allows none at all."""

    name: str
    default: Entry | None = None
    allowed: tuple[Entry, ...] = ()
    refused: tuple[Entry, ...] = ()
    absent: bool = False


class Length(_Rule, frozen=True, kw_only=True, tag="length"):
    """How many entries a list attribute has; an absent one counts as `default`."""

    name: str
    equals: int
    default: int


class EqualEntries(_Rule, frozen=True, kw_only=True, tag="equal_entries"):
    """All entries of a list attribute are equal, and equal to `value` if there is one."""

    name: str
    value: int | None = None
    required: bool = False


class Mirrored(_Rule, frozen=True, kw_only=True, tag="mirrored"):
    """The second half of a list attribute repeats the first, as pads do that are the same on both sides."""

    name: str


class Count(_Rule, frozen=True, kw_only=True, tag="count"):
    """How many inputs or outputs are present."""

    of: Literal["inputs", "outputs"]
    min: int = 0
    max: int = 10_000


class Values(_Rule, frozen=True, kw_only=True, tag="values"):
    """Bounds of the entries of a constant input, and of how many there are."""

    at: int
    min: float = float("-inf")
    max: float = float("inf")
    max_length: int = 1_000_000
    min_length: int = 0


class Setting(_Rule, frozen=True, kw_only=True, tag="setting"):
    """A parameter of the target that must be at least `min`, or one of `allowed`."""

    name: str
    min: int = 0
    allowed: tuple[str, ...] = ()


class Bounds(_Rule, frozen=True, kw_only=True, tag="bounds"):
    """Clip: its bounds must be constants; they must be one of the pairs allowed, if any are listed."""

    allowed: tuple[tuple[float, float], ...] = ()
    refuse_equal: bool = False


class Quantized(_Rule, frozen=True, kw_only=True, tag="quantized"):
    """Quantization parameters of inputs or outputs by position: constant, per tensor or per channel, zero point.

    `scalar` wants each scale and zero point as a scalar, and no list of one.
    """

    of: Literal["inputs", "outputs"] = "inputs"
    at: tuple[int, ...]
    per_channel: bool = False
    scalar: bool = False
    axis: int | None = None
    zero_point: int | None = None
    scale: float | None = None
    tolerance: float = 0.0


class SameQuantization(_Rule, frozen=True, kw_only=True, tag="same_quantization"):
    """Inputs and output 0 must have equal scales and zero points."""


class FiniteScale(_Rule, frozen=True, kw_only=True, tag="finite_scale"):
    """Every constant scale is a finite number."""


class QuantizedOutput(_Rule, frozen=True, kw_only=True, tag="quantized_output"):
    """The output of a quantized unit must be quantized too."""


class GroupedDilation(_Rule, frozen=True, kw_only=True, tag="grouped_dilation"):
    """A grouped convolution that is not depthwise must not be dilated."""


class GraphEdge(_Rule, frozen=True, kw_only=True, tag="graph_edge"):
    """Refuses a Q that a graph input feeds and a DQ that makes a graph output."""


class Between(_Rule, frozen=True, kw_only=True, tag="between"):
    """Taken only as part of a pattern that the provider fuses: some producer and some consumer must be one of these."""

    pattern: str
    producers: tuple[str, ...] = ()
    consumers: tuple[str, ...] = ()


class Readers(_Rule, frozen=True, kw_only=True, tag="readers"):
    """Refuses an output that several nodes read if one of them is `op` with these attributes."""

    op: str
    attribute: dict[str, Entry] = {}


class GemmBias(_Rule, frozen=True, kw_only=True, tag="gemm_bias"):
    """The shapes input C may have: "row" [N] and [1,N], "scalar", "matrix", or "first" (XNNPACK's test of dim 0)."""

    shapes: tuple[Literal["row", "scalar", "one", "column", "matrix", "first"], ...]


class MatMulRanks(_Rule, frozen=True, kw_only=True, tag="matmul_ranks"):
    """Both operands of rank 2, or both above 2 with equal leading dimensions if `batched`."""

    batched: bool


class ReshapeTarget(_Rule, frozen=True, kw_only=True, tag="reshape_target"):
    """A 0 in the shape must not be with allowzero, nor stand for a dimension that is 0."""


class SplitSizes(_Rule, frozen=True, kw_only=True, tag="split_sizes"):
    """The sizes must add up to the axis; `equal` wants them all the same."""

    equal: bool = False
    min_parts: int = 1


class ResizeScales(_Rule, frozen=True, kw_only=True, tag="resize_scales"):
    """Resize: only the last `spatial` axes change, and how far they may go.

    A scale below 1 is one over a divisor of the axis (`divisor`), one above 1 is a whole number (`whole`), both do not
    occur together (not `mixed`), scales are the quotients of the sizes (`exact`), the last axis does not change alone
    (`not_alone`), each axis has at least so many elements afterwards (`least`).
    """

    spatial: int = 2
    least: int = 0
    divisor: bool = False
    whole: bool = False
    mixed: bool = True
    exact: bool = False
    not_alone: bool = False


class SlopeShape(_Rule, frozen=True, kw_only=True, tag="slope_shape"):
    """PRelu's slope is [C,1,1] or has one element."""


class ConvKernel(_Rule, frozen=True, kw_only=True, tag="conv_kernel"):
    """The attribute kernel_shape equals the weight's spatial dimensions."""


class PadReach(_Rule, frozen=True, kw_only=True, tag="pad_reach"):
    """Only the last `last` dimensions are padded, each by less than its size if `below_dim`."""

    last: int
    below_dim: bool = False


class AxisLast(_Rule, frozen=True, kw_only=True, tag="axis_last"):
    """The axis is the last one."""

    default: int


Rule = (
    Never | Forms | Dtype | SameDtype | Rank | Static | KnownShape | NonZero | DimLimit | Constant | Computed
    | Internal | Traced | Inline | Attribute | Length | EqualEntries | Mirrored | Count | Values | Setting | Bounds
    | Quantized | SameQuantization | QuantizedOutput | FiniteScale | GroupedDilation | GraphEdge | Between | Readers
    | GemmBias | MatMulRanks | ReshapeTarget | SplitSizes | ResizeScales | SlopeShape | ConvKernel | PadReach
    | AxisLast
)  # fmt: skip
