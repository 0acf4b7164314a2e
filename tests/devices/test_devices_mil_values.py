"""ML Programs: each operation against the values that coremltools infers: coreml_values.py has the cases."""

import subprocess
import sys
from importlib.util import find_spec

import coreml_values
import numpy as np
import pytest
from coreml_values import ROWS, compare, compute, list_cases
from test_devices_mil import CASES

from edgekit.devices.ios.mil.compute import OPERATIONS


def test_every_operation_is_held_against_coremltools_or_onnx() -> None:
    held = {kind for kind, _ in list_cases()} | {case[0] for case in CASES}
    assert OPERATIONS.keys() - held == {"silu"}


def test_silu_is_x_times_its_sigmoid() -> None:
    (found,) = compute("silu", {"x": ROWS}, (ROWS,))
    assert np.allclose(found, ROWS / (1 + np.exp(-ROWS)), rtol=1e-6)


@pytest.mark.long
@pytest.mark.slow
def test_one_opset_is_what_coremltools_infers() -> None:
    if find_spec("coremltools") is None:
        pytest.skip("coremltools is not installed")
    finished = subprocess.run(
        [sys.executable, coreml_values.__file__, "iOS17"], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, finished.stdout
    assert "82 operations, 296 comparisons in iOS17; 0 too far apart" in finished.stdout
    assert "coremltools infers nothing of: avg_pool, batch_norm, conv, " in finished.stdout


def test_values_that_lie_apart_are_told() -> None:
    row = compare("exp", "float32", (np.nextafter(ROWS, 9),), (ROWS,))
    assert (row.problem, row.ulp) == ("", 1.0)
    assert compare("exp", "float32", (ROWS + np.float32(1e-5),), (ROWS,)).problem == "too far apart"
    assert compare("exp", "float32", (ROWS * np.float32(np.nan),), (ROWS,)).problem == "too far apart"
    assert compare("shape", "float32", (np.array([1, 2]),), (np.array([1, 3]),)).problem == "too far apart"
    wrong = compare("exp", "float16", (ROWS[0],), (ROWS,))
    assert wrong.problem == "shape (8,), coremltools (3, 8)"


def test_a_parameter_without_a_default_is_asked_for() -> None:
    for kind in ("elu", "leaky_relu", "sigmoid_hard"):
        with pytest.raises(ValueError, match=f"{kind} '{kind}': its parameter alpha is missing"):
            compute(kind, {"x": ROWS}, (ROWS,))


def test_sizes_are_left_to_an_input_of_the_same_rank_only() -> None:
    with pytest.raises(ValueError, match=r"its shape \[0, 2, 4\] leaves sizes to an input of rank 2"):
        compute("reshape", {"x": ROWS, "shape": [0, 2, 4]}, (ROWS,))
