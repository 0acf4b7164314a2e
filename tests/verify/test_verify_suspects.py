from collections.abc import Callable

import numpy as np
import pytest
from verify_devices import from_list

from edgekit.model.tensors import Array, Tensors
from edgekit.verify.causes.suspects import find_suspects

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
