"""How long the automatic search for MobileNetV2 takes with 256 samples, and how its time is spent.

    python tools/bench/search_time.py [--targets nnapi,qnn] [--model NAME] [--samples 256]

The goal cannot be met, so that the search goes its whole way. The zoo's samples are repeated to the number. The limit
is 300 s of wall time on two cores; CPU time is printed too, because it says more on a machine that others use.
"""

import argparse
import os
import resource
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import msgspec
import numpy as np
from quantize_zoo import int8_targets
from zoo_tasks import ZOO, load_task, write_calibration

from edgekit.jobs.quantize import quantize_for
from edgekit.recipe import Data, Recipe

LIMIT_SECONDS = 300.0
_NEVER = -100.0


def search(name: str, target: str, samples: int) -> tuple[float, float, dict[str, float], int]:
    """Returns wall and CPU seconds of a search that goes its whole way, the seconds of each step, and its trials."""
    task = load_task(name)
    spent: dict[str, float] = defaultdict(float)
    began, cpu = time.perf_counter(), _cpu_seconds()
    last = [("prepare", began)]

    def note(message: str) -> None:
        now, (step, since) = time.perf_counter(), last[-1]
        spent[step] += now - since
        last.append((message.rsplit(" (", maxsplit=1)[-1].split(")", maxsplit=1)[0], now))

    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        repeated = {key: np.resize(value, (samples, *value.shape[1:])) for key, value in task.calibration.items()}
        write_calibration(msgspec.structs.replace(task, calibration=repeated), work / "calib.npz")
        recipe = Recipe(targets=(target,), dims=task.dims, max_drop=_NEVER)
        report = quantize_for(task.model, Data(source=str(work / "calib.npz")), work / "q.onnx", recipe, progress=note)
    note("end")
    return time.perf_counter() - began, _cpu_seconds() - cpu, dict(spent), len(report.trials)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> int:
    """Searches for each target and returns 1 if one took longer than the limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", default=",".join(int8_targets()))
    parser.add_argument("--model", default="mobilenetv2_1.0_224_fp32")
    parser.add_argument("--samples", type=int, default=256)
    args = parser.parse_args()
    if not ZOO.is_dir():
        print(f"needs {ZOO}")
        return 2
    slowest = 0.0
    for target in args.targets.split(","):
        wall, cpu, spent, trials = search(args.model, target, args.samples)
        slowest = max(slowest, wall)
        steps = ", ".join(f"{name} {seconds:.0f}" for name, seconds in spent.items())
        load = os.getloadavg()[0]
        print(f"{args.model} {target}: {wall:.0f} s wall, {cpu:.0f} s CPU, {trials} trials ({steps}); load {load:.1f}")
    return int(slowest > LIMIT_SECONDS)


if __name__ == "__main__":
    sys.exit(main())
