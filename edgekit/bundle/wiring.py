"""The wiring of a group: its stages in order, the source of each input, and how samples run through it.

A source is `data.NAME`, an input of the group, or `MEMBER.OUTPUT`, the output of an earlier stage. What a wiring does
not state is found by name: an input is fed by the output of the same name, a state by the output that continues it.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Literal

import msgspec

from edgekit.bundle.edgekit_pipeline import DATA, PipelineError, run_sample
from edgekit.errors import DataError, suggest_name
from edgekit.model.state import MOST_FEEDS, fits, match_state
from edgekit.model.tensors import Array, Tensors, TensorSpec

MAX_MEMBERS, MAX_TOKENS, MAX_CROPS = 16, 4096, 64
"""Limits for a group that may come from an untrusted source."""

MEMBER_NAME = r"[a-z][a-z0-9_]{0,31}"
_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=256)]
_Feeds = Annotated[dict[str, _Name], msgspec.Meta(max_length=MOST_FEEDS)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
# Types that can hold the index of any token.
_TOKEN_TYPES = ("int64", "int32")
Fault = tuple[str, str]
"""What is wrong, and a hint."""


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    pass


class Text(_Strict, frozen=True, kw_only=True):
    """How a stage reads the tokens so far, and predicts the next one.

    `input` takes their indices, `mask` is 1 where there is a token and 0 elsewhere, `positions` counts them from 0.
    With `align = "right"` the last token is at the end, as a cache with a sliding window needs it. In `scores` [...,
    rows, tokens] the largest value in the row of the last token is the next token.
    """

    input: _Name
    scores: _Name
    mask: str = ""
    positions: str = ""
    align: Literal["left", "right"] | None = None


class Crop(_Strict, frozen=True, kw_only=True):
    """How a stage runs once for each of the best boxes of an image.

    `image` [1, C, H, W], `boxes` [..., N, 4] (left, top, right, bottom) and `scores` [..., N] are sources. At most
    `most` boxes whose score is `least` or more are cut out, resized (bilinear, half-pixel centres) for `input`, and run
    from left to right. The index of the largest value of `result` is the class of the box.
    """

    input: _Name
    image: _Name
    boxes: _Name
    scores: _Name
    result: _Name
    units: Literal["pixels", "shares"] = "pixels"
    most: Annotated[int, msgspec.Meta(ge=1, le=MAX_CROPS)] = 16
    least: float = 0.5


class Stage(_Strict, frozen=True, kw_only=True):
    """A stage, which runs one member: `feeds` gives inputs their source, `state` the output of the run before.

    With `repeat` it runs until the end token or the maximum of tokens; an input in `state` begins with its source, or
    zeros.
    """

    run: _Name
    feeds: _Feeds = {}
    state: _Feeds = {}
    text: Text | None = None
    crop: Crop | None = None
    repeat: bool = False


class Tokens(_Strict, frozen=True, kw_only=True):
    """The tokens that a group begins with, as numbers or a source `data.NAME`, and where the text ends.

    `end` is the token that ends a text, None for none; at most `most` are generated. `pad` fills empty positions.
    """

    start: Annotated[tuple[_Token, ...], msgspec.Meta(min_length=1, max_length=MAX_TOKENS)] | _Name
    end: _Token | None = None
    most: Annotated[int, msgspec.Meta(ge=1, le=MAX_TOKENS)] = 64
    pad: _Token = 0


class Wiring(_Strict, frozen=True, kw_only=True):
    """The stages of a group in the order in which they run, each member once."""

    stages: Annotated[tuple[Stage, ...], msgspec.Meta(min_length=1, max_length=MAX_MEMBERS)]
    tokens: Tokens | None = None


class Interface(msgspec.Struct, frozen=True, kw_only=True):
    """The inputs and outputs of a member, by name."""

    inputs: Mapping[str, TensorSpec]
    outputs: Mapping[str, TensorSpec]


def describe_interface(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> Interface:
    """Returns the interface of a model with these inputs and outputs."""
    return Interface(inputs={spec.name: spec for spec in inputs}, outputs={spec.name: spec for spec in outputs})


def split_source(source: str) -> tuple[str, str]:
    """Returns the member (or "data") and the tensor that a source names; tensor names may contain dots."""
    member, _, tensor = source.partition(".")
    return member, tensor


def list_sources(stage: Stage) -> Iterator[str]:
    """Yields every source that a stage reads."""
    yield from stage.feeds.values()
    if stage.crop is not None:
        yield from (stage.crop.image, stage.crop.boxes, stage.crop.scores)


def list_data(wiring: Wiring, members: Mapping[str, Interface]) -> tuple[TensorSpec, ...]:
    """Returns the group's own inputs, by name; an image from which only boxes are cut has no shape of its own."""
    found: dict[str, TensorSpec] = {}
    for stage in wiring.stages:
        for name, source in stage.feeds.items():
            owner, tensor = split_source(source)
            if owner == DATA and name in members[stage.run].inputs:
                found[tensor] = msgspec.structs.replace(members[stage.run].inputs[name], name=tensor)
    for stage in wiring.stages:
        if stage.crop is not None and stage.crop.image.startswith(f"{DATA}."):
            tensor = split_source(stage.crop.image)[1]
            found.setdefault(tensor, TensorSpec(name=tensor, dtype="float32", shape=(1, None, None, None)))
    if wiring.tokens is not None and isinstance(wiring.tokens.start, str):
        tensor = split_source(wiring.tokens.start)[1]
        found.setdefault(tensor, TensorSpec(name=tensor, dtype="int64", shape=(1, None)))
    return tuple(found[name] for name in sorted(found))


def find_fault(wiring: Wiring, members: Mapping[str, Interface]) -> Fault | None:
    """Returns the first fault of the wiring, which may be untrusted, with a hint; None if there is none."""
    return next(_list_faults(wiring, members), None)


def _list_faults(wiring: Wiring, members: Mapping[str, Interface]) -> Iterator[Fault]:
    for name in members:
        if not re.fullmatch(MEMBER_NAME, name) or name == DATA:
            yield f"has a member {name[:99]!r}", f"a name is like encoder, and not '{DATA}'"
    runs = Counter(stage.run for stage in wiring.stages)
    for name in (*runs, *members):
        if name not in members:
            yield f"runs '{name[:99]}', which is no member", suggest_name(name, members)
        elif runs[name] != 1:
            yield f"runs '{name}' in {runs[name]} stages", "each member has one stage"
    texts, crops = [stage for stage in wiring.stages if stage.text], [stage for stage in wiring.stages if stage.crop]
    if bool(texts) != bool(wiring.tokens):
        yield "has tokens and no stage with text, or the other way round", "[tokens] start = [1], and a stage's `text`"
    if len(crops) > 1 or (crops and texts):
        yield "has several stages that choose", "cut boxes out in one stage, or write text"
    if wiring.tokens is not None and isinstance(wiring.tokens.start, str):
        owner, tensor = split_source(wiring.tokens.start)
        if owner != DATA or not tensor:
            yield f"begins with {wiring.tokens.start[:99]!r}", f"numbers of tokens, or {DATA}.NAME"
    before: dict[str, Stage] = {}
    for stage in wiring.stages:
        for what, hint in _judge_stage(stage, before, members):
            yield f"has a stage '{stage.run}' that {what}", hint
        before[stage.run] = stage


def _judge_stage(stage: Stage, before: Mapping[str, Stage], members: Mapping[str, Interface]) -> Iterator[Fault]:
    interface = members[stage.run]
    filled = Counter((*stage.feeds.keys() | stage.state.keys(), *_list_roles(stage)))
    for name in filled:
        if name not in interface.inputs:
            yield f"fills '{name[:99]}', which is no input", suggest_name(name, interface.inputs)
        elif filled[name] > 1:
            yield f"fills '{name}' twice", "name one source"
    for name in interface.inputs:
        if name not in filled:
            yield f"leaves '{name}' empty", f'feeds = {{"{name}" = "{DATA}.NAME"}}, or MEMBER.OUTPUT'
    if stage.repeat and stage.text is None:
        yield "repeats and reads no text", "text = { input = ..., scores = ... }"
    if stage.state and not stage.repeat:
        yield "has state and runs once", "repeat = true"
    for source in list_sources(stage):
        owner, tensor = split_source(source)
        if owner == DATA:
            if not tensor:
                yield f"is fed from {source[:99]!r}", f"{DATA}.NAME is an input of the group"
        elif owner not in before:
            yield f"is fed from {source[:99]!r}, and no stage before it has that name", suggest_name(owner, before)
        elif before[owner].repeat or before[owner].crop is not None:
            yield f"is fed from '{owner}', which runs several times", "feed it from a stage that runs once"
        elif tensor not in members[owner].outputs:
            yield f"is fed from {source[:99]!r}, which is no output", suggest_name(tensor, members[owner].outputs)
    yield from _judge_outputs(stage, interface)
    for name in stage.feeds.keys() & interface.inputs.keys():
        owner, tensor = split_source(stage.feeds[name])
        spec, output_spec = interface.inputs[name], members[owner].outputs.get(tensor) if owner in members else None
        if output_spec is None:
            continue
        sizes = zip(spec.shape or (), output_spec.shape or (), strict=False)
        differs = any(isinstance(size, int) and isinstance(own, int) and size != own for size, own in sizes)
        # An initial state is cut to the size of its input; any other source must have that size.
        if not fits(spec, output_spec) or (name not in stage.state and differs):
            yield f"feeds [{spec}] from [{output_spec}]", "types and sizes must be the same"


def _list_roles(stage: Stage) -> list[str]:
    """Returns the inputs that the stage fills itself: tokens, mask, positions, or the crop of a box."""
    text = () if stage.text is None else (stage.text.input, stage.text.mask, stage.text.positions)
    return [*filter(None, text), *(() if stage.crop is None else (stage.crop.input,))]


def _judge_outputs(stage: Stage, interface: Interface) -> Iterator[Fault]:
    for name, output in stage.state.items():
        if output not in interface.outputs:
            yield f"has state from '{output[:99]}', which is no output", suggest_name(output, interface.outputs)
        elif name in interface.inputs and not fits(interface.inputs[name], interface.outputs[output]):
            yield (
                f"has state [{interface.inputs[name]}] from [{interface.outputs[output]}]",
                "all sizes but one must be the same",
            )
    read = [*([stage.text.scores] if stage.text else []), *([stage.crop.result] if stage.crop else [])]
    for name in read:
        if name not in interface.outputs:
            yield f"chooses by '{name[:99]}', which is no output", suggest_name(name, interface.outputs)
        elif interface.outputs[name].dtype in _TOKEN_TYPES:
            before = "end the model before its ArgMax: edgekit prepare MODEL --outputs NAMES --out FILE"
            yield f"chooses by [{interface.outputs[name]}], whose whole numbers are no scores", before
    of_tokens = () if stage.text is None else (stage.text.input, stage.text.positions)
    for name in _list_roles(stage):
        if (spec := interface.inputs.get(name)) is None:
            continue
        # All sizes are known, except for the batch and, of text, the length: with a single axis, that is the length.
        known = list(spec.shape or (0,))
        known = known[1:] if len(known) > 1 and not isinstance(known[0], int) else known
        known = known[:-1] if stage.crop is None and not isinstance(known[-1], int) else known
        if not all(isinstance(dim, int) and dim > 0 for dim in known):
            yield f"cannot fill [{spec}]", "give its dimensions sizes: dims = { NAME = 64 }"
        elif name in of_tokens and spec.dtype not in _TOKEN_TYPES:
            yield f"cannot write numbers of tokens into [{spec}]", f"it takes {' or '.join(_TOKEN_TYPES)}"
        elif spec.dtype == "string":
            yield f"cannot fill [{spec}]", "it takes numbers"


def resolve_wiring(wiring: Wiring, members: Mapping[str, Interface]) -> Wiring:
    """Returns the wiring with every source stated; what it states already does not change.

    An input without a source is fed by the first of these that exists: the output of the same name of an earlier stage,
    the nearest one; an output of an earlier stage that `match_state` pairs with it; the group's input of the same name.
    A stage that repeats gets those of its own outputs back that `match_state` pairs with its inputs. Text is aligned
    right if any stage has state.
    """
    stages: list[Stage] = []
    for stage in wiring.stages:
        if (interface := members.get(stage.run)) is None:
            stages.append(stage)
            continue
        state, roles, feeds = dict(stage.state), _list_roles(stage), dict(stage.feeds)
        if stage.repeat and not state:
            state = match_state(list(interface.inputs.values()), list(interface.outputs.values()))
        for name in interface.inputs:
            if name in feeds or name in roles:
                continue
            source = _find_source(name, interface, stages, members)
            # State without a source begins with zeros.
            if source is not None or name not in state:
                feeds[name] = source or f"{DATA}.{name}"
        stages.append(msgspec.structs.replace(stage, feeds=feeds, state=state))
    align = "right" if any(stage.state for stage in stages) else "left"
    for place, stage in enumerate(stages):
        if stage.text is not None and stage.text.align is None:
            stages[place] = msgspec.structs.replace(stage, text=msgspec.structs.replace(stage.text, align=align))
    return msgspec.structs.replace(wiring, stages=tuple(stages))


def _find_source(name: str, own: Interface, before: Sequence[Stage], members: Mapping[str, Interface]) -> str | None:
    for stage in reversed(before):
        other = members.get(stage.run)
        if other is None or stage.repeat or stage.crop is not None:
            continue
        if name in other.outputs:
            return f"{stage.run}.{name}"
        found = match_state([own.inputs[name]], list(other.outputs.values()))
        if name in found:
            return f"{stage.run}.{found[name]}"
    return None


Run = Callable[[str, Sequence[Tensors]], Sequence[Tensors]]
"""Runs a member on some inputs and returns the outputs, one for each."""


def run_pipeline(
    wiring: Wiring, members: Mapping[str, Interface], samples: Sequence[Tensors], run: Run
) -> list[dict[str, Array]]:
    """Returns the result of each sample: the tokens or classes chosen, without the end token.

    If nothing is chosen, the result is the last stage's outputs. All samples run together: a device is started once for
    each stage, and once for each token. `wiring` is resolved and valid.

    Raises:
        DataError: a sample begins with no tokens, or a member's output is nothing that a stage can read.
    """
    order = [stage.run for stage in wiring.stages]
    wiring_table, specs = msgspec.to_builtins(wiring), msgspec.to_builtins(members)
    results: list[dict[str, Array]] = [{} for _ in samples]
    requests: dict[int, tuple[str, Sequence[Tensors]]] = {}
    try:
        pipelines = [run_sample(wiring_table, specs, dict(sample)) for sample in samples]
        outputs: dict[int, Sequence[Tensors] | None] = dict.fromkeys(range(len(samples)))
        while outputs:
            for index, outputs_of_run in outputs.items():
                try:
                    requests[index] = pipelines[index].send(outputs_of_run)
                except StopIteration as end:
                    results[index] = end.value
            # The member of the earliest stage runs next: samples that have passed it wait for the others.
            member = min((name for name, _ in requests.values()), key=order.index, default="")
            due = {index: requests.pop(index)[1] for index in sorted(requests) if requests[index][0] == member}
            member_inputs = [inputs for each in due.values() for inputs in each]
            remaining = iter(run(member, member_inputs) if member_inputs else ())
            outputs = {index: [next(remaining) for _ in each] for index, each in due.items()}
    except PipelineError as error:
        raise DataError(str(error), hint=error.hint) from error
    return results
