"""What the bundle's own model does on this machine too is not held against a device, and what it does not is."""

from pathlib import Path

import msgspec
import numpy as np
import pytest
from bundle_models import save_graph
from onnx import TensorProto, helper, numpy_helper
from verify_devices import InProcess, Lie, from_list

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.golden.golden import Golden, make_golden
from edgekit.jobs.build import build
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.recipe import Data, Recipe
from edgekit.target import Form
from edgekit.verify.causes.own_model import find_own_half_values, run_own_model
from edgekit.verify.run import verify_bundle


def save_model(path: Path) -> Model:
    """Two outputs that grow with the first input, and hardly move within the range that is calibrated."""
    weight = np.array([[1.0, 0.5], [0.01, -0.01]], np.float32)
    nodes = [helper.make_node("MatMul", ["x", "w"], ["y"], name="mul")]
    graph = helper.make_graph(
        nodes, "line", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 2])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 2])], [numpy_helper.from_array(weight, "w")],
    )  # fmt: skip
    return save_graph(graph, path)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    """A bundle that was calibrated with inputs below 1."""
    folder = tmp_path_factory.mktemp("clipping")
    save_model(folder / "line.onnx")
    np.savez(folder / "data.npz", x=np.random.default_rng(0).uniform(-1, 1, size=(32, 1, 2)).astype(np.float32))
    build(
        folder / "line.onnx",
        Data(source=str(folder / "data.npz")),
        folder / "out",
        Recipe(targets=("nnapi",)),
        verify=False,
    )
    return open_bundle(folder / "out" / "line-nnapi")


@pytest.fixture(scope="module")
def beyond(bundle: Bundle) -> Golden:
    """Samples beyond that range, whose outputs the bundle's own model clips to the same."""
    rows = np.random.default_rng(1).uniform(1.2, 2.0, size=(12, 1, 2)).astype(np.float32)
    model = load_model(bundle.folder.parents[1] / "line.onnx")
    return make_golden(model, from_list([{"x": row} for row in rows]), bundle.folder.parents[1] / "golden")


def ask(bundle: Bundle, golden: Golden | None, lie: Lie) -> tuple[str, str]:
    (run,) = verify_bundle(bundle, [InProcess(lie=lie)], golden=golden).runs
    return " / ".join(run.failures), " / ".join(run.notes)


def test_what_the_own_model_clips_is_told_and_no_accusation(bundle: Bundle, beyond: Golden) -> None:
    failures, notes = ask(bundle, beyond, lambda rows: rows)
    assert "same for every sample" not in failures
    assert "output 'y' is the same for every sample; so it is from the bundle's own model on this machine" in notes


def test_nothing_is_told_of_an_honest_device(bundle: Bundle) -> None:
    assert ask(bundle, None, lambda rows: rows) == ("", "")


def test_what_the_own_model_does_not_do_stays_an_accusation(bundle: Bundle) -> None:
    failures, notes = ask(bundle, None, lambda rows: [rows[0]] * len(rows))
    assert "output 'y' is the same for every sample" in failures
    assert "own model" not in notes
    failures, _ = ask(bundle, None, lambda rows: rows[:-1])
    assert "came back for" in failures


def half(value: Array) -> Array:
    return value.astype(np.float16).astype(np.float32)


def save_halving(path: Path) -> Model:
    nodes = [
        helper.make_node("Cast", ["x"], ["h"], name="down", to=TensorProto.FLOAT16),
        helper.make_node("Cast", ["h"], ["c"], name="up", to=TensorProto.FLOAT),
        helper.make_node("MatMul", ["c", "w"], ["y"], name="mul"),
    ]
    graph = helper.make_graph(
        nodes, "half", [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 4])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 4])],
        [numpy_helper.from_array(np.eye(4, dtype=np.float32), "w")],
    )  # fmt: skip
    return save_graph(graph, path)


def test_half_precision_of_the_own_model_is_not_the_device_s(bundle: Bundle, tmp_path: Path) -> None:
    save_halving(tmp_path / "half.onnx")
    inputs = np.random.default_rng(0).normal(size=(12, 1, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", x=inputs)
    recipe = Recipe(targets=("cpu",), precision="fp32")
    build(tmp_path / "half.onnx", Data(source=str(tmp_path / "data.npz")), tmp_path / "out", recipe, verify=False)
    halving = open_bundle(tmp_path / "out" / "half-cpu")
    whole, got = (from_list([{"y": row} for row in rows]) for rows in (inputs, half(inputs)))
    samples = from_list([{"x": row} for row in inputs])
    assert find_own_half_values(whole, got, halving, samples) == ()
    other = from_list([{"x": row[:, :2]} for row in inputs])
    (note,) = find_own_half_values(whole, got, bundle, other)
    assert "holds only values of half precision" in note


def test_a_bundle_of_which_nothing_runs_here_excuses_nobody(bundle: Bundle) -> None:
    assert run_own_model(bundle, from_list([{"x": np.zeros((1, 2), np.float32)}])) is not None
    assert run_own_model(bundle, from_list([{"x": np.zeros((1, 3), np.float32)}])) is None


def test_the_first_file_that_runs_here_is_the_own_model(bundle: Bundle) -> None:
    samples = from_list([{"x": np.ones((1, 2), np.float32)}])
    (name,) = bundle.manifest.forms["onnx"]
    forms: dict[Form, tuple[str, ...]] = {"onnx": ("manifest.json",), "full": (name,)}
    other = msgspec.structs.replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, forms=forms))
    first, second = run_own_model(bundle, samples), run_own_model(other, samples)
    assert first is not None
    assert second is not None
    assert np.array_equal(next(iter(first))["y"], next(iter(second))["y"])
    assert (first.count, second.count) == (1, 1)
