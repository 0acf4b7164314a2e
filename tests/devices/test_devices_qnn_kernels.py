"""Kernels of Qualcomm's HTP that are wrong, or make no session: `check` says so, and takes their neighbours."""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import onnx
import pytest
from devices_models import make_job, require_device, run_in
from onnx import compose, helper, parser

from edgekit._ort import CpuSession, SessionSettings
from edgekit.check.check import check_model
from edgekit.check.report import CheckReport
from edgekit.jobs.check import fix_for_target
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.target import load_target

# RMSNormalization is of opset 23, Swish of 24.
HEAD = '<ir_version: 11, opset_import: ["" : 24]> '
Range = tuple[float, float]


EXPAND = "g (float[1,2,1,3,4] x) => (float[1,2,2,3,4] y) <int64[5] s = {1,2,2,3,4}, float k = {0.5}> { MAKE }"


class Pair(NamedTuple):
    """A graph that check refuses and one that it takes, the reason, and the range of the numbers for both."""

    refused: str
    taken: str
    reason: str
    low: float = -4
    high: float = 4


def between(body: str, shape: str, inside: Range, made: Range, dtype: str = "uint8") -> str:
    """Returns a graph that computes `r` from `d` between Q and DQ; `b` is about 2, and `g` a gain of one number."""
    most = int(np.iinfo(dtype).max)
    steps = [(high - low) / most for low, high in (inside, made)]
    zeros = [round(-low / step) for (low, _), step in zip((inside, made), steps, strict=True)]
    two = min(most, round(2 / steps[0]) + zeros[0])
    return f"""g (float[{shape}] x) => (float[{shape}] y)
        <float s = {{{steps[0]:.12f}}}, {dtype} z = {{{zeros[0]}}}, float t = {{{steps[1]:.12f}}},
        {dtype} u = {{{zeros[1]}}}, {dtype} w = {{{two}}}, {dtype}[1] o = {{{most}}}>
        {{ q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) b = DequantizeLinear(w, s, z)
        g = DequantizeLinear(o, s, z) {body} p = QuantizeLinear(r, t, u) y = DequantizeLinear(p, t, u) }}"""


def resize(coordinates: str, rounding: str, rows: int) -> str:
    modes = f'coordinate_transformation_mode="{coordinates}", nearest_mode="{rounding}"'
    return f"""g (float[1,2,8,3] x) => (float[1,2,{rows},3] y) <int64[4] s = {{1,2,{rows},3}}>
        {{ y = Resize<{modes}>(x, , , s) }}"""


def transposed(kernel: int, rows: int, pads: str) -> str:
    count = ", ".join(str(each % 5 - 1.5) for each in range(2 * kernel * kernel))
    return f"""g (float[1,1,5,5] x) => (float[1,2,{rows},{rows}] y)
        <float[1,2,{kernel},{kernel}] w = {{{count}}}, float[2] b = {{3, -2}}>
        {{ y = ConvTranspose<strides=[2,2], output_padding=[1,1], pads=[{pads}]>(x, w, b) }}"""


def depthwise(end: int, added: int) -> str:
    return f"""g (float[1,2,1,8] x) => (float[1,2,1,16] y) <float[2,1,1,3] w = {{1, -2, 3, -1, 2, 0.5}}>
        {{ y = ConvTranspose<group=2, strides=[1,2], pads=[0,1,0,{end}], output_padding=[0,{added}]>(x, w) }}"""


def transposed_groups(axes: int) -> str:
    before, kernel, after = (",".join([size] * axes) for size in "324")
    count = ", ".join(str(each % 5 - 1.5) for each in range(2 * 2**axes))
    return f"""g (float[1,2,{before}] x) => (float[1,2,{after}] y) <float[2,1,{kernel}] w = {{{count}}}>
        {{ y = ConvTranspose<group=2>(x, w) }}"""


def swish(shape: str, alpha: float = 1.0) -> str:
    return between(f"r = Swish<alpha={alpha}>(d)", shape, (-4, 4), (-0.3, 4))


def log(low: float) -> str:
    return between("r = Log(d)", "2,9", (0, 4), (low, 1.4), "uint16")


def slope(shape: str) -> str:
    one = ",".join("1" for _ in shape.split(","))
    return f"""g (float[1,2,{shape}] x) => (float[1,2,{shape}] y)
        <float[2,2,{one}] w = {{1, -2, 3, 4}}, float[2,{one}] s = {{0.2, 0.1}}> {{ c = Conv(x, w) y = PRelu(c, s) }}"""


RMS = """g (float[1,4,8] x) => (float[1,4,8] y)
    <float[8] w = {1, -2, 3, 4, 5, 6, 7, 8}, float t = {2}, float e = {0.001}, int64[1] l = {-1}>
    { p = Pow(x, t) m = ReduceMean(p, l) a = Add(m, e) s = Sqrt(a) r = Reciprocal(s) n = Mul(x, r) y = Mul(w, n) }"""
GROUPS = """g (float[1,4,SHAPE] x) => (float[1,4,SHAPE] y) <float[4] s = {1,2,3,4}>
    { y = GroupNormalization<num_groups=2>(x, s, s) }"""
# The refused graph is computed wrongly.
WRONG = {
    "half pixels": Pair(
        resize("half_pixel", "floor", 16), resize("half_pixel", "round_prefer_floor", 16), "along axis 2 it picks"
    ),
    "half pixels of PyTorch": Pair(
        resize("pytorch_half_pixel", "ceil", 11), resize("asymmetric", "floor", 11), "along axis 2 it picks"
    ),
    "padded output": Pair(transposed(2, 11, "0,0,0,0"), transposed(3, 12, "0,0,0,0"), "does not reach, [1, 1] at"),
    "padded depthwise layer": Pair(depthwise(1, 1), depthwise(0, 0), "output_padding [0, 1] of a depthwise layer"),
    "groups in three axes": Pair(transposed_groups(3), transposed_groups(2), "attribute 'group' is 2"),
    "broadcast base": Pair(
        between("r = Pow(b, d)", "2,9", (-4, 4), (0, 16)),
        between("r = Pow(d, b)", "2,9", (-4, 4), (0, 16)),
        "input 0 is broadcast, from [] to [2, 9]",
        low=0.25,
    ),
    "narrow logarithm": Pair(log(-2.5), log(-2.7), "the scale of output 0 is 5.95", low=0.1),
    "swish of five axes": Pair(swish("1,1,2,3,4"), swish("1,2,3,4"), "rank 5 of input 0 is above 4"),
    "logarithm of one": Pair(
        "g (float[4,1] x) => (float[4,1] y) { a = LogSoftmax(x) y = Add(a, x) }",
        "g (float[4,2] x) => (float[4,2] y) { a = LogSoftmax(x) y = Add(a, x) }",
        "axis -1 has 1 element",
    ),
    "running sum": Pair(
        between("a = Constant<value_int=0>() r = CumSum(d, a)", "4,9", (-4, 4), (-32, 32)),
        "g (float[4,9] x) => (float[4,9] y) { a = Constant<value_int=0>() y = CumSum(x, a) }",
        "results of uint8 are wrong",
    ),
}
# No session can be made of the refused graph.
NONE = {
    "norm": Pair(RMS, RMS.replace("Mul(w, n)", "Mul(n, w)"), "is fused, and cannot be finalized (1002)"),
    "padded output, no session": Pair(transposed(4, 13, "0,0,0,0"), transposed(4, 11, "1,1,1,1"), "does not reach"),
    "alpha": Pair(swish("2,9", 1.5), swish("2,9"), "attribute 'alpha' is 1.5"),
    "tangent": Pair(
        "g (float[1,1,2,3,4] x) => (float[1,1,2,3,4] y) { y = Tan(x) }",
        "g (float[1,2,3,4] x) => (float[1,2,3,4] y) { y = Tan(x) }",
        "rank 5 of input 0 is above 4",
    ),
    "slopes": Pair(slope("2,2,3"), slope("2,6"), "rank 5 of input 0 is above 4"),
    "bools of five axes": Pair(
        EXPAND.replace("MAKE", "r = Greater(x, k) e = Expand(r, s) y = Cast<to=1>(e)"),
        EXPAND.replace("MAKE", "r = Mul(x, k) y = Expand(r, s)"),
        "rank 5 of output 0 is above 4",
    ),
    "groups": Pair(GROUPS.replace("SHAPE", "2,3,4"), GROUPS.replace("SHAPE", "6,4"), "rank 5 of input 0 is above 4"),
    "norm of one number": Pair(
        between("r = RMSNormalization<axis=-1>(d, g)", "4,1", (-4, 4), (-4, 4)),
        "g (float[4,1] x) => (float[4,1] y) <float[1] g = {4}> { y = RMSNormalization<axis=-1>(x, g) }",
        "axis -1 has 1 element",
    ),
}
MENDED = ("half pixels", "half pixels of PyTorch", "padded output", "padded depthwise layer")


def check(text: str, path: Path) -> CheckReport:
    onnx.save(parser.parse_model(HEAD + text), str(path))
    return check_model(load_model(path), load_target("qnn"))


def read_shape(model: onnx.ModelProto) -> list[int]:
    return [dim.dim_value for dim in model.graph.input[0].type.tensor_type.shape.dim]


def measure_errors(folder: Path, models: dict[str, tuple[onnx.ModelProto, Range]]) -> dict[str, float]:
    """Returns the error of each model in the simulator, as a share of its largest result; one session runs them all."""
    rng, inputs, whole = np.random.default_rng(0), dict[str, Array](), onnx.GraphProto()
    for name, (model, (low, high)) in models.items():
        inputs[f"{name}/x"] = rng.uniform(low, high, read_shape(model)).astype(np.float32)
        whole.MergeFrom(compose.add_prefix(model, f"{name}/").graph)
    path = folder / "all.onnx"
    onnx.save(helper.make_model(whole, opset_imports=[helper.make_opsetid("", 24)], ir_version=11), str(path))
    samples: list[Tensors] = [inputs]
    run = run_in(require_device("qnn-htp-sim", "qnn"), make_job(path, "qnn", samples), folder / "work")
    assert (run.failure, run.notes) == (None, ())
    wanted, found = CpuSession(path, SessionSettings()).run(inputs), next(iter(run.outputs))
    largest = {name: np.abs(value).max() for name, value in wanted.items()}
    return {
        name: float(np.abs(wanted[f"{name}/y"] - found[f"{name}/y"]).max() / largest[f"{name}/y"]) for name in models
    }


@pytest.mark.slow
def test_kernels_that_are_wrong_are_refused_and_their_neighbours_are_right(tmp_path: Path) -> None:
    models: dict[str, tuple[onnx.ModelProto, Range]] = {}
    for name, pair in WRONG.items():
        for side, text in (("wrong", pair.refused), ("right", pair.taken)):
            models[f"{side} {name}"] = parser.parse_model(HEAD + text), (pair.low, pair.high)
    for name in MENDED:
        assert check(WRONG[name].refused, tmp_path / "m.onnx").is_refused
        mended = fix_for_target(load_model(tmp_path / "m.onnx"), tmp_path / "mended.onnx", load_target("qnn"))
        assert not mended.after.is_refused
        models[f"mended {name}"] = onnx.load(str(mended.model.path)), (-4, 4)
    errors = measure_errors(tmp_path, models)
    # If one of these is right with a new version of QNN, its rule can go.
    assert [name for name, error in errors.items() if name.startswith("wrong") and error < 0.06] == []
    assert {name: error for name, error in errors.items() if not name.startswith("wrong") and error > 0.05} == {}


@pytest.mark.parametrize("name", [*WRONG, *NONE])
def test_check_refuses_the_kernel_and_not_its_neighbour(name: str, tmp_path: Path) -> None:
    pair = (WRONG | NONE)[name]
    refused = check(pair.refused, tmp_path / "refused.onnx")
    assert refused.verdict == "no"
    assert any(pair.reason in each for node in refused.node_list for each in node.reasons if node.fatal)
    assert check(pair.taken, tmp_path / "taken.onnx").verdict == "yes"


def test_check_remarks_on_a_softplus_of_four_axes(tmp_path: Path) -> None:
    text = "g (float[1,SHAPE] x) => (float[1,SHAPE] y) { y = Softplus(x) }"
    four, three = (check(text.replace("SHAPE", shape), tmp_path / "m.onnx") for shape in ("4,9,9", "4,81"))
    assert (four.verdict, three.verdict, three.node_list[0].remarks) == ("yes", "yes", ())
    assert "spoils other nodes of the session" in four.node_list[0].remarks[0]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["norm", *(pytest.param(name, marks=pytest.mark.long) for name in [*NONE][1:])])
def test_no_session_can_be_made_of_a_refused_graph(name: str, tmp_path: Path) -> None:
    device = require_device("qnn-htp-sim", "qnn")
    for place, text in enumerate((NONE[name].refused, NONE[name].taken)):
        model, work = parser.parse_model(HEAD + text), tmp_path / str(place)
        work.mkdir()
        onnx.save(model, str(work / "m.onnx"))
        sample: Tensors = {"x": np.ones(read_shape(model), np.float32)}
        run = device.run_job(make_job(work / "m.onnx", "qnn", [sample]), work)
        assert (run.failure is None) == (place == 1), run.failure
