"""Fixtures of the quantize stage; no test changes their files."""

import pytest
from quantize_models import conv_net, random_samples

from edgekit.model.model import Model
from edgekit.quantize import Calibration, calibrate_model


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return conv_net(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="session")
def calibration(net: Model, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return calibrate_model(net, random_samples(net), work=tmp_path_factory.mktemp("calibration"))
