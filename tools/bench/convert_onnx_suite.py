"""Prepares and converts each node test and light model of the onnx package: `python convert_onnx_suite.py [NAME]`.

Each model that ONNX Runtime loads is prepared, and written in both ORT styles. Each file must load, and must return the
model's outputs on the test's own inputs (light models: on random inputs). It prints a line for each file that does not,
and the counts. With a NAME it runs only models whose name contains it.
"""

import collections
import importlib
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from edgekit._ort import CpuSession, SessionSettings
from edgekit.convert import OrtOptions, write_ort
from edgekit.data.samples import draw_samples
from edgekit.errors import EdgekitError
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare import prepare_model

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    from onnx.backend.test import loader
    from onnx.backend.test.case import node as node_cases

RANDOM = frozenset({"Bernoulli", "Dropout", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform"})


def run(path: Path, inputs: Mapping[str, Array]) -> list[Any]:
    """Returns the outputs, of any kind."""
    config = {"session.enable_saved_runtime_optimizations": "1", "session.qdqisint8allowed": "1"}
    session = CpuSession(path, SessionSettings(config=config, threads=1))
    return list(session._session.run(None, dict(inputs)))  # noqa: SLF001 - sequences and optionals too


def same(left: Any, right: Any) -> bool:
    """Returns True if two outputs are equal within float rounding."""
    if isinstance(left, list | tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if not isinstance(left, np.ndarray) or left.dtype.kind not in "fc":
        return bool(np.array_equal(left, right))
    return bool(np.allclose(left, right, rtol=2e-3 if left.dtype.itemsize < 4 else 1e-4, atol=1e-5, equal_nan=True))


def _prepare(model: Model, folder: Path) -> Path:
    return prepare_model(model, folder / "prepared.onnx", {}).path


def _full(model: Model, folder: Path) -> Path:
    write_ort(model, folder / "full.ort", OrtOptions(style="full", cpu="arm"))
    return folder / "full.ort"


def _runtime(model: Model, folder: Path) -> Path:
    write_ort(model, folder / "runtime.ort", OrtOptions(style="runtime", cpu="arm"))
    return folder / "runtime.ort"


STEPS: dict[str, Callable[[Model, Path], Path]] = {"prepare": _prepare, "full": _full, "runtime": _runtime}


def list_cases(*modules: str) -> list[Any]:
    """Returns the node tests that have a model, without those with random operators.

    With `modules` only these of `onnx.backend.test.case.node` are imported: some take seconds to compute their results.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in modules:
            importlib.import_module(f"{node_cases.__name__}.{name}")
        found: list[Any] = vars(node_cases)["_NodeTestCases"] if modules else node_cases.collect_testcases(None)
        return [case for case in found if case.model is not None and not _is_random(case.model)]


def list_light() -> list[Path]:
    """Returns the light models: networks of the model zoo with constant weights."""
    return sorted((Path(loader.DATA_DIR) / "light").glob("*.onnx"))


def check_case(case: Any, folder: Path) -> dict[str, str]:
    """Returns the result of each step: "equal", "differs", or why it was refused; empty if ONNX Runtime fails."""
    path = folder / "model.onnx"
    onnx.save(case.model, str(path))
    names = [value.name for value in case.model.graph.input]
    data = case.data_sets[0][0] if case.data_sets else []
    return _check(path, {name: value for name, value in zip(names, data, strict=False) if name}, folder)


def check_light(light: Path, folder: Path) -> dict[str, str]:
    """Returns the same for a light model, which is prepared first because its initializers are inputs (IR version 3).

    ONNX Runtime folds some of these initializers, but leaves their inputs in the file, so the caller would have to give
    them.
    """
    path = folder / "model.onnx"
    path.write_bytes(light.read_bytes())
    drawn = draw_samples(load_model(path).inputs)
    return {} if drawn is None else _check(path, next(iter(drawn)), folder, convert="prepared.onnx")


def _check(path: Path, inputs: Mapping[str, Array], folder: Path, *, convert: str = "model.onnx") -> dict[str, str]:
    try:
        expected = run(path, inputs)
    except Exception:  # noqa: BLE001 - what ONNX Runtime cannot run is not our case
        return {}
    results = {}
    for step, write in STEPS.items():
        source = path if step == "prepare" else folder / convert
        try:
            got = run(write(load_model(source), folder), inputs)
            results[step] = "equal" if len(got) == len(expected) and all(map(same, expected, got)) else "differs"
        except EdgekitError as error:
            results[step] = f"{type(error).__name__}: {error.message[:200]}"
        except Exception as error:  # noqa: BLE001 - onnxruntime's exceptions have no base of their own
            results[step] = f"fails: {str(error)[:200]}"
    return results


def _is_random(model: onnx.ModelProto) -> bool:
    return any(node.op_type in RANDOM for node in model.graph.node)


def main() -> int:
    """Runs the suite; returns 1 if a model came out different."""
    pattern = sys.argv[1] if len(sys.argv) > 1 else ""
    counts: collections.Counter[tuple[str, str]] = collections.Counter()
    checks: list[tuple[str, Callable[[Path], dict[str, str]]]] = [
        *((path.stem, partial(check_light, path)) for path in list_light()),
        *((case.name, partial(check_case, case)) for case in list_cases()),
    ]
    for name, check in checks:
        if pattern not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            results = check(Path(folder))
        for step, result in results.items():
            counts[step, result.split(":")[0]] += 1
            if result != "equal" or name.startswith("light"):
                print(f"{name}: {step}: {result}", flush=True)
    for (step, result), count in sorted(counts.items()):
        print(f"{step:8} {result:20} {count}")
    return 1 if any(result in ("differs", "fails") for _, result in counts) else 0


if __name__ == "__main__":
    sys.exit(main())
