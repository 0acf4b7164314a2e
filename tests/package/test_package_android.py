"""What an Android developer pastes or links, run with Android's own ONNX Runtime: bundles opened as an app opens them.

The Java machine runs the archive's own classes and binding (`standalone/android_natives.c`); C++ is linked with the
loader of the device `android`. So the provider is real, and its options and session keys go all the way.
"""

import platform
import re
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from android_parts import (
    LIBRARY,
    android_headers,
    android_libraries,
    build_natives,
    find_phone_prefix,
    find_runtime,
    link_for_android,
)
from bundle_models import flip_byte
from fixture_types import MakeOnce, present
from package_loaders import CPU, NNAPI, PACKAGE, QNN, XNNPACK, join_jars, run_check, run_program
from package_maven import ANDROID, KOTLIN_MAIN, fetch_jar, fetch_kotlin

from edgekit.bundle.archive import unpack_archive
from edgekit.bundle.folder import open_bundle
from edgekit.devices.android.compute import can_compute
from edgekit.devices.process.pipes import serving
from edgekit.package import formats
from edgekit.package.package import package_bundles

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
LOADER = Path(formats.__file__).parent / "standalone" / "cpp"
RENAMED = {
    "SessionOptionsAppendExecutionProviderV2": "SessionOptionsAppendExecutionProvider_V2",
    "EpDeviceEpName": "EpDevice_EpName",
    "AppendCUDA": "SessionOptionsAppendExecutionProvider_CUDA_V2",
    "AppendTensorRT": "SessionOptionsAppendExecutionProvider_TensorRT_V2",
}
WARNINGS = ("-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")


@pytest.fixture(scope="module")
def machine(make_once: MakeOnce) -> Sequence[str]:
    """The beginning of a command that runs Java with Android's binding and library, and NNAPI of Android 12."""
    natives = make_once("android-natives", build_natives) / "natives"
    return (
        *("env", f"EDGEKIT_ANDROID_LIBRARIES={android_libraries(platform.machine())}", "EDGEKIT_NNAPI_LEVEL=31"),
        *("java", "-XX:TieredStopAtLevel=1", "-Donnxruntime.native.onnxruntime.skip=true"),
        *(f"-Donnxruntime.native.path={natives}", "-cp"),
    )


@pytest.fixture(scope="module")
def java(machine: Sequence[str], checker: str) -> Sequence[str]:
    """The command that runs `standalone/Check.java`."""
    return (*machine, join_jars(checker, find_runtime().classes), f"{PACKAGE}.Check")


@pytest.fixture(scope="module")
def kotlin(repository: Path, unpacked: Path, bundles: Path, make_once: MakeOnce) -> str:
    """A class path with all Kotlin that bundles and the archive's README have, compiled without a warning."""
    compiler, library = fetch_kotlin()
    path = join_jars(library, find_runtime().classes, fetch_jar(ANDROID), unpacked / "classes.jar")

    def compile_kotlin(work: Path) -> None:
        sources = [HERE / "standalone" / "Snippets.kt", work / "usage.kt"]
        sources[1].write_text(wrap_usage((repository / "README.md").read_text()))
        for name in (CPU, NNAPI, QNN, XNNPACK):
            target = name.rpartition("-")[2]
            sources.append(work / f"{target}.kt")
            sources[-1].write_text(f"package {target}\n\n{(bundles / name / 'app' / 'ModelSession.kt').read_text()}")
        options = ("-no-stdlib", "-no-reflect", "-Werror", "-classpath", path, "-d", str(work / "out"))
        run_program(["java", "-XX:TieredStopAtLevel=1", "-cp", compiler, KOTLIN_MAIN, *options, *sources])

    return join_jars(make_once("kotlin", compile_kotlin) / "out", library, find_runtime().classes)


def run_neural(command: Sequence[str | Path], folder: Path) -> tuple[str, Mapping[str, int]]:
    """Returns what a program printed, and how many operations of each kind NNAPI's networks had."""
    if not can_compute():
        pytest.skip("needs ai-edge-litert: pip install ai-edge-litert==2.3.0")
    with serving(folder / "nnapi", "edgekit.devices.android.compute", 120) as served:
        shown = run_program(["env", f"EDGEKIT_NNAPI_PIPES={served.folder}", *command])
    return shown, present(served.read_facts()).operations


def wrap_usage(readme: str) -> str:
    """The lines of the README of an archive, which stand inside a function of an app."""
    block = readme.partition("Kotlin:\n\n")[2].partition("\n\n`openFirst`")[0]
    lines = [line.removeprefix("    ") for line in block.splitlines()]
    imports = [line for line in lines if line.startswith("import ")]
    used = ["import ai.onnxruntime.OnnxTensor", "import android.content.Context", "import android.util.Log", *imports]
    body = [f"    {line}" for line in lines if line not in imports]
    return "\n".join(
        ("package usage", "", *used, "", "fun use(context: Context, inputs: Map<String, OnnxTensor>) {", *body, "}", "")
    )


def test_java_opens_the_first_bundle_that_runs(java: Sequence[str], unpacked: Path, tmp_path: Path) -> None:
    shown, operations = run_neural([*java, unpacked / "assets" / PACKAGE, tmp_path, "open", "-"], tmp_path)
    assert f"not opened: {QNN}: give the library of QNNExecutionProvider" in shown
    assert f"{NNAPI}: self-test passed with" in shown
    assert operations["CONV_2D"] > 0


@pytest.mark.parametrize("name", [XNNPACK, NNAPI])
def test_java_opens_the_bundle_with_every_key_and_option_and_its_self_test_can_say_no(
    name: str, java: Sequence[str], unpacked: Path, bundles: Path, tmp_path: Path
) -> None:
    shown, _ = run_neural([*java, unpacked / "assets" / PACKAGE, tmp_path, "keys", name], tmp_path)
    manifest = open_bundle(bundles / name).manifest
    assert f"{name}: self-test passed with" in shown
    assert "tuned elsewhere: opened\ntuned here: refused\n" in shown
    # XNNPACK's own pool, one of whose threads is the caller; ONNX Runtime was told to have none.
    if name == XNNPACK:
        assert f"threads: {int(manifest.provider_options['intra_op_num_threads']) - 1}\n" in shown
    lines = shown.splitlines()
    refused = [line.removeprefix("refused: ") for line in lines if line.startswith("refused: ")]
    assert refused == sorted(manifest.session_config)
    options = [line.removeprefix("option: ") for line in lines if line.startswith("option: ")]
    assert options == [f"{key}={value}" for key, value in sorted(manifest.provider_options.items())]
    assert "SQNR in dB" in shown
    assert shown.count("is off by") == len(manifest.golden.chosen) > 0


def test_java_refuses_an_older_onnxruntime(java: Sequence[str], unpacked: Path, tmp_path: Path) -> None:
    shown = run_check(java, unpacked, tmp_path, "older", XNNPACK, code=1)
    assert f"'{XNNPACK}' needs ONNX Runtime 1.1000.0, this is 1.29.0" in shown


@pytest.mark.parametrize("name", ["golden/expected.npz", "model.onnx"])
def test_the_java_loader_names_an_altered_file(name: str, java: Sequence[str], unpacked: Path, tmp_path: Path) -> None:
    shutil.copytree(unpacked / "assets", tmp_path / "aar" / "assets")
    flip_byte(tmp_path / "aar" / "assets" / PACKAGE / XNNPACK / name)
    shown = run_check(java, tmp_path / "aar", tmp_path / "work", "open", XNNPACK, "--cpu", code=1)
    assert f"'{name}' of bundle '{XNNPACK}' was altered" in shown


def test_java_unpacks_an_altered_file_again(java: Sequence[str], unpacked: Path, tmp_path: Path) -> None:
    run_check(java, unpacked, tmp_path, "open", XNNPACK, "--cpu")
    (model,) = tmp_path.rglob("model.onnx")
    whole = model.read_bytes()
    flip_byte(model)
    run_check(java, unpacked, tmp_path, "open", XNNPACK, "--cpu")
    assert model.read_bytes() == whole


@pytest.mark.long
@pytest.mark.parametrize("name", [CPU, NNAPI, XNNPACK])
def test_the_kotlin_snippet_opens_the_bundle(
    name: str, machine: Sequence[str], kotlin: str, bundles: Path, tmp_path: Path
) -> None:
    manifest = open_bundle(bundles / name).manifest
    shown, operations = run_neural([*machine, kotlin, "use.SnippetsKt", manifest.target, bundles / name], tmp_path)
    assert f"inputs: [{', '.join(tensor.name for tensor in manifest.inputs)}]" in shown
    assert ("CONV_2D" in operations) == (name == NNAPI)
    if name == XNNPACK:
        assert f"threads: {int(manifest.provider_options['intra_op_num_threads']) - 1}\n" in shown


@pytest.mark.long
def test_cpp_opens_xnnpack_on_arm_and_says_what_it_cannot(bundles: Path, tmp_path: Path, make_once: MakeOnce) -> None:
    abi = "arm64-v8a"
    package_bundles((bundles / XNNPACK, bundles / QNN), "tar", tmp_path / "board.tar")
    unpack_archive(tmp_path / "board.tar", tmp_path / "board")
    program = link_for_android(abi, tmp_path / "board" / "cpp" / "main.cc", tmp_path / "edgekit_run", make_once)
    enter = find_phone_prefix(abi, tmp_path)
    run: list[str | Path] = [*enter, program, android_libraries(abi) / LIBRARY, tmp_path / "board" / "bundles"]
    assert f"{XNNPACK}: self-test passed with" in run_program([*run, "--only", XNNPACK])
    assert "give the library of QNNExecutionProvider" in run_program([*run, "--only", QNN], code=1)


@pytest.mark.parametrize("name", [pytest.param(CPU, marks=pytest.mark.long), XNNPACK])
def test_the_cpp_snippet_opens_the_bundle(name: str, bundles: Path, tmp_path: Path, make_once: MakeOnce) -> None:
    bundle = open_bundle(bundles / name)
    # The header is the real one of the archive; the snippet alone is held to our warnings.
    flags = (*WARNINGS, "-DORT_API_MANUAL_INIT", "-isystem", android_headers(), "-include")
    source, snippet = HERE / "standalone" / "run_snippet.cc", bundle.folder / "app" / "model_session.h"
    program = link_for_android("x86_64", source, tmp_path / "run_snippet", make_once, *flags, snippet)
    shown = run_program([program, android_libraries("x86_64") / LIBRARY, bundle.folder])
    assert f"placed on [{bundle.manifest.provider}]" in shown
    assert [f"input: {tensor.name}" in shown for tensor in bundle.manifest.inputs] == [True]


@pytest.mark.parametrize("fault", ["", "kRun"])
def test_the_cpp_loader_calls_the_places_of_the_real_header(fault: str, tmp_path: Path) -> None:
    text = (LOADER / "edgekit_ort.h").read_text()
    slots = {name: int(place) for name, place in re.findall(r"^  k(\w+) = (\d+),$", text, re.MULTILINE)}
    assert len(slots) == text.count("  k") - text.count("  kDtypes")
    named = {name: RENAMED.get(name, name) for name in slots}
    lines = [
        f"static_assert(offsetof(OrtApi, {named[name]}) == {place + (f'k{name}' == fault)} * sizeof(void*));"
        for name, place in slots.items()
    ]
    source = tmp_path / "places.cc"
    source.write_text("\n".join(("#include <onnxruntime_c_api.h>", "#include <cstddef>", *lines, "")))
    command = ["g++", "-std=c++17", "-fsyntax-only", "-isystem", str(android_headers()), str(source)]
    run_program(command, code=1 if fault else 0)
