"""Trains a MobileNetV2-like net with simulated quantization, and shows what is left of it in plain mode.

    python tools/bench/qat_drop.py [GRID]... [--targets nnapi:api_level=28,nnapi] [--cache ~/.cache/edgekit/qat]

A float net learns shapes, its batch normalisation is folded, and it goes on with weights and activations rounded as
TensorFlow's FakeQuant nodes do (Jacob et al., arXiv:1712.05877): one scale a layer, ranges of activations averaged over
batches. GRID says which integers weights have: "symmetric" (int8, zero at 0) or "shifted" (uint8 with a zero point).
What is quantized is the float net that such training leaves, its weights on their grid and without any Q or DQ node;
"as trained" is the same net with the Q and DQ nodes of its training, run as it is. Training needs jax and optax
(`pip install -r tools/lock/train.txt`) and some minutes of CPU; what was trained is kept in the cache. No sample
calibrates and scores. Exit code 1: more than 0.4 points are lost, beyond the sampling error.
"""

import argparse
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
from four_bit_nets import shapes
from onnx import helper, numpy_helper
from quantize_zoo import read_target_name

from edgekit._ort import CpuSession, SessionSettings
from edgekit.jobs.quantize import quantize_for
from edgekit.model.tensors import Array
from edgekit.recipe import Data, Recipe

sys.path.insert(0, str(Path(__file__).parent / "collapse"))

from collapse_families import TRAIN, class_loss, make_depthwise, scene_classes
from collapse_net import EPSILON, Net
from collapse_train import Values, run_net

GRIDS = ("symmetric", "shifted")
TARGETS = "nnapi:api_level=28,nnapi,qnn,xnnpack,cpu"
ALLOWED = 0.4
"""How many points may be lost."""
_FLOAT_STEPS, _STEPS, _BATCH, _RATE = 600, 160, 48, 3e-4
# Ranges of activations follow the batches at first, and stand still for the last quarter of the training.
_KEPT, _FROZEN_FROM = 0.95, 0.75
_CALIBRATE, _SCORED = 256, 16_000
_ENDS = {"symmetric": (-127, 127), "shifted": (0, 255)}

Ranges = dict[str, tuple[Any, Any]]


def fold_norms(net: Net) -> Net:
    """Returns a net whose batch normalisation is part of the convolutions before it."""
    folded = Net(net.name, net.opset, seed=0)
    folded.inputs, folded.outputs = dict(net.inputs), dict(net.outputs)
    norms = {node.input[0]: node for node in net.nodes if node.op_type == "BatchNormalization"}
    folded.arrays = {name: value for name, value in net.arrays.items() if not name.startswith("bn")}
    for node in net.nodes:
        if node.op_type == "BatchNormalization":
            continue
        norm, copy = norms.get(node.output[0]), onnx.NodeProto()
        copy.CopyFrom(node)
        if norm is not None:
            gamma, beta, mean, var = (net.arrays[name] for name in norm.input[1:])
            factor, weight = gamma / np.sqrt(var + EPSILON), net.arrays[node.input[1]]
            folded.arrays[node.input[1]] = (weight * factor.reshape(-1, 1, 1, 1)).astype(np.float32)
            bias = folded.constant(beta - mean * factor, f"{node.input[1]}.bias")
            del copy.input[2:], copy.output[:]
            copy.input.append(bias)
            copy.output.append(norm.output[0])
        folded.nodes.append(copy)
    return folded


def fit_grid(low: Any, high: Any) -> tuple[Any, Any]:
    """Returns the scale of a range that holds zero, and the integer that stands for it, of integers from 0 on."""
    low, high = jnp.minimum(low, 0.0), jnp.maximum(high, 0.0)
    scale = jnp.maximum((high - low) / 255, 1e-9)
    return scale, jnp.round(-low / scale)


def fit_weight(weight: Any, grid: str) -> tuple[Any, Any]:
    """Returns the one scale of a layer's weights, and its zero point."""
    if grid == "shifted":
        return fit_grid(weight.min(), weight.max())
    return jnp.maximum(jnp.abs(weight).max() / _ENDS[grid][1], 1e-9), jnp.float32(0.0)


def round_through(value: Any, scale: Any, zero: Any, ends: tuple[int, int]) -> Any:
    """Returns values on a grid, cut to its ends; the gradient is that of the cut alone."""
    scale, zero = jax.lax.stop_gradient(scale), jax.lax.stop_gradient(zero)
    cut = jnp.clip(value, (ends[0] - zero) * scale, (ends[1] - zero) * scale)
    return cut + jax.lax.stop_gradient(jnp.round(cut / scale) * scale - cut)


def round_weights(weights: Values, grid: str) -> Values:
    """Returns the constants of a net with weights on their grid; biases stay as they are."""
    return {
        name: value if value.ndim == 1 else round_through(value, *fit_weight(value, grid), _ENDS[grid])
        for name, value in weights.items()
    }


def find_rounded(net: Net) -> list[str]:
    """Returns the tensors that are rounded: all but what a Clip alone reads, and what was only moved."""
    cut = {node.input[0] for node in net.nodes if node.op_type == "Clip"}
    made = [node.output[0] for node in net.nodes if node.op_type != "Reshape"]
    return [*net.inputs, *(name for name in made if name not in cut)]


def run_rounded(net: Net, weights: Values, rows: Any, ranges: Ranges | None) -> tuple[Values, Ranges]:
    """Returns the tensors of a net with activations rounded to ranges, if there are any, and what these should be."""
    seen: Ranges = {}
    names = set(find_rounded(net))

    def change(name: str, value: Any) -> Any:
        if name not in names:
            return value
        seen[name] = value.min(), value.max()
        return value if ranges is None else round_through(value, *fit_grid(*ranges[name]), (0, 255))

    values = run_net(net, weights, {"image": change("image", rows)}, training=False, change=change)
    return values, seen


def train_rounded(net: Net, grid: str, images: Array, labels: Array) -> Ranges:
    """Trains a folded net in place with rounded weights and activations, and returns the ranges of the latter."""
    weights = {name: jnp.asarray(net.arrays[name]) for name in sorted(net.trained)}
    optimizer = optax.adam(optax.cosine_decay_schedule(_RATE, _STEPS))
    state, rng = optimizer.init(weights), np.random.default_rng(7)

    def loss_of(weights: Values, rows: Values, ranges: Ranges) -> Any:
        values, seen = run_rounded(net, round_weights(weights, grid), rows["image"], ranges)
        return class_loss(values, rows), seen

    def step(weights: Values, state: Any, rows: Values, ranges: Ranges) -> Any:
        (value, seen), gradients = jax.value_and_grad(loss_of, has_aux=True)(weights, rows, ranges)
        updates, state = optimizer.update(gradients, state, weights)
        return optax.apply_updates(weights, updates), state, value, seen

    # Called, since as a decorator it has no type where jax is not installed.
    fast_step: Callable[..., Any] = jax.jit(step)

    _, ranges = run_rounded(net, weights, images[:256], None)
    for number in range(_STEPS):
        chosen = rng.choice(len(images), _BATCH, replace=False)
        rows = {"image": images[chosen], "label": labels[chosen]}
        weights, state, value, seen = fast_step(weights, state, rows, ranges)
        if number < _FROZEN_FROM * _STEPS:
            ranges = {name: _follow(ranges[name], ends) for name, ends in seen.items()}
        if (number + 1) % (_STEPS // 4) == 0:
            print(f"  {net.name}, {grid}: step {number + 1} of {_STEPS}, loss {float(value):.4f}", flush=True)
    net.arrays |= {name: np.asarray(value) for name, value in weights.items()}
    return ranges


def _follow(old: tuple[Any, Any], new: tuple[Any, Any]) -> tuple[Any, Any]:
    low, high = (_KEPT * before + (1 - _KEPT) * seen for before, seen in zip(old, new, strict=True))
    return low, high


def put_on_grid(net: Net, grid: str) -> dict[str, tuple[Array, Array, Array]]:
    """Puts the weights of a trained net on their grid, in place, and returns integers, scale and zero point of each."""
    stored: dict[str, tuple[Array, Array, Array]] = {}
    kind = np.int8 if grid == "symmetric" else np.uint8
    for name in net.trained:
        weight = net.arrays[name]
        if weight.ndim == 1:
            continue
        scale, zero = (np.asarray(each, np.float32) for each in fit_weight(weight, grid))
        integers = np.clip(np.rint(weight / scale) + zero, *_ENDS[grid])
        net.arrays[name] = ((integers - zero) * scale).astype(np.float32)
        stored[name] = integers.astype(kind), scale, np.asarray(zero, kind)
    return stored


def add_pairs(proto: onnx.ModelProto, stored: dict[str, tuple[Array, Array, Array]], ranges: Ranges) -> onnx.ModelProto:
    """Returns the model with the Q and DQ nodes of its training: weights as integers, a pair behind each activation."""
    made = onnx.ModelProto()
    made.CopyFrom(proto)
    graph = made.graph
    kept = [tensor for tensor in graph.initializer if tensor.name not in stored]
    nodes: list[onnx.NodeProto] = []

    def hold(name: str, value: Any) -> str:
        kept.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def pair(name: str, raw: str) -> None:
        scale, zero = (np.float32(each) for each in fit_grid(*ranges[name]))
        grid = [hold(f"{name}.scale", scale), hold(f"{name}.zero", np.uint8(zero))]
        nodes.append(helper.make_node("QuantizeLinear", [raw, *grid], [f"{name}.integers"], name=f"{name}.q"))
        nodes.append(helper.make_node("DequantizeLinear", [f"{name}.integers", *grid], [name], name=f"{name}.dq"))

    for name, values in stored.items():
        grid = [
            hold(f"{name}.{role}", value) for role, value in zip(("integers", "scale", "zero"), values, strict=True)
        ]
        nodes.append(helper.make_node("DequantizeLinear", grid, [name], name=f"{name}.dq"))
    pair("image.rounded", "image")
    for node in graph.node:
        node.input[:] = ["image.rounded" if name == "image" else name for name in node.input]
        nodes.append(node)
        if node.output[0] in ranges:
            name, node.output[0] = node.output[0], f"{node.output[0]}.raw"
            pair(name, node.output[0])
    kept_nodes = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:], graph.initializer[:]
    graph.node.extend(kept_nodes)
    graph.initializer.extend(kept)
    onnx.checker.check_model(made)
    return made


def make_files(cache: Path, grid: str) -> tuple[Path, Path]:
    """Returns the float file and the one with Q and DQ nodes of a trained net; trains it where the cache has none."""
    files = cache / f"{grid}.onnx", cache / f"{grid}_qdq.onnx"
    if all(path.is_file() for path in files):
        return files
    cache.mkdir(parents=True, exist_ok=True)
    net = read_net(find_float(cache))
    ranges = train_rounded(net, grid, *scene_classes(TRAIN))
    ranges["image.rounded"] = ranges.pop("image")
    stored = put_on_grid(net, grid)
    proto = net.to_onnx()
    onnx.save(add_pairs(proto, stored, ranges), str(files[1]))
    onnx.save(proto, str(files[0]))
    return files


def find_float(cache: Path) -> Path:
    """Returns the file of the float net, without batch normalisation; trains it where the cache has none."""
    path = cache / "float.onnx"
    if not path.is_file():
        net = make_depthwise("qat", 17, bounded=True, decades=0.0, steps=_FLOAT_STEPS)
        onnx.save(fold_norms(net).to_onnx(), str(path))
    return path


def read_net(path: Path) -> Net:
    """Returns the net of a file, whose layers' weights and biases can be trained."""
    proto = onnx.load(str(path))
    net = Net(proto.graph.name, proto.opset_import[0].version, seed=0)
    net.nodes = list(proto.graph.node)
    net.arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    net.trained = {name for node in net.nodes if node.op_type in {"Conv", "Gemm"} for name in node.input[1:]}
    for shapes_of, values in ((net.inputs, proto.graph.input), (net.outputs, proto.graph.output)):
        for value in values:
            shapes_of[value.name] = tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)[1:]
    return net


def score(path: Path, images: Array, labels: Array) -> Array:
    """Returns which answers of a model are right."""
    session = CpuSession(path, SessionSettings())
    answers = [next(iter(session.run({"image": row[None]}).values())).argmax() for row in images]
    right: Array = np.array(answers) == labels
    return right


def describe(found: Array, reference: Array) -> tuple[str, bool]:
    """Returns what a model loses against another, with its 95 % interval, and whether that is no more than allowed."""
    lost = 100 * (reference.astype(float) - found)
    half = 1.96 * lost.std() / np.sqrt(len(lost))
    return f"{100 * found.mean():6.2f} %, {lost.mean():5.2f} ± {half:.2f} lost", lost.mean() - half <= ALLOWED


def main() -> int:
    """Shows each net on each target, and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("grids", nargs="*", default=list(GRIDS))
    parser.add_argument("--targets", default=TARGETS)
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache/edgekit/qat")
    parser.add_argument("--scored", type=int, default=_SCORED)
    args = parser.parse_args()
    good = True
    rows, labels = shapes(args.scored, 911)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        np.savez(work / "calib.npz", image=shapes(_CALIBRATE, 910)[0])
        for grid in args.grids:
            path, trained = make_files(args.cache, grid)
            reference = score(path, rows, labels)
            print(f"{grid}: float {100 * reference.mean():.2f} % of {len(rows)}", flush=True)
            print(f"  {'as trained':20} {describe(score(trained, rows, labels), reference)[0]}", flush=True)
            for name in args.targets.split(","):
                target, settings = read_target_name(name)
                recipe = Recipe(targets=(target,), settings=settings)
                report = quantize_for(path, Data(source=str(work / "calib.npz")), work / "q.onnx", recipe)
                text, is_good = describe(score(work / "q.onnx", rows, labels), reference)
                good &= is_good
                kept, ratio = len(report.float_nodes), report.predicted.sqnr_db
                print(f"  {name:20} {text}{'' if is_good else ' NO'} ({ratio:.1f} dB, {kept} float)", flush=True)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
