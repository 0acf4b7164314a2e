"""Sums of 8-bit products: on a PC whose CPU may saturate, they are those of the phone that it stands in for."""

import shutil
from pathlib import Path
from typing import cast

import msgspec
import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator
from tiny_models import parse_net

from edgekit import machine
from edgekit._ort import CPU_PROVIDER, EXACT_SUMS, IN_FLOAT, CpuSession, Level, SessionSettings, makes_session
from edgekit.convert.convert import Source, write_ort_form
from edgekit.convert.ort_form import OrtOptions
from edgekit.data.samples import Samples
from edgekit.devices.android.android import X86_64, Android
from edgekit.devices.device import Job
from edgekit.devices.local.host import Host
from edgekit.devices.process.run import find_exact_sums
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, TensorSpec
from edgekit.target import load_target

NO_VNNI, VNNI = "flags : sse avx2", "flags : sse avx2 avx512_vnni"
KEY = "session.x64quantprecision"
X = np.random.default_rng(1).normal(size=(4, 64)).astype(np.float32)


def save(path: Path, kind: str = "uint8", second: str = "wz2") -> Path:
    """Writes two MatMuls with weights up to 127, of which pairs of products exceed 16 bits."""
    zero = 128 if kind == "uint8" else 0
    rng = np.random.default_rng(0)
    shapes = {"w": (64, 32), "v": (32, 8)}
    proto = parse_net(
        f"""(float[4,64] x) => (float[4,8] y)
        <float s = {{0.02}}, float t = {{0.3}}, {kind} z = {{{zero}}}, float ws = {{0.01}}, int8 wz = {{0}},
         int8 wz2 = {{0}}> {{
          q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) wd = DequantizeLinear(w, ws, wz) m = MatMul(d, wd)
          n = QuantizeLinear(m, t, z) e = DequantizeLinear(n, t, z) vd = DequantizeLinear(v, ws, {second})
          o = MatMul(e, vd) p = QuantizeLinear(o, t, z) y = DequantizeLinear(p, t, z) }}""",
        {name: rng.integers(-127, 127, shape).astype(np.int8) for name, shape in shapes.items()},
    )
    onnx.save(proto, str(path))
    return path


def make_job(model: Path, target: str, **settings: str) -> Job:
    spec = TensorSpec(name="y", dtype="float32", shape=(4, 8))
    rows = Samples(source="x", count=1, read=lambda: iter([{"x": X}]))
    return Job(model=model, target=load_target(target, settings), outputs=(spec,), samples=rows)


@pytest.fixture
def saturating(monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine looks like an x64 without VNNI."""
    monkeypatch.setattr(machine, "read_cpu_flags", lambda: NO_VNNI)
    monkeypatch.setattr("edgekit.machine.platform.machine", lambda: "x86_64")


@pytest.mark.parametrize("kind", ["uint8", "int8"])
def test_this_machine_computes_what_a_phone_does(kind: str, tmp_path: Path) -> None:
    model = save(tmp_path / "m.onnx", kind)
    exact = CpuSession(model, SessionSettings(level=Level.DISABLED)).run({"x": X})["y"]
    assert np.array_equal(CpuSession(model, SessionSettings()).run({"x": X})["y"], exact)
    run = Host().run(make_job(model, "cpu"), tmp_path / "work")
    assert run.failure is None
    assert np.array_equal(next(iter(run.outputs))["y"], exact)


@pytest.mark.usefixtures("saturating")
@pytest.mark.parametrize(("flags", "entry"), [(NO_VNNI, "1"), ("", "1"), (VNNI, "")])
def test_sessions_ask_for_exact_sums_where_the_cpu_may_saturate(
    flags: str, entry: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "read_cpu_flags", lambda: flags)
    model = save(tmp_path / "m.onnx")
    assert read_entry(CpuSession(model, SessionSettings())) == entry
    assert read_entry(CpuSession(model, SessionSettings(config={KEY: "0"}))) == "0"
    # A file that is written is the same, whatever CPU writes it.
    assert not read_entry(CpuSession(model, SessionSettings(save_to=tmp_path / "o.onnx")))
    # ONNX Runtime makes no session then.
    shared = save(tmp_path / "shared.onnx", second="wz")
    assert not read_entry(CpuSession(shared, SessionSettings()))
    monkeypatch.setattr("edgekit.machine.platform.machine", lambda: "aarch64")
    assert not read_entry(CpuSession(model, SessionSettings()))


def read_entry(session: CpuSession) -> str:
    options = session._session.get_session_options()
    try:
        return str(options.get_session_config_entry(KEY))
    except RuntimeError:
        return ""


@pytest.mark.usefixtures("saturating")
def test_a_device_of_this_machine_adds_exactly_for_phones_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, shared = save(tmp_path / "m.onnx"), save(tmp_path / "shared.onnx", second="wz")
    for target in ("cpu", "xnnpack", "nnapi", "qnn"):
        assert find_exact_sums(make_job(model, target), CPU_PROVIDER) == EXACT_SUMS
        assert find_exact_sums(make_job(shared, target), CPU_PROVIDER) == IN_FLOAT
    # NNAPI sees the graph that it gets in an app.
    assert not find_exact_sums(make_job(shared, "nnapi"), "NnapiExecutionProvider")
    for job in (
        make_job(model, "cpu", arch="x64-vnni"),
        make_job(model, "openvino"),
        make_job(save_form(tmp_path / "integers.onnx", SIGNED), "cpu"),
        msgspec.structs.replace(make_job(model, "cpu"), model=tmp_path / "m.ort"),
    ):
        assert not find_exact_sums(job, CPU_PROVIDER)
    monkeypatch.setattr(machine, "read_cpu_flags", lambda: VNNI)
    assert not find_exact_sums(make_job(model, "cpu"), CPU_PROVIDER)


@pytest.mark.usefixtures("saturating")
def test_a_file_is_opened_once_to_see_whether_its_sums_can_be_exact(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, opened = save(tmp_path / "m.onnx"), list[Path]()

    def make(model: Path, settings: SessionSettings) -> bool:
        opened.append(model)
        return makes_session(model, settings)

    monkeypatch.setattr("edgekit.devices.process.run.makes_session", make)
    monkeypatch.setattr("edgekit.devices.process.run._EXACT", {})
    # The same file in the folder of each run, and then another one.
    copies = [Path(shutil.copy(model, tmp_path / name)) for name in ("a.onnx", "b.onnx")]
    assert [find_exact_sums(make_job(copy, "xnnpack"), CPU_PROVIDER) for copy in copies] == [EXACT_SUMS] * 2
    shared = save(tmp_path / "c.onnx", second="wz")
    assert find_exact_sums(make_job(shared, "xnnpack"), CPU_PROVIDER) == IN_FLOAT
    # It is opened as it is too: what is refused so is refused on a phone.
    assert opened == [copies[0], shared, shared]


MIXED = """(float[4,64] x) => (float[4,32] y)
  <float s = {0.02}, uint8 z = {128}, float ws = {0.01}, int8 wz = {0}, float t = {0.3}> {
  q = QuantizeLinear(x, s, z) p = QLinearMatMul(q, s, z, w, ws, wz, t, z) y = DequantizeLinear(p, t, z) }"""
DYNAMIC = """(float[4,64] x) => (float[4,32] y) <float ws = {0.01}, int8 wz = {0}> {
  q, s, z = DynamicQuantizeLinear(x) i = MatMulInteger(q, w, z, wz) f = Cast <to = 1> (i)
  t = Mul(s, ws) y = Mul(f, t) }"""
SIGNED = MIXED.replace("uint8 z = {128}", "int8 z = {0}")
TIED = """(float[4,64] x) => (float[4,64] y)
  <float s = {0.02}, uint8 z = {128}, float ws = {0.01}, int8 wz = {0}, float t = {0.3}> {
  q = QuantizeLinear(x, s, z) d = DequantizeLinear(q, s, z) wd = DequantizeLinear(w, ws, wz) m = MatMul(d, wd)
  n = QuantizeLinear(m, t, z) e = DequantizeLinear(n, t, z) o = MatMul(e, wd)
  p = QuantizeLinear(o, t, z) y = DequantizeLinear(p, t, z) }"""


def save_form(path: Path, text: str) -> Path:
    weights = np.random.default_rng(0).integers(-127, 127, (64, 64 if text == TIED else 32)).astype(np.int8)
    # The reference of ONNX has a DequantizeLinear from this opset on.
    onnx.save(parse_net(text, {"w": weights}, opset=19), str(path))
    return path


@pytest.mark.usefixtures("saturating")
@pytest.mark.parametrize("text", [MIXED, DYNAMIC, SIGNED])
def test_products_of_integers_are_exact_at_each_level(text: str, tmp_path: Path) -> None:
    model = save_form(tmp_path / "m.onnx", text)
    (wanted,) = cast("list[Array]", ReferenceEvaluator(str(model)).run(None, {"x": 4 * X}))
    for level in Level:
        assert np.allclose(CpuSession(model, SessionSettings(level=level)).run({"x": 4 * X})["y"], wanted, atol=1e-4)
    raised = CpuSession(model.read_bytes(), SessionSettings(level=Level.DISABLED))._session.get_session_options()
    # Without an entry that a session was given, and for floats between Q and DQ nodes, the level stays.
    given = CpuSession(model, SessionSettings(level=Level.DISABLED, config={KEY: "0"}))._session.get_session_options()
    assert raised.graph_optimization_level != given.graph_optimization_level or text == SIGNED


@pytest.mark.usefixtures("saturating")
def test_where_nodes_share_a_constant_sums_are_exact_in_float(tmp_path: Path) -> None:
    """A vocoder whose products share a factor had 21.5 dB in its plan, and 35.9 on a phone."""
    model = save_form(tmp_path / "m.onnx", TIED)
    (wanted,) = cast("list[Array]", ReferenceEvaluator(str(model)).run(None, {"x": 4 * X}))
    session = CpuSession(model, SessionSettings())
    assert not read_entry(session)
    assert np.array_equal(session.run({"x": 4 * X})["y"], wanted)
    spec = TensorSpec(name="y", dtype="float32", shape=(4, 64))
    rows = Samples(source="x", count=1, read=lambda: iter([{"x": 4 * X}]))
    run = Host().run(msgspec.structs.replace(make_job(model, "cpu"), outputs=(spec,), samples=rows), tmp_path / "work")
    assert np.array_equal(next(iter(run.outputs))["y"], wanted)


@pytest.mark.usefixtures("saturating")
def test_products_of_two_signed_integers_run_as_they_are(tmp_path: Path) -> None:
    job = make_job(save_form(tmp_path / "m.onnx", SIGNED), "cpu")
    spec = msgspec.structs.replace(job.outputs[0], shape=(4, 32))
    assert Host().run(msgspec.structs.replace(job, outputs=(spec,)), tmp_path / "work").failure is None


@pytest.mark.usefixtures("saturating")
def test_a_converted_file_is_compared_in_the_kernels_that_it_has(tmp_path: Path) -> None:
    source = load_model(save_form(tmp_path / "m.onnx", DYNAMIC))
    written = write_ort_form(
        Source(model=source, origin=source, samples=Samples(source="x", count=1, read=lambda: iter([{"x": 4 * X}]))),
        tmp_path, OrtOptions(style="full", cpu="arm"),
    )  # fmt: skip
    assert written.equality is not None
    assert written.equality.passed


@pytest.mark.usefixtures("saturating")
def test_the_library_for_android_adds_exactly_but_for_operators_of_integers(tmp_path: Path) -> None:
    """With MatMulInteger and s8 weights that library ended by SIGABRT (random network 7004 of the long tests)."""
    device, qdq = Android(cpu=X86_64), save(tmp_path / "m.onnx")
    products = onnx.load(str(qdq))
    products.graph.node.add(op_type="MatMulInteger", input=["q", "w"], output=["more"])
    onnx.save(products, str(tmp_path / "p.onnx"))
    for model, is_exact in ((qdq, True), (tmp_path / "p.onnx", False)):
        request = device._describe_job(make_job(model, "xnnpack"))
        assert (request.session_config.get(KEY) == "1") == is_exact
