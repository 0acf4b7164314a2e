"""The runner with a plug-in provider, contexts, and the way to an Android build."""

import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import Stub, make_job, present, qdq_conv, require_runner

from edgekit.convert.convert import convert_model
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.local.host import QNN, qnn_options
from edgekit.devices.local.runner import LIBRARY, PROGRAM, NativeRunner, build_runner, find_runner, host_abi
from edgekit.devices.process.files import list_model_files
from edgekit.devices.process.run import describe_job, run_program
from edgekit.errors import BundleError, ModelError, UsageError
from edgekit.model.model import load_model
from edgekit.target import load_target

pytestmark = pytest.mark.slow


def run_plugin(job: Job, work: Path) -> DeviceRun:
    """Runs a job with the runner of this machine and Qualcomm's provider library."""
    library = pytest.importorskip("onnxruntime_qnn", reason="pip install onnxruntime-qnn==2.7.0").get_library_path()
    native = require_runner(host_abi())
    request = msgspec.structs.replace(
        describe_job(job, provider=QNN),
        runtime=str(native.library),
        library=str(library),
        provider_options=qnn_options(job.target.session.provider_options),
    )
    return run_program(Stub(), [str(native.program), "--pipe"], job, request, work)


@pytest.mark.parametrize("form", ["onnx", "context"])
def test_qualcomms_simulator_gives_the_same_bits(tmp_path: Path, work: Path, form: str) -> None:
    path = qdq_conv(tmp_path / "f.onnx", np.uint8)
    job = make_job(path, "qnn")
    simulator = present("qnn-htp-sim", "qnn")
    if form == "context":
        converted = convert_model(load_model(path), load_target("qnn"), tmp_path / "out")
        assert len(converted.files["context"]) == 2
        job = msgspec.structs.replace(job, model=tmp_path / "out" / converted.files["context"][0])
    (work / "a").mkdir()
    (work / "b").mkdir()
    want = simulator.run_job(job, work / "a")
    got = run_plugin(job, work / "b")
    assert (got.failure, want.failure) == (None, None)
    assert got.placement == want.placement
    assert {node.provider for node in got.placement} == {QNN}
    for mine, other in zip(got.outputs, want.outputs, strict=True):
        assert mine["y"].tobytes() == other["y"].tobytes()


def save_context(folder: Path, name: str | bytes) -> Path:
    """A model of two contexts, the first of which lies in a file of that name."""
    text = """<ir_version: 9, opset_import: ["" : 17, "com.microsoft" : 1]> g (float[1] x) => (float[1] z) {
      y = com.microsoft.EPContext<embed_mode = 0, main_context = 1>(x)
      z = com.microsoft.EPContext<embed_mode = 1, main_context = 1>(y) }"""
    proto = onnx.parser.parse_model(text)
    proto.graph.node[0].attribute.append(onnx.helper.make_attribute("ep_cache_context", name))
    onnx.save(proto, str(folder / "m.onnx"))
    return folder / "m.onnx"


def test_the_files_of_a_context_are_named_by_its_nodes(tmp_path: Path) -> None:
    (tmp_path / "c.bin").write_bytes(b"compiled")
    assert list(list_model_files(save_context(tmp_path, "c.bin"))) == ["m.onnx", "c.bin"]
    before = load_model(tmp_path / "m.onnx")
    (tmp_path / "c.bin").write_bytes(b"otherwise")
    assert load_model(tmp_path / "m.onnx").sha256 != before.sha256


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("../secret", "refers to external data '../secret' outside its folder"),
        ("/etc/passwd", "outside its folder"),
        (b"a\0b", r"'a\x00b' outside its folder"),
        (b"\xff\xfe", "outside its folder"),
        ("", "outside its folder"),
        ("none.bin", "needs external data 'none.bin', which is missing"),
    ],
)
def test_a_context_outside_its_folder_is_refused_by_every_command(
    tmp_path: Path, refused: Callable[..., str], name: str | bytes, words: str
) -> None:
    (tmp_path.parent / "secret").write_bytes(b"of somebody else")
    model = save_context(tmp_path, name)
    for command in ("bench", "profile", "check", "inspect"):
        assert words in refused(command, str(model))
    with pytest.raises(ModelError, match="external data"):
        list_model_files(model)


@pytest.fixture
def ndk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stands for an NDK: its toolchain file leads to this machine's cross compiler; the cache is empty."""
    require_runner("linux-arm64")
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    toolchain = tmp_path / "ndk/build/cmake/android.toolchain.cmake"
    toolchain.parent.mkdir(parents=True)
    toolchain.write_text("set(CMAKE_SYSTEM_NAME Linux)\nset(CMAKE_CXX_COMPILER aarch64-linux-gnu-g++)\n")
    return tmp_path / "ndk"


def write_aar(path: Path, name: str = "jni/arm64-v8a/libonnxruntime.so") -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(name, b"a library")
    return path


@pytest.mark.long
def test_an_android_runner_takes_its_library_from_the_archive(tmp_path: Path, ndk: Path) -> None:
    assert isinstance(find_runner("arm64-v8a"), Missing)
    built = build_runner("arm64-v8a", lambda _: None, ndk=ndk, library=write_aar(tmp_path / "ort.aar"))
    assert built.library.read_bytes() == b"a library"
    assert built.program.read_bytes()[18] == 183  # ELF's number of 64-bit Arm
    assert set(built.files) == {PROGRAM, LIBRARY}
    assert isinstance(find_runner("arm64-v8a"), NativeRunner)
    with pytest.raises(UsageError, match="for arm64-v8a"):
        build_runner("arm64-v8a", lambda _: None, ndk=ndk, library=write_aar(tmp_path / "b.aar", "jni/x86/a.so"))
    with pytest.raises(BundleError, match="absolute or climbs"):
        build_runner("arm64-v8a", lambda _: None, ndk=ndk, library=write_aar(tmp_path / "c.aar", "../a.so"))
    assert isinstance(find_runner("arm64-v8a"), NativeRunner)
