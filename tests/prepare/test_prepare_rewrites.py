"""Each rewrite finds its pattern, leaves what only looks like it, and changes no result beyond what it says."""

import contextlib
from collections.abc import Collection
from pathlib import Path

import numpy as np
import onnx
import pytest
from prepare_models import assert_same, make_model, op_names, rewrite

from edgekit.check.check import check_model
from edgekit.errors import EdgekitError, ModelError, RuntimeRefusal
from edgekit.graph.graph import read_graph
from edgekit.model.model import Model, iterate_tensors, load_model, save_proto
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.fix import FIXES, REQUIRED_REWRITES, REWRITES, TARGET_REWRITES, fix_model
from edgekit.target import load_target


def _count(first: int, size: int) -> str:
    return ",".join(str((each % 7) - 3) for each in range(first, first + size))


WITH = {
    "conv-to-planes": f"""g (float[1,3,20] x) => (float[1,6,1] y, float[1,4,12] z)
        <float[4,3,3] w = {{{_count(0, 36)}}}, float[4] b = {{1,2,3,4}}, float[4,1,3] v = {{{_count(5, 12)}}},
        float[6,8,2] o = {{{_count(2, 96)}}},
        float[4,1] s = {{0.5,2,3,-1}}, float[1,4,1] k = {{1,2,3,-4}}, float h = {{9.5}}>
        {{ a = Conv<pads=[2,5], strides=[2], dilations=[2]>(x, w, b) p = PRelu(a, s) q = Conv<group=4, pads=[1,1]>(p, v)
        r = Add(p, q) t = Mul(r, k) z = Clip(t, , h) n = MaxPool<kernel_shape=[3], pads=[1,1]>(z)
        c = Concat<axis=1>(n, z) d = Conv<auto_pad="SAME_UPPER">(c, o) e = Tanh(d) y = GlobalAveragePool(e) }}""",
    "default-activations": """g (float[2,1,3] x, float[2,8,3] w, float[2,8,2] r, float[1,6,3] u, float[1,6,2] v)
        => (float[2,2,1,2] y, float[2,1,1,2] z) {
        y = LSTM<hidden_size=2, direction="bidirectional", activations=["Sigmoid", "Tanh", "Tanh", "sigmoid", "tanh",
        "tanh"]>(x, w, r) z = GRU<hidden_size=2, activations=["Sigmoid", "Tanh"]>(x, u, v) }""",
    "split-lstm": """g (float[3,2,4] x, float[2,8,4] w, float[2,8,2] r, float[2,16] b, float[2,2,2] h, float[2,2,2] c)
        => (float[3,2,2,2] y, float[2,2,2] p, float[2,2,2] q) {
        y, p, q = LSTM<hidden_size=2, direction="bidirectional">(x, w, r, b, , h, c) }""",
    # onnx's text form has float16 as integers of the same bits: 15360 is 1, 16384 is 2.
    "half-to-float": """g (bool c, float16[2,3] x, float[3,3] f) => (float16[2,3] y, float[2,3] z, float16[2,3] q)
        <float16[3] b = {15360, 16384, 17408}, int64[2] s = {2, 3}>
        { h = Cast<to=10>(f) p = MatMul(x, h) q = Add(p, b) k = ConstantOfShape<value = float16[1] {16896}>(s)
        t = Mul(q, k) z = Cast<to=1>(t) y = If(c)
        <then_branch = a () => (float16[2,3] u) <float16[3] w = {17408, 15360, 16384}> { u = Mul(t, w) },
        else_branch = e () => (float16[2,3] v) { r = Neg(z) v = Cast<to=10>(r) }> }""",
    "double-to-float": """g (double[2,3] x, float[2,3] f) => (double[2,3] y, float[2,3] z)
        <double[3,3] w = {1.0,2.0,3.0,4.0,-5.0,6.0,7.0,8.0,9.0}, double[3] b = {0.5, -1.0e300, 3.0},
        double h = {-9.0e9}, int64[2] s = {2, 3}> { m = MatMul(x, w) c = Max(b, h) p = Add(m, c)
        e = ConstantOfShape<value = double[1] {3.0}>(s) y = Mul(p, e) t = Cast<to=1>(p) z = Sub(t, f) }""",
    "flat-bias": """g (float[2,3] x) => (float[2,2] y, float[2,4] z)
        <float[3,2] w = {1,2,3,4,5,6}, float[1,2] b = {0.5, -1}, float[4,2] v = {1,2,3,4,5,6,7,8}, float[1] c = {7}>
        { y = Gemm(x, w, b) z = Gemm<transB=1>(y, v, c) }""",
    "drop-copies": """g (float[2,3] x) => (float[2,3] y, float[2,3] z) { a = Relu(x) b = Identity(a) c, m = Dropout(b)
        d = Concat<axis=0>(c) e = Transpose<perm=[0,1]>(d) y = Neg(e) z = Concat<axis=1>(y) }""",
    "trailing-inputs": "g (float[2,3] x) => (float[2,3] y) <float low = {0.5}> { y = Clip(x, low) }",
    "plain-pad": """g (float[2,3] x) => (float[4,3] y, float[2,5] z)
        <int64[4] p = {1,0,1,0}, int64[4] q = {0,1,0,1}, float v = {0}>
        { y = Pad(x, p, v) z = Pad<mode="constant">(x, q, v) }""",
    "zero-pad": """g (float[2,3] x) => (float[4,3] y, float[2,5] z)
        <int64[4] p = {1,0,1,0}, int64[2] q = {1,1}, int64[1] a = {1}, float s = {0.1}, int8 o = {-128}>
        { i = QuantizeLinear(x, s, o) d = DequantizeLinear(i, s, o) y = Pad(d, p) z = Pad(d, q, , a) }""",
    "plain-count": """g (float[1,2,5,4] x) => (float[1,2,2,2] y, float[1,2,3,3] z)
        { y = AveragePool<kernel_shape=[2,2], strides=[2,2], pads=[0,0,0,0], count_include_pad=1>(x)
        z = AveragePool<kernel_shape=[3,2], auto_pad="VALID", count_include_pad=1>(x) }""",
    "even-split": """g (float[2,4] x) => (float[2,2] y, float[2,2] z) <int64[2] s = {2,2}>
        { y, z = Split<axis=-1>(x, s) }""",
    "write-pads": """g (float[1,2,3,3] x) => (float[1,1,4,4] y, float[1,1,6,6] z)
        <float[2,1,2,2] w = {1,2,3,4,5,6,7,8}>
        { y = ConvTranspose(x, w) z = ConvTranspose<auto_pad="NOTSET", strides=[2,2]>(x, w) }""",
    "plain-average": """g (float[1,2,5,4] x, float[1,2,5] u, float[1,2,3,2,2] p)
        => (float[1,2,5,4] y, float[1,2,3,2] z, float[1,2,5,4] w, float[1,2,3] v, float[1,2,5] t, float[1,2,3] s,
        float[A,B,C,D] r, float[1,2,3,2,2] q)
        { r = AveragePool<kernel_shape=[3,2], strides=[2,3], pads=[1,0,0,0], ceil_mode=1, count_include_pad=1>(x)
        q = AveragePool<kernel_shape=[2,3,2], pads=[0,1,0,1,1,1], count_include_pad=1>(p)
        t = AveragePool<kernel_shape=[2], auto_pad="SAME_UPPER">(u)
        s = AveragePool<kernel_shape=[2], strides=[2], pads=[0,1], ceil_mode=1>(u)
        y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x)
        z = AveragePool<kernel_shape=[2,3], strides=[2,2], auto_pad="SAME_UPPER">(x)
        w = AveragePool<kernel_shape=[2,4], auto_pad="SAME_LOWER">(x)
        v = AveragePool<kernel_shape=[3], strides=[2], pads=[2,0], count_include_pad=1>(u) }""",
    # Windows beyond the end, one that begins behind it, pads that do not count or that no window leaves.
    "floor-pool": """g (float[1,2,7,6] x) => (float[1,2,4,3] y, float[1,2,3,2] z, float[1,2,4,2] u, float[1,2,4,6] v,
        float[1,2,4,3] w) { w = MaxPool<kernel_shape=[1,1], strides=[2,2], ceil_mode=1>(x)
        y = MaxPool<kernel_shape=[3,2], strides=[2,2], ceil_mode=1, pads=[1,0,1,1]>(x)
        z = AveragePool<kernel_shape=[3,3], strides=[3,3], ceil_mode=1>(x)
        u = MaxPool<kernel_shape=[2,2], dilations=[1,2], strides=[2,3], ceil_mode=1>(x)
        v = AveragePool<kernel_shape=[2,1], strides=[2,1], pads=[0,0,1,0], ceil_mode=1, count_include_pad=1>(x) }""",
    "pad-axes": """g (float[2,3,4] x) => (float[2,6,5] y, float[2,3,6] z) <float v = {9}, int64[4] p = {1,2,0,1},
        int64[2] a = {-1,1}, int64[2] q = {2,0}, int64[1] b = {2}>
        { y = Pad(x, p, v, a) z = Pad<mode="edge">(x, q, , b) }""",
    # Half of odd sizes, once and a half of them, and three fifths of a line.
    "exact-resize": """g (float[1,2,7,9] x, float[1,2,7] u) => (float[1,2,3,4] y, float[1,2,10,13] z, float[1,2,4] v,
        float[1,2,7,4] w) <float[4] h = {1,1,0.5,0.5}, float[4] f = {1,1,1.5,1.5}, float[3] t = {1,1,0.6},
        float[4] d = {1,1,1,0.5}> { y = Resize<mode="linear">(x, , h)
        z = Resize<mode="linear", coordinate_transformation_mode="asymmetric">(x, , f)
        v = Resize<mode="linear", coordinate_transformation_mode="pytorch_half_pixel">(u, , t)
        w = Resize<mode="linear">(x, , d) }""",
    "planar-resize": """g (float[2,3,3,4,5] x) => (float[2,3,6,4,7] y, float[2,3,5,6,10] z, float[2,3,3,8,5] u)
        <float[5] f = {1,1,2,1,1.5}, int64[5] s = {2,3,5,6,10}, float[5] g = {1,1,1,2,1}>
        { y = Resize<mode="linear">(x, , f)
        z = Resize<mode="linear", coordinate_transformation_mode="align_corners">(x, , , s)
        u = Resize<mode="linear", coordinate_transformation_mode="asymmetric">(x, , g) }""",
    "split-mish": "g (float[2,9] x) => (float[2,9] y) { y = Mish(x) }",
    "scaled-elu": """g (float[2,9] x) => (float[2,9] y, float[2,9] z, float[2,9] u, float[2,9] v)
        { y = Celu(x) z = Celu<alpha=0.3>(x) u = Selu(x) v = Selu<alpha=0.5, gamma=1.0>(x) }""",
    "split-elu": """g (float[2,9] x) => (float[2,9] y, float[2,9] z, float[2,9] u, float[2,9] v) <float k = {200}>
        { y = Elu<alpha=0.5>(x) a = Mul(x, k) z = Elu(a) u = Celu<alpha=0.3>(x) v = Selu(x) }""",
    "reciprocal-to-div": "g (float[2,9] x) => (float[2,9] y) { a = Exp(x) y = Reciprocal(a) }",
    "split-swish": """g (float[2,9] x) => (float[2,9] y, float[2,9] z, float[2,9] u, float[2,9] v)
        { y = Swish(x) z = Swish<alpha=0.5>(x) u = com.microsoft.QuickGelu<alpha=2.0>(x)
        v = com.microsoft.QuickGelu(x) }""",
    # A mask on either side, computed and constant; 0.1 * 255 and less are needed.
    "narrow-mask": """g (float[2,9] x, float[1,9] m) => (float[2,9] y, float[2,9] z)
        <float s = {0.02}, uint8 o = {128}, float v = {40}, uint8 n = {255}, float t = {0.05}, uint8 p = {200},
        float k = {-9999}, uint8[1,9] w = {255,0,255,255,0,255,0,254,255}>
        { b = Mul(m, k) e = QuantizeLinear(b, v, n) f = DequantizeLinear(e, v, n)
        a = QuantizeLinear(x, s, o) d = DequantizeLinear(a, s, o) g = DequantizeLinear(w, v, n)
        h = Add(d, g) q = QuantizeLinear(h, t, p) y = DequantizeLinear(q, t, p)
        i = Add(f, d) r = QuantizeLinear(i, t, p) z = DequantizeLinear(r, t, p) }""",
    "divide-one": """g (float[2,9] x) => (float[2,9] y) <float s = {0.1}, uint8 z = {0}, float t = {0.5}>
        { a = Abs(x) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z) r = Reciprocal(d)
        u = QuantizeLinear(r, t, z) y = DequantizeLinear(u, t, z) }""",
    "widen-kernel": """g (float[1,2,3,4] x, float[1,2,5] u) => (float[1,2,2,2] y, float[1,2,7] v) <float s = {0.001},
        uint16 z = {100}, int8[2,1,1,1] w = {100,-50}, int8[2,1,1] k = {7,-3}, float[2] f = {0.01,0.02},
        int8[2] o = {0,0}, float[2] b = {1,2}>
        { q = com.microsoft.QuantizeLinear(x, s, z) d = com.microsoft.DequantizeLinear(q, s, z)
        e = DequantizeLinear<axis=0>(w, f, o) y = Conv<group=2, strides=[2,2], auto_pad="VALID">(d, e, b)
        r = com.microsoft.QuantizeLinear(u, s, z) t = com.microsoft.DequantizeLinear(r, s, z)
        c = DequantizeLinear<axis=0>(k, f, o) v = Conv<group=2, pads=[2,0], dilations=[2]>(t, c) }""",
    "pad-edge": """g (float[1,2,3,4] x) => (float[1,2,6,7] y, float[1,2,3,6] z)
        <int64[8] p = {0,0,1,2,0,0,2,1}, int64[8] q = {0,0,0,2,0,0,0,0}>
        { y = Pad<mode="edge">(x, p) z = Pad<mode="edge">(x, q) }""",
    "cast-by-floor": """g (float[2,3] x) => (float[2,3] y, float[2,3] z) <float big = {9}>
        { a = Mul(x, big) b = Cast<to=6>(a) y = Cast<to=1>(b) c = Cast<to=7>(a) z = Cast<to=1>(c) }""",
    "bounded-exp": """g (float[2,3] x) => (float[2,3] y, float[2,3] z) <float big = {90}>
        { a = Mul(x, big) y = Softplus(a) b = ReduceMax(a) c = Sub(a, b) z = Exp(c) }""",
    "plain-power": """g (float[2,3] x) => (float[2,3] y, float[2,3] z, float[2,3] w)
        <float two = {2}, float[1] four = {4}, float[1,1] half = {0.5}>
        { y = Pow(x, two) z = Pow(x, four) a = Abs(x) w = Pow(a, half) }""",
    "clip-to-relu": "g (float[2,3] x) => (float[2,3] y) <float low = {0}> { a = Neg(x) y = Clip(a, low) }",
    "part-silu": """g (float[1,2,3,4] x) => (float[1,2,3,4] y, float[1,2,3,4] z) <float s = {0.001}, uint16 o = {32768}>
        { q = com.microsoft.QuantizeLinear(x, s, o) d = com.microsoft.DequantizeLinear(q, s, o) g = Sigmoid(d)
        r = com.microsoft.QuantizeLinear(g, s, o) t = com.microsoft.DequantizeLinear(r, s, o) y = Mul(d, t)
        z = Mul(t, d) }""",
    "flat-softplus": """g (float[1,2,3,4] x) => (float[1,2,3,4] y, float[1,2,3,4] z)
        <float s = {0.001}, uint16 o = {32768}> { y = Softplus(x) q = com.microsoft.QuantizeLinear(x, s, o)
        d = com.microsoft.DequantizeLinear(q, s, o) b = Softplus(d) r = com.microsoft.QuantizeLinear(b, s, o)
        z = com.microsoft.DequantizeLinear(r, s, o) }""",
    "unsqueeze-arg": """g (float[2,3,4] x) => (int64[2,1,4] y, int64[2,3,1] z)
        { y = ArgMax<axis=1>(x) z = ArgMin<axis=-1, select_last_index=1>(x) }""",
    "own-constants": """g (bool c, float[2] x) => (float[2] y) <float[2] s = {1,2}, float[2] t = {3,4}>
        { n = Mul(x, t) y = If(c) <then_branch = t () => (float[2] a) { k = Mul(n, s) a = Mul(k, t) },
        else_branch = e () => (float[2] b) { b = If(c) <then_branch = i () => (float[2] p) { p = Neg(x) },
        else_branch = j () => (float[2] q) { q = Add(x, s) }> }> }""",
    "cast-by-int32": "g (uint8[2,3] x) => (float[2,3] y) { a = Cast<to=1>(x) y = Neg(a) }",
    "gate-first": """g (float[2,3] x) => (float[2,3] y)
        { a = Neg(x) h = HardSigmoid<alpha=0.16666667, beta=0.5>(a) y = Mul(a, h) }""",
    "batch-norm-to-conv": """g (float[2,3,4] x, float[2,3] u) => (float[2,3,4] y, float[2,3] z)
        <float[3] s = {1, -2, 0.5}, float[3] b = {0.25, 1, -3}, float[3] m = {1, 0, -1}, float[3] v = {0.5, 2, 4}>
        { y = BatchNormalization(x, s, b, m, v) z = BatchNormalization<epsilon=0.1>(u, s, b, m, v) }""",
    # In either order, with and without a bias, in groups, and before padding.
    "scale-to-conv": """g (float[1,2,3,4] x) => (float[1,2,3,4] y, float[1,2,3,4] z, float[1,2,5,6] t, float[1,2,3,4] u)
        <float a = {0.5}, float[1] b = {-3}, float[2,2,1,1] w = {1,2,3,4}, float[2] c = {0.25, -5},
        float[2,1,1,1] v = {-1.5, 2}>
        { d = Mul(x, a) e = Add(d, b) y = Conv(e, w) f = Mul(b, x) h = Add(a, f) z = Conv(h, w, c)
        i = Mul(x, a) j = Add(i, b) t = Conv<pads=[1,1,1,1], group=2>(j, v, c)
        k = Mul(x, a) l = Add(k, b) u = Conv<auto_pad="SAME_UPPER">(l, w) }""",
    "flat-softmax": """g (float[1,2,3,4] x) => (float[1,2,3,4] y)
        <float[2,2,1,1] w = {1,2,3,4}> { a = Conv(x, w) b = Relu(a) y = Softmax<axis=3>(b) }""",
    "index-to-int32": (
        "g (float[100,3] x, int32[2] i) => (float[2,3] y) { w = Cast<to=7>(i) y = Gather<axis=0>(x, w) }"
    ),
    "gather-to-reshape": """g (float[4,3] x) => (float[4,3,1] y, float[1,4,1,3] z) <int64[3,1] i = {0, 1, -1},
        int64[1,4,1] k = {0, 1, 2, 3}> { y = Gather<axis=-1>(x, i) z = Gather(x, k) }""",
    "gather-from-start": """g (float[4,3] x) => (float[4] y, float[2,3] z) <int64 i = {-1}, int32[2] k = {-3, 2}>
        { y = Gather<axis=-1>(x, i) z = Gather(x, k) }""",
    "plain-gather": """g (float[3,4] x, int32[2,3,4] w)
        => (float[2,4] y, float[1,1,1,2] z, float[3,4] e, float[1,2,1,1,4] f, int32[3,4] m)
        <float h = {0.1}, int32[2] i = {2, 0}, int64[1,1,1,2,2] p = {1, -1, 0, 0}, int64[1,2,1,1,1] q = {2, 0},
        int64[3,2] n = {1, -1, 0, 2, -2, 1},
        int64[3,4] k = {0, 3, 2, 1, 1, 1, 0, 2, 3, 3, 0, 1}>
        { b = Greater(x, h) s = Gather(b, i) y = Cast<to=1>(s) t = GatherND(b, p) z = Cast<to=1>(t)
        u = GatherElements<axis=1>(b, k) e = Cast<to=1>(u) f = GatherND(x, q) m = GatherND(w, n) }""",
    "pad-reflect": """g (float[1,2,5,4] x) => (float[1,2,8,7] y) <int64[8] p = {0,0,1,3,0,0,2,0}>
        { a = Relu(x) y = Pad<mode="reflect">(a, p) }""",
    # Half pixels of whole factors, others that half_pixel has with ties upwards, corners, and others by Gather.
    "plain-nearest": """
        g (float[1,2,6,4] x) => (float[1,2,12,8] y, float[1,2,2,4] z, float[1,2,11,4] u, float[1,2,9,4] v)
        <float[4] f = {1,1,2,2}, int64[4] s = {1,2,2,4}, int64[4] t = {1,2,11,4}, int64[4] r = {1,2,9,4}> { a = Relu(x)
        y = Resize<nearest_mode="round_prefer_floor">(a, , f) z = Resize<mode="nearest">(a, , , s)
        u = Resize<coordinate_transformation_mode="align_corners">(a, , , t)
        v = Resize<nearest_mode="ceil">(a, , , r) }""",
    # Pads that are too few, none, and enough of them.
    "pad-transposed": f"""g (float[1,2,3,4] x, float[1,2,5] k, float[2] c)
        => (float[1,2,10,8] y, float[1,1,16] z, float[1,2,5,8] u)
        <float[2,2,2,3] w = {{{_count(0, 24)}}}, float[2,1,2] v = {{1,2,3,4}}, float[2] b = {{5,-6}},
        float[2,1,1,3] d = {{1,2,3,4,5,6}}>
        {{ y = ConvTranspose<strides=[3,2], pads=[0,1,0,1], output_padding=[2,1]>(x, w, b)
        z = ConvTranspose<strides=[3], output_padding=[2]>(k, v)
        u = ConvTranspose<strides=[2,2], pads=[0,1,1,1], output_padding=[1,1], group=2>(x, d, c) }}""",
    "transposed-to-conv": f"""g (float[1,4,3,5] x, float16[1,2,5] k, float[2] c)
        => (float[1,6,4,5] y, float[1,2,7,7] z, float16[1,3,6] u)
        <float[4,3,3,2] w = {{{_count(0, 72)}}}, float[4,2,2,3] v = {{{_count(3, 48)}}},
        float16[2,3,2] h = {{15360, 16384, 17408, 15360, 16384, 15360, 17408, 16384, 15360, 15360, 16384, 17408}},
        float[6] b = {{1,2,3,4,5,-6}}>
        {{ y = ConvTranspose<group=2, pads=[0,1,1,0], strides=[1,1]>(x, w, b)
        z = ConvTranspose<dilations=[4,2], pads=[0,1,0,1], output_padding=[0,0]>(x, v, c) u = ConvTranspose(k, h) }}""",
    "plain-gemm": """g (float[3,2] x, float[3,4] w) => (float[2,4] y) <float[4] c = {1, 2, 3, 4}>
        { y = Gemm<alpha=0.5, beta=2.0, transA=1>(x, w, c) }""",
    "gemm-to-matmul": """
        g (float[1,4,3] x) => (float[1,4,2] y) <int64[2] f = {4,3}, int64[3] s = {1,4,2}, float[2] b = {1,-2},
        float[3,2] w = {1,2,3,4,5,6}> { r = Reshape(x, f) p = Gemm(r, w, b) y = Reshape(p, s) }""",
    "split-qlinear": """g (float[1,2,4,4] x, bool[1,2,4,4] k) => (float[1,3,1,1] y, float[4,4] t, float[4,3] v,
        float[1,2,4,4] r, float[1,6,4,4] n, float[1,2,4,2] d, float[4,3] a2)
        <float s = {0.0625}, uint8 z = {128}, float o = {0.125}, uint8 h = {7}, float[1] o1 = {0.125},
        uint8[1] h1 = {7}, int8[3,2,1,1] w = {1,-2,3,4,-5,6}, float[3] q = {0.5, 0.25, 1},
        int8[3] e = {0,0,0}, int32[3] b = {1,-2,3}, int64[2] i = {8,4},
        uint8[4,4] m = {1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16}, float[4] u = {1,2,0.5,0.25}, uint8[4] a = {3,3,3,3},
        int64[1] f2 = {2}, int64[1] f3 = {6}, int32[1,3] b2 = {1,-2,3}, int8[3,4] g = {1,-2,3,4,-5,6,7,8,9,-10,11,12}>
        { p = QuantizeLinear(x, s, z) c = QLinearConv(p, s, z, w, q, e, o1, h1, b)
        l = com.microsoft.QLinearLeakyRelu<alpha=0.5>(c, o, h, s, z)
        j = com.microsoft.QLinearGlobalAveragePool(l, s, z, o, h) y = DequantizeLinear(j, o, h)
        f = Reshape(p, i) f1 = Slice(f, f2, f3) f4 = QLinearMatMul(f1, s, z, m, u, a, o, h)
        t = DequantizeLinear(f4, o, h) v = com.microsoft.QGemm<transB=1, alpha=0.5>(f1, s, z, g, q, e, b2)
        a1 = com.microsoft.QGemm<transB=1>(f1, s, z, g, q, e, b, o, h) a2 = DequantizeLinear(a1, o, h)
        r1 = com.microsoft.QLinearAdd(p, s, z, p, s, z, o, h) r2 = com.microsoft.QLinearMul(r1, o, h, p, s, z, s, z)
        r3 = com.microsoft.QLinearWhere(k, r2, s, z, p, s, z, o, h) r = DequantizeLinear(r3, o, h)
        n1 = com.microsoft.QLinearSigmoid(p, s, z, s, z)
        n2 = com.microsoft.QLinearSoftmax<axis=3, opset=11>(p, s, z, s, z)
        n3 = com.microsoft.QLinearConcat<axis=1>(o, h, p, s, z, n1, s, z, n2, s, z) n = DequantizeLinear(n3, o, h)
        d1 = com.microsoft.QLinearAveragePool<kernel_shape=[1,3]>(p, s, z, s, h) d = DequantizeLinear(d1, s, h) }""",
    "matmul-to-2d": """g (float[2,4,3] x, float[4,3] r) => (float[2,4,2] y, float[2,2,3] z, float[2,3] t)
        <float[3,2] w = {1, -2, 3, -4, 5, 6}, float[2,4] v = {1, 2, -3, 4, 5, -6, 7, 8}>
        { y = MatMul(x, w) z = MatMul(v, x) t = MatMul(v, r) }""",
    "join-hard-swish": """g (float[2,9] x) => (float[2,9] y) <float t = {3}, float z = {0}, float s = {6}>
        { a = Add(x, t) b = Clip(a, z, s) c = Div(b, s) y = Mul(x, c) }""",
    "split-hard-swish": "g (float[2,9] x) => (float[2,9] y) { y = HardSwish(x) }",
    "split-to-slices": """g (float[2,9] x) => (float[2,2] y, float[2,3] z, float[2,4] u)
        <int64[3] s = {2, 3, 4}> { y, z, u = Split<axis=-1>(x, s) }""",
    "split-hard-sigmoid": """g (float[2,9] x) => (float[2,9] y, float[2,9] z)
        { y = HardSigmoid(x) z = HardSigmoid<alpha=0.16666667,beta=0.4>(x) }""",
    "split-layer-norm": """g (float[2,4,3] x) => (float[2,4,3] y) <float[3] w = {1, -2, 3}, float[3] b = {1, 2, 3}>
        { y = LayerNormalization<epsilon=0.001>(x, w, b) }""",
    "split-rms-norm": """g (float[2,4,3] x) => (float[2,4,3] y) <float[3] w = {1, -2, 3}>
        { y = SimplifiedLayerNormalization<axis=-1, epsilon=0.001, stash_type=1>(x, w) }""",
    "split-skip-norm": """g (float[2,4,3] x, float[2,4,3] z) => (float[2,4,3] y, float[2,4,3] t, float[2,4,3] u)
        <float[3] w = {1, -2, 3}, float[3] b = {1, 2, 3}, float[3] c = {3, 1, 2}, float f = {0.00001}>
        { y, , , t = com.microsoft.SkipLayerNormalization<epsilon=0.001>(x, z, w, b, c)
        l = Mul(x, f) u = com.microsoft.SkipLayerNormalization(l, l, w) }""",
    "split-gelu": "g (float[2,9] x) => (float[2,9] y) { y = com.microsoft.Gelu(x) }",
    "split-tanh-gelu": "g (float[2,9] x, float[9] b) => (float[2,9] y) { y = com.microsoft.FastGelu(x, b) }",
    "exact-gelu": "g (float[2,9] x, float[9] b) => (float[2,9] y) { y = com.microsoft.FastGelu(x, b) }",
    "spread-quantizers": """g (float[2,4,3] x, int8[2,4,3] i) => (float[4,6] y, float[3,8] w)
        <float s = {0.0625}, uint8 z = {128}, int8 o = {0}, int64[2] f = {4,6}, int64[2] g = {3,8}, int64[1] b0 = {0},
        int64[1] b1 = {3}> { q = QuantizeLinear(x, s, z) r = Reshape(q, f) y = DequantizeLinear(r, s, z)
        a = Transpose<perm=[2,0,1]>(i) b = Reshape(a, g) c = Slice(b, b0, b1) w = DequantizeLinear(c, s, o) }""",
    "uint8-activations": """g (float[2,3] x, int8[2,2] i) => (float[2,2] y, int8[2,2] o, int8[2,2] p)
        <float s = {0.0625}, int8 z = {-7}, float[1] t = {0.125}, int8[3,2] w = {1,-2,3,4,-5,6}, int8 e = {0}>
        { q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) b = DequantizeLinear(w, s, e) c = MatMul(a, b)
        d = QuantizeLinear(c, t, e) f = DequantizeLinear(d, t, e) j = DequantizeLinear(i, s) y = Add(f, j)
        o = QuantizeLinear(y, s, z) k = DequantizeLinear(o, s, z) p = QuantizeLinear(k, t, e) }""",
    "int8-activations": """g (float[2,3] x, uint8[2,2] i) => (float[2,2] y, uint8[2,2] o)
        <float s = {0.0625}, uint8 z = {7}, float t = {0.125}, uint8[3,2] w = {1,2,3,4,255,6}, uint8 e = {0},
        float[2] u = {0.5, 0.25}, uint8[2] v = {128, 100}>
        { q = QuantizeLinear(x, s, z) a = DequantizeLinear(q, s, z) b = DequantizeLinear(w, u, v) c = MatMul(a, b)
        d = QuantizeLinear(c, t) f = DequantizeLinear(d, t) j = DequantizeLinear(i, s, z) y = Add(f, j)
        o = QuantizeLinear(y, s, z) }""",
    "split-bias-gelu": """g (float[2,9] x, float[9] b) => (float[2,9] y)
        { a = com.microsoft.BiasGelu(x, b) y = com.microsoft.FastGelu(a, b) }""",
    "split-embed-norm": """g (float[1,2] x) => (float[1,2,3] y, int32[1] m, float[1,2,3] t) <int32[1,2] i = {3, 1},
        int32[1,2] s = {0, 1}, float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,-12},
        float[2,3] k = {1,2,-3,4,5,6}, float[3] g = {1,2,3}>
        { c = Cast<to=6>(x) y, m, t = com.microsoft.EmbedLayerNormalization<epsilon=0.001>(i, s, w, w, k, g, g, c) }""",
    "flat-expand": """g (float[1,2,4,3] x) => (float[1,6,4,3] y)
        <int64[1] a = {2}, int64[5] s = {1,2,3,4,3}, int64[4] t = {1,6,4,3}>
        { b = Unsqueeze(x, a) c = Expand(b, s) y = Reshape(c, t) }""",
    "expand-to-concat": (
        "g (float[2,1,3] x) => (float[2,4,3] y) <int64[3] s = {2,4,1}> { a = Relu(x) y = Expand(a, s) }"
    ),
    "neg-to-mul": "g (float[2,9] x) => (float[2,9] y) { a = Relu(x) y = Neg(a) }",
    "split-l2-norm": """g (float[2,3,4] x) => (float[2,3,1] y, float[3] z, float[2,3,1] w) <float o = {0}>
        { y = ReduceL2<axes=[-1]>(x) z = ReduceL2<axes=[0,2], keepdims=0>(x) n = Mul(x, o)
        w = ReduceL2<axes=[2]>(n) }""",
    "idle-expand": """g (float[2,9] x, float[9] u, float[2,1] v) => (float[2,9] y, float[3,2,9] z, float[2,9] w)
        <int64[2] s = {2,9}, int64[3] t = {3,2,9}, float[3,1,1] k = {1,2,3}, float o = {1}>
        { a = Expand(v, s) y = Div(x, a) b = Expand(u, s) d = Expand(k, t) z = Mul(b, d) c = Greater(a, b)
        e = Expand(o, s) w = Where(c, x, e) }""",
    # Windows and back, a projection's query and key, a part of five axes that is a result, axes of 1 that move, and
    # rows that are unfolded.
    "fewer-axes": """g (float[1,4,6,3] x, float[2,3,4] u) => (float[6,2,2,3] y, float[1,4,6,3] z, float[2,2,3,1] q,
        float[2,3,2] k, float[1,2,3,2,1] r, float[3,2,1,1,4] m, float[1,8,3,3] n) <int64[6] s = {1,2,2,3,2,3},
        int64[4] t = {6,2,2,3}, int64[3,2] j = {0,-1,1,2,2,3}, int64[4] d = {1,8,3,3},
        int64[6] v = {1,2,3,2,2,3}, int64[4] w = {1,4,6,3}, int64[5] f = {1,2,3,2,2}, int64[2] h = {0,-1},
        int64[2] c = {0,1}, int64[1] a = {-1}, int64[1] o = {0}, int64[1] e = {1}, int64[1] i = {4},
        int64[5] g = {1,2,1,3,4}>
        { xr = Reshape(x, s) xt = Transpose<perm=[0,1,3,2,4,5]>(xr) y = Reshape(xt, t) b = Relu(y) br = Reshape(b, v)
        bt = Transpose<perm=[0,1,3,2,4,5]>(br) z = Reshape(bt, w) ur = Reshape(u, f) q0, k0 = Split<axis=-1>(ur)
        qt = Transpose<perm=[0,4,1,3,2]>(q0) q1 = Squeeze(qt, c) kr = Squeeze(k0, h)
        k = Relu(kr) q = Unsqueeze(q1, a) r = Slice(ur, o, e, i) ug = Reshape(u, g)
        m = Transpose<perm=[3,1,0,2,4]>(ug) xg = Gather<axis=-2>(x, j)
        xu = Transpose<perm=[0,1,3,2,4]>(xg) n = Reshape(xu, d) }""",
    "sum-to-mean": """g (float[2,3,4] x) => (float[2,1,4] y, float[3] z, float s, float[2,3,1] t)
        <int64[1] a = {-2}, int64[2] b = {2,0}, int64[0] n = {}, int64[1] c = {2}>
        { y = ReduceSum(x, a) z = ReduceSum<keepdims=0>(x, b) s = ReduceSum<keepdims=0>(x)
        t = ReduceSum<noop_with_empty_axes=1>(x, c) }""",
    "affine-grid-to-matmul": """g (float[2,2,3] x, float[1,3,4] u)
        => (float[2,4,5,2] y, float[2,3,1,2] z, float[1,2,3,4,3] v)
        <int64[4] s = {2,7,4,5}, int64[4] t = {2,1,3,1}, int64[5] r = {1,2,2,3,4}>
        { y = AffineGrid<align_corners=1>(x, s) z = AffineGrid(x, t) v = AffineGrid(u, r) }""",
    "split-instance-norm": """g (float[2,3,4,5] x, float[2,2,6] u) => (float[2,3,4,5] y, float[2,2,6] v)
        <float[3] w = {1,-2,3}, float[3] b = {4,5,6}, float[2] k = {2,3}> { y = InstanceNormalization(x, w, b)
        v = InstanceNormalization<epsilon=0.1>(u, k, k) }""",
    "planar-instance-norm": """g (float[2,3,2,4,5] x) => (float[2,3,2,4,5] y)
        <float[3] s = {1,-2,3}, float[3] b = {3,2,1}> { y = InstanceNormalization<epsilon=0.1>(x, s, b) }""",
    "einsum-to-matmul": f"""g (float[1,5,2,3] x, float[2,3,4] q, float[2,3,5] r, float[3] v)
        => (float[1,5,2,4] y, float[2,4,5] z, float[5,2,3] t, float[2] s, float[6] p, float[2,5,4] a, float[1,5,2,4] b)
        <float[2,3,4] w = {{{_count(0, 24)}}}, float[5,4] m = {{{_count(1, 20)}}}, float[3,2] k = {{{_count(2, 6)}}},
        float[3,4,6] n = {{{_count(3, 72)}}}>
        {{ y = Einsum<equation="btgi,gih->btgh">(x, w) z = Einsum<equation="bct,bcs->bts">(q, r)
        t = Einsum<equation="bti, hi -> hbt">(q, m) s = Einsum<equation="i,ij->j">(v, k)
        h = ReduceMean<axes=[0], keepdims=0>(q) p = Einsum<equation="ij,ijk->k">(h, n)
        a = Einsum<equation="...ki,... kj -> ...ji">(q, r) b = Einsum<equation="...gi,gij->...gj">(x, w) }}""",
    "join-gelu": """g (float[2,9] x) => (float[2,9] y) <float r = {1.41421356}, float o = {1}, float h = {0.5}>
        { a = Div(x, r) b = Erf(a) c = Add(b, o) d = Mul(x, c) y = Mul(d, h) }""",
    "float-weights": """g (float[1,3,4,4] x) => (float[1,2,4,4] y)
        <int8[2,3,1,1] w = {127, -2, 3, -127, 5, -128}, float[2] s = {0.5, 0.25}, int8[2] z = {0, 3}>
        { f = DequantizeLinear<axis=0>(w, s, z) y = Conv(x, f) }""",
    # A layer, a Relu before a Reshape and a sum that are rounded, and a layer that is not.
    "complete-units": """g (float[1,2,4] x) => (float[1,6] y, float[1,2,4] z, float[1,2,4] u)
        <float s = {0.02}, int8 o = {0}, float t = {0.03}, int8[2,2,2] w = {127, -2, 3, -127, 5, -128, 9, 40},
        float[2] c = {0.01, 0.02}, int8[2] n = {0, 0}, float[2] b = {0.3, -7.1}>
        { q = QuantizeLinear(x, s, o) d = DequantizeLinear(q, s, o) f = DequantizeLinear<axis=0>(w, c, n)
        a = Conv(d, f, b) r = Relu(a) e = Flatten(r) p = QuantizeLinear(e, t, o) y = DequantizeLinear(p, t, o)
        i = Add(d, d) j = Relu(i) k = QuantizeLinear(j, t, o) z = DequantizeLinear(k, t, o)
        g = DequantizeLinear<axis=0>(w, c, n) u = Conv<pads=[0,1]>(d, g, b) }""",
    # As onnx's converter raises opset 11, and along the last axis of what a Reshape joins.
    "plain-softmax": """g (float[2,4,3] x) => (float[2,4,3] y, float[2,4,3] z)
        <int64[3] s = {2,4,3}, int64[2] r = {8,3}> { a = Flatten<axis=2>(x) b = Softmax(a) y = Reshape(b, s)
        c = Reshape(x, r) d = LogSoftmax<axis=1>(c) z = Reshape(d, s) }""",
    "join-softmax": """g (float[2,4,3] x) => (float[2,4,3] y, float[2,4,3] z)
        <int64[3] s = {2,1,3}, int64[1] a = {1}, int64[1] l = {-1}, float b = {-inf}>
        { j = ReduceMax<axes=[1], keepdims=0>(x) m = Max(b, j) n = Reshape(m, s) c = Sub(x, n) e = Exp(c)
        t = ReduceSum<keepdims=0>(e, a) u = Unsqueeze(t, a) y = Div(e, u)
        f = Exp(x) g = ReduceSum(f, l) z = Div(f, g) }""",
    "join-layer-norm": (
        "g (float[2,4,3] x) => (float[2,4,3] y, float[2,4,3] z) <float[3] w = {1, -2, 3}, float t = {2}, "
        "float[4,1] b = {1, -2, 3, 4}, float e = {0.001}, int64[1] a = {1}, int64[3] s = {2,1,3}, float q = {0.25}, "
        "float o = {0}> "
        # As PyTorch writes it, with the scale before the division, and as Flax does it, along axis 1.
        "{ m = ReduceMean<axes=[-1]>(x) c = Sub(x, m) p = Pow(c, t) v = ReduceMean<axes=[2]>(p) f = Add(v, e) "
        "r = Sqrt(f) cw = Mul(w, c) y = Div(cw, r) "
        "k = ReduceSum<keepdims=0>(x, a) m1 = Mul(k, q) m2 = Reshape(m1, s) c1 = Sub(x, m2) h = Mul(x, x) "
        "l = ReduceSum<keepdims=0>(h, a) n = Mul(q, l) u = Mul(m1, m1) d = Sub(n, u) g = Max(o, d) "
        "j = Reshape(g, s) i = Add(e, j) r1 = Sqrt(i) r2 = Reciprocal(r1) rb = Mul(r2, b) cb = Mul(c1, rb) "
        "z = Add(b, cb) }"
    ),
    "join-rms-norm": """
        g (float[2,4,3] x) => (float[2,4,3] y) <float[3] w = {1, -2, 3}, float t = {2}, float e = {0.001}>
        { a = Pow(x, t) b = ReduceMean<axes=[-1]>(a) c = Add(b, e) d = Sqrt(c) f = Reciprocal(d) g = Mul(x, f)
        y = Mul(w, g) }""",
    "unsigned-weights": """
        g (float[2,3] x) => (float[2,2] y) <int8[3,2] w = {127, -2, 3, -127, 5, -128}, float s = {0.5}>
        { f = DequantizeLinear(w, s) y = Gemm(x, f) }""",
    "clip-to-min-max": (
        "g (float[2,9] x) => (float[2,9] y) <float low = {-0.25}, float high = {0.5}> { y = Clip(x, low, high) }"
    ),
    "plain-slope": "g (float[1,2,3,3] x) => (float[1,2,3,3] y) <float[1,2,1,1] s = {0.25, -2}> { y = PRelu(x, s) }",
    "squeeze-to-scalar": """g (float[1,1] x) => (float y, float z) <int64[0] n = {}>
        { y = Reshape(x, n) a = Abs(x) z = Reshape(a, n) }""",
    "leaky-slope": """g (float[2,3] x) => (float[2,3] y, float[2,3] z) <float s = {0.2}, float[1,1] t = {-3}>
        { y = PRelu(x, s) z = PRelu(x, t) }""",
    "leaky-to-max": """g (float[1,2,1,2,3] x) => (float[1,4,1,2,3] y, float[1,12] z)
        <float s = {0.02}, uint8 o = {128}, float t = {0.015}, uint8 p = {9}>
        { q = QuantizeLinear(x, s, o) d = DequantizeLinear(q, s, o) a = LeakyRelu<alpha=0.2>(d)
        b = QuantizeLinear(a, t, p) c = DequantizeLinear(b, t, p) y = Concat<axis=1>(d, c)
        e = LeakyRelu(d) f = QuantizeLinear(e, t, p) h = DequantizeLinear(f, t, p) z = Flatten(h) }""",
}
WITHOUT = {
    # The gate is first already, has another slope, or is that of another value.
    "gate-first": """g (float[2,3] x) => (float[2,3] y, float[2,3] z, float[2,3] t)
        { a = Neg(x) h = HardSigmoid<alpha=0.16666667, beta=0.5>(a) y = Mul(h, a)
        k = HardSigmoid(a) z = Mul(a, k) t = Mul(x, h) }""",
    "batch-norm-to-conv": """g (float[2,3,4] x, float[3] s) => (float[2,3,4] y)
        <float[3] b = {0.25, 1, -3}, float[3] v = {0.5, 2, 4}> { y = BatchNormalization(x, s, b, b, v) }""",
    # Behind no layer, along another axis, and behind a Reshape, through which no Transpose goes.
    "flat-softmax": """g (float[1,2,3,4] x) => (float[1,2,3,4] y, float[1,2,3,4] z, float[1,2,12] t)
        <float[2,2,1,1] w = {1,2,3,4}, int64[3] f = {1,2,12}>
        { y = Softmax<axis=3>(x) a = Conv(x, w) z = Softmax<axis=1>(a) r = Reshape(a, f) t = Softmax<axis=2>(r) }""",
    "unsqueeze-arg": "g (float[2,3,4] x) => (int64[2,4] y) { y = ArgMax<axis=1, keepdims=0>(x) }",
    "own-constants": """g (bool c, float[2] x) => (float[2] y) <float[2] s = {1,2}>
        { n = Mul(x, s) y = If(c) <then_branch = t () => (float[2] a) { a = Mul(n, s) },
        else_branch = e () => (float[2] b) <float[2] t = {3,4}> { b = Mul(n, t) }> }""",
    # QNN fuses a Cast with a QuantizeLinear; its other kernels are right.
    "cast-by-int32": """g (uint8[2,3] x, int32[2] w) => (uint8[2,3] y, float16[2,3] z, float[2] v) <float s = {0.5}>
        { a = Cast<to=1>(x) y = QuantizeLinear(a, s) z = Cast<to=10>(x) v = Cast<to=1>(w) }""",
    "split-lstm": """g (float[3,1,4] x, float[1,8,4] w, float[1,8,2] r, int32[1] n) => (float[3,1,1,2] y) {
        y = LSTM<hidden_size=2>(x, w, r, , n) }""",
    # Planes already, a weight that is computed, places of maxima.
    "conv-to-planes": """g (float[1,2,5,5] x, float[1,2,9] u, float[2,2,3] v)
        => (float[1,1,3,3] y, float[1,2,7] z, float[1,2,7] m, int64[1,2,7] p)
        <float[1,2,3,3] w = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7,8,9}>
        { y = Conv(x, w) z = Conv(u, v) m, p = MaxPool<kernel_shape=[3]>(u) }""",
    "default-activations": """
        g (float[2,1,3] x, float[1,6,3] u, float[1,6,2] v) => (float[2,1,1,2] y, float[2,1,1,2] z) {
        y = GRU<hidden_size=2, activations=["Sigmoid", "Relu"]>(x, u, v) z = GRU<hidden_size=2>(x, u, v) }""",
    "half-to-float": "g (float16[2] x) => (float16[2] y) { a = Relu(x) y = my.Half(a) }",
    # The layer computes in float32 already.
    "double-to-float": """g (double[2] x, float[2,3] u) => (double[2] y, float[2,3] z)
        <float[3,3] w = {1,2,3,4,5,6,7,8,9}> { y = Sin(x) z = MatMul(u, w) }""",
    "drop-copies": """g (float[2,3] x) => (float[2,3] y, bool[2,3] m, float[4,3] z, float[3,2] t, float[3,2] u)
        { a, m = Dropout(x) b = Neg(a) y = Identity(b) z = Concat<axis=0>(a, b) c = Transpose<perm=[1,0]>(b)
        t = Abs(c) d = Transpose(b) u = Abs(d) }""",
    "trailing-inputs": "g (float[2,3] x) => (float[2,3] y) <float high = {0.5}> { y = Clip(x, , high) }",
    "plain-pad": """g (float[2,3] x, float u) => (float[4,3] y, float[4,3] z, float[4,3] t)
        <int64[4] p = {1,0,1,0}, float v = {0.5}> { y = Pad(x, p, v) z = Pad(x, p, u) t = Pad(x, p) }""",
    # A value, another mode, another zero point, none, and data that are not quantized.
    "zero-pad": """g (float[2,3] x) => (float[4,3] y, float[4,3] z, float[4,3] t, float[4,3] u, float[4,3] w)
        <int64[4] p = {1,0,1,0}, float v = {0.5}, float s = {0.1}, int8 o = {-128}, int8 k = {-127}>
        { i = QuantizeLinear(x, s, o) d = DequantizeLinear(i, s, o) y = Pad(d, p, v) z = Pad<mode="edge">(d, p)
        j = QuantizeLinear(x, s, k) e = DequantizeLinear(j, s, k) t = Pad(e, p)
        f = DequantizeLinear(j, s) u = Pad(f, p) w = Pad(x, p) }""",
    # An upper bound that matters, one that is fed, and another lower bound.
    "clip-to-relu": """g (float[2,3] x, float fed) => (float[2,3] y, float[2,3] z, float[2,3] t)
        <float low = {0}, float six = {6}> { y = Clip(x, low, six) z = Clip(x, low, fed) t = Clip(x, six) }""",
    # Three axes, 8 bits, the gate of another tensor, and a gate that is not rounded.
    "part-silu": """g (float[1,3,4] x, float[1,1,3,4] u) => (float[1,3,4] y, float[1,1,3,4] z, float[1,1,3,4] v)
        <float s = {0.1}, uint8 o = {128}, uint16 w = {32768}> { a = com.microsoft.QuantizeLinear(x, s, w)
        b = com.microsoft.DequantizeLinear(a, s, w) c = Sigmoid(b) d = com.microsoft.QuantizeLinear(c, s, w)
        e = com.microsoft.DequantizeLinear(d, s, w) y = Mul(b, e) f = QuantizeLinear(u, s, o)
        g = DequantizeLinear(f, s, o) h = Sigmoid(g) i = QuantizeLinear(h, s, o) j = DequantizeLinear(i, s, o)
        z = Mul(g, j) k = com.microsoft.QuantizeLinear(u, s, w) l = com.microsoft.DequantizeLinear(k, s, w)
        m = Sigmoid(l) v = Mul(g, e) }""",
    "plain-count": """g (float[1,2,5,4] x) => (float[1,2,5,4] y, float[A,B,C,D] z, float[1,2,5,4] w)
        { y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1], count_include_pad=1>(x)
        z = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1, count_include_pad=1>(x)
        w = AveragePool<kernel_shape=[2,2], auto_pad="SAME_UPPER", count_include_pad=1>(x) }""",
    "even-split": """g (float[2,4] x, int64[2] c) => (float[A,2] y, float[B,2] z, float[C,2] u, float[D,2] v,
        float[2,1] p, float[2,3] q) <int64[2] s = {1,3}>
        { y, z = Split<axis=-1, num_outputs=2>(x) u, v = Split<axis=1>(x, c) p, q = Split<axis=1>(x, s) }""",
    "write-pads": """g (float[1,2,3,3] x) => (float[1,1,4,4] y, float[1,1,6,6] z)
        <float[2,1,2,2] w = {1,2,3,4,5,6,7,8}>
        { y = ConvTranspose<pads=[0,0,0,0]>(x, w) z = ConvTranspose<auto_pad="SAME_UPPER", strides=[2,2]>(x, w) }""",
    # No padding, and windows that a ceil_mode does not add to.
    "plain-average": """g (float[1,2,5,4] x, float[1,2,5] u)
        => (float[1,2,3,2] z, float[1,2,2,2] w, float[1,2,4] s)
        { z = AveragePool<kernel_shape=[3,3], auto_pad="VALID">(x) s = AveragePool<kernel_shape=[2]>(u)
        w = AveragePool<kernel_shape=[3,2], strides=[2,2], ceil_mode=1>(x) }""",
    # Another mode, a side that is cut off, and whole numbers.
    "pad-edge": """g (float[2,3] x, int64[2,3] i) => (float[2,5] y, float[2,3] z, int64[2,5] w)
        <int64[4] p = {0,1,0,1}, int64[4] q = {0,1,0,-1}>
        { y = Pad<mode="reflect">(x, p) z = Pad<mode="edge">(x, q) w = Pad<mode="edge">(i, p) }""",
    # Through bytes and bools, to another type, and whole numbers from the start.
    "cast-by-floor": """g (float[2] x, int64[2] i) => (float[2] y, float[2] z, float16[2] v, float[2] w)
        { a = Cast<to=2>(x) y = Cast<to=1>(a) b = Cast<to=9>(x) z = Cast<to=1>(b) c = Cast<to=6>(x) v = Cast<to=10>(c)
        d = Cast<to=6>(i) w = Cast<to=1>(d) }""",
    # Limited already.
    "bounded-exp": """g (float[2,3] x) => (float[2,3] y, float[2,3] z) <float low = {-80}, float high = {80}>
        { a = Clip(x, low, high) y = Exp(a) b = Clip(x, low) z = Softplus(b) }""",
    # Another exponent, one of more axes, one for each column, integers, and an exponent that is computed.
    "plain-power": """g (float[2] x, int32[2] i, float e)
        => (float[2] y, float[1,2] z, float[2] v, int32[2] w, float[2] u) <float three = {3}, float[1,1] deep = {2},
        float[2] each = {2, 2}, int32 whole = {2}>
        { y = Pow(x, three) z = Pow(x, deep) v = Pow(x, each) w = Pow(i, whole) u = Pow(x, e) }""",
    "flat-softplus": """g (float[1,3,4] x, float[1,1,3,4] u) => (float[1,3,4] y, float[1,1,3,4] z, float[1,1,3,4] t)
        <float s = {0.1}, uint8 o = {128}, uint16 w = {32768}> { y = Softplus(x) q = QuantizeLinear(u, s, o)
        d = DequantizeLinear(q, s, o) b = Softplus(d) r = QuantizeLinear(b, s, o) z = DequantizeLinear(r, s, o)
        v = com.microsoft.QuantizeLinear(u, s, w) f = com.microsoft.DequantizeLinear(v, s, w) p = Softplus(f)
        k = com.microsoft.QuantizeLinear(p, s, w) l = com.microsoft.DequantizeLinear(k, s, w) t = Tanh(l) }""",
    "index-to-int32": "g (float[5,3] x, int32[2] i) => (float[2,3] y) { y = Gather<axis=0>(x, i) }",
    "gather-to-reshape": """
        g (float[4,3] x, int64[4] r, float[N,3] u) => (float[4,2] y, float[4,3] z, float[4,3] w, float[3,3] t)
        <int64[2] i = {0, 1}, int64[4] k = {0, 2, 1, 3}, int64[3] m = {0, 1, 2}>
        { y = Gather<axis=1>(x, i) z = Gather(x, k) w = Gather(x, r) t = Gather(u, m) }""",
    "gather-from-start": """g (float[4,3] x, int64[4] r, float[N,3] u) => (float[4] y, float[4,3] z, float[1,3] t)
        <int64 i = {1}, int64[1] m = {-1}> { y = Gather<axis=1>(x, i) z = Gather(x, r) t = Gather(u, m) }""",
    "plain-gather": """g (int32[5,3] x, int32[2] i, int64[2,1] j) => (int32[2,3] y, int32[2,3] z, int32[5] u)
        <int64[5,1] k = {0,1,2,1,0}>
        { y = Gather<axis=0>(x, i) z = GatherND(x, j) u = GatherND<batch_dims=1>(x, k) }""",
    # Not rounded up, SAME, pads that count and those of ceil_mode, which do not; indices.
    "floor-pool": """g (float[1,1,6,6] x)
        => (float[1,1,3,3] y, float[1,1,3,3] z, float[1,1,3,3] u, float[1,1,3,3] v, int64[1,1,3,3] i)
        { y = MaxPool<kernel_shape=[2,2], strides=[2,2]>(x)
        z = MaxPool<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER", ceil_mode=1>(x)
        u = AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1, count_include_pad=1>(x)
        v, i = MaxPool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(x) }""",
    "pad-axes": """g (float[2,3] x, int64[1] a, int64[2] q) => (float[2,M] y, float[A,B] z, float[C,D] u)
        <int64[4] p = {0,1,0,1}, int64[2] r = {1,1}, int64[1] b = {1}>
        { y = Pad(x, p) z = Pad(x, r, , a) u = Pad(x, q, , b) }""",
    # Exact scales, sizes, ends that decide, no whole ratio, another mode, and one result in place of several.
    "exact-resize": """g (float[1,2,7,8] x) => (float[1,2,14,4] y, float[1,2,3,4] z, float[1,2,3,4] v, float[1,2,5,6] w,
        float[1,2,3,4] t, float[1,2,1,8] u)
        <float[4] d = {1,1,2,0.5}, int64[4] s = {1,2,3,4}, float[4] h = {1,1,0.5,0.5},
        float[4] o = {1,1,0.77345,0.77345}, float[4] q = {1,1,0.15384616,1}>
        { y = Resize<mode="linear">(x, , d) z = Resize<mode="linear">(x, , , s)
        v = Resize<mode="linear", coordinate_transformation_mode="align_corners">(x, , h)
        w = Resize<mode="linear">(x, , o) t = Resize<mode="cubic">(x, , h)
        u = Resize<mode="linear", coordinate_transformation_mode="pytorch_half_pixel">(x, , q) }""",
    "planar-resize": """g (float[1,1,3,4,5] x, float[1,1,4,5] u)
        => (float[1,1,6,8,10] y, float[1,1,8,10] v, float[1,2,3,4,5] z)
        <float[5] f = {1,1,2,2,2}, float[4] g = {1,1,2,2}, float[5] c = {1,2,1,1,1}>
        { y = Resize<nearest_mode="floor">(x, , f) v = Resize<mode="linear">(u, , g)
        z = Resize<mode="linear">(x, , c) }""",
    "split-mish": "g (float[2,9] x) => (float[2,9] y) { y = Softplus(x) }",
    "scaled-elu": "g (float[2,9] x) => (float[2,9] y, float[2,9] z) { y = Elu(x) z = Celu<alpha=-1.0>(x) }",
    "split-elu": "g (float[2,9] x) => (float[2,9] y) { y = Elu<alpha=-1.0>(x) }",
    "reciprocal-to-div": "g (double[2,9] x) => (double[2,9] y) { y = Reciprocal(x) }",
    "split-swish": "g (float[2,9] x) => (float[2,9] y) { y = HardSwish(x) }",
    # A range that the sum has too, one of up to four times what is needed, and a sum that is not rounded.
    "narrow-mask": """g (float[2,9] x) => (float[2,9] y, float[2,9] z, float[2,9] u)
        <float s = {0.02}, uint8 o = {128}, float v = {40}, uint8 n = {255}, float t = {0.05}, uint8 p = {200},
        float b = {0.19}, uint8[9] w = {255,0,255,255,0,255,0,254,255}>
        { a = QuantizeLinear(x, s, o) d = DequantizeLinear(a, s, o) g = DequantizeLinear(w, v, n) u = Add(d, g)
        h = Add(d, g) q = QuantizeLinear(h, v, n) y = DequantizeLinear(q, v, n) k = DequantizeLinear(w, b, n)
        i = Add(d, k) r = QuantizeLinear(i, t, p) z = DequantizeLinear(r, t, p) }""",
    "divide-one": "g (float[2,9] x) => (float[2,9] y) { a = Exp(x) y = Reciprocal(a) }",
    # 8 bits, one channel after the other, several elements, and a computed weight.
    "widen-kernel": """g (float[1,2,3,3] x, int8[2,1,1,1] n)
        => (float[1,2,3,3] y, float[1,2,3,3] z, float[1,2,3,2] u, float[1,2,3,3] v)
        <float s = {0.001}, uint8 z8 = {100}, uint16 z16 = {100}, int8[2,1,1,1] w = {100,-50},
        int8[2,2,1,1] k = {7,-3,2,9}, int8[2,1,1,2] m = {1,2,3,4}, float[2] f = {0.01,0.02}, int8[2] o = {0,0}>
        { q = QuantizeLinear(x, s, z8) d = DequantizeLinear(q, s, z8) e = DequantizeLinear<axis=0>(w, f, o)
        y = Conv<group=2>(d, e) r = com.microsoft.QuantizeLinear(x, s, z16)
        t = com.microsoft.DequantizeLinear(r, s, z16) c = DequantizeLinear<axis=0>(k, f, o)
        z = Conv(t, c) a = DequantizeLinear<axis=0>(m, f, o)
        u = Conv<group=2>(t, a) b = DequantizeLinear<axis=0>(n, f, o) v = Conv<group=2>(t, b) }""",
    "pad-reflect": """
        g (float[1,2,5,4] x, int64[8] p) => (float[A,B,C,D] y, float[1,2,6,4] z) <int64[8] q = {0,0,1,0,0,0,0,0}>
        { y = Pad<mode="reflect">(x, p) z = Pad<mode="edge">(x, q) }""",
    # The modes already, another mode, an open size; all is reached, a computed bias, a stated shape.
    "plain-nearest": """g (float[1,2,6,4] x, float[1,2,N,4] k) => (float[1,2,9,4] y, float[1,2,9,4] z, float[1,2,M,4] u)
        <int64[4] s = {1,2,9,4}, float[4] f = {1,1,2,1}>
        { y = Resize<coordinate_transformation_mode="asymmetric", nearest_mode="floor">(x, , , s)
        z = Resize<mode="linear">(x, , , s) u = Resize(k, , f) }""",
    "pad-transposed": """g (float[1,1,3] x, float[1] k)
        => (float[1,1,5] y, float[1,1,7] z, float[1,1,8] u, float[1,1,6] v, float[1,1,7] o)
        <float[1,1,2] w = {1,2}, float[1,1,3] t = {1,2,3}>
        { y = ConvTranspose<strides=[2], pads=[1,1], output_padding=[0]>(x, t)
        z = ConvTranspose<strides=[2], output_padding=[1]>(x, w, k)
        u = ConvTranspose<strides=[2], output_shape=[8]>(x, w)
        v = ConvTranspose<strides=[2], auto_pad="SAME_UPPER">(x, t)
        o = ConvTranspose<strides=[2], output_shape=[7], output_padding=[1]>(x, w) }""",
    # A stride, a weight that is computed, pads beyond the kernel, three axes, an output_padding, pads that follow.
    "transposed-to-conv": """g (float[1,1,5] x, float[1,1,2] f, float[1,1,2,2,2] q)
        => (float[1,1,10] y, float[1,1,6] z, float[1,1,4] u, float[1,1,3,3,3] v, float[1,1,8] o, float[1,1,5] a,
        float[1,1,6] b) <float[1,1,2] w = {1,2}, float[1,1,2,2,2] d = {1,2,3,4,5,6,7,8}>
        { y = ConvTranspose<strides=[2]>(x, w) z = ConvTranspose(x, f) u = ConvTranspose<pads=[0,2]>(x, w)
        v = ConvTranspose(q, d) o = ConvTranspose<dilations=[2], output_padding=[1]>(x, w)
        a = ConvTranspose<auto_pad="SAME_UPPER">(x, w) b = ConvTranspose<output_shape=[6]>(x, w) }""",
    "plain-gemm": "g (float[2,3] x, float[3,4] w) => (float[2,4] y) { y = Gemm<beta=2.0>(x, w) }",
    "gemm-to-matmul": """
        g (float[2,2,3] x) => (float[4,2] y, float[4,2] z) <int64[2] f = {4,3}, float[2,3] w = {1,2,3,4,5,6}>
        { r = Reshape(x, f) y = Gemm<transB=1>(r, w) z = Gemm<transB=1, alpha=2.0>(r, w) }""",
    "matmul-to-2d": """g (float[2,4,3] x, float[3,2] u, float[4,3] r) => (float[2,4,2] y, float[2,2,3] z, float[4,2] t)
        <float[3,2] w = {1, -2, 3, -4, 5, 6}, float[2,2,4] v = {1,2,3,4,5,6,7,8,1,2,3,4,5,6,7,8}>
        { y = MatMul(x, u) z = MatMul(v, x) t = MatMul(r, w) }""",
    "join-hard-swish": """
        g (float[2,9] x) => (float[2,9] y) <float t = {3}, float z = {0}, float s = {6}, float f = {5}>
        { a = Add(x, t) b = Clip(a, z, s) c = Div(b, f) y = Mul(x, c) }""",
    "split-hard-swish": "g (float[2,9] x) => (float[2,9] y) { y = HardSigmoid(x) }",
    "split-to-slices": """g (float[2,9] x) => (float[2,3] y, float[2,3] z, float[2,3] u)
        <int64[3] s = {3, 3, 3}> { y, z, u = Split<axis=1>(x, s) }""",
    "split-hard-sigmoid": "g (float[2,9] x) => (float[2,9] y) { y = Sigmoid(x) }",
    "split-layer-norm": (
        "g (float[2,3] x) => (float[2,3] y, float[2,1] m) <float[3] w = {1, -2, 3}> { y, m = LayerNormalization(x, w) }"
    ),
    "split-rms-norm": """g (float[N,3] x) => (float[N,3] y) <float[3] w = {1, -2, 3}>
        { y = SimplifiedLayerNormalization<axis=-1, epsilon=0.001>(x, w) }""",
    "split-skip-norm": """
        g (float[2,4,3] x, float[2,4,3] z) => (float[2,4,3] y, float[2,4,1] m) <float[3] w = {1, -2, 3}>
        { y, m = com.microsoft.SkipLayerNormalization(x, z, w) }""",
    "split-gelu": "g (float[2,9] x) => (float[2,9] y) { y = com.microsoft.FastGelu(x) }",
    "split-tanh-gelu": "g (float[2,9] x) => (float[2,9] y) { y = com.microsoft.Gelu(x) }",
    "exact-gelu": "g (float[2,9] x) => (float[2,9] y) { y = com.microsoft.QuickGelu(x) }",
    "split-qlinear": """g (uint8[1,4,4,2] p, float c, uint8[2,2,4] k) => (uint8[1,4,2,2] a, uint8[1,4,4,2] b,
        uint8[1,4,4,2] d, uint8[2,2,4] e, uint8[1,4,4,2] f, float[1,4,4,2] i, uint8[1,4,4,2] g)
        <float s = {0.0625}, uint8 z = {128}, uint8[2,4,4] w = {W}, float[2,1,4] q = {1,2,3,4,5,6,7,8},
        uint8[2,1,4] v = {1,2,3,4,5,6,7,8}>
        { a = com.microsoft.QLinearAveragePool<kernel_shape=[1,3], channels_last=1>(p, s, z, s, z)
        b = com.microsoft.QLinearSoftmax<axis=1, opset=11>(p, s, z, s, z)
        d = com.microsoft.QLinearSigmoid(p, c, z, s, z)
        e = QLinearMatMul(k, s, z, w, q, v, s, z) f = com.microsoft.QLinearSigmoid(p, s, z, s)
        g = com.microsoft.QLinearAdd(p, s, z) i = DequantizeLinear(p, s, z) }""".replace("{W}", f"{{{'1,' * 31}2}}"),
    "spread-quantizers": """g (int8[2,4] x, float[2,4] k) => (int8[4,2] y, float[4,2] w, float[4,2] v)
        <float s = {0.5}, float t = {0.25}, int8 o = {0}>
        { a = Transpose(x) y = Neg(a) b = Transpose(x) w = DequantizeLinear(b, s, o) v = DequantizeLinear(b, t, o)
        c = Transpose(k) d = Abs(k) e = Transpose(d) f = DequantizeLinear(y, s, o) }""",
    "uint8-activations": """g (float[2,3] x, int8 h, int8[2,3] i) => (int8[2,3] y, float[2,3] v, float[2,3] u,
        int8[2,3] n) <float s = {0.5}, int8 z = {3}>
        { q = QuantizeLinear(x, s, z) y = Abs(q) a = QuantizeLinear(x, s, h) v = DequantizeLinear(a, s, h)
        b = QuantizeLinear(x, s, z) c = Cast<to=1>(b) d = DequantizeLinear(b, s, z) u = Add(c, d) n = Neg(i) }""",
    "int8-activations": """g (uint8[2,3] i, float[2,3] x) => (float[2,3] y, float[2,3] v)
        <float s = {0.5}, uint8 z = {3}, int8 e = {0}> { a = Cast<to=1>(i) b = DequantizeLinear(i, s, z) y = Add(a, b)
        q = QuantizeLinear(x, s, e) v = DequantizeLinear(q, s, e) }""",
    "split-bias-gelu": "g (float[2,9] x) => (float[2,9] y) { y = com.microsoft.FastGelu(x) }",
    # A size that is fed, and one place from corner to corner.
    "affine-grid-to-matmul": """g (float[2,2,3] x, int64[4] s) => (float[A,B,C,D] y, float[2,3,1,2] z)
        <int64[4] t = {2,1,3,1}> { y = AffineGrid(x, s) z = AffineGrid<align_corners=1>(x, t) }""",
    "split-instance-norm": """g (float[2,3,4,5] x, float[N,3,4,5] u, float[3] r) => (float[2,3,4,5] y, float[N,3,4,5] v)
        <float[3] w = {1,-2,3}> { y = InstanceNormalization(x, w, r) v = InstanceNormalization(u, w, w) }""",
    "planar-instance-norm": """g (float[2,3,4,5] x, float[N,3,4,5,2] u, float[0,3,4,5,2] z) => (float[2,3,4,5] y,
        float[N,3,4,5,2] v, float[0,3,4,5,2] w) <float[3] s = {1,-2,3}> { y = InstanceNormalization(x, s, s)
        v = InstanceNormalization(u, s, s) w = InstanceNormalization(z, s, s) }""",
    "split-embed-norm": """
        g (int32[1,2] i) => (float[1,2,3] y, int32[1] m) <float[4,3] w = {1,2,3,4,5,6,7,8,9,10,11,12},
        float[3] g = {1,2,3}> { y, m = com.microsoft.EmbedLayerNormalization(i, , w, w, , g, ) }""",
    "expand-to-concat": """
        g (float[1,1,3] x, float[1,3] z, float[1,2] t) => (float[2,4,3] y, float[1,1,3] u, float[17,2] v)
        <int64[3] s = {2,4,3}, int64[3] p = {1,1,3}, int64[2] m = {17,2}>
        { y = Expand(x, s) u = Expand(z, p) v = Expand(t, m) }""",
    "neg-to-mul": "g (int32[2,9] x) => (int32[2,9] y) { y = Neg(x) }",
    "split-l2-norm": """g (float[2,3] x, int32[2,3] i, float[N,3] u, float[9,9999] h) => (float[1,1] y, int32[2,1] z,
        float[N,1] w, float[A,B] t) { y = ReduceL2(x) z = ReduceL2<axes=[1]>(i) w = ReduceL2<axes=[1]>(u)
        t = ReduceL2<axes=[0,1]>(h) }""",
    "idle-expand": """g (float[1,9] x, float[N,9] u) => (float[2,9] y, float[2,1,9] z, float[N,9] w)
        <int64[2] s = {2,9},
        int64[3] t = {2,1,9}> { a = Expand(x, s) y = Mul(x, a) b = Expand(x, t) z = Sub(b, x) c = Expand(x, s)
        w = Add(u, c) }""",
    "fewer-axes": """g (float[2,3,2,3,2] x, float[N,2,2,1,3] u, float[2,3,4,5] v, int32[1,1,2,3,4] i, int64[A,B] k) =>
        (float[2,3,2,3,2] y, float[1,1,2,3,2] s, float[A,B,C,D,E] t, float[5,2,3,4] w, int32[1,2,1,3,4] j,
        float[A,B,C,D,E] q, float[2,3,4,5] l, float[A,B,C,D,E] m) <int64[2] o = {0,0}, int64[2] e = {1,1},
        int64[2] a = {0,1}, int64[1] p = {0}>
        { y = Transpose<perm=[4,3,2,1,0]>(x) s = Slice(x, o, e, a) t = Transpose<perm=[1,0,2,3,4]>(u)
        w = Transpose<perm=[3,0,1,2]>(v) j = Transpose<perm=[0,2,1,3,4]>(i) q = Slice(u, p, p, p)
        l = Gather(v, o) m = Gather(v, k) }""",
    "sum-to-mean": """g (float[2,3] x, int32[2,3] i, float[N,3] u, int64[1] a, float16[9,9999] h, float[0,3] e,
        float[2,1] l, float[9,9999] g) => (float[2,3] y, int32 z, float[3] v, float[A,B] w, float16 t, float[3] f,
        float[2,1] k, float r) <int64[1] c = {0}>
        { y = ReduceSum<noop_with_empty_axes=1>(x) z = ReduceSum<keepdims=0>(i) v = ReduceSum<keepdims=0>(u, c)
        w = ReduceSum(x, a) t = ReduceSum<keepdims=0>(h) f = ReduceSum<keepdims=0>(e, c) k = Relu(l)
        r = ReduceSum<keepdims=0>(g) }""",
    "einsum-to-matmul": """g (float[2,3,3] x, float[3,4] w, float[1,4] u, float[3,N] d, float[1,3,4] c, float[0,4] e)
        => (float[2,3,4] y, float[2,4] z, float[2,4] s, float[3,2,3] t, float[3,4] k, float[2,3,3] m, float[N,4] n,
        float[2,3,4] o, float[4,4] p)
        { y = Einsum<equation="...ij,...jk->...ik">(x, c) z = Einsum<equation="bii,ij->bj">(x, w)
        s = Einsum<equation="bij,jk->bk">(x, w) t = Einsum<equation="bij->ibj">(x) k = Einsum<equation="ij,kj">(w, u)
        m = Einsum<equation="bij,jk,lk->bil">(x, w, w) n = Einsum<equation="ij,ik->jk">(d, w)
        o = Einsum<equation="bij,bjk->bik">(x, c) p = Einsum<equation="ij,ik->jk">(e, e) }""",
    "flat-expand": "g (float[1,4,3] x) => (float[2,4,3] y) <int64[3] s = {2,4,3}> { y = Expand(x, s) }",
    "join-gelu": """g (float[2,9] x) => (float[2,9] y) <float r = {1.41421356}, float o = {1}, float h = {0.25}>
        { a = Div(x, r) b = Erf(a) c = Add(b, o) d = Mul(x, c) y = Mul(d, h) }""",
    # What is rounded behind the layer, and behind what moves it.
    "float-weights": """g (float[1,3,4,4] x) => (float[1,2,4,4] y, float[1,32] z)
        <int8[2,3,1,1] w = {127, -2, 3, -127, 5, -128}, float s = {0.5}>
        { q = QuantizeLinear(x, s) d = DequantizeLinear(q, s) f = DequantizeLinear(w, s) c = Conv(d, f)
        p = QuantizeLinear(c, s) y = DequantizeLinear(p, s) g = DequantizeLinear(w, s) h = Transpose<perm=[0,1,3,2]>(g)
        e = Conv(d, h) k = Flatten(e) r = QuantizeLinear(k, s) z = DequantizeLinear(r, s) }""",
    # A bias that is computed, is far from the products' scale, or has another size; what has two readers or leaves.
    "complete-units": """g (float[1,2,4] x, float[2] v) => (float[1,2,4] y, float[1,2,4] z, float[1,2,4] u,
        float[1,2,4] k, float[1,2,4] m, float[1,2,4] n, float[1,2,4] aa)
        <float s = {0.02}, int8 o = {0}, int8[2,2,1] w = {1, -2, 3, -4}, float t = {0.01}, float[2] b = {1e9, 2},
        float[3] c = {1,2,3}, float[3] l = {1,1,1}, float[2] e = {1, 2}>
        { q = QuantizeLinear(x, s, o) d = DequantizeLinear(q, s, o) f = DequantizeLinear(w, t, o)
        a = Conv(d, f, v) p = QuantizeLinear(a, s, o) y = DequantizeLinear(p, s, o)
        g = Conv(d, f, b) h = QuantizeLinear(g, s, o) z = DequantizeLinear(h, s, o)
        i = Conv(d, f, e) j = QuantizeLinear(i, s, o) u = DequantizeLinear(j, s, o) k = Relu(i)
        m = Relu(d) r = Relu(x) ac = QuantizeLinear(r, s, o) n = DequantizeLinear(ac, s, o) ad = Relu(d)
        ae = QuantizeLinear(ad, s, o) aa = DequantizeLinear(ae, s, o) }""",
    "plain-softmax": """g (float[2,4,3] x) => (float[2,4,3] y, float[2,3,4] z, float[2,4,3] u, float[8,3] t)
        <int64[3] s = {2,4,3}, int64[3] v = {2,3,4}>
        { a = Flatten<axis=1>(x) b = Softmax(a) y = Reshape(b, s) c = Flatten<axis=2>(x) d = Softmax(c)
        z = Reshape(d, v) e = Softmax<axis=0>(c) u = Reshape(e, s) t = Softmax(c) }""",
    "join-softmax": (
        "g (float[4,4] x, float[4,4] w) => (float[4,4] y, float[4,4] z, float[4,4] v) "
        "<int64[1] a = {0}, int64[1] b = {1}, int64[2] ab = {0,1}, int64[2] s = {4,1}> "
        # Along rows and columns, a sum that lies across, and another's sum.
        "{ e = Exp(x) t = ReduceSum<keepdims=0>(e, a) t2 = Reshape(t, s) y = Div(e, t2) h = ReduceSum(e, ab) "
        "z = Div(e, h) f = Exp(w) k = ReduceSum(f, b) v = Div(e, k) }"
    ),
    "join-layer-norm": """g (float[4,4] x, float[4,4] u) => (float[4,4] y) <float t = {2}, float e = {0.001}>
        { m = ReduceMean<axes=[1]>(u) c = Sub(x, m) p = Pow(c, t) v = ReduceMean<axes=[1]>(p) f = Add(v, e)
        r = Sqrt(f) y = Div(c, r) }""",
    "join-rms-norm": """
        g (float[2,4,3] x) => (float[2,4,3] y) <float[3] w = {1, -2, 3}, float t = {2}, float e = {0.001}>
        { a = Pow(x, t) b = ReduceMean<axes=[1]>(a) c = Add(b, e) d = Sqrt(c) f = Div(x, d) y = Mul(w, f) }""",
    "unsigned-weights": """
        g (float[1,3,4,4] x) => (float[1,2,4,4] y) <int8[2,3,1,1] w = {127, -2, 3, -127, 5, -128}, float s = {0.5}>
        { f = DequantizeLinear(w, s) y = Conv(x, f) }""",
    "clip-to-min-max": "g (float[2,9] x, float low) => (float[2,9] y) { y = Clip(x, low) }",
    "plain-slope": """g (float[2,2,1,1] x, float[1,2,1,1] r) => (float[2,2,1,1] y, float[2,2,1,1] z, float[2,2,1,1] t)
        <float[2,1,1,1] s = {0.25, -2}, float[2,1,1] p = {0.25, -2}>
        { y = PRelu(x, s) z = PRelu(x, r) t = PRelu(x, p) }""",
    # To one axis, and of a rank that is not known.
    "squeeze-to-scalar": """g (float[1,1] x, float[N] v) => (float[1] y, float z) <int64[1] o = {1}, int64[0] n = {}>
        { y = Reshape(x, o) z = Reshape(v, n) }""",
    # Two slopes, one that is computed, one that gives the result an axis, and integers.
    "leaky-slope": """g (float[2,2] x, int32[2,2] i, float r)
        => (float[2,2] y, float[2,2] z, float[A,B,C] t, int32[2,2] u)
        <float[2] s = {0.25, -2}, float[1,1,1] p = {2}, int32 k = {2}>
        { y = PRelu(x, s) z = PRelu(x, r) t = PRelu(x, p) u = PRelu(i, k) }""",
    # 16 bits, four axes, no Concat behind it, slopes of 0 and 1, and floats before it.
    "leaky-to-max": """g (float[1,1,1,2,3] x, float[1,1,2,3] u)
        => (float[1,2,1,2,3] y, float[1,2,2,3] z, float[1,1,1,2,3] v, float[1,2,1,2,3] w, float[1,2,1,2,3] t,
        float[1,2,1,2,3] k) <float s = {0.02}, uint8 o = {128}, uint16 p = {9}>
        { a = com.microsoft.QuantizeLinear(x, s, p) b = com.microsoft.DequantizeLinear(a, s, p) c = LeakyRelu(b)
        d = com.microsoft.QuantizeLinear(c, s, p) e = com.microsoft.DequantizeLinear(d, s, p)
        y = Concat<axis=1>(e, e) f = QuantizeLinear(u, s, o) g = DequantizeLinear(f, s, o) h = LeakyRelu(g)
        i = QuantizeLinear(h, s, o) j = DequantizeLinear(i, s, o) z = Concat<axis=1>(j, j) l = QuantizeLinear(x, s, o)
        m = DequantizeLinear(l, s, o) n = LeakyRelu(m) q = QuantizeLinear(n, s, o) v = DequantizeLinear(q, s, o)
        aa = LeakyRelu<alpha=0.0>(m) ab = QuantizeLinear(aa, s, o) ac = DequantizeLinear(ab, s, o)
        w = Concat<axis=1>(ac, ac) ad = LeakyRelu<alpha=1.0>(m) ae = QuantizeLinear(ad, s, o)
        af = DequantizeLinear(ae, s, o) t = Concat<axis=1>(af, af) ag = LeakyRelu(x) ah = QuantizeLinear(ag, s, o)
        ai = DequantizeLinear(ah, s, o) k = Concat<axis=1>(ai, ai) }""",
}
TOLERANCE = {
    # Without the rounding to 11 bits of the mantissa.
    "half-to-float": 2e-3,
    "double-to-float": 1e-6,
    "plain-gemm": 1e-6,
    "part-silu": 1e-3,  # a step of the second pair
    "batch-norm-to-conv": 1e-5,
    "scale-to-conv": 1e-6,
    "matmul-to-2d": 1e-6,
    "transposed-to-conv": 1e-6,
    "einsum-to-matmul": 1e-6,
    "affine-grid-to-matmul": 1e-6,
    "join-hard-swish": 1e-6,
    "split-hard-swish": 1e-6,
    "split-hard-sigmoid": 1e-6,
    "split-lstm": 1e-6,
    "split-layer-norm": 1e-5,
    "split-instance-norm": 1e-5,
    "split-rms-norm": 1e-5,
    "split-gelu": 1e-6,
    "split-tanh-gelu": 1e-5,
    "split-skip-norm": 1e-5,
    "exact-gelu": 4e-4,
    "split-bias-gelu": 1e-6,
    "split-embed-norm": 1e-5,
    "join-gelu": 1e-6,
    "join-softmax": 1e-6,
    "join-layer-norm": 1e-5,
    "join-rms-norm": 1e-5,
    "plain-power": 1e-6,
    "bounded-exp": 1e-6,
    "plain-average": 1e-6,
    "planar-resize": 1e-6,
    "exact-resize": 1e-6,
    "split-mish": 1e-6,
    "scaled-elu": 1e-6,
    "split-elu": 1e-6,
    "split-swish": 1e-6,
    "leaky-to-max": 1e-6,
    "sum-to-mean": 1e-6,
    "split-l2-norm": 1e-6,
}
"""How far results may move, relative to the largest; every other rewrite is exact to the bit."""
GONE = {
    "join-softmax": "Exp ReduceMax Sub", "join-layer-norm": "Sqrt Sub", "join-rms-norm": "Sqrt", "join-gelu": "Erf",
    "join-hard-swish": "Clip", "clip-to-relu": "Clip", "plain-softmax": "Flatten",
    "leaky-slope": "PRelu", "squeeze-to-scalar": "Reshape", "leaky-to-max": "LeakyRelu", "sum-to-mean": "ReduceSum",
    "fewer-axes": "Squeeze", "split-to-slices": "Split",
    "transposed-to-conv": "ConvTranspose",
    "split-qlinear": "QGemm QLinearConv QLinearMatMul QLinearLeakyRelu QLinearGlobalAveragePool QLinearAdd QLinearMul "
    "QLinearWhere QLinearSigmoid QLinearSoftmax QLinearConcat QLinearAveragePool",
}  # fmt: skip
"""The operators of the pattern of which none is left."""
SITES = {
    "flat-bias": 2, "write-pads": 2, "double-to-float": 6, "split-skip-norm": 2,
    "conv-to-planes": 11, "default-activations": 2, "half-to-float": 9, "drop-copies": 5, "part-silu": 2,
    "flat-softplus": 2, "unsqueeze-arg": 2, "batch-norm-to-conv": 2, "gather-to-reshape": 2, "gather-from-start": 2,
    "plain-gather": 5, "floor-pool": 5, "pad-axes": 2, "planar-resize": 3, "widen-kernel": 2, "narrow-mask": 2,
    "exact-resize": 4,
    "plain-nearest": 4, "pad-transposed": 3, "plain-pad": 2, "zero-pad": 2, "transposed-to-conv": 3,
    "matmul-to-2d": 3, "split-hard-sigmoid": 2, "plain-power": 3, "bounded-exp": 2,
    "cast-by-floor": 2, "pad-edge": 2, "plain-average": 8, "scale-to-conv": 4, "split-qlinear": 13,
    "spread-quantizers": 4, "uint8-activations": 5, "int8-activations": 4, "split-bias-gelu": 2,
    "einsum-to-matmul": 7, "affine-grid-to-matmul": 3, "plain-softmax": 2, "split-swish": 4, "join-softmax": 2,
    "join-layer-norm": 2, "leaky-slope": 2, "leaky-to-max": 2, "complete-units": 4,
    "squeeze-to-scalar": 2, "own-constants": 2, "sum-to-mean": 4, "fewer-axes": 8, "idle-expand": 4, "split-l2-norm": 3,
    "scaled-elu": 4, "split-elu": 4, "plain-count": 2, "split-instance-norm": 2,
}  # fmt: skip
"""How many nodes are rewritten, if more than one."""
OPSETS = {
    "pad-axes": 18,
    "even-split": 18,
    "split-mish": 18,
    "split-swish": 24,
    "affine-grid-to-matmul": 20,
    "zero-pad": 18,
}
"""The opset, if it is another than 17."""


@pytest.mark.parametrize("id_", WITH)
def test_the_pattern_is_rewritten_and_the_result_stays(tmp_path: Path, id_: str) -> None:
    model = make_model(WITH[id_], tmp_path / "m.onnx", opset=OPSETS.get(id_, 17))
    if id_ == "trailing-inputs":
        model = _with_empty_input(model)
    fixed = fix_model(model, tmp_path / "out.onnx", [id_])
    assert [(fix.id, len(fix.nodes)) for fix in fixed.fixes] == [(id_, SITES.get(id_, 1))]
    # onnx does not know what ONNX Runtime has in ONNX's own domain.
    if "SimplifiedLayerNormalization" not in op_names(fixed.model.path):
        onnx.checker.check_model(onnx.load(str(fixed.model.path)))
    assert set(GONE.get(id_, "").split()).isdisjoint(op_names(fixed.model.path))
    assert_same(tmp_path, fixed, TOLERANCE.get(id_, 0), seeds=range(4))


@pytest.mark.parametrize(
    ("id_", "text"),
    [
        ("plain-gather", "(float[3,4] x) => (float[2] y) <int64[2,2] i = {9,1,0,3}> { y = GatherND(x, i) }"),
        ("plain-gather", "(float[3,4] x) => (float[2] y) <int64[2,2] i = {0,1,-4,3}> { y = GatherND(x, i) }"),
        ("pad-axes", "(float[3,4] x) => (float[3,6] y) <int64[2] p = {1,1}, int64[1] a = {2}> { y = Pad(x, p, , a) }"),
        ("pad-axes", "(float[3,4] x) => (float[3,6] y) <int64[2] p = {1,1}, int64[1] a = {-3}> { y = Pad(x, p, , a) }"),
        *(
            ("floor-pool", f"(float[1,2,8,8] x) => (float[1,2,4,4] y) {{ y = MaxPool<{wrong}, ceil_mode=1>(x) }}")
            for wrong in (
                "kernel_shape=[2]", "kernel_shape=[2,2], strides=[2,2,2]", "kernel_shape=[2,2], strides=[0,2]",
                "kernel_shape=[2,2], pads=[1,1,1]", "kernel_shape=[2,2], dilations=[1]",
            )
        ),
        ("plain-average", """(float[1,8,8,8] x) => (float[1,8,9,9] y)
            { y = AveragePool<kernel_shape=[2,2], pads=[1]>(x) }"""),
        *(
            (id_, f"(float[2,2,3] x) => (float[2,4,5,2] y) <int64[{size.count(',') + 1}] s = {{{size}}}> {{ {body} }}")
            for id_, size, body in (
                ("affine-grid-to-matmul", "2", "y = AffineGrid(x, s)"),
                ("affine-grid-to-matmul", "2,1,0,5", "y = AffineGrid(x, s)"),
                ("affine-grid-to-matmul", "2,1,4194305,5", "y = AffineGrid(x, s)"),
                ("affine-grid-to-matmul", "1,1,4,5", "y = AffineGrid(x, s)"),
                ("affine-grid-to-matmul", "2,1,4,5,6", "y = AffineGrid(x, s)"),
            )
        ),
        *(
            ("einsum-to-matmul", f'(float[2,3] x) => (float[2,3] y) {{ y = Einsum<equation="{wrong}">(x, x) }}')
            for wrong in ("...abc,abc->...", "->ab", "ab->")
        ),
        ("unsigned-weights", """(float[2,3] x) => (float[2,2] y)
            <float s = {0.5}, int32 z = {0}, int8[3,2] w = {1,2,3,4,5,6}>
            { e = DequantizeLinear(w, s, z) y = MatMul(x, e) }"""),
        *(
            ("float-weights", f"""(float[2,3] x) => (float[A,B] y) <float[{count}] s = {{{scale}}}, {kind} = {{1}},
                int8[3,2] w = {{1,2,3,4,5,6}}> {{ e = DequantizeLinear<axis=0>(w, s, z) y = MatMul(x, e) }}""")
            for count, scale, kind in ((2, "1,2", "int8[2] z"), (3, "1,2,3", "int8 z"), (0, "", "int8[0] z"))
        ),
        ("narrow-mask", """(float[2,3] x) => (float[2,3] y) <float s = {0.5}, float z = {0}, int8 q = {0}>
            { d = DequantizeLinear(q, s, z) a = Add(x, d) b = QuantizeLinear(a, s, z) y = Identity(b) }"""),
        ("uint8-activations", """(float[2,3] x) => (float[2,3] y) <float s = {0.5}, int8 k = {3}, int32 z = {0}>
            { q = QuantizeLinear(x, s, k) y = DequantizeLinear(q, s, z) }"""),
        ("split-qlinear", """(uint8[1,2] x) => (uint8[1,4] y) <float s = {0.5}, uint8 z = {0}>
            { y = com.microsoft.QLinearConcat(s, z, x, s, z, x, s, z) }"""),
    ],
)  # fmt: skip
def test_a_node_that_no_session_runs_stays(tmp_path: Path, id_: str, text: str) -> None:
    """A check judges such a model too, and says why no session opens it."""
    assert rewrite(tmp_path, f"g {text}", id_, opset=20).fixes == ()


@pytest.mark.parametrize(
    ("moves", "is_spread"),
    [
        ("m = Pad(q, p, z)", True),
        ("m = Pad(q, p, k)", False),
        ("m = Pad(q, p)", False),
        ("m = Pad(q, p, h)", False),
        ('m = Pad<mode="reflect">(q, p, z)', True),
        ("r = Transpose(q) m = Pad(r, p, z)", True),
        ('m = Resize<mode="linear">(q, , e)', False),
        ("m = Resize(q, , e)", True),
        ("m, n = MaxPool<kernel_shape=[1,1]>(q)", False),
        ("r = Abs(q) m = Transpose(r)", False),
        ("m = Relu(q)", False),
    ],
)
def test_what_moves_quantized_integers_gets_quantizers(tmp_path: Path, moves: str, *, is_spread: bool) -> None:
    text = f"""g (float[2,2,4,4] x, uint8 h) => (float[A,B,C,D] y) <float s = {{0.0625}}, uint8 z = {{7}},
        uint8 k = {{8}}, int64[8] p = {{0,0,1,1,0,0,1,1}}, float[4] e = {{1,1,2,2}}>
        {{ q = QuantizeLinear(x, s, z) {moves} c = com.microsoft.QLinearSigmoid(m, s, z, s, z)
        y = DequantizeLinear(c, s, z) }}"""
    fixed = rewrite(tmp_path, text, "spread-quantizers")
    moving = sum(name in moves for name in ("Pad", "Transpose", "Resize"))
    assert [len(fix.nodes) for fix in fixed.fixes] == [moving] * is_spread
    if is_spread:
        assert_same(tmp_path, fixed, 0)


@pytest.mark.parametrize(
    ("id_", "text"),
    [
        (
            "matmul-to-2d",
            "g (float[1,3,4] x) => (float[1,2,4] y) <float[2,3] w = {1,2,3,4,5,6}> { [y] y = MatMul(w, x) }",
        ),
        ("planar-resize", WITH["planar-resize"].replace("{ y =", "{ [y] y =")),
    ],
)
def test_a_node_may_have_the_name_of_its_output(id_: str, text: str, tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, text, id_)
    assert fixed.fixes
    assert_same(tmp_path, fixed, 1e-6)


def _with_empty_input(model: Model) -> Model:
    proto = onnx.load(str(model.path))
    proto.graph.node[0].input.append("")
    return save_proto(proto, model.path)


@pytest.mark.parametrize("id_", WITHOUT)
def test_what_only_looks_like_it_stays(tmp_path: Path, id_: str) -> None:
    assert rewrite(tmp_path, WITHOUT[id_], id_, opset=OPSETS.get(id_, 17)).fixes == ()
    assert op_names(tmp_path / "out.onnx") == op_names(tmp_path / "m.onnx")


@pytest.mark.parametrize(
    "body",
    [
        "a = HardSigmoid<alpha=0.16666667, beta=0.5>(x) y = Mul(a, x)",
        "a = HardSigmoid<alpha=0.16666667>(x) y = Mul(x, a)",
        "a = Add(t, x) b = Clip(a, z, s) c = Mul(x, b) y = Div(c, s)",
        "a = Add(x, t) b = Clip(a, z, s) c = Mul(b, k) y = Mul(c, x)",
    ],
)
def test_hard_swish_is_known_in_other_spellings(tmp_path: Path, body: str) -> None:
    constants = "<float t = {3}, float z = {0}, float s = {6}, float k = {0.16666667}>"
    fixed = rewrite(tmp_path, f"g (float[2,9] x) => (float[2,9] y) {constants} {{ {body} }}", "join-hard-swish")
    assert "HardSwish" in op_names(fixed.model.path)
    assert_same(tmp_path, fixed, 1e-6)


@pytest.mark.parametrize(
    "body",
    [
        "a = HardSigmoid(x) y = Mul(a, x)",
        "a = com.microsoft.HardSigmoid<alpha=0.16666667>(x) y = Mul(a, x)",
        "a = HardSigmoid<alpha=0.16666667, beta=0.4>(x) y = Mul(a, x)",
        "a = Elu<alpha=0.16666667>(x) y = Mul(a, x)",
        "a = HardSigmoid<alpha=0.16666667>(t) y = Mul(a, x)",
        "a = Add(x, t) b = Clip(a, z, s) y = Mul(b, x)",
        "a = Add(x, t) b = Clip(a, t, s) c = Mul(b, k) y = Mul(c, x)",
        "a = Add(x, s) b = Clip(a, z, s) c = Mul(b, k) y = Mul(c, x)",
        "a = Sub(x, t) b = Clip(a, z, s) c = Mul(b, k) y = Mul(c, x)",
        "a = Add(x, t) b = Clip(a, z, s) c = Mul(b, k) y = Add(c, x)",
        "a = Add(x, t) b = Clip(a, z, s) c = Mul(x, b) y = Div(s, c)",
        "a = my.Add(x, t) b = Clip(a, z, s) c = Mul(b, k) y = Mul(c, x)",
        "a = Add(x, t) b = my.Clip(a, z, s) c = Mul(b, k) y = Mul(c, x)",
        "a = Add(x, t) b = Clip(a, z, s) c = my.Mul(b, k) y = Mul(c, x)",
        "a = Add(x, t) b = Clip(a, z, s) c = my.Mul(x, b) y = Div(c, s)",
    ],
)
def test_what_is_nearly_a_hard_swish_stays(tmp_path: Path, body: str) -> None:
    constants = "<float t = {3}, float z = {0}, float s = {6}, float k = {0.16666667}>"
    text = f"g (float[2,9] x) => (float[2,9] y) {constants} {{ {body} }}"
    assert rewrite(tmp_path, text, "join-hard-swish").fixes == ()


@pytest.mark.parametrize(
    ("body", "last"),
    [
        ("d = Mul(x, a) y = Add(d, b) e = Conv(y, w)", "Conv(y, w)"),
        ("d = Mul(x, a) e = Add(d, b) f = Neg(e)", "Conv(e, w)"),
        ("d = Mul(x, a) e = Add(d, b) f = Neg(d)", "Conv(e, w)"),
        ("d = Mul(x, v) e = Add(d, b)", "Conv(e, w)"),
        ("d = Mul(x, a) e = Add(d, v)", "Conv(e, w)"),
        ("d = Mul(x, x) e = Add(d, b)", "Conv(e, w)"),
        ("d = Mul(x, z) e = Add(d, b)", "Conv(e, w)"),
        ("d = my.Mul(x, a) e = Add(d, b)", "Conv(e, w)"),
        ("d = Mul(x, a) e = my.Add(d, b)", "Conv(e, w)"),
        ("e = Mul(x, a)", "Conv(e, w)"),
        ("e = Add(x, b)", "Conv(e, w)"),
        ("d = Mul(x, a) e = Add(d, b)", "Conv(e, q)"),
        ("d = Mul(x, a) e = Add(d, b)", "Conv(e, w, r)"),
        ("d = Mul(x, a) e = Add(d, nine)", "Conv<pads=[0,1,0,1]>(e, w)"),
        ("d = Mul(x, a) e = Add(d, nine)", 'Conv<auto_pad="SAME_LOWER">(e, w)'),
    ],
)
def test_what_a_conv_cannot_take_up_exactly_stays(tmp_path: Path, body: str, last: str) -> None:
    """Results that others read, numbers of channels or none, computed weights, and shifts that padding would cost."""
    text = f"""g (float[1,2,3,4] x, float[2,2,1,1] q, float[2] r) => (float[1,2,3,N] y)
        <float a = {{0.5}}, float b = {{-3}}, float z = {{0}}, float nine = {{9}}, float[2,1,1] v = {{1,2}},
        float[2,2,1,1] w = {{1,2,3,4}}> {{ {body} {"" if "y = " in body else f"y = {last}"} }}"""
    assert rewrite(tmp_path, text, "scale-to-conv").fixes == ()


@pytest.mark.parametrize(("pads", "shift", "left"), [("0,0,0,0", 100, 0), ("0,1,0,1", 8, 1), ("1,0,1,0", -8, 1)])
def test_before_padding_a_conv_takes_up_the_scale_alone(tmp_path: Path, pads: str, shift: float, left: int) -> None:
    text = f"""g (float[1,2,3,4] x) => (float[1,2,M,N] y) <float a = {{0.5}}, float b = {{{shift}}},
        float[2,2,1,1] w = {{1,2,3,4}}> {{ d = Mul(x, a) e = Add(d, b) y = Conv<pads=[{pads}]>(e, w) }}"""
    fixed = rewrite(tmp_path, text, "scale-to-conv")
    assert op_names(fixed.model.path).count("Add") == left
    assert "Mul" not in op_names(fixed.model.path)
    assert_same(tmp_path, fixed, 1e-6)


@pytest.mark.parametrize(("steps", "direction"), [(3, "reverse"), (3, "forward"), (1, "forward")])
def test_an_lstm_without_bias_and_states_may_return_its_last_state_alone(
    tmp_path: Path, steps: int, direction: str
) -> None:
    text = f"""g (float[{steps},2,4] x, float[1,8,4] w, float[1,8,2] r) => (float[1,2,2] h)
        {{ y, h = LSTM<hidden_size=2, direction="{direction}">(x, w, r) }}"""
    proto = onnx.load(str(make_model(text, tmp_path / "m.onnx").path))
    proto.graph.node[0].output[0] = ""
    fixed = fix_model(save_proto(proto, tmp_path / "m.onnx"), tmp_path / "out.onnx", ["split-lstm"])
    assert op_names(fixed.model.path).count("Tanh") == 2 * steps
    assert_same(tmp_path, fixed, 1e-6, seeds=range(4))


@pytest.mark.parametrize(
    ("shape", "attributes", "inputs"),
    [
        ("3,1,4", ", clip=0.5", "x, w, r"),
        ("3,1,4", ", input_forget=1", "x, w, r"),
        ("1,3,4", ", layout=1", "x, w, r"),
        ("3,1,4", ', activations=["Relu", "Tanh", "Tanh"]', "x, w, r"),
        ("3,1,4", "", "x, w, r, , , , , p"),
        ("N,1,4", "", "x, w, r"),
        ("1025,1,4", "", "x, w, r"),
    ],
)
def test_an_lstm_of_another_formula_or_length_stays(tmp_path: Path, shape: str, attributes: str, inputs: str) -> None:
    text = f"""g (float[{shape}] x, float[1,8,4] w, float[1,8,2] r, float[1,6] p) => (float[A,B,C,D] y)
        {{ y = LSTM<hidden_size=2{attributes}>({inputs}) }}"""
    assert rewrite(tmp_path, text, "split-lstm").fixes == ()


FLAX_NORM = """g (float[4,4] x, float[4,4] u) => (float[4,4] y) <int64[2] s = {4,1}, int64[2] t = {1,4}, float o = {0},
    float e = {0.001}, float[4] w = {1,-2,3,4}, float[4,4] full = {1,2,3,4,5,6,7,8,9,1,2,3,4,5,6,7},
    int64[1] one = {1}> { a = ReduceMean<axes=[1], keepdims=0>(x) m = Reshape(a, s) c = Sub(x, m) p = Mul(x, x)
    b = ReduceMean<axes=[1], keepdims=0>(p) q = Mul(a, a) d = Sub(b, q) f = Max(o, d) v = Reshape(f, s)
    h = Add(v, e) r = Sqrt(h) n = Div(c, r) i = Mul(n, w) y = Add(i, w) }"""


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("a = ReduceMean<axes=[1], keepdims=0>(x)", "a = ReduceMean<axes=[0], keepdims=0>(x)"),
        ("a = ReduceMean<axes=[1], keepdims=0>(x)", "a = ReduceMean<axes=[1], keepdims=0>(u)"),
        ("a = ReduceMean", "a = ReduceMax"),
        ("m = Reshape(a, s)", "m = Reshape(a, t)"),
        ("c = Sub(x, m)", "c = Sub(m, x)"),
        ("c = Sub(x, m)", "c = Sub(u, m)"),
        ("c = Sub(x, m)", "c = Add(x, m)"),
        ("p = Mul(x, x)", "p = Mul(x, u)"),
        ("p = Mul(x, x)", "p = Mul(u, u)"),
        ("b = ReduceMean<axes=[1], keepdims=0>(p)", "b = ReduceMean<axes=[0], keepdims=0>(p)"),
        ("b = ReduceMean<axes=[1], keepdims=0>(p)", "b = ReduceSum<keepdims=0>(p, one)"),
        ("q = Mul(a, a)", "q = Mul(b, b)"),
        ("q = Mul(a, a)", "q = Mul(a, b)"),
        ("d = Sub(b, q)", "d = Sub(q, b)"),
        ("f = Max(o, d)", "f = Max(e, d)"),
        ("v = Reshape(f, s)", "v = Reshape(f, t)"),
        ("r = Sqrt(h)", "r = Exp(h)"),
        ("n = Div(c, r)", "n = Div(r, c)"),
        ("n = Div(c, r)", "n = Mul(c, r)"),
    ],
)
def test_what_is_nearly_a_layer_norm_stays(tmp_path: Path, part: str, instead: str) -> None:
    assert op_names(rewrite(tmp_path, FLAX_NORM, "join-layer-norm").model.path) == ["LayerNormalization"]
    assert FLAX_NORM.count(part) == 1
    assert rewrite(tmp_path, FLAX_NORM.replace(part, instead), "join-layer-norm").fixes == ()


TENSORFLOW_NORM = """g (float[4,4] x, float[4,4] u) => (float[4,4] y) <float e = {0.001}, float[4] w = {1,-2,3,4},
    float[4] b = {4,3,2,1}> { m = ReduceMean<axes=[1]>(x) c = Sub(x, m) p = Mul(c, c)
    v = ReduceMean<axes=[1]>(p) h = Add(v, e) r = Sqrt(h) i = Reciprocal(r) f = Mul(i, w) s = Mul(x, f)
    n = Mul(m, f) t = Sub(b, n) y = Add(s, t) }"""


@pytest.mark.parametrize(
    ("part", "instead"),
    [
        ("s = Mul(x, f)", "s = Mul(u, f)"),
        ("s = Mul(x, f)", "s = Mul(x, i)"),
        ("n = Mul(m, f)", "n = Mul(m, i)"),
        ("n = Mul(m, f)", "n = Mul(v, f)"),
        ("n = Mul(m, f)", "n = Mul(x, f)"),
        ("n = Mul(m, f)", "n = Mul(m, w)"),
        ("t = Sub(b, n)", "t = Sub(n, b)"),
        ("p = Mul(c, c)", "p = Mul(x, x)"),
    ],
)
def test_a_layer_norm_of_tensorflow_is_joined_and_what_is_nearly_one_stays(
    tmp_path: Path, part: str, instead: str
) -> None:
    fixed = rewrite(tmp_path, TENSORFLOW_NORM, "join-layer-norm")
    assert op_names(fixed.model.path) == ["LayerNormalization"]
    assert_same(tmp_path, fixed, 1e-5)
    assert TENSORFLOW_NORM.count(part) == 1
    assert rewrite(tmp_path, TENSORFLOW_NORM.replace(part, instead), "join-layer-norm").fixes == ()


@pytest.mark.parametrize(
    ("part", "instead", "left"),
    [
        ("i = Mul(n, w)", "i = Mul(n, full)", ["LayerNormalization", "Mul", "Add"]),
        ("y = Add(i, w)", "y = Add(i, full)", ["LayerNormalization", "Add"]),
        ("y = Add(i, w)", "y = Sub(i, w)", ["LayerNormalization", "Sub"]),
        ("y = Add(i, w)", "y = Add(n, w)", ["LayerNormalization"]),
    ],
)
def test_a_scale_or_shift_that_does_not_lie_along_the_axis_stays_behind_a_layer_norm(
    tmp_path: Path, part: str, instead: str, left: list[str]
) -> None:
    fixed = rewrite(tmp_path, FLAX_NORM.replace(part, instead), "join-layer-norm")
    assert op_names(fixed.model.path) == left
    assert_same(tmp_path, fixed, 1e-5)


def test_an_older_model_gets_the_opset_that_has_layer_norms_only_where_it_divides_by_the_root_of_a_variance(
    tmp_path: Path,
) -> None:
    product, between = FLAX_NORM.replace("n = Div(c, r)", "n = Mul(c, r)"), FLAX_NORM.replace("Max(o, d)", "Abs(d)")
    fused = "g (float[2,3] x, float[3] w) => (float[2,3] y) { y = com.microsoft.SkipLayerNormalization(x, x, w) }"
    rows = ((FLAX_NORM, 15, 17), (product, 15, 15), (between, 15, 15), (fused, 15, 17), (fused, 18, 18))
    for text, own, opset in rows:
        model = make_model(text, tmp_path / "m.onnx", opset=own)
        assert prepare_model(model, tmp_path / "out.onnx", {}).opsets["ai.onnx"] == opset


SOFTMAX = "g (float[4,4] x) => (float[4,4] y) { e = Exp(x) s = ReduceSum<axes=[1]>(e) y = Div(e, s) }"


@pytest.mark.parametrize(
    ("id_", "text", "opset", "joined"),
    [
        *(("join-layer-norm", FLAX_NORM, opset, opset == 17) for opset in (16, 17)),
        *(("join-hard-swish", WITH["join-hard-swish"], opset, opset == 14) for opset in (13, 14)),
        # Before opset 13 a Softmax normalises over all axes from its own to the last.
        ("join-softmax", SOFTMAX, 12, True),
        ("join-softmax", SOFTMAX.replace("[1]", "[0]"), 12, False),
    ],
)
def test_an_operator_is_written_only_for_opsets_that_have_it(
    tmp_path: Path, id_: str, text: str, opset: int, joined: bool
) -> None:
    assert bool(rewrite(tmp_path, text, id_, opset=opset).fixes) == joined


@pytest.mark.parametrize("id_", ["join-hard-swish", "split-hard-swish", "split-hard-sigmoid"])
def test_a_hard_swish_of_doubles_stays(tmp_path: Path, id_: str) -> None:
    assert rewrite(tmp_path, WITH[id_].replace("float", "double"), id_).fixes == ()


def test_a_clip_of_fp16_is_rewritten_in_fp16(tmp_path: Path) -> None:
    rewrite(tmp_path, "g (float16[2,9] x) => (float16[2,9] y) { y = HardSwish(x) }", "split-hard-swish")
    onnx.checker.check_model(onnx.load(str(tmp_path / "out.onnx")), full_check=True)


def test_what_computed_in_float16_computes_in_float32_with_the_same_inputs_and_outputs(tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, WITH["half-to-float"], "half-to-float").model
    proto = onnx.load(str(fixed.path))
    assert [spec.dtype for spec in (*fixed.inputs, *fixed.outputs)] == [
        "bool", "float16", "float32", "float16", "float32", "float16",
    ]  # fmt: skip
    # One for the input, one for each output of float16, and that which made an output.
    assert op_names(fixed.path).count("Cast") == 4
    assert all(tensor.data_type != onnx.TensorProto.FLOAT16 for tensor in iterate_tensors(proto.graph))
    onnx.checker.check_model(proto, full_check=True)
    assert fix_model(fixed, tmp_path / "again.onnx", ["half-to-float"]).fixes == ()


def test_thresholds_of_trees_stay_float64(tmp_path: Path) -> None:
    text = """g (double[1,3] x) => (double[1,3] y, double[1,3] z)
        <double[3,3] w = {1.0,2.0,3.0,4.0,5.0,6.0,7.0,8.0,9.0}>
        { z = MatMul(x, w) y = ai.onnx.ml.Binarizer<threshold=0.5>(x) }"""
    model = make_model(text, tmp_path / "m.onnx", imports=', "ai.onnx.ml" : 1')
    assert fix_model(model, tmp_path / "out.onnx", ["double-to-float"]).fixes == ()
    assert rewrite(
        tmp_path, text.replace("y = ai.onnx.ml.Binarizer<threshold=0.5>(x)", "y = Abs(x)"), "double-to-float"
    ).fixes


@pytest.mark.parametrize(
    ("id_", "kind", "share"), [("double-to-float", "double", 1e-6), ("half-to-float", "float16", 2e-3)]
)
def test_weights_of_another_file_become_float32(tmp_path: Path, id_: str, kind: str, share: float) -> None:
    weights = {"w": np.random.default_rng(0).standard_normal((64, 64)).astype(kind)}
    text = f"g ({kind}[2,64] x) => ({kind}[2,64] y) {{ y = MatMul(x, w) }}"
    model = make_model(text, tmp_path / "m.onnx", weights=weights, external=True)
    assert model.external_files
    fixed = fix_model(model, tmp_path / "out.onnx", [id_])
    (weight,) = onnx.load(str(fixed.model.path)).graph.initializer
    assert weight.data_type == onnx.TensorProto.FLOAT
    assert np.array_equal(onnx.numpy_helper.to_array(weight), weights["w"].astype(np.float32))
    assert_same(tmp_path, fixed, share)


def test_float_weights_are_stored_beside_a_node_that_makes_nothing() -> None:
    text = """g (float[1,2] x) => (float[1,2] y) <int8[2,2] w = {1,2,3,4}, float s = {0.5}>
        { d = DequantizeLinear(w, s) y = MatMul(x, d) }"""
    graph = onnx.parser.parse_graph(text)
    graph.node.append(onnx.helper.make_node("Log", ["x"], [], domain="my.domain"))
    assert len(REWRITES["float-weights"](graph, 17)) == 1
    assert [node.op_type for node in graph.node] == ["MatMul", "Log"]


def test_an_input_of_float16_that_is_an_output_stays_so(tmp_path: Path) -> None:
    text = "g (float16[2] x) => (float16[2] x, float16[2] y, float16[2] w) <float16[2] w = {1, 2}> { y = Mul(x, w) }"
    fixed = rewrite(tmp_path, text, "half-to-float")
    assert [spec.name for spec in fixed.model.outputs] == ["x", "y", "w"]
    assert_same(tmp_path, fixed, 2e-3)


def test_a_concat_of_one_tensor_that_makes_an_output_becomes_an_identity(tmp_path: Path) -> None:
    fixed = rewrite(tmp_path, "g (float[2,3] x) => (float[2,3] y) { a = Neg(x) y = Concat<axis=0>(a) }", "drop-copies")
    assert [node.op_type for node in read_graph(fixed.model).nodes] == ["Neg", "Identity"]


def test_a_kernel_is_mirrored_for_a_check_too_but_not_on_the_disk(tmp_path: Path) -> None:
    text = "g (float[1,64,4,4] x) => (float[1,64,6,6] y) { y = ConvTranspose(x, w) }"
    weights = {"w": np.random.default_rng(0).standard_normal((64, 64, 3, 3)).astype(np.float32)}
    inside = make_model(text, tmp_path / "m.onnx", weights=weights)
    advice = check_model(inside, load_target("nnapi")).advice
    assert [(each.id, each.gain_nodes) for each in advice] == [("transposed-to-conv", 1)]
    fixed = fix_model(inside, tmp_path / "out.onnx")
    assert (op_names(fixed.model.path), fixed.model.size_bytes < inside.size_bytes + 1000) == (["Conv"], True)
    assert_same(tmp_path, fixed, 1e-6)
    outside = make_model(text, tmp_path / "o.onnx", weights=weights, external=True)
    assert fix_model(outside, tmp_path / "out.onnx").fixes == ()


@pytest.mark.parametrize("wrong", ["group=0", "group=3", "dilations=[1]", "pads=[1], output_padding=[0,1]"])
def test_a_transposed_layer_that_no_session_takes_can_be_checked(tmp_path: Path, wrong: str) -> None:
    text = f"""g (float[1,4,4,4] x) => (float[1,4,A,B] y) <float[4,4,1,1] w = {{{_count(0, 16)}}}>
        {{ y = ConvTranspose<{wrong}>(x, w) }}"""
    assert check_model(make_model(text, tmp_path / "m.onnx"), load_target("nnapi")).verdict == "no"
    assert fix_model(load_model(tmp_path / "m.onnx"), tmp_path / "out.onnx", ["pad-transposed"]).model.node_count == 1


def test_a_copy_that_a_body_reads_stays(tmp_path: Path) -> None:
    text = """g (bool c, float[2] x) => (float[2] y) { a = Identity(x) y = If (c)
        <then_branch = t () => (float[2] u) { u = Neg(a) }, else_branch = e () => (float[2] v) { v = Abs(a) }> }"""
    assert rewrite(tmp_path, text, "drop-copies").fixes == ()


def test_what_helps_some_targets_only_is_not_done_unasked(tmp_path: Path) -> None:
    fixed = fix_model(make_model(WITH["pad-reflect"], tmp_path / "m.onnx"), tmp_path / "out.onnx")
    assert fixed.fixes == ()


def test_an_invalid_node_is_refused_before_any_rewrite(tmp_path: Path) -> None:
    model = make_model(WITH["plain-gemm"], tmp_path / "m.onnx")
    proto = onnx.load(str(model.path))
    del proto.graph.node[0].input[:]
    onnx.save(proto, str(model.path))
    with pytest.raises(ModelError, match="has 0 inputs, the operator takes 2 to 3"):
        load_model(model.path)


CONTRADICTORY = {
    "conv-to-planes": """g (float[1,3,20] x) => (float[1,1,18] y) <float[1,3] w = {1,2,3}, float[1] b = {1}>
        { y = Conv(x, w, b) }""",
    "plain-nearest": """g (float[1,1,2,2] x) => (float[1,1,4,4] y) <float[4] f = {1,1,2,2}>
        { y = Resize<nearest_mode="up">(x, , f) }""",
    "flat-bias": """g (x) => (y) <float[3,2] w = {1,2,3,4,5,6}, float b = {0.5}>
        { a = Gemm<transB=5>(x, w, b) y = Neg(a) }""",
    "int8-activations": """g (float[2,3] x) => (float[2,3] y) <float s = {1}, uint8[2] z = {1}>
        { q = QuantizeLinear(x, s, z) y = DequantizeLinear(q, , z) }""",
    "unsigned-weights": """g (float[1,2] x) => (float[1,3] y) <int8[2,3] w = {1,2,3,4,5,6}, float[2147483647] s>
        { f = DequantizeLinear(w, s) y = MatMul(x, f) }""",
    "float-weights": """g (float[1,3,4,4] x) => (float[1,2,2,2] y)
        <int8[2,3,3,3] q, float[5] s = {1,2,3,4,5}> { w = DequantizeLinear<axis=0>(q, s) y = Conv(x, w) }""",
}


@pytest.mark.parametrize("name", CONTRADICTORY)
def test_a_model_that_contradicts_itself_is_refused_or_left_as_it_is(name: str, tmp_path: Path) -> None:
    with contextlib.suppress(EdgekitError):
        assert rewrite(tmp_path, CONTRADICTORY[name], name).fixes == ()


@pytest.mark.parametrize("id_", ["float-weights", "complete-units"])
def test_a_quantizer_far_behind_a_layer_is_found(id_: str, tmp_path: Path) -> None:
    moves = " ".join(f"t{at + 1} = Transpose(t{at})" for at in range(1200))
    text = f"""g (float[3,3] x) => (float[3,3] y) <float s = {{0.5}}, int8 z = {{0}}, int8[3,3] w = {{{_count(0, 9)}}}>
        {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) f = DequantizeLinear(w, s) t0 = Gemm(d, f)
        {moves} r = QuantizeLinear(t1200, s, z) y = DequantizeLinear(r, s, z) }}"""
    assert rewrite(tmp_path, text, id_).fixes == ()


def test_an_error_of_a_rewrite_itself_is_no_refusal_of_the_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: onnx.ModelProto, ids: Collection[str]) -> None:
        raise KeyError(*ids)

    monkeypatch.setattr("edgekit.prepare.fix.apply_rewrites", fail)
    with pytest.raises(KeyError):
        rewrite(tmp_path, WITH["plain-gemm"], "plain-gemm")
    with pytest.raises(RuntimeRefusal, match="ONNX Runtime refuses"):
        rewrite(tmp_path, CONTRADICTORY["conv-to-planes"], "conv-to-planes")


def test_every_rewrite_is_tested() -> None:
    elsewhere = {
        "split-attention",
        "split-grouped-attention",
        "split-rotary",
        "idle-add",
        "idle-nan-guard",
        "join-attention",
        "join-rotary",
        "sum-to-add",
        "resize-empty-inputs",
        "idle-relu",
        "flatten-to-reshape",
        "plain-reshape",
    }
    assert set(REWRITES) == set(FIXES) | set(TARGET_REWRITES) | set(REQUIRED_REWRITES) == set(WITH) | elsewhere


def test_a_network_along_one_axis_needs_two_reshapes_and_one_for_what_leaves_it(tmp_path: Path) -> None:
    text = """g (float[1,2,9] x, float[1,1,2,7] u)
        => (float[1,2,5] y, float[1,1,2,7] z, float[1,7,2] t, float[1,1,2,7] s)
        <float[2,2,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[1,1,1,1] one = {1}>
        { a = Conv(x, w) b = Relu(a) y = Conv(b, w) z = Add(u, b) t = Transpose<perm=[0,2,1]>(b) s = Add(b, one) }"""
    fixed = rewrite(tmp_path, text, "conv-to-planes")
    found = ["Reshape", "Conv", "Relu", "Reshape", "Conv", "Reshape", "Add", "Transpose"]
    assert [op for op in op_names(fixed.model.path) if op in found] == [*found, "Add"]
    assert [fix.nodes for fix in fixed.fixes] == [("Conv_a", "Relu_b", "Conv_y")]
    assert_same(tmp_path, fixed, 1e-6)


def test_constant_nodes_of_a_graph_that_was_not_optimized_stay_constants(tmp_path: Path) -> None:
    text = """g (float[1,1,4] x) => (float[1,1,4] y) <float[1,1,1] w = {2}>
        { k = Constant<value_float = 3.0>()  m = Mul(x, k)  a = Conv(x, w)  y = Add(a, m) }"""
    fixed = fix_model(make_model(text, tmp_path / "m.onnx"), tmp_path / "out.onnx", ["conv-to-planes"])
    assert op_names(fixed.model.path) == ["Mul", "Reshape", "Conv", "Reshape", "Add", "Reshape"]
    assert "k" in {each.name for each in onnx.load(str(fixed.model.path)).graph.initializer}
