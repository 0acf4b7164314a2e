"""Usual mistakes and known traps: each is made here and named, and none is named where there is none."""

from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from bundle_models import make_bundle
from devices_models import Stub
from msgspec.structs import replace
from onnx import numpy_helper
from tiny_models import parse_net
from verify_devices import InProcess, from_list, restate
from verify_models import make_images, save_network

from edgekit import machine
from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job, PlacedNode, refuse_run
from edgekit.evidence import Evidence
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.target import load_target
from edgekit.verify import suspects
from edgekit.verify.run import verify_bundle
from edgekit.verify.suspects import (
    find_ignored_optimisations,
    find_input_mistake,
    find_suspects,
    has_large_weights,
    list_traps,
)

RNG = np.random.default_rng(0)
ROWS: list[Tensors] = [
    {"y": RNG.normal(size=(1, 4, 5, 5)).astype(np.float32), "z": RNG.normal(size=(1, 4, 5, 5)).astype(np.float32)}
    for _ in range(6)
]


def softmax(value: Array) -> Array:
    powers = np.exp(value - value.max())
    return np.asarray(powers / powers.sum())


def suspect(change: Callable[[Array], Array], rows: list[Tensors] = ROWS) -> str:
    got: list[Tensors] = [{**row, "y": change(row["y"])} for row in rows]
    return find_suspects(from_list(rows), from_list(got), ["y"]).get("y", "nobody")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        pytest.param(lambda y: y * 2, "times a factor", id="scale"),
        pytest.param(lambda y: y / 255, "times a factor", id="inputs not normalised"),
        pytest.param(lambda y: y + 3, "plus a constant", id="offset"),
        pytest.param(lambda y: y[:, ::-1], "in another order", id="channel order"),
        pytest.param(lambda y: y.transpose(0, 2, 3, 1).reshape(y.shape), "in the other layout", id="layout"),
        pytest.param(softmax, "one softmax too many", id="softmax"),
        pytest.param(lambda y: RNG.normal(size=y.shape), "nobody", id="noise"),
        pytest.param(lambda y: y * np.nan, "nobody", id="NaN"),
        pytest.param(lambda y: y * 0, "is 0 everywhere", id="zeros"),
        pytest.param(lambda y: y[:, :2], "nobody", id="other shape"),
    ],
)
def test_the_usual_mistakes_are_named(change: Callable[[Array], Array], words: str) -> None:
    assert words in suspect(change)


@pytest.mark.parametrize(
    ("factor", "noise", "words"),
    [
        (10.0, 0.05, "times a factor"),  # 26 dB once undone, and 45 dB more than before
        (10.0, 0.2, "nobody"),  # 14 dB once undone: it explains too little
        (1.02, 0.01, "nobody"),  # 40 dB once undone, but it was 33 dB before
    ],
)
def test_a_mistake_is_named_where_undoing_it_explains_all(factor: float, noise: float, words: str) -> None:
    rng = np.random.default_rng(1)
    assert words in suspect(lambda y: factor * (y + noise * rng.normal(size=y.shape).astype(np.float32)))


def test_a_softmax_left_out_and_swapped_outputs_are_named_and_nothing_where_nothing_came() -> None:
    rows: list[Tensors] = [{"y": softmax(row["y"])} for row in ROWS]
    assert "before its softmax" in suspect(lambda y: np.log(y) + 5, rows)
    got: list[Tensors] = [{"y": row["z"], "z": row["y"]} for row in ROWS]
    assert find_suspects(from_list(ROWS), from_list(got), ["y", "z"]) == {
        "y": "came back as 'z': the outputs are swapped",
        "z": "came back as 'y': the outputs are swapped",
    }
    assert find_suspects(from_list(ROWS), from_list([]), ["y"]) == {}


@pytest.mark.parametrize(("size", "words"), [(1, "nobody"), (2, "times a factor")])
def test_four_values_are_too_few_for_a_factor_and_a_constant(size: int, words: str) -> None:
    rows: list[Tensors] = [{"y": row["y"].reshape(1, -1)[:, :size]} for row in ROWS]
    assert words in suspect(lambda y: y * 2, rows)


def test_of_few_values_none_is_swapped() -> None:
    rows: list[Tensors] = [{name: value.reshape(1, -1)[:, :2] for name, value in ROWS[0].items()}]
    got: list[Tensors] = [{"y": row["z"], "z": row["y"]} for row in rows]
    assert find_suspects(from_list(rows), from_list(got), ["y"]) == {}
    assert "swapped" in find_suspects(from_list(rows * 2), from_list(got * 2), ["y"])["y"]


def test_constants_that_are_equal_are_not_swapped() -> None:
    """Two counts, each the same in all samples: that the wrong one equals the other is chance."""
    five, seven = (np.full((1, 1), value, dtype=np.float32) for value in (5, 7))
    rows: list[Tensors] = [{"a": five, "b": seven}] * 4
    got: list[Tensors] = [{"a": seven, "b": five}] * 4
    assert find_suspects(from_list(rows), from_list(got), ["a"]) == {}


@pytest.mark.parametrize(
    ("wanted", "found", "told"),
    [
        (1.0, np.inf, True),
        (1.0, np.nan, True),
        (1.0, 65504.0, True),
        (1.0, -65504.0, True),
        (1.0, 65503.0, False),
        (65504.0, np.inf, False),
        (np.inf, np.inf, False),
    ],
)
def test_an_overflow_of_half_precision_is_named(wanted: float, found: float, *, told: bool) -> None:
    rows: list[Tensors] = [{"y": np.array([0.5, 0.25])}, {"y": np.array([0.5, wanted])}]
    got: list[Tensors] = [{"y": np.array([0.5, 0.25])}, {"y": np.array([0.5, found])}]
    suspects = find_suspects(from_list(rows), from_list(got), ["y"], is_half=True)
    assert ("overflows in half precision" in suspects.get("y", "")) is told
    assert "overflows" not in find_suspects(from_list(rows), from_list(got), ["y"]).get("y", "")


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        ({"y": np.ones(2)}, {}),
        ({}, {"y": np.full(2, np.inf)}),
        ({"y": np.ones(2, np.int64)}, {"y": np.full(2, np.inf)}),
        ({"y": np.ones(2)}, {"y": np.full(2, 70000)}),
        ({"y": np.ones(0)}, {"y": np.ones(0)}),
    ],
)
def test_what_is_no_number_does_not_overflow(wanted: Tensors, found: Tensors) -> None:
    assert find_suspects(from_list([wanted]), from_list([found]), ["y"], is_half=True) == {}


def test_an_overflow_behind_a_sample_without_the_output_is_named() -> None:
    rows: list[Tensors] = [{"y": np.ones(2)}, {"y": np.ones(2)}]
    got: list[Tensors] = [{}, {"y": np.full(2, np.inf)}]
    assert "overflows" in find_suspects(from_list(rows), from_list(got), ["y"], is_half=True)["y"]


@pytest.mark.parametrize(("noise", "words"), [(0.03, "in another order"), (0.3, "nobody")])
def test_an_order_is_named_only_where_it_explains_what_came_back(noise: float, words: str) -> None:
    rng = np.random.default_rng(1)
    shuffled = rng.permutation(100)

    def change(y: Array) -> Array:
        return np.asarray((y.reshape(-1)[shuffled] + noise * rng.normal(size=100)).reshape(y.shape))

    assert words in suspect(change)
    assert words in suspect(change, ROWS[:2])
    assert suspect(change, ROWS[:1]) == "nobody"  # one sample alone could be sorted into anything


@pytest.mark.parametrize(("noise", "words"), [(0.1, "nobody"), (0.001, "in another order")])
def test_an_order_that_gains_little_is_not_named(noise: float, words: str) -> None:
    rng = np.random.default_rng(1)
    rows: list[Tensors] = [{"y": np.arange(100.0) + 0.01 * rng.normal(size=100)} for _ in range(4)]
    swapped = np.r_[:10, 11, 10, 12:100]  # 52 dB as it is
    assert words in suspect(lambda y: y[swapped] + noise * rng.normal(size=100), rows)


VNNI = "flags : fpu sse avx2 avx512f avx512_vnni"
NO_VNNI = "flags : fpu sse avx2 avx512f"


def run_of(*ops: str, device: str = "host", evidence: Evidence = Evidence.EMULATED) -> DeviceRun:
    nodes = tuple(PlacedNode(name=f"n{i}", op=op, domain="", provider=CPU_PROVIDER) for i, op in enumerate(ops))
    refused = refuse_run(Stub(name=device, evidence=evidence), "")
    return replace(refused, placement=nodes, placement_source="session", failure=None)


def job_of(model: Path, target: str) -> Job:
    return Job(
        model=model, target=load_target(target), outputs=(), samples=Samples(source="", count=0, read=lambda: iter(()))
    )


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path, target="qnn")


HERE, HASWELL = run_of(evidence=Evidence.SAME_EP), run_of(device="host:haswell", evidence=Evidence.SAME_EP)
ON_ARM = run_of(device="arm64", evidence=Evidence.SAME_EP)


@pytest.mark.parametrize(
    ("run", "target", "flags", "form", "is_named"),
    [
        (HERE, "openvino", NO_VNNI, 1, True),
        (HASWELL, "cpu", NO_VNNI, 1, True),
        # For a phone this machine adds as the phone does (`find_exact_sums`).
        (HERE, "cpu", NO_VNNI, 1, False),
        (ON_ARM, "openvino", NO_VNNI, 1, False),
        (HERE, "openvino", VNNI, 1, False),
        (HERE, "openvino", "", 1, False),
        (run_of(evidence=Evidence.DEVICE), "openvino", NO_VNNI, 1, False),
        (run_of(evidence=Evidence.SAME_ARCH), "openvino", NO_VNNI, 1, False),
        (HERE, "openvino", NO_VNNI, 0, False),
    ],
)
def test_saturation_is_named_on_an_x86_without_vnni_only(
    models: tuple[Model, Model], bundle: Bundle, monkeypatch: pytest.MonkeyPatch,
    run: DeviceRun, target: str, flags: str, form: int, *, is_named: bool,
) -> None:  # fmt: skip
    for module in (machine, suspects):
        monkeypatch.setattr(module, "read_cpu_flags", lambda: flags)
    traps = [*list_traps(bundle, run, job_of(models[form].path, target))]
    assert ["saturate here, not on Arm" in trap for trap in traps] == [True] * is_named


@pytest.mark.parametrize(
    ("target", "settings", "remedy"),
    [
        ("cpu", {}, "verify on Arm"),
        ("cpu", {"arch": "x64-vnni"}, "for PCs without VNNI build with --set arch=x64"),
        ("openvino", {}, "run here with session.x64quantprecision = 1"),
    ],
)
def test_what_to_do_about_saturation_depends_on_the_target(
    models: tuple[Model, Model], bundle: Bundle, target: str, settings: dict[str, str], remedy: str
) -> None:
    job = replace(job_of(models[1].path, target), target=load_target(target, settings))
    (trap,) = list_traps(bundle, HASWELL, job)
    assert trap.endswith(f"saturate here, not on Arm; {remedy}")


def test_weights_of_seven_bits_and_unsigned_ones_do_not_saturate(models: tuple[Model, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(models[1].path))
    for dtype in (np.int8, np.uint8):
        changed = onnx.ModelProto.FromString(proto.SerializeToString())
        for tensor in changed.graph.initializer:
            if tensor.data_type == onnx.TensorProto.INT8:
                value = numpy_helper.to_array(tensor)
                value = (value // 2 if dtype is np.int8 else value.astype(np.int16) + 128).astype(dtype)
                tensor.CopyFrom(numpy_helper.from_array(value, tensor.name))
        onnx.save(changed, str(tmp_path / "safe.onnx"))
        assert (has_large_weights(models[1].path), has_large_weights(tmp_path / "safe.onnx")) == (True, False)
    (tmp_path / "m.ort").write_bytes(b"ORTM")
    assert not has_large_weights(tmp_path / "m.ort")
    assert not has_large_weights(tmp_path / "none.onnx")


def test_another_version_of_the_htp_is_named(bundle: Bundle) -> None:
    (line,) = list_traps(bundle, run_of(device="qnn-htp-sim:v68"), job_of(Path("m.ort"), "qnn"))
    assert "built for HTP v79, the device is v68" in line
    assert list(list_traps(bundle, run_of(device="qnn-htp-sim:v79"), job_of(Path("m.ort"), "qnn"))) == []
    assert list(list_traps(bundle, run_of(device="qnn-htp-sim"), job_of(Path("m.ort"), "qnn"))) == []
    unset = replace(bundle, manifest=replace(bundle.manifest, settings={}))
    assert list(list_traps(unset, run_of(device="qnn-htp-sim:v68"), job_of(Path("m.ort"), "qnn"))) == []


def test_saved_optimisations_that_were_ignored_are_a_finding() -> None:
    wanted = {"session.enable_saved_runtime_optimizations": "1"}
    ignored = run_of("QuantizeLinear", *["DequantizeLinear", "Conv"] * 3)
    assert "were ignored: 3 layers ran in float" in str(find_ignored_optimisations(ignored, wanted))
    assert find_ignored_optimisations(ignored, {}) is None
    assert find_ignored_optimisations(run_of("QuantizeLinear", "QLinearConv", "DequantizeLinear"), wanted) is None
    assert find_ignored_optimisations(run_of("Conv", "Conv"), wanted) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda x: x[:, ::-1], "channels are in the other order"),
        (lambda x: np.moveaxis(x, 1, -1).reshape(x.shape), "in the other layout"),
        (lambda x: x * 255, "times 255, not normalised"),
        (lambda x: x / 255, "divided by 255, normalised twice"),
        (lambda x: x * 2 - 1, "from -1 to 1 instead of 0 to 1"),
        (lambda x: (x + 1) / 2, "from 0 to 1 instead of -1 to 1"),
        (lambda x: (x - x.mean()) / x.std(), "with their mean and deviation taken out once more"),
        (lambda x: np.roll(x, 3, 2), "nobody"),
        (lambda x: x, "nobody"),
    ],
)
def test_input_mistakes_are_found_by_making_them(tmp_path: Path, change: Callable[[Array], Array], words: str) -> None:
    model = save_network(tmp_path / "network.onnx")
    session = CpuSession(model.path, SessionSettings(level=Level.DISABLED))
    images = make_images()

    def run() -> Iterator[Tensors]:
        for sample in images:
            yield session.run({"x": np.ascontiguousarray(change(sample["x"]), dtype=np.float32)})

    got = Samples(source="device", count=images.count, read=run)
    assert words in str(find_input_mistake(model.path, images, got, "y") or "nobody")


def test_one_order_must_fit_all_samples() -> None:
    rng = np.random.default_rng(0)
    rows: list[Tensors] = [{"y": rng.normal(size=(1, 500)).astype(np.float32)} for _ in range(4)]
    order = rng.permutation(500)
    moved = from_list([{"y": row["y"][:, order] * 1.001} for row in rows])
    assert "in another order" in find_suspects(from_list(rows), moved, ["y"])["y"]
    shuffled = from_list([{"y": row["y"][:, rng.permutation(500)]} for row in rows])
    assert find_suspects(from_list(rows), shuffled, ["y"]) == {}


def test_a_run_in_half_precision_that_overflows_says_so(bundle: Bundle) -> None:
    half = restate(bundle, precision="fp16")
    lie = InProcess(lie=lambda rows: [{"y": row["y"] * np.float32(np.inf)} for row in rows])
    assert "overflows in half precision" in " / ".join(verify_bundle(half, [lie]).runs[0].failures)


def test_a_finding_fails_a_run_whose_figures_are_good(tmp_path: Path) -> None:
    # It runs the file in runtime style without its optimisations.
    placement = run_of("QuantizeLinear", *["DequantizeLinear", "Conv"] * 3).placement
    forgetful = InProcess(evidence=Evidence.EMULATED, retell=lambda _job, _run: {"placement": placement})
    bundle = make_bundle(tmp_path)
    plan = replace(bundle.manifest.verification[0], device="emulated", form="onnx")
    run = verify_bundle(restate(bundle, verification=(plan,)), [forgetful]).runs[0]
    assert run.passed
    assert not replace(run, findings=("the saved runtime optimisations were ignored",)).passed
    assert replace(run, traps=("a trap alone explains nothing",)).passed


def test_a_compiled_context_is_asked_for_no_mistake(tmp_path: Path) -> None:
    # It opens with the provider that compiled it alone: that was an error of the whole verification.
    text = "g (float[1,4] x) => (float[1,4] y) { y = com.microsoft.EPContext<embed_mode=1>(x) }"
    path = tmp_path / "m_ctx.onnx"
    onnx.save(parse_net(text, imports=', "com.microsoft" : 1'), path)
    rows = [{"x": np.ones((1, 4), np.float32)}]
    inputs = from_list(rows)
    assert find_input_mistake(path, inputs, from_list([{"y": rows[0]["x"]}]), "y") is None
