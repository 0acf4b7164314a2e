"""Prepares and checks models of gigabytes, and measures memory: `python convert_large.py [external|inline]...`.

`external` is a chain of MatMuls with 3 GB of external data, `inline` one of 1.6 GB in one file. Each command is a
process of its own; printed are its seconds and its peak of memory over the model's size.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

WIDTH = 8192
LAYERS = {"external": 12, "inline": 6}
"""Layers of 256 MB each."""


def make_chain(path: Path, layers: int, *, external: bool) -> None:
    """Writes a chain of MatMul and Relu; in a process of its own, whose memory a child would inherit as its peak."""
    weights = []
    data = path.with_name(f"{path.name}.data")
    rng = np.random.default_rng(0)
    with data.open("wb") as file:
        for index in range(layers):
            block = (rng.standard_normal((WIDTH // 32, WIDTH), np.float32) / 90).tobytes()
            tensor = TensorProto(name=f"w{index}", data_type=TensorProto.FLOAT, dims=[WIDTH, WIDTH])
            if external:
                entries = {"location": data.name, "offset": str(file.tell()), "length": str(len(block) * 32)}
                file.writelines([block] * 32)
                tensor.data_location = TensorProto.EXTERNAL
                for key, value in entries.items():
                    tensor.external_data.add(key=key, value=value)
            else:
                tensor.raw_data = block * 32
            weights.append(tensor)
    nodes = []
    for index in range(layers):
        nodes.append(helper.make_node("MatMul", [f"r{index}", f"w{index}"], [f"m{index}"], name=f"matmul{index}"))
        nodes.append(helper.make_node("Relu", [f"m{index}"], [f"r{index + 1}"], name=f"relu{index}"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("r0", f"r{layers}")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    if not external:
        data.unlink()


def measure(arguments: list[str]) -> tuple[int, float, int, str]:
    """Returns a command's exit code, seconds, peak memory in bytes, and last line."""
    start = time.perf_counter()
    with tempfile.TemporaryFile("w+") as shown:
        argv = [sys.executable, "-m", "edgekit", *arguments]
        child = subprocess.Popen(argv, stdout=shown, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        shown.seek(0)
        lines = shown.read().strip().splitlines()
    return child.returncode, time.perf_counter() - start, usage.ru_maxrss * 1024, lines[-1] if lines else ""


def main() -> int:
    """Prints a line for each model and command; returns 1 if one takes more than 1.5 times the model's size."""
    if sys.argv[1:2] == ["--make"]:
        make_chain(Path(sys.argv[3]), LAYERS[sys.argv[2]], external=sys.argv[2] == "external")
        return 0
    within = True
    for kind in sys.argv[1:] or list(LAYERS):
        with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
            model, prepared = Path(folder) / "model.onnx", Path(folder) / "prepared.onnx"
            subprocess.run([sys.executable, __file__, "--make", kind, str(model)], check=True)
            size = sum(path.stat().st_size for path in Path(folder).iterdir())
            commands = {
                "prepare": ["prepare", str(model), "--dim", "batch=1", "--out", str(prepared), "-q"],
                "check": ["check", str(prepared), "--target", "nnapi"],
                "convert": [
                    "convert",
                    str(model),
                    "--dim",
                    "batch=1",
                    "--style",
                    "full",
                    "--out",
                    f"{folder}/out",
                    "-q",
                ],
            }
            for name, arguments in commands.items():
                code, seconds, peak, line = measure(arguments)
                within &= name == "convert" or peak < 1.5 * size
                print(f"{kind:8} {size / 1e9:.1f} GB {name:8} exit {code} {seconds:6.1f} s", end=" ")
                print(f"{peak / 1e9:5.2f} GB = {peak / size:.2f}x  {line[:120]}", flush=True)
    return 0 if within else 1


if __name__ == "__main__":
    sys.exit(main())
