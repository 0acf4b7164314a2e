"""A network with inputs of any length, and a bundle of it with a model for each of three sizes."""

from pathlib import Path

import msgspec
import numpy as np
import onnx
from tiny_models import parse_net

from edgekit.jobs.build import build
from edgekit.recipe import Data, PrecisionChoice, Recipe

# The mean over all tokens; "masked" leaves out the padding. `t` has a row for each token, `half` for every other, and
# `total` is a scalar.
NET = """<ir_version: 8, opset_import: ["" : 17]>
  g (int64[batch,sequence] ids, float[batch,sequence] mask) => (float[batch,8] y, float[batch,sequence,32] t,
     float[batch,every_other,32] half, float total)
  <int64[1] one = {{1}}, int64[1] two = {{2}}, int64[1] nothing = {{0}}, int64[1] ends = {{9999}}> {{
    e = Gather(table, ids) h = MatMul(e, w1) r = Relu(h) o = MatMul(r, w2) m = Unsqueeze(mask, two) {pool}
    total = ReduceSum<keepdims = 0>(mask) y = MatMul(p, w3) t = Identity(o)
    half = Slice(e, nothing, ends, one, two) }}"""
POOLS = {
    "masked": "k = Mul(o, m) s = ReduceSum<keepdims = 0>(k, one) n = ReduceSum<keepdims = 0>(m, one) p = Div(s, n)",
    "plain": "k = Add(o, m) p = ReduceMean<keepdims = 0, axes = [1]>(k)",
}
WEIGHTS = {"table": (50, 32), "w1": (32, 64), "w2": (64, 32), "w3": (32, 8)}
SIZES = (4, 8, 12)
LENGTHS = (3, 4, 5, 7, 8, 2, 10, 11, 12, 1, 6, 9)


def write_net(folder: Path, pool: str = "masked") -> Path:
    rng = np.random.default_rng(0)
    weights = {
        name: (rng.normal(size=shape) * (5 if name == "table" else 1) / np.sqrt(shape[0])).astype(np.float32)
        for name, shape in WEIGHTS.items()
    }
    onnx.save(parse_net(NET.format(pool=POOLS[pool]), weights), str(folder / "net.onnx"))
    return folder / "net.onnx"


def make_sample(length: int, seed: int) -> dict[str, np.ndarray]:
    ids = np.random.default_rng(seed).integers(1, 50, (1, length))
    return {"ids": ids, "mask": np.ones((1, length), np.float32)}


def write_samples(folder: Path, lengths: tuple[int, ...] = LENGTHS) -> str:
    folder.mkdir()
    for index, length in enumerate(lengths):
        np.savez(folder / f"{index:02}.npz", **make_sample(length, index))  # type: ignore[arg-type]
    return str(folder)


def make(folder: Path, pool: str = "masked", precision: PrecisionChoice = "int8", **changes: object) -> Path | None:
    data = write_samples(folder / "data")
    recipe = Recipe(targets=("cpu",), precision=precision, dims={"batch": 1}, buckets={"sequence": SIZES})
    recipe = msgspec.structs.replace(recipe, **changes)
    report = build(write_net(folder, pool), Data(source=data, evaluation=data), folder / "out", recipe, verify=False)
    assert report.bundles[0].failure is None
    return report.bundles[0].path
