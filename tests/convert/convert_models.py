"""Tiny models for the convert stage."""

from collections.abc import Mapping
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import helper
from tiny_models import parse_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.convert.ort_form import OrtOptions, write_ort
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.target import Target, load_target

ZOO = Path(__file__).parents[3] / "shared/zoo"
ARM = OrtOptions(style="full", cpu="arm")
RUNTIME = OrtOptions(style="runtime", cpu="arm")


def all_forms() -> Target:
    """The CPU provider, which loads files of every form."""
    target = load_target("cpu")
    conversion = msgspec.structs.replace(target.conversion, forms=("runtime", "full", "onnx"), saves_fusions=True)
    return msgspec.structs.replace(target, conversion=conversion)


def save_text(path: Path, graph: str, weights: Mapping[str, Array]) -> Model:
    """Writes a graph in onnx's text form with these weights, and returns its model."""
    proto = parse_net(graph, weights)
    helper.set_model_props(proto, {"author": "me"})
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(proto, str(path))
    return load_model(path)


def make_float(path: Path) -> Model:
    """Returns a model of Conv, Relu, Conv, Sigmoid, with a branch, on float32[1,3,8,8]."""
    rng = np.random.default_rng(1)
    weights: dict[str, Array] = {
        "w1": rng.standard_normal((8, 3, 3, 3)).astype(np.float32),
        "w2": rng.standard_normal((8, 8, 1, 1)).astype(np.float32),
    }
    graph = """(float[1,3,8,8] x) => (float[1,8,6,6] y) {
      [conv1] a = Conv(x, w1)
      [relu] b = Relu(a)
      [conv2] c = Conv(b, w2)
      [sigmoid] d = Sigmoid(c)
      [mul] y = Mul(d, b) }"""
    return save_text(path, graph, weights)


def make_qdq(
    path: Path, activation: str = "uint8", weights: tuple[str, str] = ("int8", "int8"), between: str = ""
) -> Model:
    """Returns a model of two quantized Conv nodes, each followed by the operator `between` before its Q node."""
    rng = np.random.default_rng(2)
    zero = np.array(128 if activation == "uint8" else 0, activation)
    values: dict[str, Array] = {"s": np.array(0.05, np.float32), "z": zero}
    nodes = ["[x_q] x_q = QuantizeLinear(x, s, z) [x_dq] x_dq = DequantizeLinear(x_q, s, z)"]
    source = "x_dq"
    for index, weight in enumerate(weights, 1):
        values[f"{weight}_zero"] = np.array(0, weight)
        values[f"w{index}"] = rng.integers(0 if weight == "uint8" else -60, 60, (3, 3, 1, 1)).astype(weight)
        nodes += [f"[w{index}_dq] w{index}_dq = DequantizeLinear(w{index}, s, {weight}_zero)"]
        nodes += [f"[conv{index}] c{index} = Conv({source}, w{index}_dq)"]
        nodes += [f"[{between}{index}] r{index} = {between}(c{index})"] if between else []
        source = "y" if index == 2 else f"d{index}"
        nodes += [f"[q{index}] q{index} = QuantizeLinear({'r' if between else 'c'}{index}, s, z)"]
        nodes += [f"[dq{index}] {source} = DequantizeLinear(q{index}, s, z)"]
    return save_text(path, f"(float[1,3,4,4] x) => (float[1,3,4,4] y) {{ {' '.join(nodes)} }}", values)


def make_branches(path: Path) -> Model:
    """Returns a model whose x64 form has several ReorderOutput nodes."""
    rng = np.random.default_rng(4)
    shape = (16, 16, 1, 1)
    weights: dict[str, Array] = {f"w{index}": rng.standard_normal(shape).astype(np.float32) for index in range(6)}
    pair = "[convN] cN = Conv(x, wN) [tN] tN = Softmax<axis=-1>(cN) "
    branches = "".join(pair.replace("N", str(index)) for index in range(6))
    joined = "[cat] y = Concat<axis=1>(t0, t1, t2, t3, t4, t5)"
    return save_text(path, f"(float[1,16,8,8] x) => (float[1,96,8,8] y) {{ {branches} {joined} }}", weights)


def run_ort(path: Path, shape: tuple[int, ...], *, saved: bool = True) -> Array:
    """Returns the outputs of a file for fixed random values, with or without saved optimizations."""
    values = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    config = {"session.enable_saved_runtime_optimizations": str(int(saved)), "session.qdqisint8allowed": "1"}
    return CpuSession(path, SessionSettings(config=config, threads=1)).run({"x": values})["y"]


def write_form(model: Model, path: Path, options: OrtOptions) -> bytes:
    """Converts a model and returns the bytes of the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_ort(model, path, options)
    return path.read_bytes()
