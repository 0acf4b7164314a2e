from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
import pytest

from edgekit.data.data_check import accept_pixels, check_samples, warn_if_few
from edgekit.data.samples import Samples, select_samples
from edgekit.errors import DataError
from edgekit.model.tensors import Array, Tensors


def samples_of(*rows: Array) -> Samples:
    def read() -> Iterator[Tensors]:
        yield from ({"x": row} for row in rows)

    return Samples(source="test data", count=len(rows), read=read)


def noise(count: int) -> Iterable[Array]:
    return np.random.default_rng(0).normal(size=(count, 1, 3, 4, 4)).astype(np.float32)


def test_raw_pixels_are_suspicious() -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (4, 1, 3, 4, 4)).astype(np.float32)
    facts = check_samples(samples_of(*pixels))
    (warning,) = facts.warnings
    assert warning.startswith("input 'x' holds whole numbers from")
    assert accept_pixels(facts, lambda name: name != "x").warnings == (warning,)
    assert accept_pixels(facts, lambda name: name == "x").warnings == ()
    assert check_samples(samples_of(*(pixels / 255))).warnings == ()
    # Four numbers in a row are no picture, but as many as a small one has may be.
    assert check_samples(samples_of(*pixels.reshape(4, 1, -1)[..., :4])).warnings == ()
    assert check_samples(samples_of(*pixels.repeat(2, axis=2).reshape(4, 1, -1))).warnings


def test_a_sample_that_repeats_is_constant_or_far_out_is_named() -> None:
    rows = list(noise(5))
    facts = check_samples(samples_of(*rows, rows[2], rows[2]))
    assert facts.warnings == ("2 of 7 samples repeat an earlier one: sample 5 is sample 2 again",)
    rows = list(noise(5))
    rows[3] = np.full_like(rows[3], 0.5)
    (warning,) = check_samples(samples_of(*rows)).warnings
    assert warning == "input 'x' is one number throughout in 1 of 5 samples, first in sample 3"
    rows = list(noise(9))
    rows[6] = rows[6] * 1000
    (warning,) = check_samples(samples_of(*rows)).warnings
    assert warning.startswith("sample 6 reaches ")


@pytest.mark.parametrize(("value", "word"), [(np.nan, "NaN"), (np.inf, "infinity")])
def test_what_is_not_finite_is_refused_with_sample_and_input(value: float, word: str) -> None:
    rows = [row.copy() for row in noise(3)]
    rows[1][0, 0, 0, 0] = value
    with pytest.raises(DataError, match=f"sample 1 of 'test data' has {word} in input 'x'"):
        check_samples(samples_of(*rows))


def test_a_sample_has_the_number_that_it_has_in_the_data() -> None:
    rows = [row.copy() for row in noise(9)]
    rows[7][0, 0, 0, 0] = np.nan
    # Two were held out before it, and one of the rest is not used.
    chosen = select_samples(select_samples(samples_of(*rows), [1, 2, 3, 5, 6, 7, 8]), [1, 2, 3, 4, 5])
    with pytest.raises(DataError, match="sample 7 of 'test data' has NaN in input 'x'"):
        check_samples(chosen)
    rows[6][:] = rows[7][:] = 0.5
    repeated, constant = check_samples(chosen).warnings
    assert repeated.endswith("sample 7 is sample 6 again")
    assert constant.endswith("first in sample 6")


def test_another_number_of_samples_than_was_promised_is_refused() -> None:
    with pytest.raises(DataError, match="'test data' gave 3 samples, then 4"):
        check_samples(msgspec.structs.replace(samples_of(*noise(3)), count=4))


def test_good_data_integers_and_strings_have_no_warning_but_few_are_few() -> None:
    facts = check_samples(samples_of(*noise(40)))
    assert (facts.count, facts.warnings, warn_if_few(facts)) == (40, (), ())
    assert warn_if_few(check_samples(samples_of(*noise(9))))[0].startswith("9 samples are few to calibrate with")
    assert check_samples(samples_of(np.array([[1, 2]]), np.array([["a"]], dtype=object))).warnings == ()


def test_resized_pixels_and_raw_sound_are_suspicious() -> None:
    pixels = [abs(row) * 60 for row in noise(40)]
    sound = [np.rint(row * 3000) for row in noise(40)]
    assert "as resized pixels do" in check_samples(samples_of(*(np.clip(row, 0, 255) for row in pixels))).warnings[0]
    assert "as raw 16-bit sound does" in check_samples(samples_of(*sound)).warnings[0]


def test_inputs_of_unlike_reach_are_suspicious() -> None:
    def read() -> Iterator[Tensors]:
        yield from ({"a": row * 200, "b": row[:, :1]} for row in noise(40))

    (warning,) = check_samples(Samples(source="test data", count=40, read=read)).warnings
    assert warning.startswith("input 'a' reaches ")
    assert "input 'b' " in warning


def pictures(count: int, channels: int = 3) -> Array:
    """Smooth pictures: sums along both axes of random numbers, of which neighbours are alike."""
    drawn = np.random.default_rng(1).normal(size=(count, 1, channels, 24, 24))
    summed = drawn.cumsum(-1).cumsum(-2)
    return np.asarray(summed / np.abs(summed).max(), np.float32)


@pytest.mark.parametrize("channels", [1, 3])
def test_noise_in_place_of_pictures_is_named(channels: int) -> None:
    assert check_samples(samples_of(*pictures(8, channels))).warnings == ()
    drawn = np.random.default_rng(0).random((8, 1, channels, 24, 24)).astype(np.float32)
    (warning,) = check_samples(samples_of(*drawn)).warnings
    assert warning.startswith("input 'x' is noise: neighbours are no more alike than random numbers")
    # A picture under noise of its own strength is a picture.
    assert check_samples(samples_of(*(pictures(8, channels) + 0.2 * drawn))).warnings == ()


def test_pictures_that_were_reshaped_and_not_transposed_are_named() -> None:
    planes = pictures(8)
    transposed = planes.transpose(0, 1, 3, 4, 2)
    (warning,) = check_samples(samples_of(*transposed.reshape(planes.shape))).warnings
    assert "repeats every third value in a row, as NHWC pictures do" in warning
    # One channel was not transposed: its order is that of a state with three parts.
    assert check_samples(samples_of(*transposed.reshape(8, 1, 1, 72, 24))).warnings == ()


def test_print_whose_strokes_stand_three_values_apart_is_in_order() -> None:
    strokes = np.arange(24, dtype=np.float32) % 3 == 0
    assert check_samples(samples_of(*(pictures(8) + strokes))).warnings == ()


def test_gray_pictures_for_a_model_of_colors_are_named() -> None:
    gray = pictures(8, 1)
    (warning,) = check_samples(samples_of(*gray.repeat(3, 2))).warnings
    assert warning.startswith("input 'x' holds gray pictures alone")
    # Each channel normalised by its own mean and deviation, as of ImageNet, is gray all the same.
    scale, shift = (np.array(row, np.float32)[:, None, None] for row in ([4.37, 4.46, 4.44], [2.12, 2.04, 1.8]))
    assert check_samples(samples_of(*(gray * scale - shift))).warnings == (warning,)
    assert check_samples(samples_of(*gray, *gray[:, :, :, ::-1])).warnings == ()
    # One picture in colors is enough.
    assert check_samples(samples_of(*gray.repeat(3, 2), pictures(9)[8])).warnings == ()


def test_noise_in_place_of_sound_is_named_and_features_have_no_order() -> None:
    drawn = np.random.default_rng(2).normal(size=(8, 1, 4000)).astype(np.float32)
    (warning,) = check_samples(samples_of(*drawn)).warnings
    assert "is noise" in warning
    assert check_samples(samples_of(*(drawn[..., 1:] + drawn[..., :-1]))).warnings == ()
    features = check_samples(samples_of(*drawn[..., :500]))
    assert (features.warnings, features.is_noise) == ((), False)


def in_bytes(planes: Array) -> Array:
    low, high = float(planes.min()), float(planes.max())
    return np.rint((planes - low) / (high - low) * 255).astype(np.uint8)


@pytest.mark.parametrize("as_given", [lambda value: value, in_bytes], ids=["float32", "uint8"])
def test_nhwc_pictures_and_pictures_in_bytes_are_held_to_the_same(as_given: Callable[[Array], Array]) -> None:
    planes = as_given(pictures(8))
    shown = planes.transpose(0, 1, 3, 4, 2)
    assert check_samples(samples_of(*planes)).warnings == check_samples(samples_of(*shown)).warnings == ()
    (warning,) = check_samples(samples_of(*planes.reshape(shown.shape))).warnings
    assert "as NCHW pictures do that were reshaped and not transposed to NHWC" in warning
    (warning,) = check_samples(samples_of(*shown.reshape(planes.shape))).warnings
    assert "as NHWC pictures do that were reshaped and not transposed to NCHW" in warning
    drawn = as_given(np.random.default_rng(0).random(shown.shape).astype(np.float32))
    facts = check_samples(samples_of(*drawn))
    assert "is noise" in facts.warnings[0]
    assert facts.is_noise


def test_scaled_pixels_that_became_whole_numbers_are_named() -> None:
    scaled = (in_bytes(pictures(8)) / 255).astype(np.uint8)
    scaled[:, ..., :4] = 1
    assert any("nothing but 0 and 1" in line for line in check_samples(samples_of(*scaled)).warnings)
    mask = np.ones((8, 1, 1, 24, 24), np.uint8)
    mask[..., :9] = 0
    assert not any("nothing but 0 and 1" in line for line in check_samples(samples_of(*mask)).warnings)


def test_samples_to_calibrate_with_are_held_against_golden_ones() -> None:
    rows = pictures(40)
    mine, golden = samples_of(*rows[::2]), rows[1::2]
    assert check_samples(mine, golden=samples_of(*golden)).warnings == ()
    for other, what in (((golden + 1) / 2 + 1, "smallest value"), (golden * 0.01, "spread"), (golden + 9, "smallest")):
        (warning,) = check_samples(mine, golden=samples_of(*other)).warnings
        assert warning.startswith(f"input 'x' has a {what}" if what != "spread" else "input 'x' has a ")
        assert "in the samples to calibrate with and of" in warning
    # Of a few, chance parts such sets now and then: one in 35 of two times four.
    assert check_samples(samples_of(*rows[:4]), golden=samples_of(*(golden[:4] + 9))).warnings == ()
