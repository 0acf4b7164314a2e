"""Converts on emulated 64-bit Arm: ONNX Runtime's aarch64 wheel writes the raw file, which is made canonical here."""

import shutil
import subprocess
from pathlib import Path

from edgekit.convert.ort_form import Style
from edgekit.convert.ort_format.canonical import canonicalize_file
from edgekit.devices.local.arm64 import PYTHON, arm64_root, enter_arm64, find_missing_root, folder_in_arm64

MISSING = find_missing_root()

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
    """Writes a model in canonical ORT format, with the optimizations of a 64-bit Arm machine."""
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
