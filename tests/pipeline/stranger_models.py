"""Small networks with blocks as exporters write them, on which edgekit once gave a wrong verdict."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
from tiny_models import save_net

from edgekit.model.tensors import Array


class Stranger(msgspec.Struct, frozen=True, kw_only=True):
    """A network in onnx's text form with one input `x` and one output `y`.

    Random `weights` are scaled so that the magnitude of values stays the same; `constants` are used as they are. The
    network is built for `target`.
    """

    nodes: str
    shape: tuple[int, ...]
    output: str
    answers: Literal["classes", "map", "sequence", "values", "vector"]
    target: str
    weights: Mapping[str, tuple[int, ...]] = {}
    constants: Mapping[str, object] = {}


_SIDE = (1, 3, 16, 16)

STRANGERS: Mapping[str, Stranger] = {
    "residual": Stranger(
        nodes="""a = Conv<pads=[1,1,1,1]>(x, w1)  b = Relu(a)  c = Conv<pads=[1,1,1,1]>(b, w2)  d = Add(b, c)
            e = Relu(d)  p = GlobalAveragePool(e)  f = Flatten(p)  y = Gemm(f, w3)""",
        shape=_SIDE, output="1,10", answers="classes", target="nnapi",
        weights={"w1": (16, 3, 3, 3), "w2": (16, 16, 3, 3), "w3": (16, 10)},
    ),
    "squeeze and excitation": Stranger(
        nodes="""a = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w1)  h = HardSwish(a)  s = ReduceMean<axes=[2,3]>(h)
            t = Conv(s, w2)  u = Relu(t)  v = Conv(u, w3)  g = HardSigmoid<alpha=0.16666667>(v)  m = Mul(h, g)
            p = ReduceMean<axes=[2,3], keepdims=0>(m)  y = Gemm(p, w4)""",
        shape=_SIDE, output="1,10", answers="classes", target="xnnpack",
        weights={"w1": (16, 3, 3, 3), "w2": (4, 16, 1, 1), "w3": (16, 4, 1, 1), "w4": (16, 10)},
    ),
    "u-net": Stranger(
        nodes="""a = Conv<pads=[1,1,1,1]>(x, w1)  b = Relu(a)  c = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)
            d = Conv<pads=[1,1,1,1]>(c, w2)  e = Relu(d)  f = ConvTranspose<strides=[2,2]>(e, w3)
            g = Concat<axis=1>(b, f)  y = Conv<pads=[1,1,1,1]>(g, w4)""",
        shape=_SIDE, output="1,4,16,16", answers="map", target="nnapi",
        weights={"w1": (8, 3, 3, 3), "w2": (16, 8, 3, 3), "w3": (16, 8, 2, 2), "w4": (4, 16, 3, 3)},
    ),
    "detector with SiLU": Stranger(
        nodes="""a = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w1)  b = Sigmoid(a)  c = Mul(a, b)
            d = Conv<strides=[2,2], pads=[1,1,1,1]>(c, w2)  e = Sigmoid(d)  f = Mul(d, e)
            g = Resize<mode="nearest", coordinate_transformation_mode="asymmetric", nearest_mode="floor">(f, none, two)
            h = Concat<axis=1>(c, g)  i = Conv(h, w3)  j = Reshape(i, rows)  k = Conv(f, w4)  l = Reshape(k, rows)
            y = Concat<axis=2>(j, l)""",
        shape=_SIDE, output="1,6,80", answers="values", target="nnapi",
        weights={"w1": (16, 3, 3, 3), "w2": (16, 16, 3, 3), "w3": (6, 32, 1, 1), "w4": (6, 16, 1, 1)},
        constants={"rows": np.array([1, 6, -1]), "two": np.array([1, 1, 2, 2], np.float32),
                   "none": np.array([], np.float32)},
    ),
    "sound in one dimension": Stranger(
        nodes="""u = Unsqueeze(x, middle)  a = Conv<strides=[1,4]>(u, w1)  b = Relu(a)  c = Conv<strides=[1,2]>(b, w2)
            d = Relu(c)  p = ReduceMean<axes=[3], keepdims=1>(d)  s = Squeeze(p, last)  y = Gemm(s, w3)""",
        shape=(1, 256), output="1,6", answers="values", target="nnapi",
        weights={"w1": (16, 1, 1, 8), "w2": (16, 16, 1, 4), "w3": (16, 6)},
        constants={"middle": np.array([1, 2]), "last": np.array([2, 3])},
    ),
    "reflected edges": Stranger(
        nodes="""q = Pad<mode="reflect">(x, edges)  a = Conv(q, w1)  b = Relu(a)  r = Pad<mode="reflect">(b, edges)
            y = Conv(r, w2)""",
        shape=_SIDE, output="1,3,16,16", answers="values", target="xnnpack",
        weights={"w1": (16, 3, 3, 3), "w2": (3, 16, 3, 3)}, constants={"edges": np.array([0, 0, 1, 1, 0, 0, 1, 1])},
    ),
    "cascade with PRelu": Stranger(
        nodes="""a = Conv(x, w1)  b = PRelu(a, s1)  c = MaxPool<kernel_shape=[2,2], strides=[2,2]>(b)  d = Conv(c, w2)
            e = PRelu(d, s2)  f = Flatten(e)  y = Gemm(f, w3)""",
        shape=_SIDE, output="1,10", answers="values", target="nnapi",
        weights={"w1": (8, 3, 3, 3), "w2": (16, 8, 3, 3), "w3": (400, 10)},
        constants={"s1": np.full((8, 1, 1), 0.2, np.float32), "s2": np.full((16, 1, 1), 0.3, np.float32)},
    ),
    "shuffled channels": Stranger(
        nodes="""a = Conv<pads=[1,1,1,1]>(x, w1)  b, c = Split<axis=1>(a, halves)
            d = Conv<group=8, pads=[1,1,1,1]>(c, w2)  e = Relu(d)  f = Concat<axis=1>(b, e)
            g = Reshape(f, apart)  h = Transpose<perm=[0,2,1,3,4]>(g)
            i = Reshape(h, whole)  j = Conv(i, w3)  p = GlobalAveragePool(j)  y = Flatten(p)""",
        shape=_SIDE, output="1,10", answers="classes", target="qnn",
        weights={"w1": (16, 3, 3, 3), "w2": (8, 1, 3, 3), "w3": (10, 16, 1, 1)},
        constants={"halves": np.array([8, 8]), "apart": np.array([1, 2, 8, 16, 16]),
                   "whole": np.array([1, 16, 16, 16])},
    ),
    "resized twice": Stranger(
        nodes="""a = Conv<pads=[1,1,1,1]>(x, w1)  b = Relu(a)
            c = Resize<mode="linear", coordinate_transformation_mode="align_corners">(b, none, two)
            d = Resize<mode="cubic", coordinate_transformation_mode="half_pixel">(c, none, two)  y = Conv(d, w2)""",
        shape=(1, 3, 8, 8), output="1,3,32,32", answers="values", target="cpu",
        weights={"w1": (8, 3, 3, 3), "w2": (3, 8, 1, 1)},
        constants={"two": np.array([1, 1, 2, 2], np.float32), "none": np.array([], np.float32)},
    ),
    "averages that count the edge": Stranger(
        nodes="""a = Conv(x, w1)  b = Relu(a)
            c = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], strides=[2,2], count_include_pad=1>(b)
            d = Conv(c, w2)  p = GlobalAveragePool(d)  y = Flatten(p)""",
        shape=_SIDE, output="1,10", answers="classes", target="xnnpack",
        weights={"w1": (16, 3, 3, 3), "w2": (10, 16, 1, 1)},
    ),
    "sentence": Stranger(
        nodes="""q = MatMul(x, w1)  k = MatMul(x, w2)  v = MatMul(x, w3)  t = Transpose<perm=[0,2,1]>(k)
            s = MatMul(q, t)  d = Div(s, root)  c = Softmax(d)  m = MatMul(c, v)  r = Add(m, x)
            n = LayerNormalization(r, gain)
            e = ReduceMean<axes=[1], keepdims=0>(n)  y = Tanh(e)""",
        shape=(1, 12, 32), output="1,32", answers="vector", target="qnn",
        weights={"w1": (32, 32), "w2": (32, 32), "w3": (32, 32)},
        constants={"root": np.float32(5.66), "gain": np.linspace(0.5, 1.5, 32, dtype=np.float32)},
    ),
    "steps of a sequence": Stranger(
        nodes="""t = Transpose<perm=[2,0,1]>(x)  h, last = GRU<hidden_size=16>(t, w1, w2)  s = Squeeze(h, one)
            r = Transpose<perm=[1,0,2]>(s)  y = MatMul(r, w3)""",
        shape=(1, 8, 20), output="1,20,6", answers="sequence", target="cpu",
        weights={"w1": (1, 48, 8), "w2": (1, 48, 16), "w3": (16, 6)}, constants={"one": np.array([1])},
    ),
}  # fmt: skip
"""Each network by its name."""


def write_stranger(stranger: Stranger, folder: Path) -> None:
    """Writes model.onnx, and samples for calibration, for verification and for the oracle."""
    rng = np.random.default_rng(11)
    shape = ",".join(map(str, stranger.shape))
    drawn = {name: rng.normal(0, _gain(shape), shape) for name, shape in stranger.weights.items()}
    stored = {name: np.asarray(value) for name, value in {**drawn, **stranger.constants}.items()}
    kept = {name: value.astype(np.float32) if value.dtype == np.float64 else value for name, value in stored.items()}
    text = f"(float[{shape}] x) => (float[{stranger.output}] y) {{ {stranger.nodes} }}"
    save_net(text, folder / "model.onnx", **kept)
    # "many" are as many as it takes to see what the few of a calibration did not reach.
    for file, count in (("calib", 16), ("eval", 16), ("held", 24), ("many", 400)):
        np.savez(folder / f"{file}.npz", x=np.stack([_draw(rng, stranger.shape) for _ in range(count)]))


def _gain(shape: tuple[int, ...]) -> float:
    inputs = np.prod(shape[1:]) if len(shape) > 2 else shape[0]
    return float(np.sqrt(2 / inputs))


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> Array:
    """Returns a sample that differs from others in contrast, level and pattern, as real ones do."""
    level = rng.normal(size=tuple(size if axis == 1 and len(shape) > 2 else 1 for axis, size in enumerate(shape)))
    wave = np.sin(np.arange(shape[-1]) * rng.uniform(0.1, 2) + rng.uniform(0, 6))
    return np.asarray(level + rng.uniform(0.3, 1.5) * wave + rng.normal(size=shape) * 0.3, np.float32)
