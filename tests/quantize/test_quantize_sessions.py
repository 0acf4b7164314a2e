"""A QDQ file is measured in a form that this machine computes faster, with the same numbers."""

from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from tiny_models import save_net

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.model.tensors import Array
from edgekit.quantize.graph import sessions
from edgekit.quantize.graph.sessions import open_quantized

# A layer with a scale for each channel, then one with a single scale.
NET = """<ir_version: 10, opset_import: ["" : 21]> g (float[1,3,5,5] x) => (float[1,4] y)
<float s = {0.03}, KIND z = {7}, float[4] us = {0.01, 0.02, 0.03, 0.04}, int8[4] uz = {0, 0, 0, 0},
 float vs = {0.02}, LAST vz = {5}, float[2,4] bs = {1, 2, 3, 4, 5, 6, 7, 8}, LAST[2,4] bz = {1, 2, 3, 4, 5, 6, 7, 8}>
{
  xq = QuantizeLinear(x, s, z)  xd = DequantizeLinear(xq, s, z)
  ud = DequantizeLinear<axis = 0>(u, us, uz)
  a = Conv(xd, ud)  aq = QuantizeLinear(a, s, z)  ad = DequantizeLinear(aq, s, z)
  p = GlobalAveragePool(ad)  f = Flatten(p)
  fq = QuantizeLinear(f, s, z)  fd = DequantizeLinear(fq, s, z)
  vd = DequantizeLinear(v, vs, vz)
  y = MatMul(fd, vd)
}"""
SETTINGS = SessionSettings(level=Level.DISABLED)


def write_net(path: Path, kind: str, given: str = "", other: str = "") -> Path:
    rng, last = np.random.default_rng(3), "int8" if kind == "int8" else "uint8"
    weights = {"u": rng.integers(-99, 99, (4, 3, 2, 2), np.int8), "v": rng.integers(0, 99, (4, 4)).astype(last)}
    text = NET.replace("KIND", kind).replace("LAST", last).replace(given or "?", other)
    return save_net(text, path, **weights).path


def open_exactly(path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[onnx.GraphProto, CpuSession]:
    """Returns the graph that is computed, and a session that computes it node by node, as ONNX defines it."""
    opened: list[bytes] = []

    def open_session(model: bytes, settings: SessionSettings, **kept: Any) -> CpuSession:
        opened.append(model)
        return CpuSession(model, msgspec.structs.replace(settings, level=Level.DISABLED), **kept)

    monkeypatch.setattr(sessions, "CpuSession", open_session)
    session = open_quantized(path)
    return onnx.load_from_string(opened[-1]).graph, session


def run(session: CpuSession) -> Array:
    return session.run({"x": np.random.default_rng(1).normal(size=(1, 3, 5, 5)).astype(np.float32)})["y"]


@pytest.mark.parametrize(
    ("kind", "flags", "types"),
    [
        ("int8", "avx512_vnni", {"uint8"}),
        ("int8", "avx512f", {"int8"}),
        ("uint8", "avx512_vnni", {"uint8"}),
        ("uint16", "avx512_vnni", {"uint16"}),
    ],
)
def test_numbers_are_the_same_and_int8_is_unsigned_where_products_of_it_are_computed_in_float(
    kind: str, flags: str, types: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_net(tmp_path / "q.onnx", kind)
    monkeypatch.setattr(sessions, "read_cpu_flags", lambda: flags)
    graph, session = open_exactly(path, monkeypatch)
    stored = {tensor.name: onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer}
    assert {str(stored[node.input[2]].dtype) for node in graph.node if node.op_type == "QuantizeLinear"} == types
    assert np.array_equal(run(session), run(CpuSession(path, SETTINGS)))


@pytest.mark.parametrize(("kind", "kept"), [("uint8", {"u", "v"}), ("uint16", set())])
def test_constants_beside_16_bits_are_folded_by_onnx_runtime(
    kind: str, kept: set[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graph, _ = open_exactly(write_net(tmp_path / "q.onnx", kind), monkeypatch)
    constants = {tensor.name for tensor in graph.initializer}
    assert {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"} & constants == kept


@pytest.mark.parametrize(
    ("given", "other"),
    [
        ("v, vs, vz", "v, vs"),
        ("<axis = 0>(u, us, uz)", "<axis = 0>(u, us)"),
        ("vd = DequantizeLinear(v, vs, vz)", "vi = Identity(vs)  vd = DequantizeLinear(v, vi, vz)"),
        ("DequantizeLinear(v, vs, vz)", "DequantizeLinear<axis = 0, block_size = 2>(v, bs, bz)"),
    ],
)
def test_constants_without_a_zero_point_or_with_scales_that_are_computed_or_for_blocks_stay(
    given: str, other: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_net(tmp_path / "q.onnx", "uint16", given, other)
    graph, session = open_exactly(path, monkeypatch)
    constants = {tensor.name for tensor in graph.initializer}
    assert len({node.input[0] for node in graph.node if node.op_type == "DequantizeLinear"} & constants) == 1
    assert np.array_equal(run(session), run(CpuSession(path, SETTINGS)))
