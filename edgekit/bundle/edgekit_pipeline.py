"""Runs one sample through a group of models, from its inputs to its result, as `group.json` says.

This file is copied into the folder `app/` of each group, and so imports only numpy. Between stages, boxes are cut out
of an image and resized, as an app does between detector and classifier, and tokens are written into the inputs of a
stage. An input of fixed size is filled from the left or the right; an input of open size gets exactly the new tokens.
"""

from collections.abc import Generator
from typing import Any

import numpy as np

DATA = "data"
"""The name that stands for the group's own inputs in place of a member."""
CHOSEN = "chosen"
"""The result of a group that chooses: indices of tokens or classes, int64 [n]; n differs from sample to sample."""

Tensors = dict[str, Any]
Table = dict[str, Any]
Runs = Generator[tuple[str, list[Tensors]], Any, Tensors]
"""A generator that yields a member and the inputs of its next runs, is sent their outputs, and returns the result."""


class PipelineError(ValueError):
    """A sample, or an output of a member, that a stage cannot use; `hint` says what to do."""

    def __init__(self, message: str, *, hint: str) -> None:
        super().__init__(message)
        self.hint = hint


def run_sample(wiring: Table, members: Table, inputs: Tensors) -> Runs:
    """Runs the stages of a wiring; `members` holds the specs of the `inputs` and `outputs` of each member, by name.

    The result are the chosen tokens or classes without the end token, or the last stage's outputs if nothing is chosen.

    Raises:
        PipelineError: the sample begins with no tokens, or a member's output is nothing that a stage can read.
    """
    return (yield from _Sample(wiring, members, inputs).run())


class _Sample:
    """The progress of a sample: the outputs of the stages, its tokens, and how many of them each stage has read."""

    def __init__(self, wiring: Table, members: Table, inputs: Tensors) -> None:
        self._stages, self._rules, self._members = wiring["stages"], wiring["tokens"], members
        self._made: dict[str, Tensors] = {DATA: inputs}
        self._read: dict[str, int] = {}
        self._classes: list[int] = []
        start: Any = self._rules["start"] if self._rules else []
        begun: Any = self._find(start).flat if isinstance(start, str) else start
        self._tokens = [int(token) for token in begun]
        if isinstance(start, str) and not self._tokens:
            raise PipelineError(f"a sample has no tokens in '{start}'", hint="a text begins with one token at least")
        self._first = len(self._tokens)

    def run(self) -> Runs:
        for stage in self._stages:
            if stage["crop"]:
                yield from self._run_boxes(stage)
            elif stage["repeat"]:
                yield from self._run_loop(stage)
            else:
                (outputs,) = yield stage["run"], [self._fill(stage, {})]
                self._take(stage, outputs)
        if not any(stage["text"] or stage["crop"] for stage in self._stages):
            return self._made[self._stages[-1]["run"]]
        chosen = [*self._classes, *self._tokens[self._first :]]
        ends = self._rules and chosen and chosen[-1] == self._rules["end"]
        return {CHOSEN: np.array(chosen[:-1] if ends else chosen, np.int64)}

    def _run_loop(self, stage: Table) -> Runs:
        specs, text, state = self._members[stage["run"]]["inputs"], stage["text"], Tensors()
        # Without a cache the whole text must fit into the input.
        room = None if text["align"] == "right" else _find_length(specs, text["input"], self._feed(stage))
        while len(self._tokens) - self._first < self._rules["most"]:
            has_ended = len(self._tokens) > self._first and self._tokens[-1] == self._rules["end"]
            if has_ended or (room is not None and len(self._tokens) > room):
                return {}
            given = self._fill(stage, state)
            (outputs,) = yield stage["run"], [given]
            self._take(stage, outputs)
            fed = stage["state"].items()
            state = {name: _feed_back(_list_sizes(specs[name]), given[name], outputs[output]) for name, output in fed}
        return {}

    def _run_boxes(self, stage: Table) -> Runs:
        crop = stage["crop"]
        spec, sources = self._members[stage["run"]]["inputs"][crop["input"]], ("image", "boxes", "scores")
        pictures = cut_boxes(crop, spec, *(self._find(crop[source]) for source in sources))
        given = [{**self._feed(stage), crop["input"]: picture} for picture in pictures]
        # Without inputs the device need not be started.
        for outputs in (yield stage["run"], given) if given else ():
            self._classes.append(int(_rows(stage["run"], crop["result"], outputs)[-1].argmax()))
        return {}

    def _find(self, source: str) -> Any:
        owner, _, tensor = source.partition(".")
        return self._made[owner][tensor]

    def _feed(self, stage: Table) -> Tensors:
        """Returns the inputs that sources fill, and the initial state."""
        specs, inputs = self._members[stage["run"]]["inputs"], Tensors()
        for name, source in stage["feeds"].items():
            inputs[name] = self._find(source)
        for name in stage["state"]:
            # Zeros for one sample, with open dimensions of size 0.
            shape = _list_sizes(specs[name])
            sizes = [size if isinstance(size, int) else int(not axis) for axis, size in enumerate(shape)]
            zeros = np.zeros(sizes, specs[name]["dtype"])
            # An initial state may be longer than the input: the input takes its last rows.
            inputs[name] = _feed_back(shape, zeros, inputs[name]) if name in inputs else zeros
        return inputs

    def _fill(self, stage: Table, state: Tensors) -> Tensors:
        """Returns the inputs of a stage, which sources, its state and the text fill."""
        given = {**self._feed(stage), **state}
        if not stage["text"]:
            return given
        text, specs, known = stage["text"], self._members[stage["run"]]["inputs"], self._tokens
        is_right, length = text["align"] == "right", _find_length(specs, text["input"], given)
        # An open input takes only the new tokens; one of fixed size is filled up, or takes the newest tokens.
        window = known[self._count_read(stage) :] if length is None else known[-length:] if is_right else known[:length]
        size = len(window) if length is None else length
        first = len(known) - len(window) if is_right else 0
        inputs = {text["input"]: _place(specs[text["input"]], window, size, self._rules["pad"], is_right=is_right)}
        if text["positions"]:
            counted = [*range(first, first + len(window))]
            inputs[text["positions"]] = _place(specs[text["positions"]], counted, size, 0, is_right=is_right)
        if text["mask"]:
            mask = specs[text["mask"]]
            most = _find_length(specs, text["mask"], given) or self._count_held(stage, given, len(known) - size) + size
            ones = [1] * min(len(known), most)
            inputs[text["mask"]] = _place(mask, ones, most, 0, is_right=is_right)
        return {**given, **inputs}

    def _count_read(self, stage: Table) -> int:
        """Returns how many tokens the state of a stage covers: those that it, or the source of its state, has read."""
        if not stage["state"]:
            return 0
        sources = [stage["feeds"][name].partition(".")[0] for name in stage["state"] if name in stage["feeds"]]
        return self._read.get(stage["run"]) or max((self._read.get(owner, 0) for owner in sources), default=0)

    def _count_held(self, stage: Table, given: Tensors, default: int) -> int:
        """Returns the length of a stage's state on the axis on which it grows, initial padding included."""
        mine = self._members[stage["run"]]
        for name, output in stage["state"].items():
            pairs = zip(_list_sizes(mine["inputs"][name]), _list_sizes(mine["outputs"][output]), strict=False)
            for axis, (size, made) in enumerate(pairs):
                # On the axis that grows, the open size differs from the output's; cross-attention keeps its length.
                if axis and not isinstance(size, int) and size != made:
                    return int(given[name].shape[axis])
        return default

    def _take(self, stage: Table, outputs: Tensors) -> None:
        """Takes the outputs of a run, and the token that they choose."""
        text, self._made[stage["run"]] = stage["text"], outputs
        if text:
            self._read[stage["run"]] = len(self._tokens)
            rows = _rows(stage["run"], text["scores"], outputs)
            # A single row belongs to the last token; of several rows, the one at the position of the token counts.
            is_last = text["align"] == "right" or len(rows) == 1
            self._tokens.append(int(rows[-1 if is_last else min(len(self._tokens), len(rows)) - 1].argmax()))


def _rows(member: str, name: str, outputs: Tensors) -> Any:
    value = outputs[name]
    if not value.ndim or not value.size:
        message = f"'{member}' gave an empty '{name}', from which nothing can be chosen"
        raise PipelineError(message, hint="change the model")
    return value.reshape(-1, value.shape[-1])


def _list_sizes(spec: Table) -> list[Any]:
    """Returns the size of each axis: a number, or the name of an open dimension, or None for one without a name."""
    return list(spec["shape"] or ())


def _feed_back(shape: list[Any], held: Any, output: Any) -> Any:
    """Returns the input of the next run: the last rows of an output, behind those of `held` if it is shorter.

    On an open axis the output counts as it is, and may grow.
    """
    for axis, size in enumerate(shape or output.shape):
        if isinstance(size, int) and output.shape[axis] != size:
            output = output if output.shape[axis] > size else np.concatenate([held, output], axis)
            # By positions, since a slice of the last 0 rows would be all of them.
            output = output.take(range(output.shape[axis] - size, output.shape[axis]), axis)
    return np.asarray(output, order="C")


def _find_length(specs: Table, name: str, given: Tensors) -> int | None:
    """Returns how many tokens an input takes: its own size, or that of its named dimension elsewhere; None for any."""
    size = [0, *_list_sizes(specs[name])][-1]
    if not isinstance(size, str):
        return size if size is None else int(size)
    named = {
        dim: int(value.shape[axis])
        for other, value in given.items()
        for axis, dim in enumerate(_list_sizes(specs[other]))
        if isinstance(dim, str)
    }
    return named.get(size)


def _place(spec: Table, values: list[int], length: int, pad: int, *, is_right: bool) -> Any:
    sizes = [dim if isinstance(dim, int) else 1 for dim in _list_sizes(spec)[:-1]]
    array = np.full([*sizes, length], pad, spec["dtype"])
    array[..., slice(length - len(values), length) if is_right else slice(0, len(values))] = values
    return array


def cut_boxes(crop: Table, spec: Table, image: Any, boxes: Any, scores: Any) -> list[Any]:
    """Returns the crops of the best boxes, in the input's shape and type, from left to right.

    `image` is [1, C, H, W], `boxes` [..., N, 4] and `scores` [..., N].

    Raises:
        PipelineError: the three are of other shapes.
    """
    corners, ranked = boxes.reshape(-1, boxes.shape[-1]) if boxes.ndim else boxes, scores.reshape(-1)
    if image.ndim != 4 or corners.ndim != 2 or corners.shape[1] != 4 or len(corners) != ranked.size:
        shapes = f"image {list(image.shape)}, boxes {list(boxes.shape)}, scores {list(scores.shape)}"
        raise PipelineError(f"no boxes can be cut out of {shapes}", hint="they are [1,C,H,W], [...,N,4] and [...,N]")
    shape = _list_sizes(spec)
    if len(shape) != 4 or shape[1] != image.shape[1]:
        message = f"a picture {list(image.shape)} does not fit [{spec['name']}: {spec['dtype']}{shape}]"
        raise PipelineError(message, hint="as many channels, [1,C,H,W]")
    if crop["units"] == "shares":
        height, width = image.shape[2:]
        corners = corners * np.array([width, height, width, height])
    order = [place for place in np.argsort(-ranked, kind="stable") if ranked[place] >= crop["least"]]
    found = [corners[place].astype(np.float64) for place in order]
    whole = [box for box in found if np.isfinite(box).all() and box[2] > box[0] and box[3] > box[1]]
    best = sorted(whole[: crop["most"]], key=tuple)
    return [_resize(image.astype(np.float64), box, shape[2:]).astype(spec["dtype"]) for box in best]


def _resize(image: Any, box: Any, size: list[int]) -> Any:
    """Returns a box resized (bilinear, half-pixel centres); beyond the image its edge is repeated."""
    for axis, low, high in ((2, box[1], box[3]), (3, box[0], box[2])):
        count, last = size[axis - 2], image.shape[axis] - 1
        places = np.clip(low + (np.arange(count) + 0.5) * (high - low) / count - 0.5, 0, last)
        below = np.floor(places).astype(np.int64)
        share = (places - below).reshape([-1 if each == axis else 1 for each in range(4)])
        image = image.take(below, axis) * (1 - share) + image.take(np.minimum(below + 1, last), axis) * share
    return image
