"""Tiny models for the prepare stage, and a way to run them."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from tiny_models import parse_net

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.fix import FixedModel, fix_model
from edgekit.serialize import read_own_toml

ZOO = Path(__file__).parents[3] / "shared/zoo"


class Spelling(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Graphs that differ in one part, in which a pattern is `found`, or that only look like it."""

    graph: str
    made: str = ""
    found: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    changes: tuple[tuple[str, str], ...] = ()
    opset: int = 17

    def list_found(self) -> list[str]:
        return [self.graph] if self.made and not self.found else [self.graph.replace("BODY", it) for it in self.found]

    def list_apart(self) -> list[str]:
        assert {self.graph.count(part) for part, _ in self.changes} <= {1}
        changed = (self.graph.replace(part, instead) for part, instead in self.changes)
        return [*changed, *(self.graph.replace("BODY", body) for body in self.apart)]


class Case(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A case of a rewrite; `rewrite_cases.toml` says what each field is."""

    pattern: str = ""
    stays: str = ""
    contradicts: str = ""
    unrunnable: tuple[str, ...] = ()
    sites: int = 1
    gone: str = ""
    tolerance: float = 0.0
    opset: int = 17
    spellings: tuple[Spelling, ...] = ()


CASES = read_own_toml(Path(__file__).parent / "rewrite_cases.toml", dict[str, Case])


def make_model(
    text: str,
    path: Path,
    *,
    opset: int = 17,
    ir_version: int = 8,
    imports: str = "",
    weights: Mapping[str, Array] | None = None,
    external: bool = False,
    edit: Callable[[onnx.ModelProto], object] | None = None,
) -> Model:
    """Writes a model from onnx's text form of its graph, with weights in it or in a file beside it, and loads it.

    `edit` changes what the text form cannot say.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    proto = parse_net(text, weights, opset=opset, ir_version=ir_version, imports=imports)
    if edit is not None:
        edit(proto)
    onnx.save(proto, str(path), save_as_external_data=external, location=f"{path.name}.data")
    return load_model(path)


def prepare(
    text: str, folder: Path, dims: Mapping[str, int] | None = None, *, to: int | None = None, **how: Any
) -> tuple[Model, Model]:
    """Returns a model from onnx's text form, made as `how` says, and the clean one, of opset `to` if that is given."""
    model = make_model(text, folder / "m.onnx", **how)
    return model, prepare_model(model, folder / "out.onnx", dims or {}, opset=to)


def make_inputs(model: Model, seed: int = 0) -> dict[str, Array]:
    """Returns random values for every input of a static model."""
    rng = np.random.default_rng(seed)
    values: dict[str, Array] = {}
    for spec in model.inputs:
        shape = tuple(dim for dim in spec.shape or () if isinstance(dim, int))
        drawn = rng.standard_normal(shape) if spec.dtype.startswith("float") else rng.integers(0, 100, shape)
        values[spec.name] = np.asarray(drawn).astype(spec.dtype)
    return values


def run_model(path: Path, inputs: Mapping[str, Array], level: Level = Level.DISABLED) -> dict[str, Array]:
    """Returns the outputs of a model."""
    return CpuSession(path, SessionSettings(level=level, threads=1)).run(inputs)


def op_names(path: Path) -> Sequence[str]:
    """Returns the operators of the main graph in order."""
    return [node.op_type for node in onnx.load(str(path), load_external_data=False).graph.node]


def rewrite(folder: Path, text: str, id_: str, *, opset: int = 17) -> FixedModel:
    """Returns the model after a rewrite, from onnx's text form."""
    return fix_model(make_model(text, folder / "m.onnx", opset=opset), folder / "out.onnx", [id_])


def assert_same(folder: Path, fixed: FixedModel, share: float, seeds: Sequence[int] = (0,)) -> None:
    """Checks that outputs changed by at most this share of the largest value of each."""
    assert_near(load_model(folder / "m.onnx"), fixed.model, share, seeds)


def assert_near(model: Model, other: Model, share: float = 0, seeds: Sequence[int] = (0,)) -> None:
    """Checks that each output of another model is that of a model, up to this share of its largest value."""
    for inputs in (make_inputs(other, seed) for seed in seeds):
        results = (run_model(path, inputs).values() for path in (model.path, other.path))
        for expected, got in zip(*results, strict=True):
            assert expected.shape == got.shape
            assert np.max(np.abs(expected - got)) <= share * np.max(np.abs(expected))
