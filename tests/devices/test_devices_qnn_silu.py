"""x * Sigmoid(x) of 16 bits on Qualcomm's HTP: its fused kernel is wrong for some sizes, and `part-silu` avoids it."""

from collections import Counter
from pathlib import Path

import numpy as np
import onnx
import pytest
from devices_models import make_job, present
from tiny_models import parse_model

from edgekit._ort import CpuSession, SessionSettings
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.model.tensors import Tensors
from edgekit.prepare.fix import fix_quantized
from edgekit.recipe import Data, Recipe
from edgekit.target import load_target

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


def measure_simulator(model: Path, shape: tuple[int, ...], work: Path) -> float:
    """Returns the ratio in dB of what the CPU computes to the simulator's distance from it."""
    rng = np.random.default_rng(0)
    samples: list[Tensors] = [{"x": rng.uniform(-4, 4, shape).astype(np.float32)}]
    work.mkdir()
    run = present("qnn-htp-sim", "qnn").run_job(make_job(model, "qnn", samples), work)
    assert (run.failure, run.notes) == (None, ())
    wanted = CpuSession(model, SessionSettings()).run(samples[0])["y"]
    distance = wanted - next(iter(run.outputs))["y"]
    return 10 * float(np.log10((wanted**2).sum() / (distance**2).sum()))


@pytest.mark.slow
@pytest.mark.parametrize("size", [(10, 20), (20, 8)])
def test_the_fused_kernel_is_wrong_and_is_avoided(size: tuple[int, int], tmp_path: Path) -> None:
    path, shape = write_silu(tmp_path / "m.onnx", *size), (1, 4, *size)
    # If this fails with a new version of QNN, its kernel is right, and the rewrite can go.
    assert measure_simulator(path, shape, tmp_path / "fused") < 20
    fixed = fix_quantized(load_model(path), load_target("qnn"), tmp_path / "fixed.onnx")
    assert [(fix.id, len(fix.nodes)) for fix in fixed.fixes] == [("part-silu", 1)]
    assert measure_simulator(fixed.model.path, shape, tmp_path / "parted") > 60


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
def test_the_product_of_a_picture_is_parted(
    rows: object, columns: object, factors: str, tmp_path: Path, *, changes: bool
) -> None:
    path = write_silu(tmp_path / "m.onnx", rows, columns, factors)
    fixed = fix_quantized(load_model(path), load_target("qnn"), tmp_path / "fixed.onnx").model.path
    assert fix_quantized(load_model(path), load_target("cpu"), tmp_path / "other.onnx").fixes == ()
    before, after = (Counter(node.op_type for node in onnx.load(str(each)).graph.node) for each in (path, fixed))
    assert after - before == (Counter(QuantizeLinear=1, DequantizeLinear=1) if changes else Counter())
    size = tuple(16 if isinstance(each, str) else int(str(each)) for each in (rows, columns))
    x = np.random.default_rng(1).uniform(-4, 4, (1, 4, *size)).astype(np.float32)
    wanted, got = (CpuSession(each, SessionSettings()).run({"x": x})["y"] for each in (path, fixed))
    # A value of x moves by one step of 0.0003 at most, and y by 1.1 times as much and half a step of its own.
    assert np.abs(wanted - got).max() <= (0.00049 if changes else 0)


def test_a_product_in_three_axes_stays(tmp_path: Path) -> None:
    text = GRAPH.replace("1,4,ROWS,COLUMNS", "1,4,9").replace("int8[4,4,1,1]", "int8[4,4,1]").replace("[1,1]", "[1]")
    text = text.replace("FACTORS", "cd, sd").replace("TYPE", "uint16").replace("MIDDLE", "32768")
    path = parse_model(text, tmp_path / "m.onnx")
    assert fix_quantized(load_model(path), load_target("qnn"), tmp_path / "fixed.onnx").fixes == ()
    assert measure_simulator(path, (1, 4, 9), tmp_path / "work") > 60


def test_a_bundle_in_16_bits_is_built_so(tmp_path: Path) -> None:
    path = parse_model(
        "g (float[1,4,10,10] x) => (float[1,4,10,10] y) <float[4,4,1,1] w = {1,2,3,4,5,-6,7,8,-9,1,2,3,4,5,6,7}>"
        " { c = Conv(x, w) s = Sigmoid(c) m = Mul(c, s) y = Conv(m, w) }",
        tmp_path / "m.onnx",
    )
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(16, 4, 10, 10)).astype(np.float32))
    recipe = Recipe(targets=("qnn",), precision="int16", forms=("onnx",))
    (bundle,) = build(path, Data(source=str(tmp_path / "d.npz")), tmp_path / "out", recipe, verify=False).bundles
    assert bundle.path is not None, bundle.failure
    made = onnx.load(str(bundle.path / "model.onnx")).graph
    makers = {name: node for node in made.node for name in node.output}
    (product,) = (node for node in made.node if node.op_type == "Mul")
    (gate,) = (node for node in made.node if node.op_type == "Sigmoid")
    assert gate.input[0] not in product.input
    chains = [makers[makers[name].input[0]].input[0] for name in product.input]
    assert gate.input[0] in chains
