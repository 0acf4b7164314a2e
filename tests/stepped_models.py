"""A model with state, and a bundle of it whose golden samples are sequences."""

from pathlib import Path

import numpy as np
from tiny_models import parse_model

from edgekit.jobs.build import build
from edgekit.model.state import State
from edgekit.recipe import Data, Recipe

STEPS = 8
RECURRENT = """<ir_version: 8, opset_import: ["" : 17]>
  g (float[1,4] x, float[1,4] h) => (float[1,4] y, float[1,4] new_h)
  <float keep = {0.9}, float[4,4] w = {1, 0.5, 0, 0, 0, 1, 0.5, 0, 0, 0, 1, 0.5, 0.5, 0, 0, 1}> {
    kept = Mul(h, keep) new_h = Add(kept, x) y = MatMul(new_h, w) }"""


def save_data(path: Path, sequences: int = 8, **more: np.ndarray) -> Data:
    rows = np.random.default_rng(0).normal(size=(sequences * STEPS, 1, 4)).astype(np.float32)
    np.savez(path, x=rows, **more)  # type: ignore[arg-type]
    return Data(source=str(path))


def make(folder: Path) -> None:
    model = parse_model(RECURRENT, folder / "recurrent.onnx")
    recipe = Recipe(targets=("cpu",), precision="fp32", state=State(steps=STEPS))
    report = build(model, save_data(folder / "d.npz"), folder / "out", recipe, verify=False)
    assert report.bundles[0].failure is None
