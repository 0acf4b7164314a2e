"""Runs a group of models from its inputs to its result, with float models or on a device.

All samples run together: a device is started once for each stage, and once for each token. Between stages, boxes are
cut out of an image and resized, as an app does between detector and classifier, and tokens are written into the inputs
of a stage. An input of fixed size is filled from the left or the right; an input of open size gets exactly the new
tokens.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from edgekit.bundle.group.wiring import CHOSEN, DATA, Crop, Interface, Stage, Text, Tokens, Wiring, split_source
from edgekit.errors import DataError
from edgekit.model.state import feed_back, first_state
from edgekit.model.tensors import Array, Tensors, TensorSpec


def cut_boxes(crop: Crop, spec: TensorSpec, image: Array, boxes: Array, scores: Array) -> list[Array]:
    """Returns the crops of the best boxes, in the input's shape and type, from left to right.

    `image` is [1, C, H, W], `boxes` [..., N, 4] and `scores` [..., N].

    Raises:
        DataError: the three are of other shapes.
    """
    corners, ranked = boxes.reshape(-1, boxes.shape[-1]) if boxes.ndim else boxes, scores.reshape(-1)
    if image.ndim != 4 or corners.ndim != 2 or corners.shape[1] != 4 or len(corners) != ranked.size:
        shapes = f"image {list(image.shape)}, boxes {list(boxes.shape)}, scores {list(scores.shape)}"
        raise DataError(f"no boxes can be cut out of {shapes}", hint="they are [1,C,H,W], [...,N,4] and [...,N]")
    if spec.shape is None or len(spec.shape) != 4 or spec.shape[1] != image.shape[1]:
        raise DataError(f"a picture {list(image.shape)} does not fit [{spec}]", hint="as many channels, [1,C,H,W]")
    if crop.units == "shares":
        height, width = image.shape[2:]
        corners = corners * np.array([width, height, width, height])
    found = [place for place in np.argsort(-ranked, kind="stable") if ranked[place] >= crop.least]
    kept = [corners[place].astype(np.float64) for place in found if _has_area(corners[place])][: crop.most]
    size = int(spec.shape[2] or 1), int(spec.shape[3] or 1)
    return [_resize(image, box, size).astype(spec.dtype) for box in sorted(kept, key=tuple)]


def _has_area(box: Array) -> bool:
    return bool(np.isfinite(box).all() and box[2] > box[0] and box[3] > box[1])


def _resize(image: Array, box: Array, size: tuple[int, int]) -> Array:
    """Returns the box resized (bilinear, half-pixel centres); beyond the image its edge is repeated."""
    left, top, right, bottom = box
    ys = top + (np.arange(size[0]) + 0.5) * (bottom - top) / size[0] - 0.5
    xs = left + (np.arange(size[1]) + 0.5) * (right - left) / size[1] - 0.5
    rows = _blend(image.astype(np.float64), ys, axis=2)
    return _blend(rows, xs, axis=3)


def _blend(values: Array, places: Array, axis: int) -> Array:
    last = values.shape[axis] - 1
    places = np.clip(places, 0, last)
    low = np.floor(places).astype(np.int64)
    shape = [1] * values.ndim
    shape[axis] = -1
    share = (places - low).reshape(shape)
    high = np.minimum(low + 1, last)
    return np.asarray(values.take(low, axis) * (1 - share) + values.take(high, axis) * share)


def fill_text(
    text: Text, tokens: Tokens, stage: Stage, mine: Interface, known: Sequence[int], read: int, given: Tensors
) -> dict[str, Array]:
    """Returns the inputs of a stage that reads text; `given` are its other inputs, `read` the tokens in its state."""
    is_right, spec = text.align == "right", mine.inputs[text.input]
    length = find_length(spec, mine, given)
    # An open input takes only the new tokens; one of fixed size is filled up, or takes the newest tokens.
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
    """Returns how many tokens a text input takes: its own size, or that of its named dimension; None for any."""
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
    """Returns the initial state if no source gives one: zeros for one sample, with open dimensions of size 0."""
    shape = spec.shape
    if shape and not isinstance(shape[0], int):
        shape = (1, *shape[1:])
    return first_state(msgspec.structs.replace(spec, shape=shape))


def count_read(stage: Stage, read: Mapping[str, int]) -> int:
    """Returns how many tokens the state of a stage covers: those that it, or the source of its state, has read."""
    if not stage.state:
        return 0
    sources = (stage.feeds[name].partition(".")[0] for name in stage.state if name in stage.feeds)
    return read.get(stage.run) or max((read.get(owner, 0) for owner in sources), default=0)


def _count_held(stage: Stage, mine: Interface, given: Tensors, default: int) -> int:
    """Returns the length of a stage's state on the axis on which it grows, initial padding included."""
    for name, output in stage.state.items():
        pairs = zip(mine.inputs[name].shape or (), mine.outputs[output].shape or (), strict=False)
        for axis, (size, made) in enumerate(pairs):
            # On the axis that grows, the open size differs from that of the output; cross-attention keeps its length.
            if axis and not isinstance(size, int) and size != made:
                return int(given[name].shape[axis])
    return default


def _place(spec: TensorSpec, values: Sequence[int], length: int, pad: int, *, is_right: bool) -> Array:
    sizes = [dim if isinstance(dim, int) else 1 for dim in (spec.shape or ())[:-1]]
    array = np.full((*sizes, length), pad, np.dtype(spec.dtype))
    places = slice(length - len(values), length) if is_right else slice(0, len(values))
    array[..., places] = list(values)
    return array


Run = Callable[[str, Sequence[Tensors]], Sequence[Tensors]]
"""Runs a member on some inputs and returns the outputs, one for each."""


class _Track(msgspec.Struct, frozen=True, kw_only=True):
    """The progress of one sample: its inputs, the outputs of the stages, its tokens, and the generated ones.

    `read` says how many of the tokens each stage with text has read.
    """

    given: Tensors
    made: Mapping[str, Tensors] = {}
    tokens: tuple[int, ...] = ()
    chosen: tuple[int, ...] = ()
    read: Mapping[str, int] = {}


def run_pipeline(
    wiring: Wiring, members: Mapping[str, Interface], samples: Sequence[Tensors], run: Run
) -> list[dict[str, Array]]:
    """Returns the result of each sample: the tokens or classes chosen, without the end token.

    If nothing is chosen, the result is the last stage's outputs.

    `wiring` is resolved and valid.

    Raises:
        DataError: a sample begins with no tokens, or a member's output is nothing that a stage can read.
    """
    tracks = [_Track(given=sample, tokens=_begin(wiring.tokens, sample)) for sample in samples]
    for stage in wiring.stages:
        mine = members[stage.run]
        if stage.crop is not None:
            tracks = _run_boxes(stage, stage.crop, mine, tracks, run)
        elif stage.repeat:
            tracks = _run_loop(stage, wiring.tokens, mine, tracks, run)
        else:
            inputs = [_fill(stage, wiring.tokens, mine, track, {}) for track in tracks]
            outputs = run(stage.run, inputs)
            tracks = [_take(stage, *pair) for pair in zip(tracks, outputs, strict=True)]
    return [_conclude(wiring, track) for track in tracks]


def _begin(tokens: Tokens | None, sample: Tensors) -> tuple[int, ...]:
    if tokens is None:
        return ()
    if not isinstance(tokens.start, str):
        return tokens.start
    found = tuple(int(token) for token in sample[split_source(tokens.start)[1]].flat)
    if not found:
        raise DataError(f"a sample has no tokens in '{tokens.start}'", hint="a text begins with one token at least")
    return found


def _conclude(wiring: Wiring, track: _Track) -> dict[str, Array]:
    if not wiring.chooses:
        return dict(track.made[wiring.stages[-1].run])
    end = None if wiring.tokens is None else wiring.tokens.end
    chosen = track.chosen[:-1] if track.chosen and track.chosen[-1] == end else track.chosen
    return {CHOSEN: np.array(chosen, np.int64)}


def _run_loop(stage: Stage, tokens: Tokens | None, mine: Interface, tracks: Sequence[_Track], run: Run) -> list[_Track]:
    found, states = list(tracks), [dict[str, Array]() for _ in tracks]
    while active := [place for place, track in enumerate(found) if _goes_on(stage, tokens, mine, track)]:
        given = [_fill(stage, tokens, mine, found[place], states[place]) for place in active]
        for place, inputs, outputs in zip(active, given, run(stage.run, given), strict=True):
            found[place] = _take(stage, found[place], outputs)
            states[place] = {
                name: feed_back(mine.inputs[name], inputs[name], outputs[output])
                for name, output in stage.state.items()
            }
    return found


def _goes_on(stage: Stage, tokens: Tokens | None, mine: Interface, track: _Track) -> bool:
    if tokens is None or stage.text is None or len(track.chosen) >= tokens.most:
        return False
    # Without a cache the whole text must fit into the input.
    length = find_length(mine.inputs[stage.text.input], mine, _feed(stage, mine, track))
    if stage.text.align != "right" and length is not None and len(track.tokens) > length:
        return False
    return not track.chosen or track.chosen[-1] != tokens.end


def _fill(stage: Stage, tokens: Tokens | None, mine: Interface, track: _Track, state: Tensors) -> dict[str, Array]:
    inputs = {**_feed(stage, mine, track), **state}
    if stage.text is None or tokens is None:
        return inputs
    read = count_read(stage, track.read)
    return {**inputs, **fill_text(stage.text, tokens, stage, mine, track.tokens, read, inputs)}


def _feed(stage: Stage, mine: Interface, track: _Track) -> dict[str, Array]:
    """Returns the inputs that sources fill, and the initial state."""
    inputs = {name: _read(source, track) for name, source in stage.feeds.items()}
    for name in stage.state:
        begun = begin_state(mine.inputs[name])
        # An initial state may be longer than the input: the input takes its last rows.
        inputs[name] = feed_back(mine.inputs[name], begun, inputs[name]) if name in inputs else begun
    return inputs


def _read(source: str, track: _Track) -> Array:
    owner, tensor = split_source(source)
    return track.given[tensor] if owner == DATA else track.made[owner][tensor]


def _take(stage: Stage, track: _Track, outputs: Tensors) -> _Track:
    track = msgspec.structs.replace(track, made={**track.made, stage.run: outputs})
    if stage.text is None:
        return track
    track = msgspec.structs.replace(track, read={**track.read, stage.run: len(track.tokens)})
    rows = _rows(stage.run, stage.text.scores, outputs)
    # A single row belongs to the last token; of several rows, the one at the position of the token counts.
    row = -1 if stage.text.align == "right" or len(rows) == 1 else min(len(track.tokens), len(rows)) - 1
    token = int(rows[row].argmax())
    return msgspec.structs.replace(track, tokens=(*track.tokens, token), chosen=(*track.chosen, token))


def _run_boxes(stage: Stage, crop: Crop, mine: Interface, tracks: Sequence[_Track], run: Run) -> list[_Track]:
    cut = [
        cut_boxes(
            crop, mine.inputs[crop.input], *(_read(source, track) for source in (crop.image, crop.boxes, crop.scores))
        )
        for track in tracks
    ]
    given = [
        {**_feed(stage, mine, track), crop.input: picture}
        for track, pictures in zip(tracks, cut, strict=True)
        for picture in pictures
    ]
    # Without inputs the device need not be started.
    outputs = iter(run(stage.run, given) if given else ())
    return [
        msgspec.structs.replace(
            track, chosen=tuple(int(_rows(stage.run, crop.result, next(outputs))[-1].argmax()) for _ in pictures)
        )
        for track, pictures in zip(tracks, cut, strict=True)
    ]


def _rows(member: str, name: str, outputs: Tensors) -> Array:
    value = outputs[name]
    if not value.ndim or not value.size:
        raise DataError(f"'{member}' gave an empty '{name}', from which nothing can be chosen", hint="change the model")
    return value.reshape(-1, value.shape[-1])
