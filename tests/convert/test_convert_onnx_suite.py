"""A sample of the onnx package's node tests, and one of its light models, through prepare and both ORT styles.

`tools/bench/convert_onnx_suite.py` runs them all.
"""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/bench"))

from convert_onnx_suite import check_case, check_light, list_cases, list_light

pytestmark = pytest.mark.slow

MODULES = (
    "conv", "einsum", "gru", "if_", "loop", "optionalgetelement", "quantizelinear", "resize", "scan",
    "sequence_map", "split", "topk", "unique",
)  # fmt: skip
EVERY = 3
REFUSED_BY_WRITER = "We do not support type"
"""What ONNX Runtime's own writer says of optional types."""


def test_a_sample_of_node_tests_converts_and_stays_equal(tmp_path: Path) -> None:
    results: dict[tuple[str, str], str] = {}
    for index, case in enumerate(list_cases(*MODULES)[::EVERY]):
        folder = tmp_path / str(index)
        folder.mkdir()
        results |= {(case.name, step): result for step, result in check_case(case, folder).items()}
    assert len({name for name, _ in results}) > 25
    assert {step for _, step in results} == {"prepare", "full", "runtime"}
    wrong = {key: result for key, result in results.items() if result != "equal" and REFUSED_BY_WRITER not in result}
    assert {key for key in wrong if key[1] != "prepare"} == set()
    assert all(result.startswith(("ModelError", "UsageError", "OpenDimsError")) for result in wrong.values())


def test_a_light_model_converts_and_stays_equal(tmp_path: Path) -> None:
    path = next(path for path in list_light() if path.stem == "light_squeezenet")
    assert check_light(path, tmp_path) == {"prepare": "equal", "full": "equal", "runtime": "equal"}
