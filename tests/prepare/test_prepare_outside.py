"""Weights that never are in memory: the files are those that a model in memory would give."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from prepare_models import make_model, run_model

from edgekit.model.external import point_into
from edgekit.model.model import Model
from edgekit.model.tensors import Array
from edgekit.prepare import basic
from edgekit.prepare.clean import prepare_model, sketch_model
from edgekit.prepare.external import write_inline
from edgekit.prepare.fix import fix_model


def make_layers(path: Path, *, external: bool = False) -> Model:
    """Writes hidden layers whose weights are larger than what skimming leaves inside, with a GELU in parts."""
    rng = np.random.default_rng(0)
    weights: dict[str, Array] = {
        "up": rng.standard_normal((64, 1024)).astype(np.float32) / 8,
        "down": rng.standard_normal((1024, 64)).astype(np.float32) / 32,
        "bias": rng.standard_normal(1024).astype(np.float32),
        "root": np.array(2**0.5, np.float32), "one": np.array(1, np.float32), "half": np.array(0.5, np.float32),
    }  # fmt: skip
    text = """g (float[n,64] x) => (float[n,64] y) { a = MatMul(x, up) b = Add(a, bias) c = Div(b, root) d = Erf(c)
      e = Add(d, one) f = Mul(b, e) g = Mul(f, half) y = MatMul(g, down) }"""
    return make_model(text, path, weights=weights, external=external)


def test_weights_are_written_inside_byte_for_byte(tmp_path: Path) -> None:
    model = make_layers(tmp_path / "m.onnx")
    whole = onnx.load(str(model.path)).SerializeToString(deterministic=True)
    pointing = point_into(model.path)
    assert len(pointing.SerializeToString()) < len(whole) / 10
    write_inline(pointing, tmp_path, tmp_path / "again.onnx")
    assert (tmp_path / "again.onnx").read_bytes() == whole


def test_a_weight_that_is_cut_off_is_not_written(tmp_path: Path) -> None:
    model = make_layers(tmp_path / "m.onnx", external=True)
    proto = onnx.load(str(model.path), load_external_data=False)
    data = tmp_path / "m.onnx.data"
    data.write_bytes(data.read_bytes()[:-4])
    with pytest.raises(OSError, match="ends within a weight"):
        write_inline(proto, tmp_path, tmp_path / "again.onnx")


@pytest.mark.parametrize("external", [False, True])
def test_a_model_worked_on_outside_of_memory_becomes_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, external: bool
) -> None:
    model = make_layers(tmp_path / "m.onnx", external=external)
    made: list[Path] = []
    for at_least in (1 << 40, 0):
        monkeypatch.setattr(basic, "OUTSIDE_FROM_BYTES", at_least)
        folder = tmp_path / str(at_least)
        prepared = prepare_model(model, folder / "p.onnx", {"n": 2})
        fixed = fix_model(prepared, folder / "f.onnx")
        assert [fix.id for fix in fixed.fixes] == ["join-gelu"]
        assert fix_model(prepared, prepared.path).model.path.read_bytes() == fixed.model.path.read_bytes()
        sketched = sketch_model(model, folder / "s.onnx", {"n": 2})
        assert sorted(path.name for path in folder.iterdir()) == ["f.onnx", "p.onnx", "s.onnx"]
        assert sketched.node_count == prepared.node_count
        made.append(fixed.model.path)
    inputs = {"x": np.random.default_rng(1).standard_normal((2, 64)).astype(np.float32)}
    first, second = (run_model(path, inputs)["y"] for path in made)
    assert np.array_equal(first, second)
    one, other = (onnx.load(str(path)).graph for path in made)
    assert list(one.node) == list(other.node)
    stored = [sorted(graph.initializer, key=lambda tensor: tensor.name) for graph in (one, other)]
    assert stored[0] == stored[1]
