"""State that a model feeds back to itself: plans are judged over whole sequences, and its ranges may be shortened."""

from pathlib import Path

import numpy as np
import pytest
from quantize_models import make_samples
from tiny_models import parse_model

from edgekit.graph.graph import read_graph
from edgekit.jobs.quantize import quantize_for
from edgekit.model.model import load_model
from edgekit.model.outputs import StatedOutput
from edgekit.model.state import State
from edgekit.quantize.accuracy.predict import FloatReference
from edgekit.quantize.mixed_precision.state_ranges import find_state
from edgekit.recipe import Data, Recipe

STEPS = 8
# The state is summed up, and 0.1 more at each step in the second model.
SUM = """g (float[1,4] x, float[1,4] h) => (float[1,4] y, float[1,4] new_h) <float more = {MORE_RELIEF}> {
  sum = Add(h, x) new_h = Add(sum, more) y = Neg(sum) }"""


def test_a_quantized_model_gets_its_own_state(tmp_path: Path) -> None:
    exact, other = (load_model(parse_model(SUM.replace("MORE_RELIEF", more), tmp_path / more)) for more in ("0", "0.1"))
    rng, rows, state = np.random.default_rng(0), [], np.zeros((1, 4), np.float32)
    for step in range(4 * STEPS):
        state = state if step % STEPS else np.zeros((1, 4), np.float32)
        x = rng.normal(size=(1, 4)).astype(np.float32)
        rows.append({"x": x, "h": state})
        state = state + x
    samples, feeds = make_samples(rows), {"h": "new_h"}
    alone = FloatReference(exact, samples).predict_drop(other)
    assert alone.outputs == ("new_h",)  # by single steps y is right, and the state by itself is not
    reference = FloatReference(exact, samples, state=State(steps=STEPS, feeds=feeds))
    found = [pair.found["y"] - pair.expected["y"] for pair in reference.run_pairs(other)]
    wanted = [np.full((1, 4), -0.1 * (step % STEPS), np.float32) for step in range(4 * STEPS)]
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert reference.predict_drop(exact).drop_estimate == 0
    # A part of the samples would be no whole sequences.
    assert reference.look(other, rival=exact).prediction.samples == 4 * STEPS
    for most, counted in ((2 * STEPS + 3, 2 * STEPS), (STEPS - 3, STEPS - 3)):
        few = FloatReference(exact, samples, state=State(steps=STEPS, feeds=feeds), most=most)
        assert list(few.indices) == [*range(counted)]
        assert len([*few.run_pairs(other)]) == counted


# A cell that sums up positive numbers, to 300 and more; what it returns is flat beyond 3.
CELL = """<ir_version: 8, opset_import: ["" : 17]>
  g (float[1,8] x, float[1,8] h, float[1,1,8] c) => (float[1,8] y, float[1,8] new_h, float[1,1,8] new_c)
  <int64[1] axis = {0}, float[8,8] w = {WEIGHTS}> {
    old = Squeeze(c, axis) mixed = MatMul(h, w) gate = Sigmoid(mixed) held = Mul(gate, old) new = Add(held, x)
    new_h = Tanh(new) y = MatMul(new_h, w) new_c = Unsqueeze(new, axis) }"""


def make_cell(path: Path) -> Path:
    weights = np.random.default_rng(0).uniform(0.2, 1, (8, 8)) * np.resize([1, 1, 1, -1], 8)
    return parse_model(CELL.replace("WEIGHTS", ",".join(f"{each:.3f}" for each in weights.ravel())), path)


def test_state_is_found_behind_what_moves_and_gates_it(tmp_path: Path) -> None:
    graph = read_graph(load_model(make_cell(tmp_path / "m.onnx")))
    assert find_state(graph, {"c": "new_c"}) >= {"c", "old", "held", "new", "new_c"}
    assert find_state(graph, {"c": "new_c"}).isdisjoint({"x", "h", "mixed", "gate", "new_h", "y"})
    assert not find_state(graph, {})


@pytest.mark.parametrize("steps", [64, 1])
def test_ranges_of_state_end_where_it_has_no_effect(steps: int, tmp_path: Path) -> None:
    rng, count = np.random.default_rng(0), 6 * 64
    x = (rng.normal(size=(count, 1, 8)) + np.resize([4, -0.1, 0.1, 0], 8)).astype(np.float32)
    np.savez(tmp_path / "d.npz", x=x, h=np.zeros((count, 1, 8), np.float32), c=np.zeros((count, 1, 1, 8), np.float32))
    state = State(steps=steps, feeds={"h": "new_h", "c": "new_c"})
    recipe = Recipe(targets=("qnn",), state=state, outputs={"y": StatedOutput(kind="classes")})
    model, data = make_cell(tmp_path / "m.onnx"), Data(source=str(tmp_path / "d.npz"))
    report = quantize_for(model, data, tmp_path / "q.onnx", recipe)
    drops = {trial.step: trial.drop_estimate or 0.0 for trial in report.trials}
    cut = {step: drop for step, drop in drops.items() if "state within" in step}
    if steps == 1:
        assert not cut
        return
    # The search ends with the first range that loses more; before it each lost less.
    *_, best, last = cut.values()
    assert report.predicted.drop_estimate == best
    assert best < min(0.2 * drops["all"], last)
