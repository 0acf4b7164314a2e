"""Loaders that run samples of any length, and models with state, as the bundle's own models do."""

from collections.abc import Callable, Sequence
from pathlib import Path

import bucket_models
import numpy as np
import pytest
import stepped_models
from package_loaders import find_library, require_program, run_program

from edgekit._ort import CpuSession, SessionSettings
from edgekit.bundle.archive import unpack_archive
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.model.tensors import Array, Tensors
from edgekit.package.package import package_bundles

FAR = Path(__file__).parent / "far"
Make = Callable[[str, Callable[[Path], object]], Path]


@pytest.fixture(scope="module")
def sized(make_once: Make) -> Bundle:
    return open_bundle(make_once("buckets", bucket_models.make) / "out" / "net-cpu")


@pytest.fixture(scope="module")
def stepped(make_once: Make) -> Bundle:
    return open_bundle(make_once("recurrent", stepped_models.make) / "out" / "recurrent-cpu")


@pytest.fixture(scope="module")
def board(sized: Bundle, stepped: Bundle, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("arrays")
    package_bundles([sized.folder, stepped.folder], "tar", folder / "both.tar")
    unpack_archive(folder / "both.tar", folder / "both")
    return folder / "both"


@pytest.fixture(scope="module")
def program(board: Path) -> list[str | Path]:
    compiler = require_program("g++", "g++")
    warnings = ("-std=c++17", "-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Werror")
    code, shown = run_program(
        [compiler, *warnings, "-I", board / "cpp", FAR / "run_arrays.cc", "-o", board / "run_arrays", "-ldl"]
    )
    assert code == 0, shown
    return [board / "run_arrays", find_library(), board / "bundles"]


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
    session = CpuSession(sized.folder / bucket.file, SessionSettings())
    return buckets.padding.cut(session.run(buckets.padding.fill(sample, bucket.size)), length, bucket.size)


def run_stepped(stepped: Bundle, count: int) -> Sequence[Tensors]:
    session, state = CpuSession(stepped.find_model("onnx"), SessionSettings()), np.zeros((1, 4), np.float32)
    steps: list[Tensors] = []
    for step in range(count):
        steps.append(session.run({"x": np.arange(step, step + 4, dtype=np.float32)[None], "h": state}))
        state = steps[-1]["new_h"]
    return steps


def hold_together(got: Sequence[Tensors], wanted: Sequence[Tensors]) -> None:
    assert len(got) == len(wanted)
    for mine, theirs in zip(got, wanted, strict=True):
        assert mine.keys() == theirs.keys()
        for name, value in theirs.items():
            assert mine[name].shape == value.shape
            np.testing.assert_allclose(mine[name], value, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("length", [1, 5, 12])
def test_the_cpp_loader_fills_picks_and_cuts(program: list[str | Path], sized: Bundle, length: int) -> None:
    code, shown = run_program([*program, "sizes", str(length)])
    assert code == 0, shown
    hold_together(read_arrays(shown), [run_sized(sized, length)])


def test_the_cpp_loader_takes_no_sample_that_is_too_long(program: list[str | Path]) -> None:
    _, shown = run_program([*program, "sizes", "13"])
    assert "takes no sample of 13" in shown


def test_the_cpp_loader_feeds_state_back(program: list[str | Path], stepped: Bundle) -> None:
    code, shown = run_program([*program, "steps", "5"])
    assert code == 0, shown
    hold_together(read_arrays(shown), run_stepped(stepped, 5))
