"""x86-64 and 64-bit Arm write the same bytes; where they do not, the conversion says so beforehand."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from arm64_saver import MISSING, convert_on_arm64
from convert_models import ARM, RUNTIME, make_float, make_qdq, save_text, write_form

from edgekit.convert.convert import describe_traits
from edgekit.convert.ort_form import OrtOptions

pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=f"needs arm64: {MISSING and MISSING.command}"),
    pytest.mark.slow,
    pytest.mark.long,
]


@pytest.mark.parametrize(("make", "options"), [(make_float, ARM), (make_qdq, RUNTIME)])
def test_both_machines_write_the_same_bytes(tmp_path: Path, make: type, options: OrtOptions) -> None:
    model = make(tmp_path / "m.onnx")
    here = write_form(model, tmp_path / "here.ort", options)
    assert convert_on_arm64(model.path, tmp_path / "there.ort", options.style).read_bytes() == here
    assert describe_traits(onnx.load(str(model.path)).graph, ()) == ()


def test_a_constant_that_depends_on_the_cpu_is_told(tmp_path: Path) -> None:
    values = np.random.default_rng(0).uniform(0.1, 3, (64, 64)).astype(np.float32)
    graph = "(float[64,64] x) => (float[64,64] y) { c = Log(a) y = Mul(x, c) }"
    model = save_text(tmp_path / "m.onnx", graph, {"a": values})
    here = write_form(model, tmp_path / "here.ort", ARM)
    assert convert_on_arm64(model.path, tmp_path / "there.ort", "full").read_bytes() != here
    assert describe_traits(onnx.load(str(model.path)).graph, ()) == (
        "constants were computed by this CPU's float kernels: Log",
    )
