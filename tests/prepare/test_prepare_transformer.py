"""Transformer patterns are fused, counted, and give the same results."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from prepare_models import make_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.errors import ModelError, UsageError
from edgekit.jobs.convert import ConvertOptions, convert_for
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.transformer import FuseOptions, fuse_transformer
from edgekit.recipe import Recipe


def make_block(path: Path) -> Model:
    """Writes half a transformer layer as exporters do: GELU by Erf, a residual, layer normalisation."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "w1": rng.standard_normal((16, 32)).astype(np.float32) / 4, "b1": rng.standard_normal(32).astype(np.float32),
        "w2": rng.standard_normal((32, 16)).astype(np.float32) / 6, "b2": rng.standard_normal(16).astype(np.float32),
        "root2": np.array(2**0.5, np.float32), "one": np.array(1, np.float32), "half": np.array(0.5, np.float32),
        "gain": rng.uniform(0.5, 2, 16).astype(np.float32), "shift": rng.standard_normal(16).astype(np.float32),
    }  # fmt: skip
    text = """g (float[batch,4,16] x) => (float[batch,4,16] y) {
      [up] m1 = MatMul(x, w1) [up_bias] a1 = Add(m1, b1) [div] d = Div(a1, root2) [erf] e = Erf(d)
      [plus] p = Add(e, one) [times] t = Mul(a1, p) [gelu] g = Mul(t, half) [down] m2 = MatMul(g, w2)
      [down_bias] a2 = Add(m2, b2) [residual] r = Add(a2, x) [norm] y = LayerNormalization<axis=-1>(r, gain, shift) }"""
    return make_model(text, path, weights=weights)


def keep(model: Model, _: Path) -> Model:
    return model


def test_patterns_are_fused_and_counted(tmp_path: Path) -> None:
    model = make_block(tmp_path / "m.onnx")
    fused = fuse_transformer(model, FuseOptions(for_cpu=False), tmp_path / "f.onnx", keep)
    assert fused.fused == {"BiasGelu": 1, "SkipLayerNormalization": 1}
    assert (fused.nodes_before, fused.nodes_after) == (11, 4)
    sample = {"x": np.random.default_rng(1).standard_normal((2, 4, 16)).astype(np.float32)}
    plain = SessionSettings(level=Level.DISABLED)
    wanted, got = (CpuSession(item.path, plain).run(sample)["y"] for item in (model, fused.model))
    assert np.allclose(wanted, got, atol=1e-5)
    again = fuse_transformer(model, FuseOptions(for_cpu=False), tmp_path / "g.onnx", keep)
    assert again.model.sha256 == fused.model.sha256


def test_convert_fuses_and_compares(tmp_path: Path) -> None:
    make_block(tmp_path / "m.onnx")
    options = ConvertOptions(fuse=FuseOptions())
    report = convert_for(tmp_path / "m.onnx", tmp_path / "out", Recipe(targets=(), dims={"batch": 1}), options)
    assert report.fusion is not None
    # On the CPU the fused normalisation takes longer than its parts.
    assert report.fusion.fused == {"Gelu": 1}
    assert report.fusion.equality.passed
    assert report.census["full"]["Gelu"] == 1
    assert all(found.passed for found in report.equality.values())


def test_nothing_to_fuse_and_an_unknown_family_are_refused(tmp_path: Path) -> None:
    model = make_block(tmp_path / "m.onnx")
    with pytest.raises(UsageError, match=r"no --model-type 'brt'.*bert"):
        fuse_transformer(model, FuseOptions(model_type="brt"), tmp_path / "f.onnx", keep)
    proto = onnx.load(str(model.path))
    del proto.graph.node[2:]
    proto.graph.output[0].name = "a1"
    onnx.save(proto, str(tmp_path / "n.onnx"))
    with pytest.raises(ModelError, match="no pattern of 'bert' was found"):
        fuse_transformer(load_model(tmp_path / "n.onnx"), FuseOptions(), tmp_path / "f.onnx", keep)
