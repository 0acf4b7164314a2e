"""Known traps: each is stepped into, and named; and none is named where there is none."""

from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from bundle_models import make_bundle
from onnx import numpy_helper
from verify_devices import InProcess, from_list
from verify_models import make_images, quantize, save_network

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.folder import Bundle
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job, PlacedNode
from edgekit.evidence import Evidence
from edgekit.model.model import Model
from edgekit.model.tensors import Array, Tensors
from edgekit.verify.run import verify_bundle
from edgekit.verify.suspects import (
    find_ignored_optimisations,
    find_input_mistake,
    find_suspects,
    list_traps,
    may_saturate,
)

VNNI = "flags : fpu sse avx2 avx512f avx512_vnni"
NO_VNNI = "flags : fpu sse avx2 avx512f"


def run_of(*ops: str, device: str = "host", evidence: Evidence = Evidence.EMULATED) -> DeviceRun:
    nodes = tuple(PlacedNode(name=f"n{i}", op=op, domain="", provider=CPU_PROVIDER) for i, op in enumerate(ops))
    return DeviceRun(
        device=device,
        evidence=evidence,
        outputs=from_list([]),
        placement=nodes,
        placement_source="session",
        load_ms=1.0,
        latency_ms=(),
        peak_rss_bytes=1,
        versions={},
        failure=None,
    )


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> tuple[Model, Model]:
    return quantize(tmp_path_factory.mktemp("models"))


@pytest.fixture
def bundle(tmp_path: Path) -> Bundle:
    return make_bundle(tmp_path, target="qnn")


def test_saturation_is_named_on_an_x86_without_vnni_only(models: tuple[Model, Model], bundle: Bundle) -> None:
    float_model, integer_model = (model.path for model in models)
    assert "saturate here, not on Arm" in next(list_traps(bundle, run_of(), integer_model, NO_VNNI))
    on_arm = run_of(device="arm64", evidence=Evidence.SAME_EP)
    assert list(list_traps(bundle, on_arm, integer_model, NO_VNNI)) == []
    for model, flags, evidence in (
        (integer_model, VNNI, Evidence.EMULATED),
        (integer_model, "", Evidence.EMULATED),
        (integer_model, NO_VNNI, Evidence.DEVICE),
        (integer_model, NO_VNNI, Evidence.SAME_ARCH),
        (float_model, NO_VNNI, Evidence.EMULATED),
    ):
        assert list(list_traps(bundle, run_of(evidence=evidence), model, flags)) == []


def test_weights_of_seven_bits_do_not_saturate(models: tuple[Model, Model], tmp_path: Path) -> None:
    proto = onnx.load(str(models[1].path))
    for tensor in proto.graph.initializer:
        if tensor.data_type == onnx.TensorProto.INT8:
            halved = numpy_helper.to_array(tensor) // 2
            tensor.CopyFrom(numpy_helper.from_array(halved.astype(np.int8), tensor.name))
    onnx.save(proto, str(tmp_path / "seven.onnx"))
    assert (may_saturate(models[1].path), may_saturate(tmp_path / "seven.onnx")) == (True, False)


def test_another_version_of_the_htp_is_named(bundle: Bundle) -> None:
    (line,) = list_traps(bundle, run_of(device="qnn-htp-sim:v68"), Path("m.ort"), "")
    assert "built for HTP v79, the device is v68" in line
    assert list(list_traps(bundle, run_of(device="qnn-htp-sim:v79"), Path("m.ort"), "")) == []
    assert list(list_traps(bundle, run_of(device="qnn-htp-sim"), Path("m.ort"), "")) == []


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
        (lambda x: x * 2 - 1, "from -1 to 1 instead of 0 to 1"),
        (lambda x: np.roll(x, 3, 2), "nobody"),
        (lambda x: x, "nobody"),
    ],
)
def test_mistakes_in_the_inputs_are_found_by_making_them(
    tmp_path: Path, change: Callable[[Array], Array], words: str
) -> None:
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


def test_an_overflow_in_half_precision_is_named(bundle: Bundle) -> None:
    rows: list[Tensors] = [{"y": np.full((1, 8), 100.0, np.float32)}] * 3
    for broken in (np.inf, np.nan, 65504.0):
        got = from_list([{"y": np.full((1, 8), broken, np.float32)}] * 3)
        assert "overflows in half precision" in find_suspects(from_list(rows), got, ["y"], is_half=True)["y"]
        assert "overflows" not in find_suspects(from_list(rows), got, ["y"]).get("y", "")
    half = msgspec.structs.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, precision="fp16"))
    lie = InProcess(lie=lambda rows: [{"y": row["y"] * np.float32(np.inf)} for row in rows])
    assert "overflows in half precision" in " / ".join(verify_bundle(half, [lie]).runs[0].failures)


def test_a_finding_fails_a_run_whose_figures_are_good(tmp_path: Path) -> None:
    class Forgetful(InProcess, frozen=True, kw_only=True):
        """Runs the file in runtime style without its optimisations."""

        def run_job(self, job: Job, work: Path) -> DeviceRun:
            placement = run_of("QuantizeLinear", *["DequantizeLinear", "Conv"] * 3).placement
            return msgspec.structs.replace(super().run_job(job, work), placement=placement)

    bundle = make_bundle(tmp_path)
    plan = msgspec.structs.replace(bundle.manifest.verification[0], device="emulated", form="onnx")
    bundle = msgspec.structs.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, verification=(plan,)))
    run = verify_bundle(bundle, [Forgetful(evidence=Evidence.EMULATED)]).runs[0]
    assert run.passed
    assert not msgspec.structs.replace(run, findings=("the saved runtime optimisations were ignored",)).passed
    assert msgspec.structs.replace(run, traps=("a trap alone explains nothing",)).passed


def test_a_compiled_context_is_asked_for_no_mistake(tmp_path: Path) -> None:
    # It opens with the provider that compiled it alone: that was an error of the whole verification.
    text = "g (float[1,4] x) => (float[1,4] y) { y = com.microsoft.EPContext<embed_mode=1>(x) }"
    path = tmp_path / "m_ctx.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17, "com.microsoft": 1]> {text}'), path)
    rows = [{"x": np.ones((1, 4), np.float32)}]
    inputs = Samples(source="x", count=1, read=lambda: iter(rows))
    got = Samples(source="y", count=1, read=lambda: iter([{"y": rows[0]["x"]}]))
    assert find_input_mistake(path, inputs, got, "y") is None
