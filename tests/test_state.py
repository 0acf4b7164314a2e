"""State: which outputs feed which inputs, and what a step makes of them."""

import numpy as np
import pytest
from tiny_models import spec

from edgekit.errors import UsageError
from edgekit.model.state import State, feed_back, first_state, match_state, resolve_state, run_steps
from edgekit.model.tensors import Tensors, TensorSpec


@pytest.mark.parametrize(
    ("inputs", "outputs", "feeds"),
    [
        ("ids past_key_values.0.key past_key_values.0.value", "logits present.0.key present.0.value", "1>1 2>2"),
        ("ids past_key_0 past_value_0", "logits present_value_0 present_key_0", "1>2 2>1"),
        ("ids past", "logits present", "1>1"),
        ("input state", "output stateN", "1>1"),
        ("input h c", "output hn cn", "1>1 2>2"),
        ("x h_0 c_0", "y h_n c_n", "1>1 2>2"),
        ("x initial_h", "y next_h", "1>1"),
        ("x prev_state", "y state", "1>1"),
        ("x state", "y new_state", "1>1"),
        ("x cache_time", "y cache_time_next", "1>1"),
        ("x state_in", "y state_out", "1>1"),
        ("in", "out", ""),
        ("pixels", "person n", ""),
        ("mea image", "mean", ""),
        ("x state", "new_state state_out", ""),  # two outputs could be meant
    ],
)
def test_state_is_matched_by_name(inputs: str, outputs: str, feeds: str) -> None:
    takes, gives = ([spec(name, 1, 4) for name in names.split()] for names in (inputs, outputs))
    wanted = {takes[int(pair[0])].name: gives[int(pair[2])].name for pair in feeds.split()}
    assert match_state(takes, gives) == wanted


@pytest.mark.parametrize(
    "output",
    [spec("new_h", 1, 4, dtype="float16"), spec("new_h", 4), spec("new_h", 2, 5), spec("new_h", 1, 4, dtype="string")],
    ids=str,
)
def test_state_is_not_matched_where_type_or_shape_differ(output: TensorSpec) -> None:
    assert match_state([spec("h", 1, 4, dtype="string" if output.dtype == "string" else "float32")], [output]) == {}


def test_a_mask_that_comes_out_again_is_no_state_unless_it_is_stated() -> None:
    inputs, outputs = ([spec(name, 1, 4, dtype="bool")] for name in ("mask", "mask_out"))
    assert resolve_state(None, [*inputs, spec("x", 1)], outputs) == State()
    assert resolve_state(State(feeds={"mask": "mask_out"}), inputs, outputs).feeds == {"mask": "mask_out"}


@pytest.mark.parametrize(
    "output", [spec("new_h", 1, 5), spec("new_h", None, 4), TensorSpec(name="new_h", dtype="float32", shape=None)]
)
def test_one_size_may_differ_and_open_ones_fit_any(output: TensorSpec) -> None:
    assert match_state([spec("h", 1, 4)], [output]) == {"h": "new_h"}


@pytest.mark.parametrize(
    ("shape", "output", "wanted"),
    [
        ((1, 3), [[7, 8, 9]], [[7, 8, 9]]),
        ((1, 3), [[0, 1, 2, 9]], [[1, 2, 9]]),  # a window: the oldest goes
        ((1, 3), [[9]], [[1, 2, 9]]),  # only what is new
        ((1, 0), [[9]], []),
        ((1, None), [[0, 1, 2, 9]], [[0, 1, 2, 9]]),  # an open dimension grows
    ],
)
def test_an_output_becomes_the_next_input(
    shape: tuple[int | None, ...], output: list[list[int]], wanted: list[list[int]]
) -> None:
    held = np.array([[0, 1, 2]], np.float32)
    found = feed_back(spec("h", *shape), held, np.array(output, np.float32))
    assert found.tolist() == (wanted or [[]])
    assert found.flags.c_contiguous


def test_sequences_side_by_side_keep_their_own_state() -> None:
    rows: list[list[Tensors]] = [
        [{"x": np.array([1.0]), "h": np.array([10.0])}, {"x": np.array([2.0]), "h": np.array([0.0])}],
        [{"x": np.array([1.0]), "h": np.array([99.0])}, {"x": np.array([2.0])}],
        [{"x": np.array([1.0])}, {"x": np.array([2.0])}],
    ]
    steps = run_steps(rows, {"h": "n"}, {"h": spec("h", 1)}, lambda given: [{"n": g["x"] + g["h"]} for g in given])
    assert [[float(out["n"][0]) for out in outputs] for _, outputs in steps] == [[11, 2], [12, 4], [13, 6]]


def test_a_step_that_lacks_a_sequence_is_the_last() -> None:
    rows: list[list[Tensors]] = [[{"x": np.array([1.0]), "h": np.array([0.0])}]] * 3
    assert len(list(run_steps(rows, {"h": "n"}, {"h": spec("h", 1)}, lambda _: []))) == 1


def test_a_sequence_begins_with_zeros() -> None:
    assert first_state(spec("h", 1, None, 4)).shape == (1, 0, 4)
    assert not first_state(spec("h", 2, dtype="int64")).any()


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (State(feeds={"hh": "new_h"}), "'hh', which is no input"),
        (State(feeds={"h": "new"}), "from 'new', which is no output"),
        (State(feeds={"x": "new_h"}), "does not fit"),
        (State(feeds={"h": "new_h", "c": "new_h"}), "several inputs from 'new_h'"),
        (State(steps=2, feeds={"x": "y", "h": "new_h", "c": "new_c"}), "feeds every input"),
    ],
)
def test_a_state_that_does_not_fit_is_refused(state: State, said: str) -> None:
    takes = [spec("x", 2, 8), spec("h", 1, 4), spec("c", 1, 4)]
    gives = [spec("y", 2, 8), spec("new_h", 1, 4), spec("new_c", 1, 4)]
    with pytest.raises(UsageError, match=said):
        resolve_state(state, takes, gives)


def test_steps_of_a_model_without_state_are_refused() -> None:
    with pytest.raises(UsageError, match="no output of the model feeds an input") as error:
        resolve_state(State(steps=2), [spec("x", 4)], [spec("y", 4)])
    assert '[state] feeds = { "x" = "y" }' in (error.value.hint or "")
    with pytest.raises(UsageError) as error:
        resolve_state(State(steps=2), [spec("x", 4)], [spec("y", 5, 3)])
    assert 'feeds = { "INPUT" = "OUTPUT" }' in (error.value.hint or "")


def test_the_feeds_to_state_name_each_input_and_output_once() -> None:
    takes, gives = [spec("x", 9), spec("a", 4), spec("b", 4)], [spec("y", 1), spec("p", 4), spec("q", 4)]
    with pytest.raises(UsageError) as error:
        resolve_state(State(steps=2), takes, gives)
    assert '[state] feeds = { "a" = "p", "b" = "q" }' in (error.value.hint or "")
