"""Packages for boards: their loaders are compiled and run with the real ONNX Runtime and QNN's simulator.

`test_package_android.py` runs the one in C++ on 64-bit Arm, with XNNPACK, and its snippet.
"""

import json
import platform
import re
import shutil
import sys
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from android_parts import android_headers
from bundle_models import flip_byte, tuned_for
from fixture_types import MakeOnce
from package_loaders import (
    CPU,
    QNN,
    XNNPACK,
    find_library,
    find_qnn,
    load_program,
    require_program,
    run_program,
)  # fmt: skip
from tiny_models import parse_model

from edgekit._ort import Level
from edgekit.bundle.archive import unpack_archive
from edgekit.bundle.folder import open_bundle
from edgekit.bundle.manifest import SessionSetting
from edgekit.bundle.multi import sign_bundle
from edgekit.bundle.sign import TestResult, make_key
from edgekit.devices.bundled import find_class
from edgekit.devices.find import known_device
from edgekit.errors import BundleError, UsageError
from edgekit.jobs.build import build
from edgekit.package.package import package_bundles
from edgekit.package.variant import Extra, parse_extras
from edgekit.recipe import Data, Recipe
from edgekit.tune.tune import apply_setting

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
WARNINGS = ("-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")


@pytest.fixture(scope="session")
def board(bundles: Path, make_once: MakeOnce) -> Path:
    def pack(folder: Path) -> None:
        report = package_bundles((bundles,), "tar", folder / "digits.tar")
        assert report.size_bytes == sum(report.sizes.values())
        assert not report.outweighs
        unpack_archive(folder / "digits.tar", folder / "digits")

    return make_once("board", pack) / "digits"


@pytest.fixture(scope="session")
def program(board: Path, make_once: MakeOnce) -> Path:
    require_program("cmake", "cmake")

    def build_program(out: Path) -> None:
        run_program(["cmake", "-S", board / "cpp", "-B", out, f"-DCMAKE_CXX_FLAGS={' '.join(WARNINGS)}"])
        run_program(["cmake", "--build", out])

    return make_once("board-program", build_program) / "edgekit_run"


@pytest.fixture
def damaged(board: Path, tmp_path: Path) -> Path:
    """A copy of the package, to be damaged."""
    for name in ("bundles", "python"):
        shutil.copytree(board / name, tmp_path / "copy" / name)
    return tmp_path / "copy"


def test_the_package_is_the_same_to_the_byte_wherever_the_bundles_lie(bundles: Path, tmp_path: Path) -> None:
    shutil.copytree(bundles, tmp_path / "elsewhere" / "bundles")
    for kind in ("tar", "zip"):
        first = package_bundles((bundles,), kind, tmp_path / f"a.{kind}")
        second = package_bundles((tmp_path / "elsewhere" / "bundles",), kind, tmp_path / f"b.{kind}")
        assert first.sha256 == second.sha256
        assert (tmp_path / f"a.{kind}").read_bytes() == (tmp_path / f"b.{kind}").read_bytes()


def test_bundles_that_a_board_cannot_use_are_left_out_or_refused_if_named(bundles: Path, tmp_path: Path) -> None:
    report = package_bundles((bundles,), "zip", tmp_path / "out.zip")
    assert [variant.name for variant in report.bundles] == [
        QNN, "digits_mobilenet-coreml", XNNPACK, "digits_mobilenet-cpu",
    ]  # fmt: skip
    assert [Path(left.path).name for left in report.left_out] == ["digits_mobilenet-nnapi"]
    with pytest.raises(UsageError, match=r"NnapiExecutionProvider cannot be used .* --as aar or "):
        package_bundles((bundles / "digits_mobilenet-nnapi",), "zip", tmp_path / "no.zip")
    with pytest.raises(UsageError, match="given twice"):
        package_bundles((bundles / QNN, bundles / QNN), "zip", tmp_path / "no.zip")
    assert not (tmp_path / "no.zip").exists()


def test_a_damaged_bundle_is_not_packed(bundles: Path, tmp_path: Path) -> None:
    shutil.copytree(bundles / XNNPACK, tmp_path / "bundle")
    flip_byte(tmp_path / "bundle" / "model.onnx")
    with pytest.raises(BundleError, match=r"model\.onnx"):
        package_bundles((tmp_path / "bundle",), "tar", tmp_path / "no.tar")
    assert not (tmp_path / "no.tar").exists()


def test_a_package_contains_the_signature_and_checks_the_key(bundles: Path, tmp_path: Path) -> None:
    shutil.copytree(bundles / XNNPACK, tmp_path / "bundle")
    public = make_key(tmp_path / "key")
    with pytest.raises(BundleError, match="sign"):
        package_bundles((tmp_path / "bundle",), "zip", tmp_path / "no.zip", key=public)
    sign_bundle(tmp_path / "bundle", tmp_path / "key", TestResult(result="PASSED", configuration=()))
    report = package_bundles((tmp_path / "bundle",), "zip", tmp_path / "out.zip", key=public, extras=("all",))
    assert f"bundles/{XNNPACK}/signature.json" in report.files
    unpack_archive(tmp_path / "out.zip", tmp_path / "out")
    assert open_bundle(tmp_path / "out" / "bundles" / XNNPACK, key=public).manifest.target == "xnnpack"
    (tmp_path / "bundle" / "signature.json").unlink()
    (tmp_path / "bundle" / "signature.json").symlink_to("/etc/hostname")
    with pytest.raises(BundleError, match="leads out of"):
        package_bundles((tmp_path / "bundle",), "zip", tmp_path / "no.zip")


def test_the_cpp_loader_opens_the_first_bundle_that_the_machine_can_run(program: Path, board: Path) -> None:
    shown = run_program([program, find_library(), board / "bundles", "--plugin", find_qnn()])
    assert f"{QNN}: self-test passed with" in shown


def test_the_cpp_loader_never_falls_back_to_the_cpu_silently(program: Path, board: Path) -> None:
    shown = run_program([program, find_library(), board / "bundles", "--only", XNNPACK], code=1)
    assert f"{XNNPACK}: not opened: XNNPACK execution provider is not supported in this build" in shown
    shown = run_program([program, find_library(), board / "bundles"])
    assert f"{QNN}: not opened: give the library of QNNExecutionProvider" in shown
    assert f"{XNNPACK}: not opened: XNNPACK execution provider is not supported in this build" in shown
    assert "digits_mobilenet-cpu: " in shown
    run_program([program, find_library(), board / "bundles", "--cpu", "--only", XNNPACK])


@pytest.mark.parametrize("name", ["model.onnx", "golden/expected.npz", "manifest.json", "golden"])
def test_the_loaders_name_an_altered_file(name: str, program: Path, damaged: Path) -> None:
    if name == "golden":
        (shared,) = (damaged / "bundles").glob("golden-*/inputs.npz")
        name = f"../{shared.parent.name}/inputs.npz"
    flip_byte(damaged / "bundles" / XNNPACK / name)
    options = ["--cpu", "--only", XNNPACK]
    for command in ([program, find_library(), damaged / "bundles"], [sys.executable, _loader(damaged)]):
        assert f"'{name}' of bundle '{XNNPACK}' was altered" in run_program([*command, *options], code=1)


def test_the_cpp_loader_passes_keys_on_and_can_say_no(board: Path, bundles: Path, tmp_path: Path) -> None:
    require_program("clang++", "clang")
    source, out = HERE / "standalone" / "check_loader.cc", tmp_path / "check_loader"
    run_program(["clang++", *WARNINGS, "-I", board / "cpp", source, "-o", out, "-ldl"])
    system = platform.system().lower()
    shown = run_program([out, find_library(), board / "bundles", XNNPACK, system, platform.machine()])
    assert "tuned here: refused\ntuned elsewhere: opened\nuntuned: opened\n" in shown
    manifest = open_bundle(bundles / XNNPACK).manifest
    lines = shown.splitlines()
    assert lines[0] == "0 failures"
    assert "is off by" in lines[4]
    assert "SQNR in dB" in lines[-1 - len(manifest.session_config)]
    refused = [line.removeprefix("refused: ") for line in lines if line.startswith("refused: ")]
    assert refused == sorted(manifest.session_config)


def test_the_python_loader_runs_the_bundle_on_the_simulator(board: Path) -> None:
    assert f"{QNN}: self-test passed with" in run_program([sys.executable, _loader(board), "--plugin", find_qnn()])


def test_the_python_loader_passes_every_key_on_and_its_self_test_can_say_no(damaged: Path, bundles: Path) -> None:
    table = damaged / "python" / "edgekit_bundles.json"
    variants: list[dict[str, Any]] = json.loads(table.read_bytes())
    (variant,) = (variant for variant in variants if variant["name"] == XNNPACK)
    manifest = open_bundle(bundles / XNNPACK).manifest
    assert variant["session_config"] == manifest.session_config
    assert variant["provider_options"] == manifest.provider_options
    for key in sorted(manifest.session_config):
        long = {**variant, "session_config": {**variant["session_config"], key: "x" * 100_000}}
        table.write_text(json.dumps([long]))
        assert "not opened" in run_program([sys.executable, _loader(damaged), "--cpu"], code=1), key
    table.write_text(json.dumps([{**variant, "thresholds": {**variant["thresholds"], "min_sqnr_db": 199.0}}]))
    assert "SQNR in dB" in run_program([sys.executable, _loader(damaged), "--cpu"], code=1)
    table.write_text(json.dumps([{**variant, "tolerance": dict.fromkeys(variant["tolerance"], -1.0)}]))
    shown = run_program([sys.executable, _loader(damaged), "--cpu"], code=1)
    assert shown.count("is off by") == len(manifest.golden.chosen) > 0


def test_tuned_settings_reach_the_session_on_machines_of_their_class(bundles: Path, tmp_path: Path) -> None:
    shutil.copytree(bundles / CPU, tmp_path / CPU)
    here = find_class(known_device("host"))
    assert here is not None
    setting = SessionSetting(level=Level.EXTENDED, threads=1, config={"session.set_denormal_as_zero": "1"})
    apply_setting(tmp_path / CPU, tuned_for(here, setting))
    # What was measured with another file says nothing of the one that is packed.
    other = msgspec.structs.replace(here, system="elsewhere")
    apply_setting(tmp_path / CPU, tuned_for(other, msgspec.structs.replace(setting, form="onnx")))
    package_bundles((tmp_path / CPU,), "tar", tmp_path / "p.tar")
    unpack_archive(tmp_path / "p.tar", tmp_path / "p")
    table = (tmp_path / "p" / "cpp" / "edgekit_bundles.h").read_text()
    assert f'"{here.system}", "{here.machine}", {here.cores}, 2,' in table
    assert '"elsewhere"' not in table
    loader: Any = load_program(_loader(tmp_path / "p"))
    (variant,) = loader.read_variants()
    assert variant["tuned"][0]["session_config"].items() >= {"session.set_denormal_as_zero": "1"}.items()
    folder = loader.find_folder(variant)
    options = loader.open_session(variant, folder).get_session_options()
    assert (options.graph_optimization_level, options.intra_op_num_threads) == (loader.ort.GraphOptimizationLevel(2), 1)
    for changed, told in (
        ({}, False),
        ({"machine": "other"}, True),
        ({"cores": here.cores + 1}, True),
        ({"level": 77}, True),
    ):
        strange = {**variant, "tuned": [{**variant["tuned"][0], **changed}]}
        plain = loader.open_session(strange, folder, tuned=told).get_session_options()
        assert plain.graph_optimization_level == loader.ort.GraphOptimizationLevel.ORT_ENABLE_ALL
        assert plain.intra_op_num_threads == 0
    assert loader.find_tuned({**variant, "tuned": [{**variant["tuned"][0], "cores": 0}]}) is not None


@pytest.mark.parametrize(("name", "extras"), [(XNNPACK, ("golden",)), (XNNPACK, ("all",)), (QNN, ("forms", "onnx"))])
def test_extra_files_are_packed_if_asked(name: str, extras: tuple[Extra, ...], bundles: Path, tmp_path: Path) -> None:
    report = package_bundles((bundles / name,), "tar", tmp_path / "more.tar", extras=extras)
    unpack_archive(tmp_path / "more.tar", tmp_path / "more")
    manifest = open_bundle(bundles / name).manifest
    carried = {file.removeprefix(f"bundles/{name}/") for file in report.files if file.startswith("bundles/")}
    wanted = {*manifest.forms[manifest.form], "manifest.json", "golden/expected.npz"}
    if extras == ("all",):
        wanted = {*manifest.files, "manifest.json"}
        assert open_bundle(tmp_path / "more" / "bundles" / name).manifest == manifest
    elif "forms" in extras:
        wanted |= {file for files in manifest.forms.values() for file in files}
        assert "model.onnx" in carried
    assert {file for file in carried if not file.startswith("bundles/golden-")} == wanted
    if "forms" not in extras:
        variants = json.loads((tmp_path / "more" / "python" / "edgekit_bundles.json").read_bytes())
        assert variants[0]["samples"] == manifest.golden.samples
        assert report.outweighs
        shown = run_program([sys.executable, _loader(tmp_path / "more"), "--cpu"])
        assert f"with {manifest.golden.samples} samples" in shown


def test_an_unknown_kind_of_extra_files_is_refused() -> None:
    assert parse_extras(("onnx,golden", "golden")) == ("golden", "onnx")
    with pytest.raises(UsageError, match="--with 'form'") as raised:
        parse_extras(("form",))
    assert raised.value.hint == "did you mean 'forms'?"


@pytest.mark.long
def test_the_cpp_loader_gives_all_providers_in_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    require_program("g++", "g++")
    model = parse_model("g (float[1,8] x) => (float[1,8] y) { y = Relu(x) }", tmp_path / "m.onnx")
    np.savez(tmp_path / "x.npz", x=np.random.default_rng(0).normal(size=(4, 8)).astype(np.float32))
    told = {"device_id": "1", "gpu_mem_limit": "1073741824", "max_workspace_size": "65536"}
    recipe = Recipe(targets=("tensorrt",), precision="fp32", settings=told)
    build(model, Data(source=str(tmp_path / "x.npz")), tmp_path / "built", recipe, verify=False)
    package_bundles((tmp_path / "built",), "tar", tmp_path / "p.tar")
    unpack_archive(tmp_path / "p.tar", tmp_path / "p")
    run, recorder = tmp_path / "run", tmp_path / "recorder.so"
    headers = ("-isystem", android_headers())
    loader, source = tmp_path / "p" / "cpp", HERE / "standalone" / "record_nvidia.cc"
    run_program(["g++", *WARNINGS, "-I", loader, loader / "main.cc", "-o", run, "-ldl"])
    run_program(["g++", "-std=c++17", "-shared", "-fPIC", *headers, source, "-o", recorder, "-ldl"])
    # The real library, built without a GPU, must be asked for the first provider, and refuse.
    shown = run_program([run, find_library(), tmp_path / "p" / "bundles"], code=1)
    assert "not opened: TensorRT execution provider is not enabled in this build" in shown
    monkeypatch.setenv("REAL_ORT", str(find_library()))
    shown = run_program([run, recorder, tmp_path / "p" / "bundles"])
    *first, then, behind, limit, last, passed = shown.splitlines()
    assert {"option device_id=1", "option trt_max_workspace_size=65536"} <= {*first}
    assert (then, last) == ("then TensorRT", "then CUDA")
    assert (behind, limit) == ("option device_id=1", "option gpu_mem_limit=1073741824")
    assert "self-test passed with" in passed
    shown = run_program([run, recorder, tmp_path / "p" / "bundles", "--cpu", "--time", "3"])
    assert "then " not in shown
    found = re.search(r"CPU time of a request: (\S+) ms warm, (\S+) ms run, (\S+) ms with a session", shown)
    assert found is not None, shown
    # Making a session takes many times as long as one Relu, warm or not.
    assert float(found[3]) > 3 * max(float(found[1]), float(found[2]))


def _loader(package: Path) -> Path:
    return package / "python" / "edgekit_loader.py"
