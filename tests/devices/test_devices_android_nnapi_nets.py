"""A whole net on NNAPI, as Android's ONNX Runtime builds it, against LiteRT on the same net written directly."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from demo_paths import EVALUATION
from litert_nets import compare_net, cut_middle, run_on_litert
from onnx import numpy_helper
from test_devices_android_nnapi import require_device

from edgekit.graph.graph import read_graph
from edgekit.model.model import load_model

pytestmark = pytest.mark.slow


def test_the_digits_lie_within_a_step_of_litert_s_and_a_changed_weight_does_not(
    demo_bundles: Path, tmp_path: Path
) -> None:
    require_device()
    path = demo_bundles / "digits_mobilenet-nnapi" / "model.onnx"
    with np.load(EVALUATION) as archive:
        (name,) = archive.files
        rows = [{name: archive[name][at]} for at in range(4)]
    found = compare_net(path, rows, tmp_path)
    assert found.values == 40
    assert found.steps <= 1
    middle, inputs = cut_middle(path, rows, tmp_path)
    right = run_on_litert(read_graph(load_model(middle)), inputs, is_signed=False)
    proto = onnx.load(middle)
    weight = next(tensor for tensor in proto.graph.initializer if len(tensor.dims) == 4)
    weight.CopyFrom(numpy_helper.from_array(-numpy_helper.to_array(weight), weight.name))
    onnx.save(proto, middle)
    wrong = run_on_litert(read_graph(load_model(middle)), inputs, is_signed=False)
    assert max(np.abs(one - other).max() for one, other in zip(right, wrong, strict=True)) > 1
