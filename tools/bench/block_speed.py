"""What blocks of 4-bit weights cost on the CPU: CPU seconds of MatMulNBits as a share of the float MatMul's.

    python tools/bench/block_speed.py [--size 2048]

One product of [rows, N] with [N, N], for one row (a token) and 64 (a prompt), for each block size and accuracy level,
one thread, both in turn; the median of five rounds.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.model import Model, load_model
from edgekit.quantize.weight_only.convert import BLOCKS, WeightOnlyOptions, compress_weights

_ROUNDS, _RUNS = 5, {1: 20, 64: 4}
_LEVELS = (0, 4)


def make_product(path: Path, rows: int, size: int) -> Model:
    """Writes a MatMul with a weight [size, size]."""
    weight = np.random.default_rng(0).standard_normal((size, size)).astype(np.float32)
    graph = helper.make_graph(
        [helper.make_node("MatMul", ["x", "w"], ["y"], name="mix")],
        "g",
        [helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [rows, size])],
        [helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [rows, size])],
        [numpy_helper.from_array(weight, "w")],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    return load_model(path)


def measure_rows(rows: int, size: int, work: Path) -> dict[tuple[int, int], float]:
    """Returns by block size and accuracy level the share of the float product's CPU seconds."""
    model = make_product(work / "float.onnx", rows, size)
    sessions = {(0, 0): CpuSession(model.path, SessionSettings(threads=1))}
    for block in BLOCKS:
        for level in _LEVELS:
            options = WeightOnlyOptions(form="int4", block=block, accuracy_level=level)
            light = compress_weights(model, options, work / f"{block}-{level}.onnx").model
            sessions[block, level] = CpuSession(light.path, SessionSettings(threads=1))
    sample = {"x": np.random.default_rng(1).standard_normal((rows, size)).astype(np.float32)}
    seconds: dict[tuple[int, int], list[float]] = {key: [] for key in sessions}
    for session in sessions.values():
        session.run(sample)
    for _ in range(_ROUNDS):
        for key, session in sessions.items():
            began = time.process_time()
            for _ in range(_RUNS[rows]):
                session.run(sample)
            seconds[key].append(time.process_time() - began)
    return {key: median(found) / median(seconds[0, 0]) for key, found in seconds.items() if key[0]}


def main() -> int:
    """Prints a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", type=int, default=2048, metavar="N")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        found = {rows: measure_rows(rows, args.size, Path(folder)) for rows in _RUNS}
    print("| block | " + " | ".join(f"{rows} rows, level {level}" for rows in _RUNS for level in _LEVELS) + " |")
    for block in BLOCKS:
        cells = [f"{found[rows][block, level]:.2f}" for rows in _RUNS for level in _LEVELS]
        print(f"| {block} | {' | '.join(cells)} |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
