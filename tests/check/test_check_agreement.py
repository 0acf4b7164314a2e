"""The prediction for QNN is what Qualcomm's own simulator does, node by node."""

import importlib.util
import sys
from pathlib import Path

import pytest
from check_models import check_file, conv_net, quantized_net, save_text
from fixture_types import present
from onnxruntime.quantization import QuantType

from edgekit.target import load_target

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

from placement_agreement import observe_qnn

pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("onnxruntime_qnn") is None,
        reason="needs onnxruntime-qnn: pip install onnxruntime-qnn==2.7.0",
    ),
    pytest.mark.slow,
]


@pytest.mark.parametrize("kind", ["float", pytest.param("uint8", marks=pytest.mark.long), "int8"])
def test_the_rules_place_networks_as_qualcomms_simulator_does(tmp_path: Path, kind: str) -> None:
    signs = {"uint8": QuantType.QUInt8, "int8": QuantType.QInt8}
    path = quantized_net(tmp_path / "q.onnx", signs[kind]) if kind in signs else conv_net(tmp_path / "f.onnx")
    predicted = {node.name: node.taken for node in check_file(path, "qnn").node_list}
    seen = observe_qnn(path, load_target("qnn"))
    places = {name: provider for name, provider in seen.providers.items() if name in predicted}
    assert seen.failure is None
    assert len(places) > 0.8 * len(predicted)
    assert all((provider != "CPUExecutionProvider") is predicted[name] for name, provider in places.items())


def test_a_session_that_fails_is_predicted(tmp_path: Path) -> None:
    path = save_text("g (float[2,4] x) => (float[2,4] y) { [n] y = Elu(x) }", tmp_path / "m.onnx")
    assert "1002" in present(observe_qnn(path, load_target("qnn", {"soc_model": "30"})).failure)
    assert check_file(path, "qnn", {"soc_model": "30"}).is_refused
