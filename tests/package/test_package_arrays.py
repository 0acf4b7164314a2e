"""Loaders that run samples of any length, and models with state, as the bundle's own models do."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from android_parts import find_runtime
from fixture_types import MakeOnce, present
from package_loaders import compile_java, find_library, join_jars, load_program, require_program, run_program
from package_maven import ORT, fetch_jar
from tiny_models import parse_model
from verify_devices import open_loader

import edgekit.package
from edgekit._ort import CpuSession, SessionSettings
from edgekit.bundle.archive import unpack_archive
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.errors import UsageError
from edgekit.jobs.build import build
from edgekit.model.tensors import Array, Tensors
from edgekit.package.package import package_bundles
from edgekit.recipe import Data, Recipe

PROGRAMS = Path(__file__).parent / "standalone"
LOADER = Path(edgekit.package.__file__).parent / "standalone" / "python" / "edgekit_loader.py"


def test_python_s_bound_outputs_are_those_of_a_plain_session_in_batches_of_any_size(batches: Bundle) -> None:
    """The loader's pattern for servers: what is bound and warmed up computes what a plain session does."""
    loader = load_program(LOADER)
    session = onnxruntime.InferenceSession(str(batches.find_model("onnx")))
    rng = np.random.default_rng(0)
    gain = np.array(2, np.float32)
    warm = loader.Warm(session, {"x": np.zeros((1, 4), np.float32), "gain": gain})
    for count in (1, 1, 4, 4, 1):
        # A slice that is not contiguous is bound too.
        sample = {"x": rng.normal(size=(count, 8)).astype(np.float32)[:, ::2], "gain": gain}
        for got, value in zip(warm.run(sample).values(), session.run(None, sample), strict=True):
            assert got.shape == value.shape
            np.testing.assert_array_equal(got, value)


def test_pythons_self_test_passes_for_a_model_of_scalars(batches: Bundle, tmp_path: Path) -> None:
    loader, variant = open_loader(batches, tmp_path)
    folder = loader.find_folder(variant)
    assert loader.run_self_test(variant, folder, loader.open_session(variant, folder)) == []


@pytest.mark.parametrize("has_tensor", [True, False])
def test_the_self_test_leaves_out_maps_and_what_has_no_fixed_shape(*, has_tensor: bool, tmp_path: Path) -> None:
    """The output of ZipMap, with which scikit-learn exports classifiers, has other names in a session."""
    fixed, made = ("float[1,4] y, ", "y = Neg(x)") if has_tensor else ("", "")
    text = f"""<ir_version: 9, opset_import: ["" : 17, "ai.onnx.ml" : 1]> g (float[1,4] x)
        => ({fixed}seq(map(int64, float)) maps, float[n] many) <float zero = {{0}}, int64[1] flat = {{-1}}> {{
        {made} maps = ai.onnx.ml.ZipMap<classlabels_int64s = [0,1,2,3]>(x) over = Greater(x, zero)
        where = Reshape(over, flat) many = Compress(x, where) }}"""
    np.savez(tmp_path / "d.npz", x=np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
    recipe = Recipe(targets=("cpu",), precision="fp32")
    model, data = parse_model(text, tmp_path / "m.onnx"), Data(source=str(tmp_path / "d.npz"))
    (summary,) = build(model, data, tmp_path / "out", recipe, verify=False).bundles
    bundle = open_bundle(present(summary.path))
    if not has_tensor:
        with pytest.raises(UsageError, match="each of its outputs is a map, or its shape depends on the data"):
            open_loader(bundle, tmp_path)
        return
    loader, variant = open_loader(bundle, tmp_path)
    assert [each["name"] for each in variant["outputs"]] == ["y"]
    folder = loader.find_folder(variant)
    assert loader.run_self_test(variant, folder, loader.open_session(variant, folder)) == []


@pytest.fixture(scope="session")
def batches(make_once: MakeOnce) -> Bundle:
    """A bundle for the CPU whose first axis is open; an input and an output are scalars."""

    def fill(folder: Path) -> None:
        text = """g (float[N,4] x, float gain) => (float[N,4] y, float[N,4] z, float top)
            { s = Mul(x, gain) y = Softmax(s) z = Mul(x, x) top = ReduceMax<keepdims = 0>(x) }"""
        path = parse_model(text, folder / "batches.onnx")
        rows = np.random.default_rng(0).normal(size=(8, 1, 4)).astype(np.float32)
        np.savez(folder / "d.npz", x=rows, gain=np.ones(8, np.float32))
        recipe = Recipe(targets=("cpu",), precision="fp32")
        build(path, Data(source=str(folder / "d.npz")), folder / "out", recipe, verify=False)

    return open_bundle(make_once("batches", fill) / "out" / "batches-cpu")


@pytest.fixture(scope="session")
def program(sized: Bundle, stepped: Bundle, batches: Bundle, make_once: MakeOnce) -> list[str | Path]:
    compiler = require_program("clang++", "clang")

    def compile_program(folder: Path) -> None:
        package_bundles([sized.folder, stepped.folder, batches.folder], "tar", folder / "board.tar")
        unpack_archive(folder / "board.tar", folder / "board")
        warnings = ("-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
        source, out = PROGRAMS / "run_arrays.cc", folder / "run_arrays"
        run_program([compiler, *warnings, "-I", folder / "board" / "cpp", source, "-o", out, "-ldl"])

    made = make_once("arrays-board", compile_program)
    return [made / "run_arrays", find_library(), made / "board" / "bundles"]


def read_arrays(shown: str) -> Sequence[Tensors]:
    """Returns the arrays that a program printed, in as many steps as their names come again."""
    steps: list[dict[str, Array]] = []
    for line in shown.splitlines():
        head, _, values = line.partition(":")
        name, *shape = head.split()
        if not steps or name in steps[-1]:
            steps.append({})
        steps[-1][name] = np.array(values.split(), np.float32).reshape([int(dim) for dim in shape])
    return steps


def run_sized(sized: Bundle, length: int) -> Tensors:
    buckets = sized.manifest.buckets
    assert buckets
    bucket = buckets.choose(length)
    assert bucket is not None
    sample: Tensors = {"ids": np.arange(1, length + 1)[None], "mask": np.ones((1, length), np.float32)}
    # The loader's session adds products as an app's does here, without VNNI in 16 bits.
    session = CpuSession(sized.folder / bucket.file, SessionSettings(config={"session.x64quantprecision": "0"}))
    return buckets.padding.cut(session.run(buckets.padding.fill(sample, bucket.size)), length, bucket.size)


def run_stepped(stepped: Bundle, count: int) -> Sequence[Tensors]:
    session, state = CpuSession(stepped.find_model("onnx"), SessionSettings()), np.zeros((1, 4), np.float32)
    steps: list[Tensors] = []
    for step in range(count):
        steps.append(session.run({"x": np.arange(step, step + 4, dtype=np.float32)[None], "h": state}))
        state = steps[-1]["new_h"]
    return steps


def assert_close(got: Sequence[Tensors], wanted: Sequence[Tensors]) -> None:
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].shape == value.shape
            np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 12])
def test_the_cpp_loader_pads_picks_and_cuts(program: list[str | Path], sized: Bundle, length: int) -> None:
    assert_close(read_arrays(run_program([*program, "sizes", str(length)])), [run_sized(sized, length)])


def test_the_cpp_loader_takes_no_sample_that_is_too_long(program: list[str | Path]) -> None:
    assert "takes no sample of 13" in run_program([*program, "sizes", "13"])


def test_the_cpp_loader_feeds_state_back(program: list[str | Path], stepped: Bundle) -> None:
    assert_close(read_arrays(run_program([*program, "steps", "5"])), run_stepped(stepped, 5))


def test_the_cpp_loader_keeps_sessions_warm(program: list[str | Path], batches: Bundle) -> None:
    shown = run_program([*program, "warm", "3"])
    session = CpuSession(batches.find_model("onnx"), SessionSettings())
    samples = [
        (np.arange(rows * 4, dtype=np.float32) + first).reshape(rows, 4) for rows in (1, 1, 3, 3, 1) for first in (1, 2)
    ]
    assert_close(
        read_arrays(shown), [session.run({"x": sample, "gain": np.array(2, np.float32)}) for sample in samples]
    )


@pytest.fixture
def java(sized: Bundle, stepped: Bundle, make_once: MakeOnce, tmp_path: Path) -> list[str | Path]:
    """The command that runs `standalone/RunArrays.java` with an Android archive of both bundles."""
    require_program("javac", "openjdk-17-jdk-headless")
    runtime = find_runtime()

    def compile_program(folder: Path) -> None:
        package_bundles([sized.folder, stepped.folder], "aar", folder / "maven", runtime=runtime)
        (archive,) = (folder / "maven").rglob("*.aar")
        unpack_archive(archive, folder / "aar")
        (assets,) = (folder / "aar" / "assets").iterdir()
        path = join_jars(folder / "aar" / "classes.jar", runtime.classes)
        compile_java(PROGRAMS / "RunArrays.java", assets.name, path, folder)

    made = make_once("arrays-java", compile_program)
    (assets,) = (made / "aar" / "assets").iterdir()
    classes = join_jars(made, made / "aar" / "classes.jar", fetch_jar(ORT))
    return ["java", "-cp", classes, f"{assets.name}.RunArrays", assets, tmp_path / "work"]


@pytest.mark.long
def test_the_java_loader_pads_picks_and_cuts(java: list[str | Path], sized: Bundle, stepped: Bundle) -> None:
    first, *steps = read_arrays(run_program([*java, "5", "4"]))
    # The first step of the second bundle has other names than the first bundle's outputs, all but `y`.
    assert_close([first], [run_sized(sized, 5)])
    assert_close(steps, run_stepped(stepped, 4))


@pytest.mark.long
def test_the_java_loader_takes_no_sample_that_is_too_long(java: list[str | Path]) -> None:
    assert "takes no sample of 13" in run_program([*java, "13", "1"])
