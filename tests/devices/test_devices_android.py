"""The archive for Android: what is taken out of it, what is refused, and what its libraries do in their process."""

import shutil
import struct
import subprocess
import zipfile
from pathlib import Path

import msgspec
import numpy as np
import onnx
import pytest
from devices_models import float_conv, make_job, qdq_conv, require_device, run_in, text_model
from fixture_types import MakeOnce, present
from test_devices_android_abi import Built, build_checks

from edgekit._ort import CPU_PROVIDER, CpuSession, SessionSettings
from edgekit.check.check import check_model
from edgekit.devices.android.android import NNAPI, XNNPACK
from edgekit.devices.android.installed import LIBRARY, LOADER, MACHINES, read_library, unpack_archive
from edgekit.devices.android.network import find_feature_level
from edgekit.devices.find import find_device, install_device, list_devices
from edgekit.devices.local.runner import PROGRAM, find_sources
from edgekit.devices.observe import observe_placement
from edgekit.devices.release import Compiler, Installed
from edgekit.errors import DeviceError, EdgekitError, UsageError
from edgekit.evidence import Evidence
from edgekit.jobs.check import fix_for_target
from edgekit.model.model import load_model
from edgekit.model.tensors import Array
from edgekit.prepare.constants import disable_harmful
from edgekit.target import load_target

pytestmark = pytest.mark.slow

INTERFACE = Path(__file__).parent / "android_abi" / "check_interface.cc"


def library_for_android(
    path: Path, *, version: str = "1.29.0", api: str = "OrtGetApiBase", imports: str = "no_such_function"
) -> Path:
    """A library for this machine that says of itself what ONNX Runtime's does, and has an interface of version 0."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("cc is missing: apt-get install gcc")
    path.parent.mkdir(parents=True, exist_ok=True)
    script = path.parent / "script"
    script.write_text(f"VERS_{version} {{ global: {api}; local: *; }};")
    source = path.parent / "source.c"
    source.write_text(f"long {imports}(void); void *{api}(void) {{ return (void *)(0 * {imports}()); }}")
    flags = ["-shared", "-fPIC", "-nostdlib", "-Wl,--hash-style=gnu", f"-Wl,--version-script={script}"]
    subprocess.run([compiler, *flags, "-o", str(path), str(source)], check=True)
    return path


def archive_of(path: Path, entries: dict[str, bytes]) -> Path:
    with zipfile.ZipFile(path, "w") as archive:
        for name, data in entries.items():
            archive.writestr(name, data)
    return path


def test_installing_an_archive_unpacks_its_library_and_facts(tmp_path: Path) -> None:
    library = library_for_android(tmp_path / "made" / LIBRARY).read_bytes() + b"XnnpackExecutionProvider\0"
    entries = {"classes.jar": b"jar", "headers/onnxruntime_c_api.h": b"h", f"jni/x86_64/{LIBRARY}": library}
    entries |= {"other.txt": b"left where it is", "jni/x86_64/libonnxruntime4j_jni.so": library}
    archive = archive_of(tmp_path / "a.aar", entries)
    found = unpack_archive(archive, tmp_path / "out", tmp_path, lambda _: None)
    assert (found.archive, found.version, found.providers) == ("a.aar", "1.29.0", (XNNPACK,))
    assert found.imports == {"x86_64": ("no_such_function",)}
    names = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*.*")}
    made = {"classes.jar", "headers/onnxruntime_c_api.h", f"x86_64/{LIBRARY}", "x86_64/libonnxruntime4j_jni.so"}
    assert names == made


def test_a_bad_archive_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    folder, place = tmp_path, f"jni/x86_64/{LIBRARY}"
    good = library_for_android(folder / "good" / LIBRARY).read_bytes()
    old = library_for_android(folder / "old" / LIBRARY, version="1.10.0").read_bytes()
    other = library_for_android(folder / "other" / LIBRARY, api="another").read_bytes()
    whole = archive_of(folder / "whole.aar", {place: good})
    cut = folder / "cut.aar"
    cut.write_bytes(whole.read_bytes()[:-100])
    damaged = folder / "damaged.aar"
    damaged.write_bytes(whole.read_bytes().replace(good[2000:2040], b"x" * 40))
    text = folder / "text.aar"
    text.write_text("no archive")
    for path, words in (
        (folder / "nothing.aar", "there is no file"),
        (text, "is no whole .aar"),
        (cut, "is no whole .aar"),
        (damaged, "is no whole .aar"),
        (archive_of(folder / "empty.aar", {}), "holds no libonnxruntime.so for arm64-v8a or x86_64"),
        (archive_of(folder / "32.aar", {f"jni/x86/{LIBRARY}": good}), "only for x86"),
        (archive_of(folder / "arm.aar", {f"jni/arm64-v8a/{LIBRARY}": good}), "is for x86_64"),
        (archive_of(folder / "no.aar", {place: b"text"}), "is no 64-bit ELF library"),
        (archive_of(folder / "cl.aar", {place: good[: len(good) // 3]}), "cut off or damaged"),
        (archive_of(folder / "ha.aar", {place: good[:40]}), "cut off or damaged"),
        (archive_of(folder / "other.aar", {place: other}), "is no ONNX Runtime"),
        (archive_of(folder / "old.aar", {place: old}), "is ONNX Runtime 1.10.0"),
    ):
        with pytest.raises(EdgekitError, match=words) as caught:
            install_device("android", lambda _: None, library=path)
        assert "\n" not in caught.value.message
        assert caught.value.hint
        assert not LOADER.folder.exists()


def test_an_import_without_a_stand_in_is_named(tmp_path: Path, make_once: MakeOnce) -> None:
    built: Built = build_checks("x86_64", make_once)
    objects = tuple(Path(shutil.copy(path, tmp_path)) for path in built.objects)
    library = library_for_android(tmp_path / "made" / LIBRARY)
    imports = {*read_library(library).imports, "another_one", "strlen"}
    with pytest.raises(DeviceError, match="imports what edgekit has no stand-in for: another_one, no_such_function"):
        LOADER.link(built.compiler, objects, imports, tmp_path / "program", name="new.aar")


def test_without_a_compiler_nothing_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where none is there, nor where none is for the machine of an archive's only library."""
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    library = library_for_android(tmp_path / "made" / LIBRARY).read_bytes()
    archive = archive_of(tmp_path / "a.aar", {f"jni/x86_64/{LIBRARY}": library})
    compiler = Compiler(name="none", c=(), cpp=())
    for known in ({}, {"aarch64": compiler}):
        loader = msgspec.structs.replace(LOADER, find_compiler=known.get)
        with pytest.raises(DeviceError, match="there is no compiler for the stand-in for Android"):
            loader.install(lambda _: None, archive)
    assert not LOADER.folder.exists()


@pytest.mark.long
def test_another_versions_archive_is_installed(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    library = library_for_android(tmp_path / "made" / LIBRARY, version="1.33.7", imports="getpid").read_bytes()
    archive = archive_of(tmp_path / "new.aar", {f"jni/x86_64/{LIBRARY}": library + b"XnnpackExecutionProvider\0"})
    said: list[str] = []
    install_device("android:x86_64", said.append, library=archive)
    assert said[-1] == "ONNX Runtime 1.33.7 of new.aar for x86_64 with XnnpackExecutionProvider"
    (status,) = (status for status in list_devices() if status.name == "android")
    assert status.reason == "it was installed without arm64-v8a"
    device = find_device("android:x86_64", load_target("xnnpack"))
    run = device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "xnnpack"), work)
    assert "\n" not in present(run.failure)


def test_a_provider_that_is_lacking_is_refused(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = LOADER.find_installed()
    if now is None:
        pytest.skip("android is not installed: edgekit devices install android")
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    LOADER.folder.mkdir(parents=True)
    less = msgspec.structs.replace(now, archive="less.aar", providers=(XNNPACK,), abis=("x86_64",))
    (LOADER.folder / "device.json").write_bytes(msgspec.json.encode(less))
    device = find_device("android:x86_64", load_target("nnapi"))
    run = device.run_job(make_job(float_conv(tmp_path / "f.onnx"), "nnapi", precision="fp32"), work)
    assert run.failure == "'less.aar' was built without NnapiExecutionProvider"
    missing = present(find_device("android", load_target("nnapi")).find_missing())
    assert missing.reason == "it was installed without arm64-v8a"


def test_an_installation_from_other_sources_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path))
    facts = Installed(
        archive="a", sha256="", version="1.29.0", providers=(), abis=("x86_64",), libraries=(), sources="other"
    )
    LOADER.folder.mkdir(parents=True)
    (LOADER.folder / "device.json").write_bytes(msgspec.json.encode(facts))
    assert LOADER.find_installed() is None
    (LOADER.folder / "device.json").write_bytes(b"{")
    assert LOADER.find_installed() is None


def test_without_qemu_arm_is_named_with_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    require_device("android:x86_64", "xnnpack")
    monkeypatch.setenv("PATH", "")
    (status,) = (status for status in list_devices() if status.name == "android")
    assert (status.available, status.command) == (False, "apt-get install qemu-user-static")
    assert "qemu" in status.reason
    assert require_device("android:x86_64", "xnnpack").find_missing() is None


def test_evidence_differs_for_the_phone_s_library_and_that_for_another_cpu() -> None:
    nnapi = load_target("nnapi")
    assert find_device("android", nnapi).evidence is Evidence.SAME_BINARY
    assert find_device("android:x86_64", nnapi).evidence is Evidence.SAME_EP
    assert Evidence.SAME_BINARY.is_at_least(Evidence.SAME_EP)
    assert Evidence.SIMULATOR.is_at_least(Evidence.SAME_BINARY)
    with pytest.raises(UsageError, match="runs CPUExecutionProvider and Nnapi"):
        find_device("android", load_target("qnn"))


@pytest.mark.parametrize(("api", "level"), [(27, 27), (31, 31), (32, 1000006), (33, 1000007), (36, 1000008)])
def test_the_feature_level_is_that_of_the_release(api: int, level: int) -> None:
    assert find_feature_level(api) == level


@pytest.mark.parametrize("api", ["28", "29"])
def test_nnapi_itself_places_weights_per_channel_by_api_level(api: str, tmp_path: Path, work: Path) -> None:
    """Weights per channel are taken from API level 29 on."""
    target = load_target("nnapi", {"api_level": api})
    job = make_job(qdq_conv(tmp_path / "q.onnx", np.uint8), target)
    run = require_device("android:x86_64", "nnapi").run_job(job, work)
    assert run.load_ms > 0
    assert {node.provider for node in run.placement if node.op == "Conv"} == {NNAPI if int(api) >= 29 else CPU_PROVIDER}


def test_a_crash_on_any_cpu_is_a_failure(tmp_path: Path, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_device("android", "xnnpack")
    crashing = tmp_path / "cache" / "android"
    for abi in MACHINES:
        (crashing / abi).mkdir(parents=True)
        (crashing / abi / LIBRARY).symlink_to(LOADER.folder / abi / LIBRARY)
    program = bytearray((LOADER.folder / "arm64-v8a" / PROGRAM).read_bytes())
    # The first instruction is none.
    program[0x18:0x20] = struct.pack("<Q", 0)
    (crashing / "arm64-v8a" / PROGRAM).write_bytes(program)
    shutil.copy(LOADER.folder / "device.json", crashing)
    healthy = LOADER.folder / "x86_64" / PROGRAM
    monkeypatch.setenv("EDGEKIT_CACHE", str(tmp_path / "cache"))
    other = crashing / "x86_64" / PROGRAM
    other.symlink_to(healthy)
    (crashing / "arm64-v8a" / PROGRAM).chmod(0o755)
    job = make_job(float_conv(tmp_path / "f.onnx"), "xnnpack")
    first = require_device("android", "xnnpack").run_job(job, work)
    assert (first.crashed, str(first.failure).rpartition("; ")[2]) == (True, "'android:x86_64' runs it")
    other.unlink()
    other.write_text("#!/bin/sh\nkill -SEGV $$\n")
    other.chmod(0o755)
    second = run_in(require_device("android", "xnnpack"), job, work / "second")
    assert (second.crashed, str(second.failure).rpartition("; ")[2]) == (False, "'android:x86_64' crashes too")


def test_xnnpack_computes_the_same_with_any_threads(tmp_path: Path, work: Path) -> None:
    """The device gives it one where an app gives it four."""
    job = make_job(qdq_conv(tmp_path / "q.onnx", np.int8), "xnnpack")
    rows: list[list[Array]] = []
    for threads in (0, 4):
        told = msgspec.structs.replace(job, threads=threads)
        run = run_in(require_device("android:x86_64", "xnnpack"), told, work / str(threads))
        assert any("XNNPACK had 1 of 4 threads" in note for note in run.notes) == (threads == 0)
        rows.append([row["y"] for row in run.outputs])
    assert all(np.array_equal(one, four) for one, four in zip(*rows, strict=True))


def test_a_transpose_that_the_layout_cancels_has_no_provider(tmp_path: Path) -> None:
    """XNNPACK's convolution gives NHWC, which this model asks for: the Transpose goes, with the DQ and Q around it."""
    body = (
        "(float[1,4,8,8] x) => (float[1,8,8,4] y) <float s = {0.5}, int8 z = {0}, float[4,4,1,1] k = {"
        + ", ".join(["0.5"] * 16)
        + "}> { c = Conv(x, k) p = QuantizeLinear(c, s, z) d = DequantizeLinear(p, s, z)"
        " t = Transpose<perm=[0,2,3,1]>(d) q = QuantizeLinear(t, s, z) y = DequantizeLinear(q, s, z) }"
    )
    model, target = load_model(text_model(tmp_path / "m.onnx", body)), load_target("xnnpack")
    seen = observe_placement(model, target, require_device("android:x86_64", "xnnpack"), samples=0).providers
    assert seen == {"n0": XNNPACK, "n1": CPU_PROVIDER, "n5": CPU_PROVIDER}


_LAYER = "<float[3,2,1,1] w = {1,-2,3,1,-1,2}> { c = Conv(x, w)"
MISCOMPUTED = {
    "flat-softmax": f"(float[1,2,5,4] x) => (float[1,3,5,4] y) {_LAYER} y = Softmax<axis=-1>(c) }}",
    "plain-gemm": """(float[4,2] x) => (float[2,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}>
        { y = Gemm<transA=1>(x, w) }""",
    # The weights 1 and -2 and the bias 3, as the bits of float16.
    "half-to-float": """(float16[1,2,5,4] x) => (float16[1,1,5,4] y)
        <float16[1,2,1,1] w = {15360,49152}, float16[1] b = {16896}> { y = Conv(x, w, b) }""",
}
BIASED = """(float[3,4] x) => (float[3,3] y) <float[4,3] w = {1,2,3,4,5,6,7,8,9,1,2,3}, float[3,1] b = {1,2,3}>
    { y = Gemm(x, w, b) }"""


@pytest.mark.parametrize(
    ("id_", "body"),
    [
        # In float16 on emulated Arm.
        *(pytest.param(*each, marks=[pytest.mark.long] * (each[0] == "half-to-float")) for each in MISCOMPUTED.items()),
        ("plain-gemm", BIASED),
    ],
)
def test_what_xnnpack_takes_and_miscomputes_is_rewritten(id_: str, body: str, tmp_path: Path) -> None:
    model, target = load_model(text_model(tmp_path / "m.onnx", body)), load_target("xnnpack")
    fixed = fix_for_target(model, tmp_path / "fixed.onnx", target)
    assert [fix.id for fix in fixed.fixes] == [id_]
    assert (check_model(model, target).is_refused, fixed.after.is_refused) == (True, False)
    shape, found = [int(str(size)) for size in model.inputs[0].shape or ()], []
    samples = [{"x": np.random.default_rng(0).normal(size=shape).astype(model.inputs[0].dtype)}]
    # No library for x86-64 has XNNPACK's kernels for float16.
    device = require_device("android" if model.inputs[0].dtype == "float16" else "android:x86_64", "xnnpack")
    for each in (model, fixed.model):
        # Without the session entry, ONNX Runtime puts the Transpose back into the Gemm.
        own, _ = disable_harmful(target, onnx.load(str(each.path)).graph)
        run = run_in(device, make_job(each.path, own, samples, precision="fp32"), tmp_path / each.path.stem)
        wanted = CpuSession(each.path, SessionSettings()).run(samples[0])["y"]
        found.append(float(np.abs(next(iter(run.outputs))["y"] - wanted).max()))
    # If the first is small with a new version of ONNX Runtime, its kernel is right, and the rule can go.
    assert found[0] > 0.1
    assert found[1] < 1e-5


SPOILT = {
    "Run stands elsewhere": ("X(Run, 9,", "X(Run, 8,"),
    "SetIntraOpNumThreads differs": ("int threads", "long threads"),
    "GetDimensionsCount differs": (
        "const OrtTensorTypeAndShapeInfo*, std::size_t* out",
        "const OrtValue*, std::size_t* out",
    ),
}


@pytest.mark.parametrize("fault", ["", *SPOILT])
def test_the_runner_declares_onnxruntimes_interface_as_its_own_header_does(tmp_path: Path, fault: str) -> None:
    require_device("android:x86_64", "xnnpack")
    text = (find_sources("runner") / "src" / "ort.h").read_text()
    (tmp_path / "ort.h").write_text(text.replace(*SPOILT[fault], 1) if fault else text)
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("g++ is missing: apt-get install g++")
    include = ["-isystem", str(LOADER.folder / "headers"), "-I", str(tmp_path)]
    argv = [compiler, "-std=c++17", "-fsyntax-only", *include, str(INTERFACE)]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is not bool(fault), done.stderr
    assert fault in done.stderr
