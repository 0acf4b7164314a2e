import numpy as np
import pytest

from edgekit.model.tensors import Array
from edgekit.quantize.rounding.gptq import (
    Rounded,
    add_spread,
    refit_weights,
    round_gptq,
    round_nearest,
    shrink_moment,
    weight_scale,
)


def correlated(groups: int, size: int, seed: int = 0) -> Array:
    mix = np.random.default_rng(seed).normal(size=(groups, size, 2 * size)) * np.geomspace(1, 0.05, 2 * size)
    return mix @ np.swapaxes(mix, 1, 2)


def output_error(matrix: Array, rounded: Rounded, moment: Array) -> float:
    error = matrix - rounded.values
    return float(np.einsum("goi,gij,goj->", error, moment, error))


@pytest.mark.parametrize(("groups", "outputs", "size"), [(1, 20, 100), (8, 1, 9), (3, 5, 70)])
def test_moment_rounding_errs_less_at_the_output_than_nearest(groups: int, outputs: int, size: int) -> None:
    matrix = np.random.default_rng(1).normal(size=(groups, outputs, size)).astype(np.float32)
    moment, scale = correlated(groups, size), weight_scale(matrix, per_channel=True)
    nearest = output_error(matrix, round_nearest(matrix, scale), moment)
    assert output_error(matrix, round_gptq(matrix, moment, scale), moment) < 0.7 * nearest


def test_moment_rounding_without_correlation_is_nearest() -> None:
    matrix = np.random.default_rng(1).normal(size=(1, 4, 16)).astype(np.float32)
    scale, moment = weight_scale(matrix, per_channel=True), np.eye(16)[None]
    assert np.array_equal(round_gptq(matrix, moment, scale).integers, round_nearest(matrix, scale).integers)


def test_dead_inputs_do_not_break_moment_rounding() -> None:
    matrix = np.random.default_rng(1).normal(size=(2, 3, 9)).astype(np.float32)
    moment = correlated(2, 9)
    moment[1] = 0
    integers = round_gptq(matrix, moment, weight_scale(matrix, per_channel=True)).integers
    assert np.abs(integers[1] - round_nearest(matrix, weight_scale(matrix, per_channel=True)).integers[1]).max() <= 1


def test_refit_drops_inputs_below_the_noise_and_keeps_the_others() -> None:
    moment = np.diag([1.0, 1e-6])[None]
    refitted = refit_weights(np.ones((1, 1, 2), np.float32), moment, noise=1e-3)
    assert refitted[0, 0] == pytest.approx([1, 0], abs=2e-3)


def test_refit_averages_inputs_that_say_the_same() -> None:
    moment = np.ones((1, 2, 2))
    refitted = refit_weights(np.array([[[2.0, 0.0]]], np.float32), moment, noise=1e-3)
    assert refitted[0, 0] == pytest.approx([1, 1], abs=2e-3)


def test_shrinking_keeps_the_diagonal_and_trusts_many_samples() -> None:
    moment = correlated(1, 8)
    few, many = shrink_moment(moment, 8), shrink_moment(moment, 1_000_000)
    assert np.diagonal(few[0]) == pytest.approx(np.diagonal(moment[0]))
    assert np.allclose(many, moment, atol=1e-3 * moment.max())
    assert abs(few[0, 0, 1]) < 0.3 * abs(moment[0, 0, 1])


def test_an_input_counts_with_the_energy_of_one_vector_more_than_was_seen() -> None:
    raised = add_spread(np.array([[[5.0, 1.0], [1.0, 0.0]]]), np.array([[2.0, 6.0]]), samples=3)
    assert raised.tolist() == [[[6.0, 1.0], [1.0, 9.0]]]


def test_scale_puts_the_largest_on_127_and_survives_a_channel_of_zeros() -> None:
    matrix = np.array([[[1.27, -0.5], [0, 0], [0.1, 0.2]]], np.float32)
    assert weight_scale(matrix, per_channel=True)[0, :, 0] == pytest.approx([0.01, 0.01, 0.2 / 127])
    assert weight_scale(matrix, per_channel=False)[0, :, 0] == pytest.approx([0.01] * 3)
    assert weight_scale(matrix, per_channel=True, floor=0.005)[0, :, 0] == pytest.approx([0.01, 0.01, 0.005])
    assert (weight_scale(np.zeros((1, 2, 3), np.float32), per_channel=True) > 0).all()
