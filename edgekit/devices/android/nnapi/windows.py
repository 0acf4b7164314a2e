"""Convolutions and pooling of NNAPI as TFLite's: pads of any size, which TFLite lacks, and the layout NCHW."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np

from edgekit.devices.android.nnapi.draft import Draft
from edgekit.devices.android.nnapi.network import OperandType
from edgekit.errors import DeviceError

_SAME, _VALID = 0, 1
_TO_NHWC, _TO_NCHW = (0, 2, 3, 1), (0, 3, 1, 2)
_DEPTHWISE, _GROUPED = 4, 55
_POOLS = {1: "AVERAGE_POOL_2D", 12: "L2_POOL_2D", 17: "MAX_POOL_2D"}

Pads = tuple[int, ...] | int
"""Pads left, right, top, bottom, or a scheme of TFLite."""


class _Window(msgspec.Struct, frozen=True, kw_only=True):
    """What a kernel covers along one axis, and by how much it moves."""

    extent: int
    stride: int


class _Piece(msgspec.Struct, frozen=True, kw_only=True):
    """A run of outputs along an axis whose windows have one extent: the inputs from `start` on that they cover."""

    start: int
    size: int
    extent: int
    outputs: int


def write_conv(draft: Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes a convolution: plain, depthwise or grouped."""
    count = 4 if code in {_DEPTHWISE, _GROUPED} else 3
    pads, rest = _take_padding(draft, inputs[3:], count=count, flag=5 if code == _DEPTHWISE else 4)
    width, height = (draft.constants.whole(place) for place in rest[:2])
    fields: dict[str, Any] = {"strideW": width, "strideH": height}
    if code == _DEPTHWISE:
        fields["depthMultiplier"] = draft.constants.whole(rest[2])
    fields["fusedActivationFunction"] = draft.constants.whole(rest[count - 1])
    dilations = tuple(draft.constants.whole(place) for place in rest[count + 1 : count + 3]) or (1, 1)
    fields |= {"dilationWFactor": dilations[0], "dilationHFactor": dilations[1]}
    kernel = draft.operands[inputs[1]].shape[1:3]
    extents = [(kernel[axis] - 1) * dilations[1 - axis] + 1 for axis in (0, 1)]
    windows = (_Window(extent=extents[0], stride=height), _Window(extent=extents[1], stride=width))
    # TFLite's CONV_2D counts its groups from the channels of its filter.
    name, kind = ("DEPTHWISE_CONV_2D", "DepthwiseConv2DOptions") if code == _DEPTHWISE else ("CONV_2D", "Conv2DOptions")

    def write(source: int, target: int) -> None:
        scheme = _choose_padding(draft, pads, source, target, windows)
        if scheme is None and not isinstance(pads, int):
            scheme, source = _VALID, _pad(draft, source, pads)
        draft.add(name, (source, *inputs[1:3]), (target,), kind, padding=scheme, **fields)

    write_in_nhwc(draft, inputs[0], outputs[0], write, from_nchw=is_nchw(draft, rest, count))


def write_pool(draft: Draft, code: int, inputs: Sequence[int], outputs: Sequence[int]) -> None:
    """Writes a pooling; a window that hangs over the border counts what lies inside, as NNAPI's does."""
    pads, rest = _take_padding(draft, inputs[1:], count=5, flag=6)
    width, height, kernel_width, kernel_height, activation = (draft.constants.whole(place) for place in rest[:5])
    windows = (_Window(extent=kernel_height, stride=height), _Window(extent=kernel_width, stride=width))

    def pool(source: int, target: int, scheme: int, extents: tuple[int, int]) -> None:
        draft.add(
            _POOLS[code], (source,), (target,), "Pool2DOptions", padding=scheme, strideW=width, strideH=height,
            filterHeight=extents[0], filterWidth=extents[1], fusedActivationFunction=activation,
        )  # fmt: skip

    def write(source: int, target: int) -> None:
        scheme = _choose_padding(draft, pads, source, target, windows)
        if scheme is not None:
            pool(source, target, scheme, (kernel_height, kernel_width))
        elif not isinstance(pads, int):
            _pool_in_pieces(draft, source, target, _cut_both(draft, pads, source, target, windows), pool)

    write_in_nhwc(draft, inputs[0], outputs[0], write, from_nchw=is_nchw(draft, rest, 5))


def is_nchw(draft: Draft, places: Sequence[int], at: int) -> bool:
    """Returns True if the operand at a place is there and says that tensors lie in NCHW."""
    return len(places) > at and bool(draft.constants.whole(places[at]))


def write_in_nhwc(
    draft: Draft, source: int, target: int, write: Callable[[int, int], None], *, from_nchw: bool
) -> None:
    """Writes an operation of one tensor where TFLite has its tensors: of NCHW it is turned before and behind."""
    if not from_nchw:
        write(source, target)
        return
    shape = draft.operands[target].shape
    made = draft.like(target, tuple(shape[axis] for axis in _TO_NHWC))
    write(draft.transpose(source, _TO_NHWC), made)
    draft.transpose(made, _TO_NCHW, target)


def _take_padding(draft: Draft, places: Sequence[int], *, count: int, flag: int) -> tuple[Pads, list[int]]:
    """Returns four explicit pads or TFLite's scheme, and the numbers that follow.

    With `count` numbers behind the padding it is explicit, unless the one at `flag` is the layout of the implicit form.
    """
    explicit = len(places) >= count + 4
    if explicit and draft.operands[places[flag]].type == OperandType.BOOL:
        explicit = False
    if explicit:
        return tuple(draft.constants.whole(place) for place in places[:4]), list(places[4:])
    return {1: _SAME, 2: _VALID}[draft.constants.whole(places[0])], list(places[1:])


def _choose_padding(draft: Draft, pads: Pads, source: int, target: int, windows: Sequence[_Window]) -> int | None:
    """Returns TFLite's scheme for pads, None where there is none; `windows` are those of height and width."""
    if isinstance(pads, int):
        return pads
    if not any(pads):
        return _VALID
    wanted: list[int] = []
    for axis, window in zip((1, 2), windows, strict=True):
        size, out = draft.operands[source].shape[axis], draft.operands[target].shape[axis]
        # SAME fixes how many outputs there are, too.
        if out != -(-size // window.stride):
            return None
        total = max((out - 1) * window.stride + window.extent - size, 0)
        wanted = [total // 2, total - total // 2, *wanted]
    return _SAME if tuple(wanted) == pads else None


def _pad(draft: Draft, source: int, pads: Sequence[int]) -> int:
    """Adds a border of zeros around height and width, and returns the operand that has it."""
    left, right, top, bottom = pads
    batch, height, width, channels = draft.operands[source].shape
    border = draft.constant(np.array([[0, 0], [top, bottom], [left, right], [0, 0]], np.int32))
    place = draft.like(source, (batch, height + top + bottom, width + left + right, channels))
    draft.add("PAD", (source, border), (place,), "PadOptions")
    return place


def _cut_both(
    draft: Draft, pads: Sequence[int], source: int, target: int, windows: Sequence[_Window]
) -> tuple[list[_Piece], list[_Piece]]:
    sizes, outputs = draft.operands[source].shape, draft.operands[target].shape
    rows = _cut(sizes[1], outputs[1], windows[0], pads[2])
    return rows, _cut(sizes[2], outputs[2], windows[1], pads[0])


def _cut(size: int, outputs: int, window: _Window, before: int) -> list[_Piece]:
    """Returns an axis cut so that each piece is a pooling without pads: the whole windows, and each that hangs over."""
    pieces: list[_Piece] = []
    for index in range(outputs):
        low = index * window.stride - before
        start, end = max(low, 0), min(low + window.extent, size)
        if end <= start:
            raise DeviceError("pooling over nothing but pads is not computed here", hint="use smaller pads")
        if pieces and end - start == pieces[-1].extent == window.extent:
            last = pieces.pop()
            pieces.append(msgspec.structs.replace(last, size=end - last.start, outputs=last.outputs + 1))
        else:
            pieces.append(_Piece(start=start, size=end - start, extent=end - start, outputs=1))
    return pieces


def _pool_in_pieces(
    draft: Draft,
    source: int,
    target: int,
    pieces: tuple[list[_Piece], list[_Piece]],
    pool: Callable[[int, int, int, tuple[int, int]], None],
) -> None:
    """Pools each piece with the kernel that TFLite has, which is exact in integers too, and joins them."""
    batch, channels = draft.operands[source].shape[0], draft.operands[source].shape[3]
    width = draft.operands[target].shape[2]
    bands: list[int] = []
    for row in pieces[0]:
        cells: list[int] = []
        for column in pieces[1]:
            part = draft.like(source, (batch, row.size, column.size, channels))
            begin = draft.constant(np.array([0, row.start, column.start, 0], np.int32))
            size = draft.constant(np.array([batch, row.size, column.size, channels], np.int32))
            draft.add("SLICE", (source, begin, size), (part,), "SliceOptions")
            cells.append(draft.like(target, (batch, row.outputs, column.outputs, channels)))
            pool(part, cells[-1], _VALID, (row.extent, column.extent))
        bands.append(draft.like(target, (batch, row.outputs, width, channels)))
        draft.add("CONCATENATION", cells, (bands[-1],), "ConcatenationOptions", axis=2)
    draft.add("CONCATENATION", bands, (target,), "ConcatenationOptions", axis=1)
