"""x86-64 and 64-bit Arm write the same bytes; where they do not, the conversion says so beforehand."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import onnx
import pytest
from convert_models import ARM, RUNTIME, make_float, make_qdq, save_text, write_form

from edgekit.convert.convert import describe_traits
from edgekit.convert.ort_form import OrtOptions, Style
from edgekit.convert.ort_format.canonical import canonicalize_file
from edgekit.devices.local.arm64 import PYTHON, arm64_root, enter_arm64, find_missing_root, folder_in_arm64

MISSING = find_missing_root()
pytestmark = [
    pytest.mark.skipif(MISSING is not None, reason=f"needs arm64: {MISSING and MISSING.command}"),
    pytest.mark.slow,
    pytest.mark.long,
]


PROGRAM = """
import sys
import onnxruntime as ort

model, out, style = sys.argv[1:]
options = ort.SessionOptions()
options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_ALL
options.optimized_model_filepath = out
options.intra_op_num_threads = 1
options.log_severity_level = 4
options.add_session_config_entry("session.save_model_format", "ORT")
options.add_session_config_entry("session.disable_prepacking", "1")
options.add_session_config_entry("session.qdqisint8allowed", "1")
if style == "runtime":
    options.add_session_config_entry("optimization.minimal_build_optimizations", "save")
ort.InferenceSession(model, options, providers=["CPUExecutionProvider"], disabled_optimizers=["NchwcTransformer"])
"""


def convert_on_arm64(model: Path, out: Path, style: Style, cpu: str = "cortex-a76") -> Path:
    """Writes a model with the optimizations of ONNX Runtime's aarch64 wheel; the raw file is made canonical here."""
    root = arm64_root()
    with folder_in_arm64(root) as folder:
        inside = f"/jobs/{folder.name}"
        (folder / "save.py").write_text(PROGRAM)
        shutil.copyfile(model, folder / "model.onnx")
        arguments = [f"{inside}/save.py", f"{inside}/model.onnx", f"{inside}/model.ort", style]
        subprocess.run([*enter_arm64(root, cpu), PYTHON, *arguments], check=True, capture_output=True, timeout=600)
        shutil.move(folder / "model.ort", out)
    canonicalize_file(out)
    return out


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
