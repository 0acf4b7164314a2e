"""State: outputs that become inputs of the next step, such as a KV cache or the hidden state of a recurrent layer.

`feed_back` is the only rule by which an output becomes the next input, and `run_steps` the only loop.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated

import msgspec
import numpy as np

from edgekit.errors import UsageError, suggest_name
from edgekit.model.tensors import Array, Tensors, TensorSpec

MOST_STEPS = 4096
MOST_FEEDS = 4096
"""Limits for recipes and bundles: a model of 100 layers feeds 200 tensors back."""

# Words that mark an input from the previous step, and an output for the next step.
_PAST = frozenset({"past", "prev", "previous", "initial", "init", "old", "last", "in"})
_NEXT = frozenset({"present", "next", "new", "updated", "out", "n"})
# Words that are no evidence of state by themselves: an image may also be called "in" and "out".
_WEAK = frozenset({"in", "out", "n"})
# Prefix of the stem of an output whose name has no word of _NEXT: only inputs with a strong word of _PAST match it.
_WHOLE = "="


class State(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How a model is run step by step: `feeds` maps each state input to the output that it comes from.

    Every `steps` consecutive samples make a sequence; its first sample holds the initial state, zeros where it has
    none. `feed_back` says what happens where an output is longer or shorter than its input.
    """

    steps: Annotated[int, msgspec.Meta(ge=1, le=MOST_STEPS)] = 1
    feeds: Annotated[dict[str, str], msgspec.Meta(max_length=MOST_FEEDS)] = {}


def find_fed_back(state: State | None) -> Mapping[str, str]:
    """Returns the feeds of a model that is run step by step; none if a sequence has one step."""
    return state.feeds if state is not None and state.steps > 1 else {}


def match_state(inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> dict[str, str]:
    """Returns for each input that holds state the output that feeds it, by name, type and shape.

    `past_key_values.0.key` is fed by `present.0.key`, `state` by `new_state`, `state_out` or `stateN`, `h` by `hn`,
    `initial_h` by `next_h`, `prev_state` by `state`. An input whose name fits more than one output is not paired.
    """
    stems: dict[str, list[TensorSpec]] = {}
    for output in outputs:
        for stem in _output_stems(output.name):
            stems.setdefault(stem, []).append(output)
    found = dict[str, str]()
    for spec in inputs:
        fitting = {out.name for stem in _input_stems(spec.name) for out in stems.get(stem, ()) if fits(spec, out)}
        if len(fitting) == 1:
            found[spec.name] = fitting.pop()
    # An output feeds one input: if it fits two, the right one is unknown, and neither is paired.
    takers = Counter(found.values())
    return {name: output for name, output in found.items() if takers[output] == 1}


def resolve_state(given: State | None, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> State:
    """Returns the state of a model as stated; if no feeds are stated, with those found by name.

    Raises:
        UsageError: a name is no input or output, the two do not fit, or several steps are asked of a model without
            state.
    """
    given = given or State()
    if not given.feeds:
        # Bools are masks: an encoder returns that of its input for the decoder.
        numbers = [spec for spec in inputs if spec.dtype != "bool"]
        given = msgspec.structs.replace(given, feeds=match_state(numbers, outputs))
    fault = find_fault(given, inputs, outputs)
    if fault is not None:
        raise UsageError(f"[state] {fault[0]}", hint=fault[1])
    return given


def find_fault(state: State, inputs: Sequence[TensorSpec], outputs: Sequence[TensorSpec]) -> tuple[str, str] | None:
    """Returns what is wrong with the state of a model with these inputs and outputs, and a hint, or None."""
    takes, gives = {spec.name: spec for spec in inputs}, {spec.name: spec for spec in outputs}
    for name, output in state.feeds.items():
        if name not in takes:
            return f"feeds '{name[:99]}', which is no input of the model", suggest_name(name, takes)
        if output not in gives:
            return f"feeds '{name}' from '{output[:99]}', which is no output", suggest_name(output, gives)
        if not fits(takes[name], gives[output]):
            what = f"feeds [{takes[name]}] from [{gives[output]}], which does not fit"
            return what, "types and ranks must be the same, and all sizes but one"
    again = next((output for output, count in Counter(state.feeds.values()).items() if count > 1), None)
    if again is not None:
        return f"feeds several inputs from '{again}'", "name one output for each input"
    if state.steps > 1 and not state.feeds:
        fault = "asks for steps, and by their names no output of the model feeds an input"
        # Each input with the next output that has its type and shape: exporters keep the order.
        left = {out.name: out for out in outputs}
        pairs = list[str]()
        for spec in inputs:
            if alike := [name for name, out in left.items() if (spec.dtype, spec.shape) == (out.dtype, out.shape)]:
                pairs.append(f'"{spec.name}" = "{left.pop(alike[0]).name}"')
        every = ", ".join(pairs) or '"INPUT" = "OUTPUT"'
        line = f"[state] feeds = {{ {every} }}, without what is no state"
        return fault, f"say which does in a recipe (--recipe FILE): {line}"
    if state.steps > 1 and len(state.feeds) == len(inputs):
        return "feeds every input", "leave out the one that brings something new"
    return None


def fits(spec: TensorSpec, output: TensorSpec) -> bool:
    """Returns True if an output can become this input: same type and rank, and at most one size differs."""
    if spec.dtype != output.dtype or not spec.is_tensor or spec.dtype == "string":
        return False
    if spec.shape is None or output.shape is None:
        return True
    pairs = list(zip(spec.shape, output.shape, strict=False))
    differing = sum(1 for a, b in pairs if isinstance(a, int) and isinstance(b, int) and a != b)
    return len(spec.shape) == len(output.shape) and differing <= 1


def first_state(spec: TensorSpec) -> Array:
    """Returns the initial state of a sequence if the data have none: zeros, with open dimensions of size 0."""
    shape = tuple(dim if isinstance(dim, int) else 0 for dim in spec.shape or ())
    return np.zeros(shape, np.dtype(spec.dtype))


def feed_back(spec: TensorSpec, held: Array, output: Array) -> Array:
    """Returns an input's value for the next step, from `held`, its value in this step, and `output`.

    On an axis of fixed size, the last rows of `output` are used, preceded by the last rows of `held` if `output` is
    shorter: a window. On an open axis `output` is used as it is, and may grow.
    """
    for axis, size in enumerate(spec.shape or output.shape):
        if not isinstance(size, int) or output.shape[axis] == size:
            continue
        if output.shape[axis] < size:
            output = np.concatenate([held, output], axis)
        # By positions, since a slice of the last 0 rows would be all of them.
        output = output.take(range(output.shape[axis] - size, output.shape[axis]), axis)
    return np.asarray(output, order="C")


def run_steps(
    steps: Iterable[Sequence[Tensors]],
    feeds: Mapping[str, str],
    specs: Mapping[str, TensorSpec],
    run: Callable[[Sequence[Tensors]], Sequence[Tensors]],
) -> Iterator[tuple[Sequence[Tensors], Sequence[Tensors]]]:
    """Yields the inputs and outputs of each step, for several sequences in parallel, and feeds state back.

    `steps` holds for each step a sample of every sequence. The samples of the first step hold the initial state; state
    in later samples is ignored. If `run` returns fewer results than it was given, that was the last step.
    """
    states: list[dict[str, Array]] = []
    for samples in steps:
        states = states or [{} for _ in samples]
        given = [{**sample, **state} for sample, state in zip(samples, states, strict=True)]
        outputs = run(given)
        yield given, outputs
        if len(outputs) < len(given):
            return
        states = [
            {name: feed_back(specs[name], held[name], made[output]) for name, output in feeds.items()}
            for held, made in zip(given, outputs, strict=True)
        ]


def _words(name: str) -> list[str]:
    return [word for word in re.split(r"[^a-z0-9]+", name.lower()) if word]


def _input_stems(name: str) -> set[str]:
    """Returns the stems by which an input may match an output: its whole name, and that without words of _PAST."""
    words = _words(name.replace("past_key_values", "past"))
    rest = [word for word in words if word not in _PAST]
    whole = "_".join(words)
    # h0 and h_0 pair with hn and h_n.
    found = {whole, re.sub(r"(?<=[a-z])_?0$", "", whole)}
    if len(rest) < len(words):
        found.add(_join(words, rest))
        # A strong word in the input's name is enough: prev_state pairs with state.
        if not _WEAK.issuperset({*words} - {*rest}):
            found.add(_WHOLE + "_".join(rest))
    return found - {""}


def _output_stems(name: str) -> set[str]:
    """Returns the stems by which an output may match an input: its name without words of _NEXT, else the whole name."""
    words = _words(name)
    rest = [word for word in words if word not in _NEXT]
    if len(rest) < len(words):
        return {_join(words, rest)} - {""}
    # stateN, hn, cn
    short = re.fullmatch(r"(.*[a-z])(?:N|(?<=\b[a-z])n)", name)
    return {_WHOLE + "_".join(words), *({"_".join(_words(short[1]))} if short else ())}


def _join(words: Sequence[str], rest: Sequence[str]) -> str:
    """Returns the stem of a name; a name of marking words alone, such as `past` and `present`, is a KV cache."""
    if rest:
        return "_".join(rest)
    return "" if _WEAK.issuperset(words) else "kv"
