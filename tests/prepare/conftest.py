"""Fixtures of the prepare stage."""

from collections.abc import Callable
from pathlib import Path

import pytest
from exported_models import EXPORTED

from edgekit.model.model import Model, load_model
from edgekit.prepare.fix import ready_model


@pytest.fixture(scope="session")
def exported(make_once: Callable[[str, Callable[[Path], None]], Path]) -> Callable[[str, str], tuple[Model, Model]]:
    """A transformer as an exporter writes it, and as every build starts from it."""

    def load(name: str, style: str) -> tuple[Model, Model]:
        def fill(folder: Path) -> None:
            ready_model(EXPORTED[name](folder / "m.onnx", style), folder, {})

        folder = make_once(f"exported-{name}-{style}", fill)
        return load_model(folder / "m.onnx"), load_model(folder / "fixed/m.onnx")

    return load
