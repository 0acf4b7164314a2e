from collections.abc import Callable

import numpy as np
import pytest
from verify_devices import from_list

from edgekit.model.tensors import Array, Tensors
from edgekit.verify.suspects import find_suspects

RNG = np.random.default_rng(0)
ROWS: list[Tensors] = [
    {"y": RNG.normal(size=(1, 4, 5, 5)).astype(np.float32), "z": RNG.normal(size=(1, 4, 5, 5)).astype(np.float32)}
    for _ in range(6)
]


def softmax(value: Array) -> Array:
    powers = np.exp(value - value.max())
    return np.asarray(powers / powers.sum())


def suspect(change: Callable[[Array], Array], rows: list[Tensors] = ROWS) -> str:
    got: list[Tensors] = [{**row, "y": change(row["y"])} for row in rows]
    return find_suspects(from_list(rows), from_list(got), ["y"]).get("y", "nobody")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda y: y * 2, "times a factor", id="scale"),
        pytest.param(lambda y: y / 255, "times a factor", id="inputs not normalised"),
        pytest.param(lambda y: y + 3, "plus a constant", id="offset"),
        pytest.param(lambda y: y[:, ::-1], "in another order", id="channel order"),
        pytest.param(lambda y: y.transpose(0, 2, 3, 1).reshape(y.shape), "in another order", id="layout"),
        pytest.param(softmax, "one softmax too many", id="softmax"),
        pytest.param(lambda y: RNG.normal(size=y.shape), "nobody", id="noise"),
        pytest.param(lambda y: y * np.nan, "nobody", id="NaN"),
        pytest.param(lambda y: y * 0, "nobody", id="zeros"),
        pytest.param(lambda y: y[:, :2], "nobody", id="other shape"),
    ],
)
def test_the_usual_mistakes_are_named(change: Callable[[Array], Array], words: str) -> None:
    assert words in suspect(change)


@pytest.mark.parametrize(
    ("factor", "noise", "words"),
    [
        (10.0, 0.05, "times a factor"),  # 26 dB once undone, and 45 dB more than before
        (10.0, 0.2, "nobody"),  # 14 dB once undone: it explains too little
        (1.02, 0.01, "nobody"),  # 40 dB once undone, but it was 33 dB before
    ],
)
def test_a_mistake_is_named_only_where_undoing_it_explains_what_came_back(
    factor: float, noise: float, words: str
) -> None:
    rng = np.random.default_rng(1)
    assert words in suspect(lambda y: factor * (y + noise * rng.normal(size=y.shape).astype(np.float32)))


def test_a_softmax_left_out_is_named() -> None:
    rows: list[Tensors] = [{"y": softmax(row["y"])} for row in ROWS]
    assert "before its softmax" in suspect(lambda y: np.log(y) + 5, rows)


def test_swapped_outputs_are_named() -> None:
    got: list[Tensors] = [{"y": row["z"], "z": row["y"]} for row in ROWS]
    assert find_suspects(from_list(ROWS), from_list(got), ["y", "z"]) == {
        "y": "came back as 'z': the outputs are swapped",
        "z": "came back as 'y': the outputs are swapped",
    }


def test_nothing_to_look_at_has_no_suspect() -> None:
    assert find_suspects(from_list(ROWS), from_list([]), ["y"]) == {}


@pytest.mark.parametrize(
    ("wanted", "found", "told"),
    [
        (1.0, np.inf, True),
        (1.0, np.nan, True),
        (1.0, 65504.0, True),
        (1.0, -65504.0, True),
        (1.0, 65503.0, False),
        (65504.0, np.inf, False),
        (np.inf, np.inf, False),
    ],
)
def test_an_overflow_of_half_precision_is_named_where_the_reference_has_none(
    wanted: float, found: float, *, told: bool
) -> None:
    rows: list[Tensors] = [{"y": np.array([0.5, 0.25])}, {"y": np.array([0.5, wanted])}]
    got: list[Tensors] = [{"y": np.array([0.5, 0.25])}, {"y": np.array([0.5, found])}]
    suspects = find_suspects(from_list(rows), from_list(got), ["y"], is_half=True)
    assert ("overflows in half precision" in suspects.get("y", "")) is told
    assert "overflows" not in find_suspects(from_list(rows), from_list(got), ["y"]).get("y", "")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"y": np.ones(2)}, {}),
        ({}, {"y": np.full(2, np.inf)}),
        ({"y": np.ones(2, np.int64)}, {"y": np.full(2, np.inf)}),
        ({"y": np.ones(2)}, {"y": np.full(2, 70000)}),
        ({"y": np.ones(0)}, {"y": np.ones(0)}),
    ],
)
def test_what_is_no_number_does_not_overflow(wanted: Tensors, found: Tensors) -> None:
    assert find_suspects(from_list([wanted]), from_list([found]), ["y"], is_half=True) == {}


def test_an_overflow_behind_a_sample_without_the_output_is_named() -> None:
    rows: list[Tensors] = [{"y": np.ones(2)}, {"y": np.ones(2)}]
    got: list[Tensors] = [{}, {"y": np.full(2, np.inf)}]
    assert "overflows" in find_suspects(from_list(rows), from_list(got), ["y"], is_half=True)["y"]


@pytest.mark.parametrize(("noise", "words"), [(0.03, "in another order"), (0.3, "nobody")])
def test_an_order_is_named_only_where_it_explains_what_came_back(noise: float, words: str) -> None:
    rng = np.random.default_rng(1)
    shuffled = rng.permutation(100)

    def change(y: Array) -> Array:
        return np.asarray((y.reshape(-1)[shuffled] + noise * rng.normal(size=100)).reshape(y.shape))

    assert words in suspect(change)
    assert suspect(change, ROWS[:1]) == "nobody"  # one sample alone could be sorted into anything


@pytest.mark.parametrize(("noise", "words"), [(0.1, "nobody"), (0.001, "in another order")])
def test_an_order_that_gains_little_is_not_named(noise: float, words: str) -> None:
    rng = np.random.default_rng(1)
    rows: list[Tensors] = [{"y": np.arange(100.0) + 0.01 * rng.normal(size=100)} for _ in range(4)]
    swapped = np.r_[:10, 11, 10, 12:100]  # 52 dB as it is
    assert words in suspect(lambda y: y[swapped] + noise * rng.normal(size=100), rows)
