"""Measures peak memory relative to a model's size: `peak_memory.py [90] [400] [1600] [3000]`.

With `--residual` each pair of layers is added to the input of a LayerNormalization before it, as in transformers, so
that a signal reaches the end; the bundle is verified too.

`--table` measures plain `quantize`, which compares plans, on an embedding table of so many MB before two such pairs.

`--net NAME` measures plain `quantize` of a network of architectures.py instead, with `--samples` samples.

A model is a chain of hidden layers of so many MB; above 2 GB its weights are in a file beside it. Each command is a
process of its own. Its CPU seconds and its peak memory (`ru_maxrss`) are printed. The peak may be 1.2 times the model's
size for `prepare` and `check`, and twice its size for commands that quantize, plus 200 MB for the interpreter and its
libraries.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
import onnx
from architectures import ARCHITECTURES
from onnx import TensorProto, helper, numpy_helper
from quantize_ratio import write_model

from edgekit.model.external import DataPlace, point_to

WIDTH, HIDDEN = 1024, 4096
LAYER_MB = 2 * WIDTH * HIDDEN * 4 / 1e6
TABLE_ROWS, WORDS = 4096, 16
INT4 = ("--weights", "int4", "--target", "cpu")
SIZES_MB = (90, 400, 1600, 3000)
SPARE_BYTES = 200_000_000
EXTERNAL_FROM_MB = 2000
SHARES = {"prepare": 1.2, "check": 1.2, "quantize": 2.0, "int4": 2.0, "build": 2.0, "verify": 2.0}


def make_chain(path: Path, size_mb: int, *, residual: bool) -> None:
    """Writes pairs of MatMul with a Relu between them, in a process of its own: a child would inherit its memory."""
    rng, data = np.random.default_rng(0), path.with_name(f"{path.name}.data")
    external, weights, nodes = size_mb >= EXTERNAL_FROM_MB, list[TensorProto](), list[onnx.NodeProto]()
    x = "x"
    with data.open("wb") as file:
        for index in range(max(1, round(size_mb / LAYER_MB))):
            before = x
            if residual:
                nodes.append(helper.make_node("LayerNormalization", [x, "ones"], [f"norm{index}"]))
                x = f"norm{index}"
            for part, dims in (("up", (WIDTH, HIDDEN)), ("down", (HIDDEN, WIDTH))):
                array = rng.standard_normal(dims, np.float32) / np.float32(dims[0] ** 0.5)
                weight = TensorProto(name=f"{part}{index}", data_type=TensorProto.FLOAT, dims=dims)
                if external:
                    point_to(weight, DataPlace(data.name, file.tell(), array.nbytes))
                    file.write(array.tobytes())
                else:
                    weight.raw_data = array.tobytes()
                weights.append(weight)
                nodes.append(
                    helper.make_node("MatMul", [x, weight.name], [f"{part}{index}.y"], name=f"{part}{index}.node")
                )
                x = f"{part}{index}.y"
                if part == "up":
                    nodes.append(helper.make_node("Relu", [x], [f"relu{index}"], name=f"relu{index}.node"))
                    x = f"relu{index}"
            if residual:
                nodes.append(helper.make_node("Add", [before, x], [f"sum{index}"]))
                x = f"sum{index}"
    if residual:
        weights.append(numpy_helper.from_array(np.ones(WIDTH, np.float32), "ones"))
        nodes.append(helper.make_node("LayerNormalization", [x, "ones"], ["y"], name="last"))
    else:
        nodes.append(helper.make_node("Softmax", [x], ["y"], name="last"))
    ends = [helper.make_tensor_value_info(name, TensorProto.FLOAT, ["batch", WIDTH]) for name in ("x", "y")]
    graph = helper.make_graph(nodes, "chain", ends[:1], ends[1:], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))
    if not external:
        data.unlink()


def make_table(path: Path, size_mb: int, samples: int) -> None:
    """Writes an embedding table and two residual pairs, whose weights are in a file beside the graph, and samples."""
    rng, rows = np.random.default_rng(0), max(1, round(size_mb * 1e6 / (4 * WIDTH * TABLE_ROWS))) * TABLE_ROWS
    # Channels of unequal size after the first normalization, so that they are equalized.
    weights = [
        numpy_helper.from_array(np.exp(1.5 * rng.standard_normal(WIDTH)).astype(np.float32), "gain0"),
        numpy_helper.from_array(np.ones(WIDTH, np.float32), "gain1"),
    ]
    nodes, x = [helper.make_node("Gather", ["table", "ids"], ["rows"], name="lookup")], "rows"
    with path.with_name(f"{path.name}.data").open("wb") as file:

        def store(name: str, dims: tuple[int, int], least: int) -> None:
            weight, start = TensorProto(name=name, data_type=TensorProto.FLOAT, dims=dims), file.tell()
            for _ in range(0, dims[0], least):
                part = rng.standard_normal((least, dims[1]), np.float32) / np.float32(dims[0] ** 0.5)
                file.write(part.tobytes())
            point_to(weight, DataPlace(Path(file.name).name, start, file.tell() - start))
            weights.append(weight)

        store("table", (rows, WIDTH), TABLE_ROWS)
        for index in range(2):
            nodes.append(helper.make_node("LayerNormalization", [x, f"gain{index}"], [f"norm{index}"]))
            store(f"up{index}", (WIDTH, HIDDEN), WIDTH)
            store(f"down{index}", (HIDDEN, WIDTH), HIDDEN)
            nodes.append(helper.make_node("MatMul", [f"norm{index}", f"up{index}"], [f"wide{index}"]))
            nodes.append(helper.make_node("Relu", [f"wide{index}"], [f"relu{index}"]))
            nodes.append(helper.make_node("MatMul", [f"relu{index}", f"down{index}"], [f"narrow{index}"]))
            nodes.append(helper.make_node("Add", [x, f"narrow{index}"], [f"sum{index}"]))
            x = f"sum{index}"
    nodes.append(helper.make_node("LayerNormalization", [x, "gain1"], ["y"], name="last"))
    for index, node in enumerate(nodes):
        node.name = node.name or f"{node.op_type}{index}"
    ids = helper.make_tensor_value_info("ids", TensorProto.INT64, [1, WORDS])
    y = helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, WORDS, WIDTH])
    graph = helper.make_graph(nodes, "table", [ids], [y], weights)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8), str(path))

    np.savez(path.with_name("data.npz"), ids=np.random.default_rng(1).integers(0, TABLE_ROWS, (samples, WORDS)))


def list_commands(model: Path) -> dict[str, list[str]]:
    """Returns the commands to measure, by name."""
    folder = model.parent
    sized = ["--dim", "batch=1"]
    small = f"{folder}/int4/model.onnx"
    return {
        "prepare": ["prepare", str(model), *sized, "--out", f"{folder}/prepared.onnx", "-q"],
        "check": ["check", str(model), *sized, "--target", "cpu"],
        "int4": ["convert", str(model), *sized, *INT4, "--out", f"{folder}/int4", "-q"],
        "quantize": [
            "quantize", str(model), *sized, "--target", "cpu", "--data", f"{folder}/data.npz", "--method", "minmax",
            "--out", f"{folder}/int8.onnx", "-q",
        ],
        "build": [
            "build", small, "--target", "cpu", "--data", f"{folder}/data.npz", "--no-verify", "-q",
            "--out", f"{folder}/bundles",
        ],
        "verify": ["verify", f"{folder}/bundles/model-cpu"],
    }  # fmt: skip


def measure(arguments: list[str]) -> tuple[int, float, int, str]:
    """Returns a command's exit code, CPU seconds, peak memory in bytes, and last line."""
    with tempfile.TemporaryFile("w+") as shown:
        argv = [sys.executable, "-m", "edgekit", *arguments]
        child = subprocess.Popen(argv, stdout=shown, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        shown.seek(0)
        lines = shown.read().strip().splitlines()
    return child.returncode, usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024, lines[-1] if lines else ""


def measure_model(size_mb: int, options: argparse.Namespace) -> bool:
    """Prints a line for each command on one model; returns True if all stay below their limits."""
    within = True
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        model = Path(folder) / "model.onnx"
        form = "--make-residual" if options.residual else "--make"
        subprocess.run([sys.executable, __file__, form, str(model), str(size_mb)], check=True)
        size = sum(path.stat().st_size for path in Path(folder).iterdir())
        np.savez(f"{folder}/data.npz", x=np.random.default_rng(1).standard_normal((options.samples, WIDTH), np.float32))
        for name, arguments in list_commands(model).items():
            if (options.only and name not in options.only) or (name == "verify" and not options.residual):
                continue
            within &= show(name, arguments, size)
    return within


def measure_plain(form: str, what: str, samples: int) -> bool:
    """Prints a line for plain `quantize` of a table or an architecture; returns True if it stays below its limit."""
    with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
        model, data = Path(folder) / "model.onnx", f"{folder}/data.npz"
        subprocess.run([sys.executable, __file__, form, str(model), what, str(samples)], check=True)
        size = sum(path.stat().st_size for path in Path(folder).glob("model.onnx*"))
        given = ["quantize", str(model), "--target", "cpu", "--data", data, "--out", f"{folder}/int8.onnx", "-q"]
        return show("quantize", given, size)


def show(name: str, arguments: list[str], size: int) -> bool:
    """Measures a command and prints a line; returns True if it stays below its limit."""
    code, seconds, peak, line = measure(arguments)
    fits = code == 0 and peak <= SHARES[name] * size + SPARE_BYTES
    share = (peak - SPARE_BYTES) / size
    print(f"{size / 1e6:6.0f} MB  {name:8} exit {code}  {seconds:6.1f} CPU-s  {peak / 1e6:6.0f} MB", end="  ")
    print(f"{share:5.2f} of {SHARES[name]}x {'ok' if fits else 'OVER'}  {line[:90]}", flush=True)
    return fits


def main() -> int:
    """Returns 1 if a command fails or exceeds its limit."""
    if sys.argv[1:2] in (["--make"], ["--make-residual"]):
        make_chain(Path(sys.argv[2]), int(sys.argv[3]), residual=sys.argv[1] == "--make-residual")
        return 0
    if sys.argv[1:2] == ["--make-table"]:
        make_table(Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
        return 0
    if sys.argv[1:2] == ["--make-net"]:
        write_model(ARCHITECTURES[sys.argv[3]](), Path(sys.argv[2]).parent, int(sys.argv[4]))
        return 0
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sizes", type=int, nargs="*", default=SIZES_MB)
    parser.add_argument("--only", action="append", default=[], choices=sorted(SHARES))
    parser.add_argument("--net", action="append", default=[], choices=sorted(ARCHITECTURES))
    parser.add_argument("--table", action="store_true", help="plain `quantize` of a table of words")
    parser.add_argument("--residual", action="store_true", help="a chain that adds, and verify")
    parser.add_argument("--samples", type=int, default=32, help="that calibrate and verify")
    options = parser.parse_args()
    # All are measured, even after one that exceeds its limit.
    within = [measure_plain("--make-net", name, options.samples) for name in options.net]
    if options.table:
        within = [measure_plain("--make-table", str(size), options.samples) for size in options.sizes]
    elif not options.net:
        within = [measure_model(size, options) for size in options.sizes]
    return 0 if all(within) else 1


if __name__ == "__main__":
    sys.exit(main())
