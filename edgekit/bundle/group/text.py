"""Tokens written into the inputs of a stage: at the left or right of what has a fixed size, alone where it is open."""

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np

from edgekit.bundle.group.wiring import Interface, Stage, Text, Tokens
from edgekit.model.state import first_state
from edgekit.model.tensors import Array, Tensors, TensorSpec


def fill_text(
    text: Text, tokens: Tokens, stage: Stage, mine: Interface, known: Sequence[int], read: int, given: Tensors
) -> dict[str, Array]:
    """Returns the inputs by which a stage reads text; `given` are its other inputs, `read` the tokens in its state."""
    is_right, spec = text.align == "right", mine.inputs[text.input]
    length = find_length(spec, mine, given)
    # An open input takes what is new; one of a fixed size is filled up, or takes the newest.
    window = known[read:] if length is None else known[-length:] if is_right else known[:length]
    size = len(window) if length is None else length
    first = len(known) - len(window) if is_right else 0
    inputs = {text.input: _place(spec, window, size, tokens.pad, is_right=is_right)}
    if text.positions:
        counted = range(first, first + len(window))
        inputs[text.positions] = _place(mine.inputs[text.positions], counted, size, 0, is_right=is_right)
    if text.mask:
        mask = mine.inputs[text.mask]
        most = find_length(mask, mine, given) or _count_held(stage, mine, given, len(known) - size) + size
        ones = [1] * min(len(known), most)
        inputs[text.mask] = _place(mask, ones, most, 0, is_right=is_right)
    return inputs


def find_length(spec: TensorSpec, mine: Interface, given: Tensors) -> int | None:
    """Returns how many tokens an input for text takes, None where any number: its own size, or that of its name."""
    size = (spec.shape or (0,))[-1]
    if not isinstance(size, str):
        return size
    named = {
        dim: value.shape[axis]
        for name, value in given.items()
        for axis, dim in enumerate(mine.inputs[name].shape or ())
        if isinstance(dim, str)
    }
    return named.get(size)


def begin_state(spec: TensorSpec) -> Array:
    """Returns the state that nothing begins: zeros, of one sample, whose open dimensions hold nothing yet."""
    shape = spec.shape
    if shape and not isinstance(shape[0], int):
        shape = (1, *shape[1:])
    return first_state(msgspec.structs.replace(spec, shape=shape))


def count_read(stage: Stage, read: Mapping[str, int]) -> int:
    """Returns how many tokens the state of a stage holds: those that it read, or that who began its state did."""
    if not stage.state:
        return 0
    sources = (stage.feeds[name].partition(".")[0] for name in stage.state if name in stage.feeds)
    return read.get(stage.run) or max((read.get(owner, 0) for owner in sources), default=0)


def _count_held(stage: Stage, mine: Interface, given: Tensors, default: int) -> int:
    """Returns the rows in the state of a stage, on the axis on which it grows; pads that began it are among them."""
    for name, output in stage.state.items():
        pairs = zip(mine.inputs[name].shape or (), mine.outputs[output].shape or (), strict=False)
        for axis, (size, made) in enumerate(pairs):
            # An open size that the output does not repeat; who listens keeps the length of what is heard.
            if axis and not isinstance(size, int) and size != made:
                return int(given[name].shape[axis])
    return default


def _place(spec: TensorSpec, values: Sequence[int], length: int, pad: int, *, is_right: bool) -> Array:
    sizes = [dim if isinstance(dim, int) else 1 for dim in (spec.shape or ())[:-1]]
    array = np.full((*sizes, length), pad, np.dtype(spec.dtype))
    places = slice(length - len(values), length) if is_right else slice(0, len(values))
    array[..., places] = list(values)
    return array
