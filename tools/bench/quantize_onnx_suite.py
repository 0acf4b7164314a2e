"""Quantizes the node tests and light models of the onnx package, and counts tracebacks.

    python tools/bench/quantize_onnx_suite.py [NAME] [--targets qnn,nnapi]

Each float model is quantized as by `edgekit quantize`, for the targets in turn, with twelve random samples. The result
must be a quantized model that loads, or a refusal in one line; anything else is a traceback, and makes exit code 1.
With a NAME only models whose name contains it are run.
"""

import argparse
import collections
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle
from pathlib import Path

import msgspec
import numpy as np
import onnx
from convert_onnx_suite import list_cases, list_light

from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import draw_samples
from edgekit.errors import EdgekitError
from edgekit.jobs.quantize import quantize_for
from edgekit.model.model import load_model
from edgekit.recipe import Data, Recipe

_SAMPLES = 12
_FLOATS = frozenset({onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE})


class Outcome(msgspec.Struct, frozen=True, kw_only=True):
    """The result for a model: "quantized", "refused" or "traceback", and the last line of the reason."""

    name: str
    target: str
    result: str
    why: str = ""


def list_models() -> Iterator[tuple[str, Callable[[Path], Path]]]:
    """Yields each model with float inputs, by name, with the function that writes it into a folder."""
    yield from ((path.stem, lambda _, path=path: path) for path in list_light())
    for case in list_cases():
        if any(value.type.tensor_type.elem_type in _FLOATS for value in case.model.graph.input):
            yield case.name, partial(_write, case.model)


def _write(proto: onnx.ModelProto, folder: Path) -> Path:
    onnx.save(proto, str(folder / "model.onnx"))
    return folder / "model.onnx"


def try_model(name: str, target: str, place: Callable[[Path], Path]) -> Iterator[Outcome]:
    """Yields the result for one model; nothing if its inputs are not tensors."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        try:
            model = load_model(place(work))
            samples = draw_samples(model.inputs, _SAMPLES)
            if samples is None:
                return
            rows = list(samples)
            arrays = {key: np.stack([row[key] for row in rows]) for key in rows[0]} if rows else {}
            np.savez(work / "data.npz", **arrays)  # type: ignore[arg-type] # its stub takes names for its own options
            dims = {dim: 1 for spec in model.inputs for dim in spec.shape or () if isinstance(dim, str)}
            recipe = Recipe(targets=(target,), dims=dims)
            quantize_for(model.path, Data(source=str(work / "data.npz")), work / "out.onnx", recipe)
            CpuSession(work / "out.onnx", SessionSettings(threads=1))
            yield Outcome(name=name, target=target, result="quantized")
        except EdgekitError as error:
            yield Outcome(name=name, target=target, result="refused", why=error.message[:160])
        except Exception:  # noqa: BLE001 - what is looked for
            yield Outcome(name=name, target=target, result="traceback", why=traceback.format_exc()[-800:])


def main() -> int:
    """Runs the suite; returns 1 if a model ended in a traceback."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("name", nargs="?", default="")
    parser.add_argument("--targets", default="qnn,nnapi,xnnpack,cpu")
    args = parser.parse_args()
    counts: collections.Counter[str] = collections.Counter()
    targets = cycle(args.targets.split(","))
    chosen = [(name, place) for name, place in list_models() if args.name in name]
    for (name, place), target in zip(chosen, targets, strict=False):
        for found in try_model(name, target, place):
            counts[found.result] += 1
            if found.result == "traceback":
                print(f"{found.name} on {found.target}: {found.why}", flush=True)
    print(", ".join(f"{count} {result}" for result, count in sorted(counts.items())))
    return int(counts["traceback"] > 0)


if __name__ == "__main__":
    sys.exit(main())
