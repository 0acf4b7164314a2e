"""Damaged examples of all rewrites: each is refused, rewritten or left, and none ends in a traceback."""

import contextlib
import sys
from pathlib import Path
from random import Random

import pytest
from prepare_models import make_model
from test_prepare_rewrites import OPSETS, WITH

from edgekit.errors import EdgekitError
from edgekit.model.model import load_model
from edgekit.prepare.fix import fix_model

sys.path.insert(0, str(Path(__file__).parents[2] / "tools/fuzz"))

from mutate_model import mutate_model


@pytest.mark.fuzz
@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize("name", WITH)
def test_no_damaged_model_ends_a_rewrite_in_a_traceback(name: str, tmp_path: Path) -> None:
    model = make_model(WITH[name], tmp_path / "m.onnx", opset=OPSETS.get(name, 17))
    data, rng = model.path.read_bytes(), Random(name)  # noqa: S311 - the damage of a test
    for _ in range(100):
        model.path.write_bytes(mutate_model(rng, data))
        with contextlib.suppress(EdgekitError):
            fix_model(load_model(model.path), tmp_path / "out.onnx", [name])
