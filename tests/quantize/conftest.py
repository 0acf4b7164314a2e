"""Fixtures of the quantize stage; no test changes their files."""

from typing import Any

import pytest
from quantize_models import COLLAPSING, conv_net, make_model, random_samples

from edgekit._ort import CpuSession
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.quantize import Calibration, calibrate_model


@pytest.fixture(scope="session")
def net(tmp_path_factory: pytest.TempPathFactory) -> Model:
    return conv_net(tmp_path_factory.mktemp("net"))


@pytest.fixture(scope="session")
def calibration(net: Model, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return calibrate_model(net, random_samples(net), work=tmp_path_factory.mktemp("calibration"))


@pytest.fixture(scope="session")
def many(net: Model, tmp_path_factory: pytest.TempPathFactory) -> Calibration:
    return calibrate_model(net, random_samples(net, count=64), work=tmp_path_factory.mktemp("many"))


@pytest.fixture(scope="session")
def collapsing(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Calibration]:
    folder = tmp_path_factory.mktemp("collapsing")
    model = make_model(COLLAPSING, folder / "m.onnx", {"w": (32, 32), "v": (32, 32)})
    return model, calibrate_model(model, random_samples(model, count=48), work=folder / "work")


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[CpuSession]:
    """The session of each run that a test begins."""
    begun, run = list[CpuSession](), CpuSession.run

    def note(session: CpuSession, *given: Any, **more: Any) -> dict[str, Array]:
        begun.append(session)
        return run(session, *given, **more)

    monkeypatch.setattr(CpuSession, "run", note)
    return begun
