"""A group run from its inputs to its result, whatever runs the members: the one loop, for float model and device.

All samples go side by side: a device is started once for each stage, and once for each token.
"""

from collections.abc import Callable, Mapping, Sequence

import msgspec
import numpy as np

from edgekit.bundle.group.crops import cut_boxes
from edgekit.bundle.group.text import begin_state, count_read, fill_text, find_length
from edgekit.bundle.group.wiring import CHOSEN, DATA, Crop, Interface, Stage, Tokens, Wiring, split_source
from edgekit.errors import DataError
from edgekit.model.state import feed_back
from edgekit.model.tensors import Array, Tensors

Run = Callable[[str, Sequence[Tensors]], Sequence[Tensors]]
"""Runs a member on some inputs and returns as many outputs."""


class _Track(msgspec.Struct, frozen=True, kw_only=True):
    """How far a sample is: its inputs, what stages gave, its tokens, and what was chosen of them.

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
    """Returns the result of each sample: what was chosen, without the end token, else the last stage's outputs.

    `wiring` is settled and has no fault.

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
    # Without a cache the whole text has to fit in.
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
    """Returns the inputs that sources fill, and the state as it begins."""
    inputs = {name: _read(source, track) for name, source in stage.feeds.items()}
    for name in stage.state:
        begun = begin_state(mine.inputs[name])
        # What begins a state is as long as its stage made it: the window takes its last rows.
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
    # One row is that of the last token; of many it stands where the token does.
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
    # A device is not started for nothing.
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
        raise DataError(f"'{member}' gave an empty '{name}', by which nothing can be chosen", hint="mend the model")
    return value.reshape(-1, value.shape[-1])
