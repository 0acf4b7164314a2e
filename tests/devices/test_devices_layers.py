"""Tensors inside a model over a link: the layer that a phone or a board computes otherwise is named."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from devices_models import Altering, make_job, noise_samples, qdq_conv
from onnx import numpy_helper
from other_machine.fixtures import Phone

from edgekit.devices.remote.remote import SshDevice
from edgekit.verify.layers.on_device import find_device_layer

pytestmark = pytest.mark.slow


def negate_weights(proto: onnx.ModelProto) -> None:
    weight = next(tensor for tensor in proto.graph.initializer if tensor.name == "wq")
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), "wq"))


@pytest.mark.long
def test_a_phone_and_a_board_give_their_layers(
    phone: Phone, native_board: SshDevice, tmp_path: Path, work: Path
) -> None:
    job = make_job(qdq_conv(tmp_path / "q.onnx", np.uint8), "nnapi", noise_samples(3))
    honest = find_device_layer(native_board, job, work / "honest")
    assert [layer.name for layer in honest.layers] == ["x", "conv"]
    altered = find_device_layer(Altering(device=phone.device, change=negate_weights), job, work / "altered")
    assert [(found.layer, found.found_by) for found in (honest, altered)] == [(None, "tensors"), ("conv", "tensors")]
