"""Measures seconds and memory of `edgekit check` as a process, next to ONNX Runtime's own usability checker.

    python tools/bench/check_speed.py [--runs N]

The limits: checking MobileNetV2 (of ../shared/zoo, or the demo's model) for every target takes 0.5 s after Python's
imports, and a whole process for VGG-19 (light_vgg19 of the onnx package, whose weights are 575 MB once they are
generated) takes 2 s and 400 MB. Seconds are CPU time, the least of N interleaved runs, because other work on the
machine lengthens wall time. It prints a line for each model, and returns 1 if a limit is exceeded.
"""

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from onnx.backend.test import loader

from edgekit.jobs.check import check_targets
from edgekit.recipe import Recipe

ROOT = Path(__file__).parents[2]
ZOO = ROOT.parent / "shared/zoo/models"
MOBILENET = ZOO / "mobilenetv2_1.0_224_fp32.onnx"
DEMO = ROOT / "edgekit/demo/digits_mobilenet.onnx"
LIGHT = Path(loader.DATA_DIR) / "light"
THEIRS = "onnxruntime.tools.check_onnx_model_mobile_usability"


def main() -> int:
    """Prints the figures; returns 1 if one is over its limit."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=3)
    runs = parser.parse_args().runs
    small = [str(MOBILENET), "--dim", "N=1"] if MOBILENET.exists() else [str(DEMO)]
    vgg = str(LIGHT / "light_vgg19.onnx")
    ours, nothing = [sys.executable, "-m", "edgekit", "check"], [sys.executable, "-c", "import onnx, onnxruntime"]
    commands: dict[str, tuple[list[str], float, float]] = {
        "import onnx and onnxruntime": (nothing, 0, 0),
        "mobilenet, one target": ([*ours, *small, "--target", "nnapi"], 0, 400),
        "mobilenet, every target": ([*ours, *small], 0, 400),
        "vgg19, one target": ([*ours, vgg, "--target", "nnapi"], 2.0, 400),
        "vgg19, every target": ([*ours, vgg], 2.0, 400),
        "vgg19, ONNX Runtime's checker": ([sys.executable, "-m", THEIRS, vgg], 0, 0),
    }
    found: dict[str, list[tuple[float, float, float]]] = {name: [] for name in commands}
    for _ in range(runs):
        for name, (argv, _, _) in commands.items():
            found[name].append(_measure(argv))
    rows = {"mobilenet, check alone": _check_inside(small[0], runs)}
    rows |= {name: _sum_up(found[name], *commands[name][1:]) for name in commands}
    for name, row in rows.items():
        figures = f"{row['cpu_s']:6.2f} s cpu {row['wall_s']:6.2f} s wall {row['peak_mb']:6.0f} MB"
        print(f"{name:32} {figures}  {row['verdict']}")
    return 1 if any(row["verdict"] == "over its limit" for row in rows.values()) else 0


def _check_inside(model: str, runs: int) -> dict[str, Any]:
    recipe = Recipe(dims={} if model == str(DEMO) else {"N": 1})
    measured: list[tuple[float, float, float]] = []
    for _ in range(runs):
        wall, cpu = time.perf_counter(), time.process_time()
        check_targets(Path(model), recipe)
        measured.append((time.process_time() - cpu, time.perf_counter() - wall, 0.0))
    return _sum_up(measured, 0.5, 0)


def _measure(argv: list[str]) -> tuple[float, float, float]:
    start = time.perf_counter()
    with subprocess.Popen(argv, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        _, _, usage = os.wait4(process.pid, 0)
        process.returncode = 0
    return usage.ru_utime + usage.ru_stime, time.perf_counter() - start, usage.ru_maxrss / 1000


def _sum_up(measured: list[tuple[float, float, float]], seconds: float, megabytes: float) -> dict[str, Any]:
    cpu, wall, peak = (min(column) for column in zip(*measured, strict=True))
    over = (seconds and cpu > seconds) or (megabytes and peak > megabytes)
    verdict = "" if not seconds and not megabytes else "over its limit" if over else "ok"
    return {"cpu_s": round(cpu, 3), "wall_s": round(wall, 3), "peak_mb": round(peak), "verdict": verdict}


if __name__ == "__main__":
    sys.exit(main())
