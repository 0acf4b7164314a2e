from pathlib import Path

import numpy as np
import pytest
from fixture_types import present
from quantize_models import make_model

from edgekit._ort import CpuSession, SessionSettings
from edgekit.model.tensors import Array
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.layers import Layer, locate_patches, read_layers

CASES = {
    "plain": ("Conv<kernel_shape=[3,3]>", (6, 4, 3, 3), (1, 4, 9, 9)),
    "padded": ("Conv<kernel_shape=[3,3], pads=[1,1,1,1]>", (6, 4, 3, 3), (1, 4, 5, 5)),
    "strided": ("Conv<kernel_shape=[3,3], strides=[2,2], pads=[1,0,0,1]>", (6, 4, 3, 3), (1, 4, 9, 8)),
    "dilated": ("Conv<kernel_shape=[3,3], dilations=[2,2], pads=[2,2,2,2]>", (6, 4, 3, 3), (1, 4, 9, 9)),
    "same upper": ('Conv<kernel_shape=[3,3], strides=[2,2], auto_pad="SAME_UPPER">', (6, 4, 3, 3), (1, 4, 8, 8)),
    "same lower": ('Conv<kernel_shape=[2,2], auto_pad="SAME_LOWER">', (6, 4, 2, 2), (1, 4, 8, 8)),
    "depthwise": ("Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=4>", (4, 1, 3, 3), (1, 4, 7, 7)),
    "grouped": ("Conv<kernel_shape=[1,1], group=2>", (6, 2, 1, 1), (1, 4, 7, 7)),
    "one dimension": ("Conv<kernel_shape=[5], pads=[2,2]>", (6, 4, 5), (1, 4, 20)),
    "transposed": ("ConvTranspose<kernel_shape=[2,2], strides=[2,2]>", (4, 6, 2, 2), (1, 4, 5, 6)),
    "transposed, padded": (
        "ConvTranspose<kernel_shape=[4,3], strides=[2,3], pads=[1,0,1,2], output_padding=[1,0]>",
        (4, 6, 4, 3),
        (1, 4, 5, 6),
    ),
    "transposed, dilated": ("ConvTranspose<kernel_shape=[3], dilations=[2], pads=[1,1]>", (4, 6, 3), (1, 4, 9)),
    "gemm": ("Gemm", (4, 6), (3, 4)),
    "gemm transposed": ("Gemm<transB=1>", (6, 4), (3, 4)),
    "matmul": ("MatMul", (4, 6), (2, 5, 4)),
}


def layer_outputs(layer: Layer, patches: Array, weight: Array) -> Array:
    rows = patches.reshape(len(patches), layer.groups, layer.inputs)
    return np.asarray(np.einsum("goi,ngi->ngo", layer.to_matrix(weight), rows)).reshape(len(patches), -1)


@pytest.mark.parametrize("case", CASES)
def test_matrix_times_patches_is_what_the_layer_computes(case: str, tmp_path: Path) -> None:
    op, weight_shape, shape = CASES[case]
    dims = ",".join(map(str, shape))
    text = f"g (float[{dims}] x) => (float y) {{ y = {op}(x, w) }}"
    model = make_model(text, tmp_path / "m.onnx", {"w": weight_shape})
    graph = read_float_graph(model)
    (layer,) = read_layers(graph)
    where = present(locate_patches(graph, layer, 10_000))
    value = np.random.default_rng(0).normal(size=shape).astype(np.float32)
    weight = present(graph.constant("w"))
    expected = CpuSession(model.path, SessionSettings()).run({"x": value})["y"]
    if layer.op in {"Conv", "ConvTranspose"}:
        expected = np.moveaxis(expected, 1, -1)
    found = layer_outputs(layer, where.cut(value), weight)
    assert np.allclose(found, expected.reshape(found.shape), atol=1e-5)
    assert np.array_equal(layer.from_matrix(layer.to_matrix(weight), weight.shape), weight)


@pytest.mark.parametrize(
    "body",
    [
        "y = Gemm<alpha=0.5>(x, w)",
        "y = Gemm<transA=1>(x, w)",
        "a = MatMul(x, w) y = MatMul(a, w)",
        "y = MatMul(x, x)",
        "y = MatMul(x, e)",
    ],
)
def test_layers_that_cannot_be_corrected_are_left_out(body: str, tmp_path: Path) -> None:
    text = f"g (float[4,4] x) => (float y) <float[4,0] e = {{}}> {{ {body} }}"
    assert read_layers(read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (4, 4)}))) == ()


def test_inputs_of_unknown_size_give_no_patches(tmp_path: Path) -> None:
    text = "g (float[1,4,H,W] x) => (float y) { y = Conv(x, w) }"
    graph = read_float_graph(make_model(text, tmp_path / "m.onnx", {"w": (6, 4, 3, 3)}))
    assert locate_patches(graph, read_layers(graph)[0], 10) is None
