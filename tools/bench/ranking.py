"""How well the ranking of activations by tens of runs agrees with one that judges each by itself.

    python tools/bench/ranking.py [NAME...] [--target nnapi] [--samples 48]

Nets of ../shared/zoo and of architectures.py are planned with plain minmax ranges. Printed are the runs of both ways,
the CPU seconds, whether they name the same worst activation, how many of the worst 3 and 8 they share, and how much of
the noise that the worst 1, 3 and 8 make the found ones make: that is what relief is after.
"""

import argparse
import functools
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import numpy as np
from architectures import ARCHITECTURES
from quantize_ratio import write_model
from zoo_tasks import TASKS, load_task, write_calibration

from edgekit._ort import CpuSession
from edgekit.data.samples import limit_samples, load_samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare import ready_model
from edgekit.quantize import calibrate_model, plan_quantization
from edgekit.quantize.graph.compared_tensors import find_compared_tensors
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.relief import adapt_ranges
from edgekit.quantize.mixed_precision.sensitivity import TensorError, rank_activations
from edgekit.quantize.qdq.build import build_qdq
from edgekit.target import load_target

NAMES = (
    "kws_dscnn_float", "vww_96_float", "mnist_cnn_pytorch", "squeezenet1.1_fp32", "mobilenetv2_1.0_224_fp32",
    "ppocr_cls_mbv3", "magika_v3_3", "fastestdet", "conv50", "encoder5m",
)  # fmt: skip
WORST, DEPTHS = 8, (1, 3, 8)


def count_runs(run: Callable[..., dict[str, Array]], counts: list[int]) -> Callable[..., dict[str, Array]]:
    """Returns a session's `run` that counts its calls."""

    @functools.wraps(run)
    def counting(session: CpuSession, *args: object) -> dict[str, Array]:
        counts[-1] += 1
        return run(session, *args)

    return counting


def open_net(name: str, samples: int, folder: Path) -> tuple[Model, Path]:
    """Returns a prepared net and the file with its samples."""
    if name not in TASKS:
        source, data = write_model(ARCHITECTURES[name](), folder, samples)
        return ready_model(load_model(source), folder, {}).model, data
    task, data = load_task(name), folder / "data.npz"
    write_calibration(task, data)
    return ready_model(load_model(task.model), folder, task.dims).model, data


def measure(name: str, target: str, samples: int, folder: Path) -> tuple[list[float], bool, int]:
    """Prints the line of a net; returns which part of the noise was found at each depth, and the runs that it took."""
    model, data = open_net(name, samples, folder)
    given = limit_samples(load_samples(str(data), model.inputs), samples)
    calibration = calibrate_model(model, given, work=folder / "work")
    graph, chosen, statistics = read_float_graph(model), load_target(target), Path(calibration.statistics)
    calibration = adapt_ranges(graph, calibration)
    plan = plan_quantization(model, calibration, chosen, "int8", method="minmax")
    qdq, compared = build_qdq(graph, plan, statistics, name), find_compared_tensors(graph)
    found: list[tuple[TensorError, ...]] = []
    runs, seconds = list[int](), list[float]()
    with mock.patch.object(CpuSession, "run", count_runs(CpuSession.run, runs)):
        for worst in (None, WORST):
            runs.append(0)
            began = time.process_time()
            found.append(rank_activations(graph, qdq, compared, statistics, worst=worst))
            seconds.append(time.process_time() - began)
    every, few = found
    noise = {error.name: 10 ** (-error.sqnr_db / 10) for error in every}
    shares = [
        float(np.sum([noise[error.name] for error in few[:depth]]) / np.sum([noise[e.name] for e in every[:depth]]))
        for depth in DEPTHS
    ]
    shared = [len({e.name for e in every[:depth]} & {e.name for e in few[:depth]}) for depth in DEPTHS]
    print(
        f"{name:26} {len(every):4} activations  runs {runs[0]:5} -> {runs[1]:3}"
        f"  CPU-s {seconds[0]:6.2f} -> {seconds[1]:5.2f}  worst {'same' if shared[0] else 'other'}, {shared[1]} of 3,"
        f" {shared[2]} of {min(8, len(every))}"
        f"  noise found {' '.join(f'{share:.2f}' for share in shares)}",
        flush=True,
    )
    return shares, bool(shared[0]), runs[1]


def main() -> int:
    """Compares both rankings net by net; returns 1 where more than 99 runs were needed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES)
    parser.add_argument("--target", default="nnapi")
    parser.add_argument("--samples", type=int, default=48)
    options = parser.parse_args()
    rows: list[tuple[list[float], bool, int]] = []
    for name in options.names:
        with tempfile.TemporaryDirectory() as folder:
            rows.append(measure(name, options.target, options.samples, Path(folder)))
    shares = np.mean([row[0] for row in rows], axis=0)
    same = sum(row[1] for row in rows)
    print(f"{same} of {len(rows)} name the same worst; of the noise found {' '.join(f'{each:.3f}' for each in shares)}")
    return int(max(row[2] for row in rows) > 99)


if __name__ == "__main__":
    sys.exit(main())
