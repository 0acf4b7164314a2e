"""Roundings with the moments of the inputs, the scales that they use, and the layers that are corrected."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from fixture_types import present
from onnx import TensorProto, numpy_helper, parser
from quantize_models import make_model

from edgekit._ort import CpuSession, SessionSettings
from edgekit.graph.graph import view_model
from edgekit.model.tensors import Array
from edgekit.quantize._ort_quantizer import channel_scales
from edgekit.quantize.calibration.moments import InputMoments, StoredMoments, save_moments
from edgekit.quantize.gptq import (
    FOUR_LIMIT,
    LIMIT,
    REDUCED_LIMIT,
    Rounded,
    Rounding,
    add_spread,
    find_step,
    least_multiplier,
    lowest,
    refit_weights,
    round_gptq,
    round_nearest,
    shrink_moment,
    weight_scale,
)
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.layers import locate_patches, read_layers
from edgekit.quantize.rounding import Rounder, round_qdq_weights


def correlated(groups: int, size: int, seed: int = 0) -> Array:
    mix = np.random.default_rng(seed).normal(size=(groups, size, 2 * size)) * np.geomspace(1, 0.05, 2 * size)
    return mix @ np.swapaxes(mix, 1, 2)


def plain_gptq(row: Array, moment: Array, scale: float, noise: float, limit: int) -> list[int]:
    """Rounds one row as the paper tells it: one input after another, with the inverse of what is left."""
    hessian = moment + max(noise, 0.01 * float(np.diagonal(moment).mean())) * np.eye(len(moment))
    left, values = np.argsort(-np.diagonal(moment), kind="stable"), row.astype(np.float64)
    grid = np.zeros(len(row), int)
    while left.size:
        inverse = np.linalg.inv(hessian[np.ix_(left, left)])
        first, rest = left[0], left[1:]
        grid[first] = np.clip(np.rint(values[first] / scale), -limit, limit)
        values[rest] -= (values[first] - grid[first] * scale) / inverse[0, 0] * inverse[0, 1:]
        left = rest
    return grid.tolist()


@pytest.mark.parametrize(("groups", "size", "noise", "limit"), [(1, 6, 0.0, 127), (2, 5, 40.0, 64), (1, 130, 0.0, 20)])
def test_gptq_rounds_as_the_paper_tells_it(groups: int, size: int, noise: float, limit: int) -> None:
    matrix = np.random.default_rng(1).normal(size=(groups, 3, size)).astype(np.float32)
    moment = correlated(groups, size)
    scale = weight_scale(matrix, per_channel=True, limit=limit)
    found = round_gptq(matrix, moment, 0.8 * scale, noise, limit).integers
    for group in range(groups):
        for output in range(3):
            step = float(0.8 * scale[group, output, 0])
            wanted = plain_gptq(matrix[group, output], moment[group], step, noise, limit)
            assert np.mean(found[group, output] == wanted) > 0.98  # float32 may fall on the other side of a half


def test_refitted_weights_are_the_wiener_solution() -> None:
    moment, matrix = correlated(2, 4), np.random.default_rng(1).normal(size=(2, 3, 4))
    wanted = matrix @ moment @ np.linalg.inv(moment + 0.3 * np.eye(4))
    assert refit_weights(matrix, moment, 0.3) == pytest.approx(wanted, abs=1e-6)
    assert not refit_weights(matrix, np.zeros((2, 4, 4)), 1e-70).any()


def test_the_unit_of_the_inputs_does_not_matter() -> None:
    matrix, moment = np.random.default_rng(1).normal(size=(1, 3, 9)).astype(np.float32), correlated(1, 9)
    scale = weight_scale(matrix, per_channel=True, limit=FOUR_LIMIT)
    for unit in (2.0**-80, 2.0**80):
        found = round_gptq(matrix, moment * unit, scale, limit=FOUR_LIMIT)
        assert np.array_equal(found.integers, round_gptq(matrix, moment, scale, limit=FOUR_LIMIT).integers)


def test_shrinking_keeps_the_diagonal_and_trusts_many_samples() -> None:
    moment = correlated(1, 8)
    few, many = shrink_moment(moment, 8), shrink_moment(moment, 1_000_000)
    assert np.diagonal(few[0]) == pytest.approx(np.diagonal(moment[0]))
    assert np.allclose(many, moment, atol=1e-3 * moment.max())
    assert few[0, 0, 1] == pytest.approx(0.2 * moment[0, 0, 1])  # 8 inputs and 8 samples: 8 / (8 + 8 / 4) is taken off


def test_an_input_counts_with_the_energy_of_one_vector_more_than_was_seen() -> None:
    raised = add_spread(np.array([[[5.0, 1.0], [1.0, 0.0]]]), np.array([[2.0, 6.0]]), samples=3)
    assert raised.tolist() == [[[6.0, 1.0], [1.0, 9.0]]]


def test_scale_puts_the_largest_on_127_and_a_channel_of_zeros_gets_the_smallest_one() -> None:
    matrix = np.array([[[1.27, -0.5], [0, 0], [0.1, 0.2]]], np.float32)
    assert weight_scale(matrix, per_channel=True)[0, :, 0] == pytest.approx([0.01, 0.2 / 127, 0.2 / 127])
    assert channel_scales(matrix[0], 0, LIMIT) == pytest.approx([0.01, 0.2 / 127, 0.2 / 127])
    assert weight_scale(matrix, per_channel=False)[0, :, 0] == pytest.approx([0.01] * 3)
    assert weight_scale(matrix, per_channel=True, floor=0.005)[0, :, 0] == pytest.approx([0.01, 0.005, 0.005])
    assert (weight_scale(np.zeros((1, 2, 3), np.float32), per_channel=True) > 0).all()


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize(("most", "limit"), [(101, LIMIT), (3, LIMIT), (60, REDUCED_LIMIT)])
def test_weights_that_lie_on_a_grid_stay_as_they_are(per_channel: bool, most: int, limit: int) -> None:
    counts = np.random.default_rng(1).integers(-most, most + 1, (1, 8, 64))
    counts[0, 3] = 0
    matrix = (counts * 0.0123).astype(np.float32)
    scale = weight_scale(matrix, per_channel=per_channel, limit=limit)
    assert round_nearest(matrix, scale, limit).values == pytest.approx(matrix, abs=1e-6)
    # Biases count in steps of the weights: few counts leave room for finer ones.
    assert scale.min() * limit < 1.6 * np.abs(matrix).max()


def test_the_least_integer_of_a_grid_is_cut_rather_than_all_weights_moved() -> None:
    counts = np.random.default_rng(2).integers(-100, 100, (1, 8, 64))
    counts[0, 0, 0] = -128
    matrix = (counts * 0.01).astype(np.float32)
    error = np.abs(round_nearest(matrix, weight_scale(matrix, per_channel=False)).values - matrix)
    assert error[0, 0, 0] == pytest.approx(0.01)
    assert np.count_nonzero(error > 1e-5) == 1


def test_weights_on_no_grid_span_all_integers() -> None:
    matrix = np.random.default_rng(3).normal(size=(1, 8, 64)).astype(np.float32)
    assert find_step(matrix) is None
    assert find_step(np.zeros((1, 2, 3), np.float32)) is None
    # Neighbouring values lie up to four steps apart.
    assert find_step(np.array([[[9, 13, 18]]], np.float32)) == 1.0
    assert find_step(np.array([[[11, 16, 22]]], np.float32)) is None
    assert find_step(np.array([[[1, 2, LIMIT + 2]]], np.float32)) is None
    wide = np.random.default_rng(3).integers(-200, 200, (1, 8, 64)).astype(np.float32)
    assert find_step(wide) is None
    assert weight_scale(wide, per_channel=False).max() == pytest.approx(np.abs(wide).max() / LIMIT)
    assert weight_scale(matrix, per_channel=False, floor=1.0).min() == 1.0
    # Of two rows on a grid of ones, the scale that two integers a step would give the second is too small.
    rows = np.array([[[127, 1], [63, 1]]], np.float32)
    assert weight_scale(rows, per_channel=True)[0, :, 0].tolist() == [1.0, 0.5]
    assert weight_scale(rows, per_channel=True, floor=0.8)[0, :, 0] == pytest.approx([1.0, 0.8])


def test_what_has_16_bits_on_both_sides_has_a_least_scale() -> None:
    kinds = [(TensorProto.INT16, TensorProto.UINT16), (TensorProto.INT16, TensorProto.INT8)]
    assert [least_multiplier(*pair) for pair in kinds] == [1.001 / 2**24, 0.0]


FLOAT = "g (float[1,N] x) => (float[1,M] y) { y = Gemm<transB=1>(x, w BIAS) }"
QDQ = """g (float[1,N] x) => (float[1,M] y) { xq = QuantizeLinear(x, s, z)  xd = DequantizeLinear(xq, s, z)
  wd = DequantizeLinear(wq, ws, wz)  bd = DequantizeLinear(bq, bs, bz)  y = Gemm<transB=1>(xd, wd BIAS) }"""
MATRIX = np.array([[[1.0, 0.313, -0.207, 0.5], [0.1, 0.0333, 0.0777, -0.05]]], np.float32)
OFFSET = np.array([0.3, -0.2])


class Corrected(msgspec.Struct, frozen=True, kw_only=True):
    """What a layer's weights became."""

    integers: Array
    scale: Array
    bias: Array
    bias_scale: Array


def make_moment(folder: Path, node: str = "gemm") -> InputMoments:
    """Saves moments of four inputs in two blocks of two, which are not alike."""
    mean = np.array([[2.0, -1.0, 0.5, 3.0]], np.float32)
    mix = np.array([[1, 0.9, 0, 0], [0, 0.4, 0, 0], [0, 0, 2, 1.5], [0, 0, 0, 1]])
    parts = np.split(np.random.default_rng(0).normal(size=(50, 4)) @ mix + mean, 2, axis=1)
    covariance = np.stack([part.T @ part / 50 for part in parts])
    covariance -= (mean.reshape(2, 2, 1) * mean.reshape(2, 1, 2)).astype(np.float64)
    moment = InputMoments(
        count=50, mean=mean, spread=np.full((1, 4), 6, np.float32), low=mean[0] - 3, high=mean[0] + 3,
        covariance=covariance.astype(np.float32),
    )  # fmt: skip
    save_moments(folder, [((node,), moment)])
    return moment


def make_gemm(text: str, values: Mapping[str, Any]) -> onnx.ModelProto:
    proto = parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> {text}')
    proto.graph.initializer.extend(numpy_helper.from_array(np.asarray(value), name) for name, value in values.items())
    proto.graph.node[-1].name = "gemm"
    return proto


def correct(
    folder: Path, rounding: Rounding, *, per_channel: bool = True, bias: bool = True, limit: int = LIMIT,
    factors: tuple[float, ...] | None = None, offset: Array = OFFSET, bits: Mapping[str, int] | None = None,
    spoil: Callable[[onnx.ModelProto], object] = lambda _: None, matrix: Array = MATRIX[0],
) -> Corrected:  # fmt: skip
    """Rounds the weights of a Gemm again, whose integers are all 0 before."""
    some = np.zeros(len(matrix) if per_channel else (), np.float32)
    floats = {"w": matrix, "b": offset.astype(np.float32)}
    integers = {
        "s": np.float32(0.05), "z": np.uint8(128), "wq": np.zeros(matrix.shape, np.int8), "ws": some,
        "wz": some.astype(np.int8), "bq": np.zeros(len(matrix), np.int32), "bs": some.reshape(-1),
        "bz": some.reshape(-1).astype(np.int32),
    }  # fmt: skip
    proto = make_gemm(FLOAT.replace("BIAS", ", b" if bias else ""), floats)
    qdq = make_gemm(QDQ.replace("BIAS", ", bd" if bias else ""), integers)
    spoil(qdq)
    given = {} if factors is None else {"gemm": factors}
    how = Rounder(
        graph=view_model(proto), statistics=folder, rounding=rounding, factors=given, limit=limit, bits=bits or {}
    )
    round_qdq_weights(qdq, how)
    found = {tensor.name: numpy_helper.to_array(tensor) for tensor in qdq.graph.initializer}
    return Corrected(integers=found["wq"], scale=found["ws"], bias=found["bq"], bias_scale=found["bs"])


def check(found: Corrected, wanted: Rounded, mean: Array, step: float = 0.05) -> None:
    error = ((MATRIX - wanted.values) * mean[:, None]).sum(axis=2)[0]
    bias_scale = (np.float32(step) * wanted.scale.reshape(-1)).astype(np.float32)
    assert found.integers.tolist() == wanted.integers[0].tolist()
    assert found.scale.reshape(-1) == pytest.approx(wanted.scale.reshape(-1)[: found.scale.size])
    assert found.bias_scale == pytest.approx(bias_scale[: found.bias_scale.size])
    assert np.abs(found.bias - (OFFSET + error) / bias_scale).max() <= 0.5001


@pytest.mark.parametrize("per_channel", [True, False])
@pytest.mark.parametrize("limit", [LIMIT, 64])
def test_the_mean_error_of_rounded_weights_goes_into_the_bias(tmp_path: Path, per_channel: bool, limit: int) -> None:
    moment = make_moment(tmp_path)
    scale = weight_scale(MATRIX, per_channel=per_channel, limit=limit)
    found = correct(tmp_path, "bias", per_channel=per_channel, limit=limit)
    check(found, round_nearest(MATRIX, scale, limit), moment.mean)
    assert np.abs(found.integers).max() == limit


@pytest.mark.parametrize("rounding", ["gptq", "refit"])
@pytest.mark.parametrize(("bias", "in_parts"), [(True, False), (False, False), (True, True)])
def test_weights_are_rounded_with_the_moments_of_their_inputs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rounding: Rounding, bias: bool, in_parts: bool
) -> None:
    moment = make_moment(tmp_path)
    if in_parts:
        monkeypatch.setattr("edgekit.quantize.rounding._MOMENT_BYTES", 1)
    blocks = shrink_moment(moment.second_moment(centred=bias), 50)
    blocks = add_spread(blocks, np.full((2, 2), 6.0), 50)
    pieces, noise = MATRIX.reshape(1, 2, 2, 2).transpose(0, 2, 1, 3)[0], 0.05**2 / 12 if rounding == "refit" else 0.0
    fitted = refit_weights(pieces, blocks, noise) if rounding == "refit" else pieces
    scale = weight_scale(fitted.transpose(1, 0, 2).reshape(1, 2, 4), per_channel=True)
    integers = round_gptq(fitted, blocks, np.repeat(scale, 2, axis=0), noise).integers
    wanted = Rounded(integers=integers.transpose(1, 0, 2).reshape(1, 2, 4), scale=scale)
    found = correct(tmp_path, rounding, bias=bias)
    if bias:
        check(found, wanted, moment.mean)
    assert found.integers.tolist() == wanted.integers[0].tolist()
    assert not bias or found.bias.any()


@pytest.mark.parametrize("rounding", ["gptq", "refit"])
@pytest.mark.parametrize("limit", [FOUR_LIMIT, LIMIT])
def test_weights_of_dead_inputs_go_to_the_nearest(tmp_path: Path, rounding: Rounding, limit: int) -> None:
    rng, inputs = np.random.default_rng(0), 32
    seen = np.maximum(rng.normal(size=(400, inputs)) @ rng.normal(size=(inputs, inputs)), 0)
    # One is dead, and one follows another so faintly that 8 bits do not see it move.
    seen[:, 3], seen[:, 7] = 0, seen[:, 0] * 1e-3
    matrix = rng.normal(size=(5, inputs)).astype(np.float32)
    matrix[:, 3] = 2.5
    moments = InputMoments(
        count=len(seen), mean=seen.mean(axis=0)[None], spread=np.ptp(seen, axis=0)[None], low=seen.min(axis=0),
        high=seen.max(axis=0), covariance=np.cov(seen.T, bias=True)[None].astype(np.float32),
    )  # fmt: skip
    save_moments(tmp_path, [(("gemm",), moments)])
    bits = {"w": 4} if limit == FOUR_LIMIT else None
    found = correct(tmp_path, rounding, matrix=matrix, offset=np.zeros(5), bits=bits)
    exact, integers = matrix / found.scale[:, None], found.integers.astype(np.int32)
    for index in (3, 7):
        assert np.array_equal(integers[:, index], np.clip(np.rint(exact[:, index]), lowest(limit), limit))
    # The inputs that fire make up for each other's errors.
    assert np.abs(exact - integers).max() > 0.6


def test_what_was_rounded_is_kept_for_the_same_weights_and_rounding(tmp_path: Path) -> None:
    make_moment(tmp_path)
    first, learned = correct(tmp_path, "bias"), correct(tmp_path, "gptq")
    make_moment(tmp_path, node="another")
    assert msgspec.structs.asdict(correct(tmp_path, "bias"))["bias"].tolist() == first.bias.tolist()
    assert correct(tmp_path, "gptq").integers.tolist() == learned.integers.tolist() != first.integers.tolist()
    assert not correct(tmp_path, "refit").integers.any()  # it was not rounded before, and has no moments now
    assert not correct(tmp_path, "bias", per_channel=False).integers.any()
    assert not correct(tmp_path, "bias", bias=False).bias.any()


def test_scaled_channels_have_scaled_moments(tmp_path: Path) -> None:
    moment = make_moment(tmp_path)
    found = correct(tmp_path, "bias", factors=(1.0, 2.0, 4.0, 8.0))
    check(found, round_nearest(MATRIX, weight_scale(MATRIX, per_channel=True)), moment.mean * np.array([1, 2, 4, 8]))


def test_the_scale_leaves_the_bias_within_32_bits(tmp_path: Path) -> None:
    make_moment(tmp_path)
    least, whole = 1e7 * 1.001 / (2**31 - 1) / 0.05, (2**31 - 1) / 1.001
    roundings: tuple[Rounding, ...] = ("nearest", "bias", "gptq")
    for rounding in roundings:
        found = correct(tmp_path, rounding, offset=np.array([1e7, -0.2]))
        assert found.scale[0] == pytest.approx(least)
        assert found.scale[1] == pytest.approx(0.1 / 127)
        assert found.bias[0] == pytest.approx(whole, rel=1e-6)
        # One scale for all weights is the largest that a bias needs.
        found = correct(tmp_path, rounding, offset=np.array([-0.2, 1e7]), per_channel=False)
        assert found.scale == pytest.approx(least)
        assert found.bias[1] == pytest.approx(whole, rel=1e-6)
        assert found.integers[0] * found.scale == pytest.approx(MATRIX[0, 0], abs=1.01 * least)


def fill(name: str, value: Array) -> Callable[[onnx.ModelProto], object]:
    def spoil(qdq: onnx.ModelProto) -> None:
        tensor = next(tensor for tensor in qdq.graph.initializer if tensor.name == name)
        tensor.CopyFrom(numpy_helper.from_array(value, name))

    return spoil


@pytest.mark.parametrize(
    "spoil",
    [
        pytest.param(fill("wz", np.array([0, 1], np.int8)), id="a zero point"),
        pytest.param(fill("wq", np.zeros((2, 4), np.uint8)), id="unsigned"),
        pytest.param(fill("ws", np.zeros(2, np.float16)), id="half"),
        pytest.param(lambda qdq: qdq.graph.node[2].input.__setitem__(0, "computed"), id="no constant"),
        pytest.param(lambda qdq: qdq.graph.node[2].input.__setitem__(2, "computed"), id="no constant zero point"),
        pytest.param(lambda qdq: qdq.graph.node[-1].input.__setitem__(1, "w"), id="float weight"),
        pytest.param(lambda qdq: qdq.graph.node[-1].input.pop(), id="no bias"),
        pytest.param(lambda qdq: qdq.graph.node[-1].input.__setitem__(0, "x"), id="float input"),
        pytest.param(lambda qdq: setattr(qdq.graph.node[-1], "op_type", "Einsum"), id="no layer"),
    ],
)
def test_weights_that_are_no_symmetric_int8_stay(tmp_path: Path, spoil: Callable[[onnx.ModelProto], object]) -> None:
    make_moment(tmp_path)
    assert not correct(tmp_path, "bias", spoil=spoil).integers.any()
    assert not correct(tmp_path, "nearest", bias=False).integers.any()


def test_threads_read_moments_side_by_side(tmp_path: Path) -> None:
    moment = make_moment(tmp_path, "n")
    stored = StoredMoments(tmp_path)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(stored, ["n"] * 40):
            assert present(found).count == 50
            assert np.array_equal(present(found).covariance, moment.covariance)


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
    rows = where.cut(value).reshape(-1, layer.groups, layer.inputs)
    found = np.einsum("goi,ngi->ngo", layer.to_matrix(weight), rows)
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
