"""Tiny networks with structures that stock quantization ruins: depthwise, detector, spectrum, PReLU, sub-pixel."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from onnx import numpy_helper
from quantize_models import make_model, make_samples

from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model, save_proto
from edgekit.model.tensors import Array, Tensors
from edgekit.quantize.graph.float_graph import read_float_graph

SEPARABLE = """g (float[1,3,12,12] x) => (float[1,40,12,12] y) {
  a = Conv<kernel_shape=[1,1]>(x, w1, b1) r = Relu(a)
  d = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=24>(r, w2, b2) p = PRelu(d, slope)
  e = Conv<kernel_shape=[1,1]>(p, w3, b3) c = Clip(e, zero, six)
  f = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=16>(c, w4, b4)
  y = Conv<kernel_shape=[1,1]>(f, w5, b5) }"""
DETECTOR = """g (float[1,3,16,16] x) => (float[1,64,10] y)
  <float size = {40.0}, int64[3] flat = {1, -1, 64}> {
  a = Conv<strides=[2,2], pads=[1,1,1,1]>(x, w1, b1) as = Sigmoid(a) at = Mul(a, as)
  c = Conv<pads=[1,1,1,1]>(at, w2, b2) cs = Sigmoid(c) ct = Mul(c, cs)
  boxes = Conv(ct, w3, b3) large = Mul(boxes, size) classes = Conv(ct, w4, b4) scores = Sigmoid(classes)
  all = Concat<axis=1>(large, scores) rows = Reshape(all, flat) y = Transpose<perm=[0,2,1]>(rows) }"""
SPECTRUM = """g (float[1,1,640] x) => (float[1,40] y) <float eps = {1e-6}> {
  re = Conv<strides=[16]>(x, wr) im = Conv<strides=[16]>(x, wi) re2 = Mul(re, re) im2 = Mul(im, im)
  p = Add(re2, im2) e = Add(p, eps) l = Log(e) h = Conv<pads=[1,1]>(l, w1, b1) r = Relu(h)
  m = GlobalAveragePool(r) f = Flatten(m) y = MatMul(f, w2) }"""
SEGMENTATION = """g (float[1,3,16,16] x) => (float[1,5,16,16] y) {
  a = Conv<pads=[1,1,1,1]>(x, w1, b1) p = PRelu(a, s1) c = Conv<pads=[2,2,2,2], dilations=[2,2]>(p, w2, b2)
  q = PRelu(c, s2) d = Conv<pads=[1,1,1,1], group=24>(q, w3, b3) r = PRelu(d, s3) y = Conv(r, w4, b4) }"""
SUBPIXEL = """g (float[1,1,12,12] x) => (float[1,1,36,36] y)
  <float[4] by = {1.0, 1.0, 3.0, 3.0}> {
  a = Conv<pads=[2,2,2,2]>(x, w1, b1) r = Relu(a) c = Conv<pads=[1,1,1,1]>(r, w2, b2) s = Relu(c)
  d = Conv<pads=[1,1,1,1]>(s, w3, b3) u = DepthToSpace<blocksize=3, mode="CRD">(d)
  n = Resize(x, , by) y = Add(u, n) }"""

Shapes = dict[str, tuple[int, ...]]
SHAPES: dict[str, Shapes] = {
    SEPARABLE: {
        "w1": (24, 3, 1, 1), "b1": (24,), "w2": (24, 1, 3, 3), "b2": (24,), "w3": (16, 24, 1, 1), "b3": (16,),
        "w4": (16, 1, 3, 3), "b4": (16,), "w5": (40, 16, 1, 1), "b5": (40,), "slope": (24, 1, 1), "zero": (), "six": (),
    },
    DETECTOR: {
        "w1": (12, 3, 3, 3), "b1": (12,), "w2": (24, 12, 3, 3), "b2": (24,), "w3": (4, 24, 1, 1), "b3": (4,),
        "w4": (6, 24, 1, 1), "b4": (6,),
    },
    SPECTRUM: {
        "wr": (33, 1, 64), "wi": (33, 1, 64), "w1": (24, 33, 3), "b1": (24,), "w2": (24, 40),
    },
    SEGMENTATION: {
        "w1": (16, 3, 3, 3), "b1": (16,), "s1": (16, 1, 1), "w2": (24, 16, 3, 3), "b2": (24,), "s2": (24, 1, 1),
        "w3": (24, 1, 3, 3), "b3": (24,), "s3": (24, 1, 1), "w4": (5, 24, 1, 1), "b4": (5,),
    },
    SUBPIXEL: {
        "w1": (16, 1, 5, 5), "b1": (16,), "w2": (16, 16, 3, 3), "b2": (16,), "w3": (9, 16, 3, 3), "b3": (9,),
    },
}  # fmt: skip
UNEQUAL: dict[str, tuple[tuple[int, int], ...]] = {
    SEPARABLE: ((1, 2), (2, 3), (3, 4)), SEGMENTATION: ((1, 2), (2, 3), (3, 4)), SUBPIXEL: ((1, 2), (2, 3)),
}  # fmt: skip
"""The indices of the convolutions between which channels differ."""
SLOPES = ("slope", "s1", "s2", "s3")


def make_collapsing(text: str, folder: Path, decades: float = 2.0) -> Model:
    """A network whose channels differ by up to powers of ten, as after folding batch normalization."""
    proto = read_float_graph(make_model(text, folder / "plain.onnx", SHAPES[text])).model
    arrays = {tensor.name: numpy_helper.to_array(tensor) for tensor in proto.graph.initializer}
    arrays |= {name: np.full(SHAPES[text][name], 0.25, np.float32) for name in SLOPES if name in SHAPES[text]}
    arrays |= {name: np.array(value, np.float32) for name, value in (("zero", 0), ("six", 6)) if name in SHAPES[text]}
    if text == DETECTOR:
        arrays["b4"] = arrays["b4"] - np.float32(3)
    if text == SPECTRUM:
        arrays |= dict(zip(("wr", "wi"), fourier_weights(), strict=True))
    rng = np.random.default_rng(3)
    for maker, reader in UNEQUAL.get(text, ()):
        weight, bias, other = arrays[f"w{maker}"], arrays[f"b{maker}"], arrays[f"w{reader}"]
        factors = (10 ** rng.uniform(-decades, 0, len(bias))).astype(np.float32)
        arrays[f"w{maker}"], arrays[f"b{maker}"] = weight * factors.reshape(-1, 1, 1, 1), bias * factors
        arrays[f"w{reader}"] = other / factors.reshape((-1, 1, 1, 1) if other.shape[1] == 1 else (1, -1, 1, 1))
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in arrays.items())
    save_proto(proto, folder / "collapsing.onnx")
    return load_model(folder / "collapsing.onnx")


def fourier_weights() -> tuple[Array, Array]:
    """Cosines and sines [33,1,64] under a window."""
    angles = 2 * np.pi * np.outer(np.arange(33), np.arange(64)) / 64
    window = np.hanning(64)
    cosines, sines = np.cos(angles) * window, np.sin(angles) * window
    return cosines[:, None].astype(np.float32), sines[:, None].astype(np.float32)


def draw_samples(model: Model, count: int, seed: int) -> Samples:
    """Waves of very different amplitude for a spectrum; images of smooth patches for the other networks."""
    return make_samples(list(_rows(model, count, seed)))


def _rows(model: Model, count: int, seed: int) -> Iterator[Tensors]:
    rng = np.random.default_rng(seed)
    (spec,) = model.inputs
    shape = [int(dim or 1) for dim in spec.shape or ()]
    for _ in range(count):
        if len(shape) == 3:
            tone = np.sin(np.arange(shape[2]) * rng.uniform(0.1, 1.5)) + rng.normal(0, 0.1, shape[2])
            yield {spec.name: (10 ** rng.uniform(-3, 0) * tone).reshape(shape).astype(np.float32)}
        else:
            coarse = rng.uniform(0, 1, (*shape[:2], shape[2] // 4, shape[3] // 4))
            yield {spec.name: coarse.repeat(4, 2).repeat(4, 3).astype(np.float32)}
