"""Damaged examples of all rewrites: each is refused, rewritten or left, and none ends in a traceback."""

import contextlib
import sys
from pathlib import Path
from random import Random

import pytest
from prepare_models import CASES, make_model

from edgekit.errors import EdgekitError
from edgekit.model.model import load_model
from edgekit.prepare.fix import fix_model

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/fuzz"))

from mutate_model import mutate_model


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.pattern])
def test_no_damaged_model_ends_a_rewrite_in_a_traceback(name: str, tmp_path: Path) -> None:
    model = make_model(CASES[name].pattern, tmp_path / "m.onnx", opset=CASES[name].opset)
    data, rng = model.path.read_bytes(), Random(name)  # noqa: S311 - the damage of a test
    for _ in range(100):
        model.path.write_bytes(mutate_model(rng, data))
        with contextlib.suppress(EdgekitError):
            fix_model(load_model(model.path), tmp_path / "out.onnx", [name])
