"""edgekit's runner: built with warnings as errors, equal to Python's bits here and on Arm, and with other providers."""

import itertools
import json
import re
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import (
    Stub,
    float_conv,
    make_job,
    noise_samples,
    qdq_conv,
    require_device,
    require_runner,
    run_in,
    text_model,
)

from edgekit._proc import run_process
from edgekit.convert.convert import convert_model
from edgekit.data.samples import Samples
from edgekit.devices.device import DeviceRun, Job, Missing
from edgekit.devices.find import find_device
from edgekit.devices.local.host import QNN, qnn_options
from edgekit.devices.local.runner import (
    LIBRARY,
    PROGRAM,
    NativeRunner,
    build_runner,
    copy_runner,
    find_runner,
    host_abi,
)
from edgekit.devices.process.run import describe_job, run_program
from edgekit.errors import BundleError, ModelError, UsageError
from edgekit.model.model import list_model_files, load_model
from edgekit.model.tensors import TensorSpec
from edgekit.target import load_target

pytestmark = pytest.mark.slow

JOB = {"model": "none.onnx", "provider": "CPUExecutionProvider"}


def feed(data: bytes, *, job: object = None) -> "subprocess.CompletedProcess[bytes]":
    """Gives the runner of this machine a job and then these bytes."""
    runner = require_runner(host_abi())
    line = json.dumps({**JOB, "runtime": str(runner.library)} if job is None else job).encode() + b"\n"
    return subprocess.run([runner.program, "--pipe"], input=line + data, capture_output=True, timeout=60, check=False)


@pytest.mark.parametrize("abi", ["linux-x64", "linux-arm64"])
def test_the_runner_is_small(abi: str) -> None:
    assert require_runner(abi).program.stat().st_size < 300_000


@pytest.mark.parametrize(
    ("native", "python", "kind"),
    [
        *(("host:native", "host", kind) for kind in ("float", "qdq")),
        pytest.param("arm64:native", "arm64", "qdq", marks=pytest.mark.long),
    ],
)
def test_the_native_runner_gives_pythons_bits(tmp_path: Path, native: str, python: str, kind: str) -> None:
    path = tmp_path / "f.onnx"
    job = make_job(float_conv(path) if kind == "float" else qdq_conv(path, np.uint8), "nnapi")
    got = run_in(require_device(native, "nnapi"), job, tmp_path / "a")
    want = run_in(find_device(python, load_target("nnapi")), job, tmp_path / "b")
    assert got.failure is None
    assert (got.placement, got.versions["onnxruntime"]) == (want.placement, want.versions["onnxruntime"])
    assert got.cpu_features
    for mine, other in zip(got.outputs, want.outputs, strict=True):
        assert mine["y"].tobytes() == other["y"].tobytes()


def test_maps_and_lists_are_those_of_python(tmp_path: Path) -> None:
    """scikit-learn's classifiers give a map of each row, by ZipMap."""
    graph = """<ir_version: 8, opset_import: ["" : 17, "ai.onnx.ml" : 1]>
        g (float[2,3] x) => (seq(map(string, float)) p, seq(float[N]) q)
        { p = ai.onnx.ml.ZipMap<classlabels_strings = ["a", "b", "c"]>(x) q = SplitToSequence(x) }"""
    path = tmp_path / "m.onnx"
    onnx.save(onnx.parser.parse_model(graph), str(path))
    types = {"p.keys": "string", "p.values": "float32", "q.length": "int64", "q[0]": "float32", "q[1]": "float32"}
    job = make_job(path, "cpu", [{"x": np.arange(6, dtype=np.float32).reshape(2, 3)}])
    job = msgspec.structs.replace(
        job, outputs=tuple(TensorSpec(name=name, dtype=dtype, shape=None) for name, dtype in types.items())
    )
    got, want = (
        run_in(find_device(name, load_target("cpu")), job, tmp_path / name) for name in ("host:native", "host")
    )
    assert got.failure is None
    (mine,), (other,) = got.outputs, want.outputs
    assert sorted(mine) == sorted(other) == [*types]
    for name in types:
        np.testing.assert_array_equal(mine[name], other[name])


def test_arm64_runs_a_model_with_weights_beside_it(tmp_path: Path, work: Path) -> None:
    """Its ONNX Runtime cannot ask where a file really lies."""
    weight = np.arange(600, dtype=np.float32).reshape(2, 300)
    body = "(float[1,2] x) => (float[1,300] y) { y = MatMul(x, w) }"
    proto = onnx.load(text_model(tmp_path / "m.onnx", body, w=weight))
    onnx.save(proto, str(tmp_path / "m.onnx"), save_as_external_data=True, location="m.data", size_threshold=0)
    sample = {"x": np.array([[2.0, 1.0]], np.float32)}
    run = require_device("arm64:native").run_job(make_job(tmp_path / "m.onnx", "cpu", [sample]), work)
    assert run.failure is None
    (got,) = run.outputs
    assert np.array_equal(got["y"], sample["x"] @ weight)


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        ({}, "the job names no model"),
        ([], "the job is no object"),
        ({"model": 1}, "'model' is no string"),
        ({"model": "m\x00"}, "null character"),
        ({**JOB, "threads": -1}, "'threads' is no whole number"),
        ({**JOB, "threads": 1e6}, "'threads' is no whole number"),
        ({**JOB, "repeat": 0}, "'repeat' is less than 1"),
        ({**JOB, "session_config": {"a": 1}}, "'a' is no string"),
        ({**JOB, "model": [[]] * 40 and json.loads("[" * 40 + "]" * 40)}, "it is too deep"),
    ],
)
def test_a_job_that_is_malformed_is_an_error(job: object, reason: str) -> None:
    done = feed(b"", job=job)
    assert done.returncode == 2
    assert reason in done.stderr.decode()
    assert not done.stdout


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"runtime": "/no/such/lib.so"}, "cannot open ONNX Runtime"),
        ({}, "none.onnx"),
        ({"level": "fast"}, "'fast' is no optimization level"),
        ({"provider": "QNNExecutionProvider"}, "QNN"),
        ({"provider": "NnapiExecutionProvider"}, "this ONNX Runtime was built without NNAPI"),
        ({"provider": "NnapiExecutionProvider", "provider_options": {"FAST": "1"}}, "'FAST' is no flag of NNAPI"),
        ({"provider": "X", "library": "/no/such/ep.so"}, "/no/such/ep.so"),
        # What follows a job that is good.
        (b"[", "the input ends in the middle of a line"),
        (b"{}\n", "the header of a sample is no list"),
        (b"[" * (2 << 20), "a line of the input is longer than a MiB"),
        (b'[{"name":"x","dtype":"float32","shape":[1],"size_bytes":4}]\n12', "ends in the middle of 'x'"),
        (b'[{"name":"x","dtype":"float32","shape":[1],"size_bytes":5}]\n12345', "not that of its shape"),
        (b'[{"name":"x","dtype":"float32","shape":[-1],"size_bytes":4}]\n1234', "negative dimension"),
        (b'[{"name":"x","dtype":"float32","shape":[0,4294967296,4294967296],"size_bytes":0}]\n', "too large"),
        (b'[{"name":"x","dtype":"complex64","shape":[],"size_bytes":8}]\n12345678', "dtype of 'x' is unknown"),
        (b'[{"name":"x","dtype":"string","shape":[2],"size_bytes":5}]\n["a"]', "malformed JSON"),
        (b'[{"name":"x","dtype":"string","shape":[],"size_bytes":4}]\n"\xff\xff"', "malformed JSON"),
        (b"[[]]\n", "dtype of '' is unknown"),
        (b"[]\n", "x"),
        (b'[{"name":"z","dtype":"int8","shape":[],"size_bytes":1}]\n1', "z"),
    ],
)
def test_what_onnx_runtime_refuses_or_a_malformed_sample_is_a_refusal(
    tmp_path: Path, given: dict[str, object] | bytes, reason: str
) -> None:
    job = {**JOB, "runtime": str(require_runner(host_abi()).library)}
    if isinstance(given, bytes):
        done = feed(given, job={**job, "model": str(float_conv(tmp_path / "f.onnx"))})
    else:
        done = feed(b"", job={**job, **given})
    run = json.loads(done.stdout)
    assert (done.returncode, run["status"]) == (0, "refused")
    assert reason in run["message"]


def test_the_runner_ends_when_nobody_reads(tmp_path: Path) -> None:
    runner = require_runner(host_abi())
    line = json.dumps({**JOB, "model": str(float_conv(tmp_path / "f.onnx")), "runtime": str(runner.library)})
    with subprocess.Popen([runner.program, "--pipe"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdin is not None
        assert child.stdout is not None
        child.stdin.write(line.encode() + b"\n")
        child.stdin.flush()
        child.stdout.close()
        assert child.wait(20) == 3


def test_a_runner_that_is_killed_in_the_middle_is_a_failure(tmp_path: Path, work: Path) -> None:
    native = require_runner(host_abi())
    job = make_job(float_conv(tmp_path / "f.onnx"), "nnapi")
    (row,) = noise_samples(1)
    samples = Samples(source="many", count=1 << 20, read=lambda: iter(itertools.repeat(row, 1 << 20)))
    job = msgspec.structs.replace(job, samples=samples, budget_s=60.0)
    request = describe_job(job, runtime=str(native.library))
    program = ["timeout", "--foreground", "-s", "KILL", "1", str(native.program), "--pipe"]
    run = run_program(Stub(), program, job, request, work)
    assert re.fullmatch(r"'stub' at sample \d+ of 1048576: the program .*(137|SIGKILL).*", str(run.failure))
    assert run.outputs.count > 0


def test_a_copy_runs_with_the_library_beside_it(tmp_path: Path) -> None:
    copied = copy_runner(require_runner(host_abi()), tmp_path / "out")
    line = json.dumps({**JOB, "model": str(float_conv(tmp_path / "f.onnx"))})
    done = subprocess.run([copied.program, "--pipe"], input=line.encode() + b"\n", capture_output=True, check=True)
    assert json.loads(done.stdout)["status"] == "done"


def test_android_needs_its_ndk_and_library(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="needs --ndk and --library"):
        build_runner("arm64-v8a", lambda _: None)
    with pytest.raises(UsageError, match="is no Android NDK"):
        build_runner("arm64-v8a", lambda _: None, ndk=tmp_path, library=tmp_path / "a.aar")
    with pytest.raises(UsageError, match="did you mean 'linux-arm64'"):
        build_runner("linux-arm", lambda _: None)


def test_the_sources_compile_for_android() -> None:
    """Only the syntax, with glibc's headers: nothing here holds Android's own."""
    headers = Path("/usr/aarch64-linux-gnu/include")
    if run_process(["sh", "-c", "command -v clang++"], timeout_s=20).status or not headers.is_dir():
        pytest.skip("clang or the Arm headers are not here: apt-get install clang g++-aarch64-linux-gnu")
    newest = max((headers / "c++").iterdir(), key=lambda folder: int(folder.name))
    includes = [f"-isystem{folder}" for folder in (newest, newest / "aarch64-linux-gnu", headers)]
    sources = [f"-include{path}" for path in sorted((Path(__file__).parents[2] / "tools/runner/src").glob("*.cpp"))]
    flags = ["--target=aarch64-linux-android29", "-std=c++17", "-fsyntax-only", "-nostdinc++", "-nostdlibinc"]
    done = run_process(
        ["clang++", *flags, "-Wall", "-Wextra", "-Werror", *includes, *sources, "-xc++", "/dev/null"], timeout_s=300
    )
    assert done.succeeded, done.stderr


def run_plugin(job: Job, work: Path) -> DeviceRun:
    """Runs a job with the runner of this machine and Qualcomm's provider library."""
    library = pytest.importorskip("onnxruntime_qnn", reason="pip install onnxruntime-qnn==2.7.0").get_library_path()
    native = require_runner(host_abi())
    options = qnn_options(job.target.session.provider_options)
    request = msgspec.structs.replace(
        describe_job(job, provider=QNN), runtime=str(native.library), library=str(library), provider_options=options
    )
    return run_program(Stub(), [str(native.program), "--pipe"], job, request, work)


@pytest.mark.parametrize("form", ["onnx", pytest.param("context", marks=pytest.mark.long)])
def test_qualcomms_simulator_gives_the_same_bits(tmp_path: Path, work: Path, form: str) -> None:
    path = qdq_conv(tmp_path / "f.onnx", np.uint8)
    job = make_job(path, "qnn")
    simulator = require_device("qnn-htp-sim", "qnn")
    if form == "context":
        converted = convert_model(load_model(path), load_target("qnn"), tmp_path / "out")
        assert len(converted.files["context"]) == 2
        job = msgspec.structs.replace(job, model=tmp_path / "out" / converted.files["context"][0])
    want, got = run_in(simulator, job, work / "a"), run_plugin(job, work)
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


def test_the_binary_files_of_a_context_are_those_that_its_nodes_name(tmp_path: Path) -> None:
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
def test_an_outer_context_is_refused(
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
    """Stands for an NDK: its compiler is this machine's cross compiler; the cache is empty."""
    require_runner("linux-arm64")
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    clang = tmp_path / "ndk/toolchains/llvm/prebuilt/linux-x86_64/bin/clang++"
    clang.parent.mkdir(parents=True)
    clang.write_text('#!/bin/sh\nshift\nexec aarch64-linux-gnu-g++ "$@"\n')
    clang.chmod(0o755)
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
