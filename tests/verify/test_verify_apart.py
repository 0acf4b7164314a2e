"""Two devices that differ in their CPU alone: how far apart they lie is said, and nothing where they agree."""

from collections.abc import Sequence

import numpy as np

from edgekit.data.samples import Samples
from edgekit.model.tensors import Tensors
from edgekit.verify.sizes import KeptOutputs, describe_differences, keep_outputs


def held(device: str, shift: float, kind: str = "android", count: int = 2) -> KeptOutputs:
    return held_rows(device, shift, range(count), kind)


def held_rows(device: str, shift: float, indices: Sequence[int], kind: str = "android") -> KeptOutputs:
    rows: list[Tensors] = [{"y": np.arange(4, dtype=np.float32) + index + shift} for index in indices]
    found = keep_outputs(device, kind, indices, Samples(source="rows", count=len(rows), read=lambda: iter(rows)))
    assert found is not None
    return found


def test_cores_that_differ_are_named_with_the_distance() -> None:
    (said,) = describe_differences(
        [held("android", 0.0), held("android:cortex-a53", 0.5), held("host", 9.0, kind="host")]
    )
    assert said == (
        "android:cortex-a53 and android give different numbers: 'y' differs by at most 0.5, 13.4 dB; each is judged by"
        " itself"
    )


def test_cores_that_agree_are_not() -> None:
    assert list(describe_differences([held("android", 0.0), held("android:cortex-a53", 0.0)])) == []
    assert list(describe_differences([held("android", 0.0), held("host", 1.0, kind="host")])) == []


def test_what_both_ran_is_compared() -> None:
    assert list(describe_differences([held("android", 0.0, count=3), held("android:cortex-a53", 0.0)])) == []
    assert list(describe_differences([held("android", 0.0), held("android:cortex-a53", 1.0, count=0)])) == []


def test_only_what_both_made_of_one_sample_is_compared() -> None:
    few = held_rows("android", 0.0, (0, 5, 10))
    assert list(describe_differences([few, held_rows("android:cortex-a53", 0.0, range(11))])) == []
    assert list(describe_differences([few, held_rows("android:cortex-a53", 9.0, range(1, 5))])) == []
    (said,) = describe_differences([few, held_rows("android:cortex-a53", 0.25, range(4, 8))])
    assert "by at most 0.25" in said


def test_classes_that_differ_are_counted() -> None:
    sides = [
        KeptOutputs(device=device, kind="android", rows={0: {"y": np.array([1, 2, 3, last], np.int64)}})
        for device, last in (("android", 4), ("android:cortex-a53", 5))
    ]
    (said,) = describe_differences(sides)
    assert "'y' differs in 25.00% of its elements" in said


def test_large_outputs_are_let_go() -> None:
    rows: list[Tensors] = [{"y": np.zeros(5 << 20, np.float32)}] * 2
    assert keep_outputs("android", "android", (0, 1), Samples(source="rows", count=2, read=lambda: iter(rows))) is None
