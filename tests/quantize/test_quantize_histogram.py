import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from edgekit.quantize.histogram import HistogramGrower

floats = npst.arrays(np.float32, st.integers(1, 60), elements=st.floats(-1e6, 1e6, width=32))


@given(floats, floats)
def test_order_does_not_matter_and_nothing_is_lost(one: np.ndarray, two: np.ndarray) -> None:
    forward, backward = HistogramGrower(), HistogramGrower()
    for grower, parts in ((forward, (one, two)), (backward, (two, one))):
        for part in parts:
            grower.add(part)
    left, right = forward.freeze(), backward.freeze()
    assert left.total == one.size + two.size
    assert np.array_equal(left.centers, right.centers)
    assert np.array_equal(left.counts, right.counts)


@given(floats)
def test_centers_lie_near_the_values(values: np.ndarray) -> None:
    grower = HistogramGrower()
    grower.add(values)
    centers = grower.freeze().centers
    nearest = np.abs(values[:, None] - centers[None]).min(axis=1)
    assert (nearest <= max(float(np.abs(values).max()) / 1024, 2.0**-126)).all()


def test_zeros_have_a_bin_of_their_own() -> None:
    grower = HistogramGrower()
    grower.add(np.array([0, 0, 0, 1, -1], np.float32))
    frozen = grower.freeze()
    assert frozen.counts[frozen.centers == 0].tolist() == [3]
