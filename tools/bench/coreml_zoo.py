"""Every model of ../shared/zoo that the rules give to Core ML: built by the provider, computed, judged.

    python tools/bench/coreml_zoo.py [MODEL]... [--precision fp32] [--set ios=17]

Each is built for `coreml`, then its bundle is verified on `ios-sim` with its own limits: the real provider partitions
and writes the ML Program, edgekit computes it. A model of which the rules give Core ML nothing is counted apart.
Seconds are those of all cores, of the verification alone.
"""

import argparse
import math
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from zoo_tasks import TASKS, ZOO, load_task

from edgekit.bundle.folder import open_bundle, read_target
from edgekit.devices.find import find_device
from edgekit.errors import EdgekitError
from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe
from edgekit.verify.run import verify_bundle

TWINS = {"squeezenet1.1_fp16": "squeezenet1.1_fp32", "vww_96_float_ext": "vww_96_float"}
"""Models that are another in other types or files: they get its samples."""

MODELS = (*TASKS, "ultraface_rfb320", *TWINS)
"""The zoo's others are quantized, or trees and linear models of tables: Core ML takes nothing of them that computes."""

_DEVICE = "ios-sim"
_MOST_ROWS = 64


def write_data(name: str, folder: Path) -> tuple[Path, Data, dict[str, int]]:
    """Writes what calibrates a model and what judges it; returns the model and its dimensions."""
    parts = {"calib": folder / "calib.npz", "eval": folder / "eval.npz"}
    if name in TASKS or name in TWINS:
        task = load_task(TWINS.get(name, name))
        # A model that hands its state on is scored by whole clips; its calibration holds single steps.
        scored = task.calibration if task.stream else task.scored
        for path, rows in zip(parts.values(), (task.calibration, scored), strict=True):
            # A model of halves takes halves.
            dtype = np.float16 if name.endswith("_fp16") else None
            arrays: dict[str, Any] = {key: np.asarray(value[:_MOST_ROWS], dtype) for key, value in rows.items()}
            np.savez(path, **arrays)
        model, dims = ZOO / "models" / f"{name}.onnx" if name in TWINS else task.model, task.dims
    else:
        subprocess.run([sys.executable, str(ZOO / "inputs.py"), name, "--out", str(folder)], check=True)
        model, dims = ZOO / "models" / f"{name}.onnx", {}
    return model, Data(source=str(parts["calib"]), evaluation=str(parts["eval"])), dims


def hold_model(name: str, recipe: Recipe, work: Path) -> str:
    """Returns the row of a model, which begins with "pass" where its bundle passes.

    Raises:
        EdgekitError: it cannot be built or verified at all.
    """
    model, data, dims = write_data(name, work)
    summary = build(model, data, work / "out", msgspec.structs.replace(recipe, dims=dims), verify=False).bundles[0]
    check = summary.check
    if check is None or summary.path is None:
        return f"no bundle: {summary.failure}"
    place = f"{check.taken} of {check.nodes} nodes, {summary.precision}"
    if not check.taken:
        return f"not given to Core ML: {place}"
    bundle = open_bundle(summary.path)
    start = _cpu_seconds()
    report = verify_bundle(bundle, [find_device(_DEVICE, read_target(bundle))])
    seconds = _cpu_seconds() - start
    run = report.runs[0]
    figures = ", ".join(f"{output.sqnr_db or math.inf:.1f} dB" for output in run.outputs)
    wrong = "; ".join(report.failures) or "; ".join(run.failures)
    notes = "".join(f"\n    {note}" for note in summary.notes)
    return f"{run.verdict}: {place}, {run.samples} samples, {figures}, {seconds:.1f} CPU-s {wrong}{notes}"


def _cpu_seconds() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(part.ru_utime + part.ru_stime for part in used)


def main() -> int:
    """Prints a row for each model, and returns 1 where a bundle does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--precision", default="auto", choices=["auto", "fp16", "fp32"])
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    args = parser.parse_args()
    recipe = Recipe(targets=("coreml",), precision=args.precision, settings=dict(x.split("=", 1) for x in args.set))
    rows: list[str] = []
    for name in args.models:
        with tempfile.TemporaryDirectory() as work:
            try:
                rows.append(hold_model(name, recipe, Path(work)))
            except EdgekitError as error:
                rows.append(f"error: {error}")
        print(f"{name}: {rows[-1]}", flush=True)
    given = [row for row in rows if not row.startswith("not given")]
    passed = sum(row.startswith("pass") for row in given)
    print(f"{passed} of {len(given)} bundles pass; {len(rows) - len(given)} models are not given to Core ML")
    return int(passed < len(given))


if __name__ == "__main__":
    sys.exit(main())
