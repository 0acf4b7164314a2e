"""Qualcomm's HTP in its simulator: the fused kernel of SiLU, wrong for some sizes, and blocks of 4-bit weights."""

from collections import Counter
from collections.abc import Sequence
from functools import reduce
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import make_job, require_device, run_in
from fixture_types import present
from onnx import TensorProto, compose, helper, numpy_helper
from tiny_models import parse_model, save_net

from edgekit._ort import CpuSession, SessionSettings
from edgekit.check.check import check_model
from edgekit.data.samples import list_samples
from edgekit.devices.device import DeviceRun
from edgekit.jobs.build import build
from edgekit.jobs.check import fix_for_target
from edgekit.jobs.quantize import QuantizeOptions, quantize_for
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.fix import fix_model, fix_quantized, list_required
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.weight_blocks import quantize_blocks
from edgekit.quantize.weight_only import WeightOnlyOptions, compress_weights
from edgekit.recipe import Data, Recipe
from edgekit.target import Precision, load_target

GRAPH = """<ir_version: 10, opset_import: ["" : 21]> g (float[1,4,ROWS,COLUMNS] x) => (float[1,4,ROWS,COLUMNS] y)
  <float xs = {0.00013}, TYPE xz = {MIDDLE}, int8[4,4,1,1] w = {90,-20,30,-40,50,60,-70,8,-127,10,11,-120,13,100,15,90},
   float[4] ws = {0.01,0.01,0.01,0.01}, int8[4] wz = {0,0,0,0}, float cs = {0.0003}, TYPE cz = {MIDDLE},
   float gs = {0.0000152587890625}, TYPE gz = {0}, float ys = {0.00015}, TYPE yz = {2000}>
  { xq = QuantizeLinear(x, xs, xz) xd = DequantizeLinear(xq, xs, xz) wd = DequantizeLinear<axis=0>(w, ws, wz)
    c = Conv<kernel_shape=[1,1]>(xd, wd) cq = QuantizeLinear(c, cs, cz) cd = DequantizeLinear(cq, cs, cz)
    s = Sigmoid(cd) sq = QuantizeLinear(s, gs, gz) sd = DequantizeLinear(sq, gs, gz)
    m = Mul(FACTORS) mq = QuantizeLinear(m, ys, yz) y = DequantizeLinear(mq, ys, yz) }"""


def write_silu(path: Path, rows: object, columns: object, factors: str = "cd, sd", middle: str = "32768") -> Path:
    text = GRAPH.replace("ROWS", str(rows)).replace("COLUMNS", str(columns)).replace("FACTORS", factors)
    return parse_model(text.replace("TYPE", "uint16").replace("MIDDLE", middle), path)


def simulate(model: Path, sample: Tensors, folder: Path, precision: Precision = "int8") -> DeviceRun:
    """Runs a model on one sample in the simulator."""
    return run_in(require_device("qnn-htp-sim", "qnn"), make_job(model, "qnn", [sample], precision=precision), folder)


def compute_here(model: Path, sample: Tensors) -> Tensors:
    """Returns what the CPU computes."""
    return CpuSession(model, SessionSettings()).run(sample)


def ratio_db(wanted: Array, got: Array) -> float:
    """Returns the ratio in dB of what is wanted to the distance from it."""
    return 10 * float(np.log10((wanted**2).sum() / ((wanted - got) ** 2).sum()))


def save_rows(folder: Path, rows: Array) -> Data:
    """Writes samples of the input x."""
    np.savez(folder / "d.npz", x=rows.astype(np.float32))
    return Data(source=str(folder / "d.npz"))


def build_model(model: Path, data: Data, precision: Precision) -> Path:
    """Returns the ONNX file of a bundle for QNN."""
    recipe = Recipe(targets=("qnn",), precision=precision, forms=("onnx",))
    (bundle,) = build(model, data, model.parent / "out", recipe, verify=False).bundles
    return present(bundle.path) / "model.onnx"


def measure_simulator(model: Path, work: Path) -> float:
    """Returns such a ratio of what the CPU computes to the simulator's distance from it."""
    (ratio,) = measure_side_by_side([model], work)
    return ratio


def measure_side_by_side(models: Sequence[Path], work: Path) -> list[float]:
    """Returns such a ratio for each of some models of one opset, which run as parts of one: a session takes long."""
    work.mkdir()
    parts = [compose.add_prefix(onnx.load(str(path)), f"{number}_") for number, path in enumerate(models)]
    onnx.save(reduce(lambda one, other: compose.merge_models(one, other, []), parts), str(work / "all.onnx"))
    shapes = [[int(str(size)) for size in spec.shape or ()] for spec in load_model(work / "all.onnx").inputs]
    values = [np.random.default_rng(0).uniform(-4, 4, shape) for shape in shapes]
    sample = {f"{at}_x": value.astype(np.float32) for at, value in enumerate(values)}
    run = simulate(work / "all.onnx", sample, work / "run")
    assert (run.failure, run.notes) == (None, ())
    wanted, (got,) = compute_here(work / "all.onnx", sample), run.outputs
    return [ratio_db(wanted[f"{at}_y"], got[f"{at}_y"]) for at in range(len(models))]


@pytest.mark.slow
def test_the_fused_silu_kernel_of_16_bits_is_wrong_and_is_avoided(tmp_path: Path) -> None:
    paths = [write_silu(tmp_path / f"{rows}.onnx", rows, columns) for rows, columns in ((10, 20), (20, 8))]
    fixed = [fix_quantized(load_model(path), load_target("qnn"), tmp_path / f"fixed-{path.name}") for path in paths]
    assert [(fix.id, len(fix.nodes)) for each in fixed for fix in each.fixes] == [("part-silu", 1)] * 2
    # If this fails with a new version of QNN, its kernel is right, and the rewrite can go.
    assert max(measure_side_by_side(paths, tmp_path / "fused")) < 20
    assert min(measure_side_by_side([each.model.path for each in fixed], tmp_path / "parted")) > 60


@pytest.mark.parametrize(
    ("rows", "columns", "factors", "changes"),
    [
        (9, 9, "cd, sd", True),
        (20, 40, "sd, cd", True),
        ("H", "W", "cd, sd", True),
        (9, 9, "xd, sd", False),
        (9, 9, "sd, sd", False),
    ],
)
def test_a_silu_of_16_bits_on_an_image_is_split(
    rows: object, columns: object, factors: str, tmp_path: Path, *, changes: bool
) -> None:
    path = write_silu(tmp_path / "m.onnx", rows, columns, factors)
    fixed = fix_quantized(load_model(path), load_target("qnn"), tmp_path / "fixed.onnx").model.path
    assert fix_quantized(load_model(path), load_target("cpu"), tmp_path / "other.onnx").fixes == ()
    before, after = (Counter(node.op_type for node in onnx.load(str(each)).graph.node) for each in (path, fixed))
    assert after - before == (Counter(QuantizeLinear=1, DequantizeLinear=1) if changes else Counter())
    size = tuple(16 if isinstance(each, str) else int(str(each)) for each in (rows, columns))
    x = np.random.default_rng(1).uniform(-4, 4, (1, 4, *size)).astype(np.float32)
    wanted, got = (compute_here(each, {"x": x})["y"] for each in (path, fixed))
    # A value of x moves by one step of 0.0003 at most, and y by 1.1 times as much and half a step of its own.
    assert np.abs(wanted - got).max() <= (0.00049 if changes else 0)


def test_a_silu_of_three_axes_is_not_split(tmp_path: Path) -> None:
    text = GRAPH.replace("1,4,ROWS,COLUMNS", "1,4,9").replace("int8[4,4,1,1]", "int8[4,4,1]").replace("[1,1]", "[1]")
    text = text.replace("FACTORS", "cd, sd").replace("TYPE", "uint16").replace("MIDDLE", "32768")
    path = parse_model(text, tmp_path / "m.onnx")
    assert fix_quantized(load_model(path), load_target("qnn"), tmp_path / "fixed.onnx").fixes == ()
    assert measure_simulator(path, tmp_path / "work") > 60


def test_a_build_in_16_bits_splits_silu(tmp_path: Path) -> None:
    path = parse_model(
        "g (float[1,4,10,10] x) => (float[1,4,10,10] y) <float[4,4,1,1] w = {1,2,3,4,5,-6,7,8,-9,1,2,3,4,5,6,7}>"
        " { c = Conv(x, w) s = Sigmoid(c) m = Mul(c, s) y = Conv(m, w) }",
        tmp_path / "m.onnx",
    )
    data = save_rows(tmp_path, np.random.default_rng(0).normal(size=(16, 4, 10, 10)))
    made = onnx.load(str(build_model(path, data, "int16"))).graph
    makers = {name: node for node in made.node for name in node.output}
    (product,) = (node for node in made.node if node.op_type == "Mul")
    (gate,) = (node for node in made.node if node.op_type == "Sigmoid")
    assert gate.input[0] not in product.input
    assert gate.input[0] in [makers[makers[name].input[0]].input[0] for name in product.input]


_WEIGHTED = "float[4,4,1,1] w = {1,-2,3,1,-1,2,1,1,2,1,1,-3,1,2,-1,1}"
STEP_IN, STEP_OUT = 8 / 65535, 40 / 65535


def make_product(path: Path) -> Path:
    """Writes one MatMul of [1,4,64] with a weight [64,16] whose blocks have very unequal sizes."""
    weight = np.random.default_rng(0).normal(size=(64, 16)) * np.repeat([1.0, 0.3], 32)[:, None]
    text = "g (float[1,4,64] x) => (float[1,4,16] y) { [mix] y = MatMul(x, w) }"
    return save_net(f'<ir_version: 10, opset_import: ["" : 21]> {text}', path, w=weight.astype(np.float32)).path


def between_16_bits(path: Path, out: Path, *, free_scales: bool = False) -> Path:
    """Puts Q and DQ of uint16 around a model; with `free_scales` its blocks get positive ones that LPBQ cannot hold."""
    proto = onnx.load(str(path))
    graph, (node,) = proto.graph, list(proto.graph.node)
    if free_scales:
        stored = {tensor.name: tensor for tensor in graph.initializer}
        scales = numpy_helper.to_array(stored[node.input[2]]) * np.array([1.0, 0.93], np.float32)
        stored[node.input[2]].CopyFrom(numpy_helper.from_array(scales.astype(np.float32), node.input[2]))
    constants: dict[str, Array] = {
        "step_in": np.array(STEP_IN, np.float32), "step_out": np.array(STEP_OUT, np.float32),
        "middle": np.array(32768, np.uint16),
    }  # fmt: skip
    graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in constants.items())
    node.input[0], node.output[0] = "xd", "yf"
    pairs = (("x", "xq", "xd", "step_in"), ("yf", "yq", "y", "step_out"))
    for source, integers, made, step in pairs:
        graph.node.append(helper.make_node("QuantizeLinear", [source, step, "middle"], [integers], name=f"q_{made}"))
        graph.node.append(helper.make_node("DequantizeLinear", [integers, step, "middle"], [made], name=f"dq_{made}"))
    ordered = [graph.node[index] for index in (1, 2, 0, 3, 4)]
    nodes = [onnx.NodeProto.FromString(each.SerializeToString()) for each in ordered]
    del graph.node[:]
    graph.node.extend(nodes)
    onnx.save(proto, str(out))
    return out


def error_in_steps(model: Path, soc: str, work: Path) -> float:
    target = load_target("qnn", {"soc_model": soc})
    options = {**target.session.provider_options, "enable_block_quant_weight_optimization": "1"}
    session = msgspec.structs.replace(target.session, provider_options=options)
    target = msgspec.structs.replace(target, session=session)
    device = require_device("qnn-htp-sim", target)
    rng = np.random.default_rng(1)
    samples: list[Tensors] = [{"x": rng.uniform(-3, 3, (1, 4, 64)).astype(np.float32)} for _ in range(3)]
    run = run_in(device, make_job(model, target, samples), work)
    assert (run.failure, run.notes) == (None, ())
    pairs = zip(samples, run.outputs, strict=True)
    return max(float(np.abs(compute_here(model, sample)["y"] - got["y"]).max()) for sample, got in pairs) / STEP_OUT


@pytest.mark.slow
@pytest.mark.parametrize(("soc", "free", "least", "most"), [("30", 0, 0, 40), ("69", 0, 0, 3), ("69", 1, 300, 1e9)])
def test_the_htp_computes_lpbq_as_the_file_says(tmp_path: Path, soc: str, free: int, least: float, most: float) -> None:
    options = WeightOnlyOptions(form="int4", lpbq=True)
    light = compress_weights(load_model(make_product(tmp_path / "m.onnx")), options, tmp_path / "light.onnx").model
    model = between_16_bits(light.path, tmp_path / "q.onnx", free_scales=bool(free))
    assert least <= error_in_steps(model, soc, tmp_path / "work") <= most


@pytest.mark.slow
def test_blocks_without_lpbq_have_scales_that_lpbq_cannot_hold(tmp_path: Path) -> None:
    weight = numpy_helper.to_array(onnx.load(str(make_product(tmp_path / "m.onnx"))).graph.initializer[0])
    plain, snapped = (quantize_blocks(weight, 4, 32, lpbq=lpbq)[1] for lpbq in (False, True))
    assert (plain < 0).any()
    assert (snapped > 0).all()


@pytest.mark.slow
def test_an_input_without_elements_is_refused_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "m.onnx"
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [1, 0]) for name in "xy")
    proto = helper.make_model(helper.make_graph([helper.make_node("Relu", ["x"], ["y"], "relu")], "g", [x], [y]))
    onnx.save(proto, str(path))
    run = simulate(path, {"x": np.zeros((1, 0), np.float32)}, tmp_path / "run")
    assert str(run.failure).startswith("input 'x' has no elements")


@pytest.mark.parametrize(("tail", "precision", "reshapes"), [
    ("s = Softplus(c) y = Conv(s, w)", "int16", 2), ("s = Softplus(c) y = Conv(s, w)", "int8", 0),
    ("y = Softplus(c)", "int16", 2),
])  # fmt: skip
def test_a_build_in_16_bits_reshapes_softplus(tail: str, precision: Precision, reshapes: int, tmp_path: Path) -> None:
    text = f"g (float[1,4,8,6] x) => (float[1,4,8,6] y) <{_WEIGHTED}> {{ c = Conv(x, w) {tail} }}"
    path, out = parse_model(text, tmp_path / "m.onnx"), tmp_path / "q.onnx"
    data = save_rows(tmp_path, np.random.default_rng(0).normal(size=(24, 1, 4, 8, 6)))
    quantize_for(path, data, out, Recipe(targets=("qnn",), precision=precision))
    assert sum(node.op_type == "Reshape" for node in onnx.load(str(out)).graph.node) == reshapes
    sample = {"x": np.ones((1, 4, 8, 6), np.float32)}
    one, two = (compute_here(each, sample)["y"] for each in (path, out))
    assert np.abs(one - two).max() < 0.1 * np.abs(one).max()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("result", "tail", "id_"),
    [
        ("int64[1,1,8,6]", "y = ArgMax<axis=1>(c)", "unsqueeze-arg"),
        ("int64[1,5,6]", "y = ArgMax<axis=2, keepdims=0>(c)", ""),
        ("uint8[1,5,8,6]", "r = Relu(c) y = Cast<to=2>(r)", ""),
    ],
)
def test_the_change_to_nhwc_leaves_a_transpose_at_the_end(result: str, tail: str, id_: str, tmp_path: Path) -> None:
    weight, target = np.random.default_rng(0).normal(size=(5, 4, 1, 1)).astype(np.float32), load_target("qnn")
    text = f"(float[1,4,8,6] x) => ({result} y) {{ c = Conv(x, w) {tail} }}"
    model = save_net(text, tmp_path / "m.onnx", w=weight)
    fixed = fix_for_target(model, tmp_path / "fixed.onnx", target)
    assert [fix.id for fix in fixed.fixes] == [id_] * bool(id_)
    # With nothing to change, both are the same graph.
    reports = {model.path: check_model(model, target)} | ({fixed.model.path: fixed.after} if id_ else {})
    assert [report.verdict == "yes" for report in reports.values()] == [False, True][: len(reports)]
    for path, report in reports.items():
        run = simulate(path, {"x": np.ones((1, 4, 8, 6), np.float32)}, tmp_path / path.stem)
        # If the first of them runs as a whole with a new version of QNN, the rule of check can go.
        assert (run.failure is None and not run.notes) == (report.verdict == "yes")


@pytest.mark.slow
def test_a_cast_of_uint8_makes_ones_and_is_avoided(tmp_path: Path) -> None:
    path = parse_model("g (uint8[1,64] x) => (float[1,64] y) { c = Cast<to=1>(x) y = Neg(c) }", tmp_path / "m.onnx")
    sample: Tensors = {"x": np.arange(64, dtype=np.uint8)[None]}
    fixed = fix_for_target(load_model(path), tmp_path / "fixed.onnx", load_target("qnn"), stays_float=True).model
    runs = [simulate(each, sample, tmp_path / each.stem, "fp32") for each in (path, fixed.path)]
    found = [np.abs(next(iter(run.outputs))["y"] + sample["x"]).max() for run in runs]
    # If the first is 0 with a new version of QNN, its kernel is right, and the rewrite can go.
    assert found == pytest.approx([62, 0], abs=0.1)


@pytest.mark.slow
def test_float_kernels_that_are_wrong_for_some_values_are_avoided(tmp_path: Path) -> None:
    text = """g (float[1,4] x)
        => (float[1,4] square, float[1,4] root, float[1,4] power, float[1,4] soft, float[1,4] cut, float[1,6] pad)
        <float tenth = {0.1}, float two = {2}, float half = {0.5}, float far = {-100}, int64[4] p = {0,1,0,1}>
        { square = Pow(x, two) root = Pow(x, half) m = Mul(x, far) power = Exp(m) soft = Softplus(m)
        t = Mul(x, tenth) w = Cast<to=6>(t) cut = Cast<to=1>(w) pad = Pad<mode="edge">(x, p) }"""
    path, sample = parse_model(text, tmp_path / "m.onnx"), {"x": np.array([[-0.0, 0, 1, 4]], np.float32)}
    fixed = fix_model(load_model(path), tmp_path / "fixed.onnx", list_required(load_target("qnn"), stays_float=True))
    wrong, right = (
        next(iter(simulate(each, sample, tmp_path / each.stem, "fp32").outputs)) for each in (path, fixed.model.path)
    )
    # If one of these is right with a new version of QNN, its rewrite can go.
    faulty = (("square", 0), ("root", 0), ("power", 2), ("soft", 2), ("cut", 3))
    assert [wrong[name][0, place] for name, place in faulty] == pytest.approx(
        [-4, 131_008, -131_008, -131_008, 0.4], rel=1e-3
    )
    expected = np.array([[0, 0, 1, 16], [0, 0, 1, 2], [1, 1, 0, 0], [np.log(2), np.log(2), 0, 0], [0, 0, 0, 0]])
    found = np.concatenate([right[name] for name in ("square", "root", "power", "soft", "cut")])
    np.testing.assert_allclose(found, expected, atol=0.02)
    # What the kernel of Pad copies into the edges is not the same in each run, and may be right.
    assert right["pad"][0] == pytest.approx([0, 0, 0, 1, 4, 4], rel=1e-3)


_PLANE = "(float[1,4,20,8] x) => (float[1,4,20,8] y)"
FLOAT_WRONG = [
    ("gate-first", f"""{_PLANE}
        {{ [a] a = Neg(x) [h] h = HardSigmoid<alpha=0.16666667, beta=0.5>(a) [y] y = Mul(a, h) }}"""),
    ("flat-softplus", f"{_PLANE} <{_WEIGHTED}> {{ c = Conv(x, w) y = Softplus(c) }}"),
    ("plain-average", """(float[1,8,20,20] x) => (float[1,8,20,20] y)
        { y = AveragePool<kernel_shape=[3,3], pads=[1,1,1,1]>(x) }"""),
    ("plain-average", """(float[1,8,50] x) => (float[1,8,50] y)
        { y = AveragePool<kernel_shape=[3], pads=[1,1], count_include_pad=1>(x) }"""),
    ("plain-average", """(float[1,2,5,4] x) => (float[1,2,5,4] y)
        { y = AveragePool<kernel_shape=[2,4], pads=[1,2,0,1], count_include_pad=1>(x) }"""),
    ("floor-pool", """(float[1,16,17,23] x) => (float[1,16,9,12] y)
        { y = AveragePool<kernel_shape=[2,2], strides=[2,2], ceil_mode=1>(x) }"""),
    ("exact-resize", """(float[1,4,33,7] x) => (float[1,4,16,3] y) <float[4] s = {1,1,0.5,0.5}>
        { y = Resize<mode="linear">(x, , s) }"""),
    ("planar-resize", """(float[1,8,4,4,4] x) => (float[1,8,8,8,8] y) <float[5] s = {1,1,2,2,2}>
        { y = Resize<mode="linear">(x, , s) }"""),
    ("plain-gather", "(float[6,4,1] x) => (float[3] y) <int64[3,3] i = {1,2,0,5,3,0,0,1,0}> { y = GatherND(x, i) }"),
]  # fmt: skip


@pytest.mark.slow
def test_kernels_that_are_wrong_in_float_are_avoided(tmp_path: Path) -> None:
    wrong, right = list[Path](), list[Path]()
    for number, (id_, text) in enumerate(FLOAT_WRONG):
        wrong.append(parse_model(f"g {text}", tmp_path / f"{number}.onnx"))
        # HardSwish, which its own rewrite would write from opset 14 on, is right.
        required = {id_, *list_required(load_target("qnn"), stays_float=True)}
        fixed = fix_model(load_model(wrong[-1]), tmp_path / f"{number}-fixed.onnx", required)
        assert id_ in [fix.id for fix in fixed.fixes]
        right.append(fixed.model.path)
    assert_avoided(wrong, right, tmp_path / "run")


def assert_avoided(wrong: Sequence[Path], right: Sequence[Path], work: Path) -> None:
    """Asserts that the simulator computes the one models wrong and the others, made of them, right."""
    ratios = measure_side_by_side([*wrong, *right], work)
    # If one of the first is large with a new version of QNN, its kernel is right, and the rewrite can go.
    assert [ratio < 25 for ratio in ratios] == [True] * len(wrong) + [False] * len(right), ratios
    assert min(ratios[len(wrong) :]) > 40


_CHANNELS = ",".join(f"{each:.3g}" for each in np.linspace(1, 0.1, 8) * 2**-13.5 / 1.3)
QUANTIZED_WRONG = {
    "flat-softplus": """(float[1,4,20,8] x) => (float[1,4,20,8] y) <float xs = {0.00013}, uint16 xz = {32768},
        int8[4,4,1,1] w = {90,-20,30,-40,50,60,-70,8,-127,10,11,-120,13,100,15,90}, float ws = {0.01}, int8 wz = {0},
        float cs = {0.0003}, float ys = {0.00016}, uint16 yz = {0}>
        { xq = QuantizeLinear(x, xs, xz) xd = DequantizeLinear(xq, xs, xz) wd = DequantizeLinear(w, ws, wz)
        c = Conv(xd, wd) cq = QuantizeLinear(c, cs, xz) cd = DequantizeLinear(cq, cs, xz)
        s = Softplus(cd) sq = QuantizeLinear(s, ys, yz) y = DequantizeLinear(sq, ys, yz) }""",
    "divide-one": """(float[1,400] x) => (float[1,400] y)
        <float k = {12}, float m = {51}, float s = {0.4}, uint8 z = {0}, float t = {0.0014}>
        { a = Mul(x, k) b = Add(a, m) q = QuantizeLinear(b, s, z) d = DequantizeLinear(q, s, z)
        r = Reciprocal(d) u = QuantizeLinear(r, t, z) y = DequantizeLinear(u, t, z) }""",
    "widen-kernel": f"""(float[1,8,6,16] x) => (float[1,8,6,16] y) <float s = {{0.00013}}, uint16 z = {{32768}},
        int8[8,1,1,1] w = {{127,-127,127,-127,127,-127,127,-127}}, float[8] f = {{{_CHANNELS}}},
        int8[8] o = {{0,0,0,0,0,0,0,0}}, float t = {{0.0001}}>
        {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear<axis=0>(w, f, o)
        c = Conv<group=8>(d, e) u = QuantizeLinear(c, t, z) y = DequantizeLinear(u, t, z) }}""",
    # Half of the scores are masked, and cut off at -10; the others are off by half a unit.
    "narrow-mask": f"""(float[1,40,32] x) => (float[1,40,32] y) <float s = {{0.0314}}, uint8 z = {{128}},
        uint8[32] m = {{{",".join(["0", "255"] * 16)}}}, float f = {{39.2}}, uint8 o = {{255}},
        float t = {{0.055}}, uint8 n = {{182}}>
        {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear(m, f, o)
        a = Add(d, e) u = QuantizeLinear(a, t, n) v = DequantizeLinear(u, t, n) y = Softmax<axis=-1>(v) }}""",
    "cast-by-floor": """(float[1,64] x) => (float[1,64] y) <float s = {0.0314}, uint8 z = {128}>
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) c = Cast<to=7>(d) y = Cast<to=1>(c) }""",
    # The windows of a row differ, as what comes back is in another order.
    "part-pool": f"""(float[1,8,32,32] x) => (float[1,8,4,4] y) <float[32] k = {{{",".join(["1"] * 8 + ["0.1"] * 24)}}},
        float s = {{0.0314}}, uint8 z = {{128}}>
        {{ a = Mul(x, k) q = QuantizeLinear(a, s, z) d = DequantizeLinear(q, s, z)
        m = MaxPool<kernel_shape=[8,8], strides=[8,8]>(d)
        u = QuantizeLinear(m, s, z) y = DequantizeLinear(u, s, z) }}""",
    "leaky-to-max": """(float[1,4,4,6,8] x) => (float[1,8,4,6,8] y) <float s = {0.0314}, uint8 z = {128},
        float t = {0.016}, uint8 u = {3}, float v = {0.0317}, uint8 w = {126}>
        { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) l = LeakyRelu(d) a = QuantizeLinear(l, t, u)
        b = DequantizeLinear(a, t, u) c = Concat<axis=1>(d, b) e = QuantizeLinear(c, v, w)
        y = DequantizeLinear(e, v, w) }""",
}


@pytest.mark.slow
def test_kernels_that_are_wrong_in_a_quantized_model_are_avoided(tmp_path: Path) -> None:
    wrong, right = list[Path](), list[Path]()
    for id_, text in QUANTIZED_WRONG.items():
        head = '<ir_version: 10, opset_import: ["" : 21]> g'
        wrong.append(parse_model(f"{head} {text}", tmp_path / f"{id_}.onnx"))
        fixed = fix_quantized(load_model(wrong[-1]), load_target("qnn"), tmp_path / f"{id_}-fixed.onnx")
        assert [(fix.id, len(fix.nodes)) for fix in fixed.fixes] == [(id_, 1)]
        right.append(fixed.model.path)
    assert_avoided(wrong, right, tmp_path / "run")


@pytest.mark.slow
def test_float_nodes_of_a_build_in_8_bits_are_rewritten(tmp_path: Path) -> None:
    text = f"""g (float[1,4,6,5] x) => (float[1,4,6,5] y, float[1,4,6,5] z) <{_WEIGHTED}>
        {{ c = Conv(x, w) i = Cast<to=7>(c) y = Cast<to=1>(i) z = Conv(c, w) }}"""
    path = parse_model(text, tmp_path / "m.onnx")
    data = save_rows(tmp_path, 4 * np.random.default_rng(0).normal(size=(16, 1, 4, 6, 5)))
    quantize_for(path, data, tmp_path / "q.onnx", Recipe(targets=("qnn",)))
    made = onnx.load(str(tmp_path / "q.onnx")).graph
    assert {"Cast", "Floor"} & {node.op_type for node in made.node} == {"Floor"}
    # What was only needed for the rewrites is not in the file.
    assert not {value.name for value in made.value_info} & {node.output[0] for node in made.node if "Q" in node.op_type}


RULES_WRONG = [
    """(float[2,16,9] x) => (float[2,16,9] y)
    <uint8[9] w = {127,255,99,80,127,9,30,201,50}, float v = {0.01}, uint8 o = {0}, float t = {0.03}>
    { e = DequantizeLinear(w, v, o) q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z)
    n = RMSNormalization<axis=-1>(d, e)
    u = QuantizeLinear(n, t, z) y = DequantizeLinear(u, t, z) }""",
    """(float[9] x) => (float[9] y) <int64[1] i = {3}, uint8[1] w = {190}, float t = {0.2}>
    { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) e = DequantizeLinear(w, t, z)
    n = ScatterElements(d, i, e) u = QuantizeLinear(n, t, z) y = DequantizeLinear(u, t, z) }""",
    """(float[1,4,300] x) => (float[1,4,300] y) <int64 a = {2}, float t = {0.8}>
    { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) n = CumSum(d, a)
    u = QuantizeLinear(n, t, z) y = DequantizeLinear(u, t, z) }""",
    """(float[1,8,20,20] x) => (float[1,8,19,19] y) <float t = {0.0314}>
    { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) n = AveragePool<kernel_shape=[3,3], pads=[1,1,0,0]>(d)
    u = QuantizeLinear(n, t, z) y = DequantizeLinear(u, t, z) }""",
    """(float[3,4] x) => (float[4,5] y) <int64[4] p = {1,0,0,1}, float v = {9}, float t = {0.1}>
    { q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) n = Pad(d, p, v)
    u = QuantizeLinear(n, t, z) y = DequantizeLinear(u, t, z) }""",
]


@pytest.mark.slow
def test_the_table_says_which_quantized_kernels_are_wrong(tmp_path: Path) -> None:
    constants, paths = "float s = {0.0314}, uint8 z = {128},", list[Path]()
    for number, text in enumerate(RULES_WRONG):
        head = '<ir_version: 11, opset_import: ["" : 23]> g '
        paths.append(parse_model(head + text.replace("<", f"<{constants} ", 1), tmp_path / f"{number}.onnx"))
        assert any(node.fatal for node in check_model(load_model(paths[-1]), load_target("qnn")).node_list)
    # If one is large with a new version of QNN, its kernel is right, and the rule can go.
    ratios = measure_side_by_side(paths, tmp_path / "run")
    assert max(ratios) < 25, ratios


@pytest.mark.slow
def test_a_batch_normalization_alone_is_quantized_as_a_conv(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    gain, shift, mean = rng.normal(size=(3, 8)).astype(np.float32)
    variance, weight = rng.uniform(0.05, 2, 8).astype(np.float32), rng.normal(size=(4, 8, 3, 3)).astype(np.float32)
    text = (
        "(float[1,8,9,7] x) => (float[1,4,7,5] y) { b = BatchNormalization(x, s, o, m, v) r = Relu(b) y = Conv(r, w) }"
    )
    model = save_net(text, tmp_path / "m.onnx", s=gain, o=shift, m=mean, v=variance, w=weight)
    built = build_model(model.path, save_rows(tmp_path, rng.normal(0, 2, (16, 8, 9, 7))), "int8")
    assert Counter(node.op_type for node in onnx.load(str(built)).graph.node)["Conv"] == 2
    assert measure_simulator(built, tmp_path / "run") > 30


@pytest.mark.slow
def test_a_layer_has_the_range_after_its_relu_behind_a_reshape_or_cannot_be_finalized(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes: dict[str, tuple[int, ...]] = {"gain": (16,), "shift": (16,), "wide": (16, 256), "back": (256, 16)}
    weights = {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}
    path = save_net(
        "(float[1,64,16] x) => (float[64,16] y)"
        " <int64[2] flat = {64,16}, int64[3] cube = {1,64,256}, int64[2] rows = {64,256}> {"
        " n = LayerNormalization<axis=-1>(x, gain, shift) f = Reshape(n, flat) [wide] m = MatMul(f, wide)"
        " c = Reshape(m, cube) r = Relu(c) d = Reshape(r, rows) p = MatMul(d, back) y = Add(p, p) }",
        tmp_path / "m.onnx",
        **weights,
    ).path
    out, data = tmp_path / "q.onnx", save_rows(tmp_path, rng.normal(size=(32, 1, 64, 16)))
    quantize_for(path, data, out, Recipe(targets=("qnn",)), QuantizeOptions(method="minmax"))
    assert measure_simulator(out, tmp_path / "work") > 30

    # The same values, but the layer keeps those that its Relu cuts off: the Reshape between them computes in float.
    proto = onnx.load(str(out))
    (layer,) = (node for node in proto.graph.node if node.name == "wide")
    pair = [node for node in proto.graph.node if layer.output[0] in node.input]
    pair += [node for node in proto.graph.node if pair[0].output[0] in node.input]
    both_signs: Tensors = {"step": np.array(0.2, np.float32), "middle": np.array(128, np.uint8)}
    proto.graph.initializer.extend(numpy_helper.from_array(value, name) for name, value in both_signs.items())
    for node in pair:
        node.input[1:] = both_signs
    onnx.save(proto, str(out))
    run = simulate(out, {"x": np.zeros((1, 64, 16), np.float32)}, tmp_path / "other")
    # If this fails with a new version of QNN, it takes such a Reshape.
    assert run.failure is not None
    assert "1002" in run.failure


@pytest.mark.slow
def test_floats_run_as_fp16_and_the_log_of_smaller_values_is_wrong(tmp_path: Path) -> None:
    text = "g (float[1,32] x) => (float[1,32] y) <float e = {1e-10}> { p = Mul(x, x) a = Add(p, e) y = Log(a) }"
    model = parse_model(text, tmp_path / "m.onnx")
    powers = [np.random.default_rng(0).uniform(least, 0, (1, 32)) for least in (-6, -1)]
    samples: list[Tensors] = [{"x": (10**power).astype(np.float32)} for power in powers]
    run = require_device("qnn-htp-sim", "qnn").run_job(make_job(model, "qnn", samples, precision="fp16"), tmp_path)
    assert (run.failure, run.notes) == (None, ())
    for sample, outputs, is_right in zip(samples, run.outputs, (False, True), strict=True):
        distance = np.abs(compute_here(model, sample)["y"] - outputs["y"])
        assert bool(distance.max() < 0.05) == is_right
        # Where halves hold the power, its logarithm is right.
        assert distance[sample["x"] ** 2 > 1e-5].max() < 0.05


def write_lstm(path: Path, direction: str = "forward", steps: int = 24) -> Path:
    """Writes an LSTM with weights of usual sizes."""
    rng, turns = np.random.default_rng(0), 2 if direction == "bidirectional" else 1
    shapes = {"w": (turns, 128, 16), "r": (turns, 128, 32), "b": (turns, 256)}
    text = f"""(float[{steps},1,16] x) => (float[{steps},{turns},1,32] y)
        {{ y = LSTM<hidden_size=32, direction="{direction}">(x, w, r, b) }}"""
    weights = {name: rng.uniform(-0.35, 0.35, shape).astype(np.float32) for name, shape in shapes.items()}
    return save_net(text, path, **weights).path


@pytest.mark.slow
def test_the_kernel_of_an_lstm_is_coarse_and_its_parts_are_not(tmp_path: Path) -> None:
    path = write_lstm(tmp_path / "both.onnx", "bidirectional", steps=16)
    required = list_required(load_target("qnn"), stays_float=True)
    assert "split-lstm" in required
    fixed = fix_model(load_model(path), tmp_path / "fixed.onnx", required)
    assert [(fix.id, len(fix.nodes)) for fix in fixed.fixes] == [("split-lstm", 1)]
    whole, parts = measure_side_by_side([path, fixed.model.path], tmp_path / "run")
    # If this fails with a new version of QNN, its kernel is right, and the rewrite can go.
    assert 25 < whole < 45
    assert parts > 50


def test_a_quantized_lstm_is_written_in_parts_and_computes_the_same(tmp_path: Path) -> None:
    path, rng = write_lstm(tmp_path / "m.onnx"), np.random.default_rng(1)
    rows: Array = rng.normal(size=(16, 24, 1, 16)).astype(np.float32)
    report = quantize_for(path, save_rows(tmp_path, rows), tmp_path / "parts.onnx", Recipe(targets=("qnn",)))
    assert report.taken == "277 of 277 nodes in 1 partition"
    ops = Counter(node.op_type for node in onnx.load(str(report.out)).graph.node)
    assert (ops["LSTM"], ops["Tanh"]) == (0, 2 * 24)
    # The plan was measured with one node, as it is written where the steps have no fixed number.
    wanted, got = (compute_here(each, {"x": rows[0]})["y"] for each in (path, report.out))
    assert ratio_db(wanted, got) == pytest.approx(report.predicted.sqnr_db, abs=1.5)


@pytest.mark.slow
def test_an_old_htp_takes_a_weight_of_16_bits_as_the_sum_of_two(tmp_path: Path) -> None:
    """A v69 refuses 16-bit weights; of two layers and their sum it computes what the CPU does."""
    target, rng = load_target("qnn", {"soc_model": "36"}), np.random.default_rng(0)
    weights = {"w": rng.normal(size=(16, 8, 3, 3)).astype(np.float32), "b": rng.normal(size=16).astype(np.float32)}
    text = "(float[1,8,10,12] x) => (float[1,16,10,12] y) { [conv] y = Conv<pads=[1,1,1,1]>(x, w, b) }"
    model = save_net(text, tmp_path / "m.onnx", **weights)
    rows: list[Tensors] = [{"x": rng.normal(size=(1, 8, 10, 12)).astype(np.float32)} for _ in range(24)]
    calibration = calibrate_model(model, list_samples(rows, "rows"), work=tmp_path / "work")
    plan = plan_quantization(model, calibration, target, "int16")
    wide = msgspec.structs.replace(plan, bits={"w": 16})
    quantized = quantize_model(model, wide, calibration, tmp_path / "q.onnx").model
    run = run_in(require_device("qnn-htp-sim", target), make_job(quantized.path, target, rows[:1]), tmp_path / "run")
    assert (run.failure, run.notes) == (None, ())
    assert ratio_db(compute_here(model.path, rows[0])["y"], next(iter(run.outputs))["y"]) > 52
