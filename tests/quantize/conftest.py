"""Fixtures of the quantize stage."""

from pathlib import Path

import pytest
from quantize_models import conv_net, random_samples

from edgekit.model.model import Model
from edgekit.quantize import Calibration, calibrate_model


@pytest.fixture
def net(tmp_path: Path) -> Model:
    return conv_net(tmp_path)


@pytest.fixture
def calibration(net: Model, tmp_path: Path) -> Calibration:
    return calibrate_model(net, random_samples(net), work=tmp_path / "work")
