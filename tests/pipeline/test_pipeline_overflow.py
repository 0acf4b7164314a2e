"""A net whose values half precision cannot hold is built so that it holds them, and the build says which nodes."""

from functools import partial
from pathlib import Path

import numpy as np
from tiny_models import parse_model

from edgekit.data.samples import Samples
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.recipe import Data, Recipe
from edgekit.verify.layers.overflows import find_overflows

# The front end of a voice detector: powers of a spectrum by 2 ** 20, and then their logarithm or root.
TEXT = (
    '<ir_version: 8, opset_import: ["" : 17]> net (float[1,4,8,8] x) => (float[1,4,8,8] y) <float k = {1048576.0}>'
    "{ [conv] c = Conv(x, w) [abs] a = Abs(c) [scale] s = Mul(a, k) [root] r = Sqrt(s) [clip] y = Relu(r) }"
)


def write_net(path: Path, text: str = TEXT) -> Path:
    weights = ",".join("1.0" if row == column else "0.0" for row in range(4) for column in range(4))
    return parse_model(text.replace("<float k", f"<float[4,4,1,1] w = {{{weights}}}, float k"), path)


def images(scale: float = 1.0) -> np.ndarray:
    return scale * np.random.default_rng(0).random((8, 4, 8, 8), np.float32) + np.float32(0.25)


def test_nodes_that_overflow_stay_in_float32(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=images())
    path, data = write_net(tmp_path / "net.onnx"), Data(source=str(tmp_path / "data.npz"))
    (summary,) = build(path, data, tmp_path / "out", Recipe(targets=("coreml",))).bundles
    assert summary.failure is None
    (note,) = (note for note in summary.notes if "float32" in note)
    assert note.startswith("2 nodes stay in float32, because values there come near to 65504")
    assert "scale, root; the largest is 1.3" in note
    assert note.endswith("at 'scale'; --precision fp32 keeps all of them")
    assert not any("clamped" in note for note in summary.notes)
    assert summary.precision == "fp16"
    assert summary.verify is not None
    assert {run.verdict for run in summary.verify.runs} == {"pass"}


def test_a_value_within_half_precision_is_no_overflow(tmp_path: Path) -> None:
    """A constant may use all of the range, a value that samples move half of it; a mask may lie beyond."""
    text = (
        '<ir_version: 8, opset_import: ["" : 17]> net (float[1,4,8,8] x) => (float[1,4,8,8] y) <float k = {K}>'
        "{ [a] s = Mul(x, k) [b] y = Neg(s) }"
    )
    for constant, scale, found in (
        ("60000.0", 0.1, []), ("65504.0", 0.0, []), ("66000.0", 0.0, ["a"]), ("40000.0", 1.0, ["a", "b"]),
        ("-1e9", 0.0, []),
    ):  # fmt: skip
        model = load_model(write_net(tmp_path / "m.onnx", text.replace("{K}", f"{{{constant}}}")))
        given = (images() - 0.25)[:1] * np.float32(scale)
        samples = Samples(source="", count=1, read=partial(iter, [{"x": given}]))
        assert list(find_overflows(model, samples)) == found, constant
