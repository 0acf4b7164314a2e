"""Builds real models of ../shared/zoo for the four accelerators, and prints the cost of the builds and their results.

`make bench`, or `python tools/bench/build_zoo.py [MODEL]... [--samples N]`. Time is given in seconds, in CPU seconds,
and as a ratio to plain float inference over the same samples in the same run; memory is the peak of the whole process
tree. On a busy machine emulators run as many samples as their time allows. edgekit is first compiled to bytecode, as in
an installation.
"""

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from zoo_tasks import ZOO, require_zoo

ROOT = Path(__file__).parents[2]
DEFAULT_MODELS = ("mobilenetv2_1.0_224_fp32",)
ACCELERATORS = ("nnapi", "coreml", "qnn", "xnnpack")
DIMS = {
    "mobilenetv2_1.0_224_fp32": ("N=1",),
    "vww_96_float": ("unk__337=1",),
    "kws_dscnn_float": ("unk__123=1",),
    "magika_v3_3": ("unk__214=1",),
    "silero_vad_micro_transformer": ("batch=1", "samples=16000"),
}


def main() -> int:
    """Runs the benchmark and returns 1 if a bundle did not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=DEFAULT_MODELS)
    parser.add_argument("--samples", type=int, default=256, help="calibration samples; the zoo's are repeated to it")
    args = parser.parse_args()
    require_zoo()
    # If bytecode cannot be stored, each process would compile every module again, and the figures would include that.
    subprocess.run([sys.executable, "-m", "compileall", "-q", str(ROOT / "edgekit")], check=True)
    return max(bench_model(name, args.samples) for name in args.models)


def bench_model(name: str, samples: int) -> int:
    """Builds one model and prints the figures."""
    model = ZOO / "models" / f"{name}.onnx"
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        subprocess.run([sys.executable, str(ZOO / "inputs.py"), name, "--out", str(folder)], check=True)
        repeat_samples(folder / "calib.npz", samples)
        float_seconds = time_float(model, folder / "calib.npz")
        command = [sys.executable, "-m", "edgekit", "build", str(model), "--data", str(folder / "calib.npz")]
        command += [word for target in ACCELERATORS for word in ("--target", target)]
        command += ["--eval", str(folder / "eval.npz"), "--out", str(folder / "out"), "--json"]
        command += [word for dim in DIMS.get(name, ()) for word in ("--dim", dim)]
        if (folder / "eval_labels.npy").exists():
            command += ["--labels", str(folder / "eval_labels.npy")]
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds, peak_bytes, output = run_measured(command)
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu_seconds = used.ru_utime + used.ru_stime - before.ru_utime - before.ru_stime
    report = json.loads(output)
    print(f"{name}: {samples} calibration and {report['golden_samples']} evaluation samples")
    print(f"  {cpu_seconds:.1f} CPU seconds, load {os.getloadavg()[0]:.1f}")
    print(f"  {seconds:.1f} s, {seconds / float_seconds:.1f} times float inference; peak {peak_bytes / 1e6:.0f} MB")
    for bundle in report["bundles"]:
        print_bundle(bundle)
    return 0 if report["passed"] else 1


def repeat_samples(path: Path, count: int) -> None:
    """Makes an archive hold exactly `count` samples, repeating its own."""
    with np.load(path) as archive:
        arrays = {key: archive[key] for key in archive.files}
    repeated: dict[str, Any] = {key: np.resize(value, (count, *value.shape[1:])) for key, value in arrays.items()}
    np.savez(path, **repeated)


def time_float(model: Path, data: Path) -> float:
    """Returns the seconds that plain ONNX Runtime needs for the samples, one at a time."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
    with np.load(data) as archive:
        arrays = {key: archive[key] for key in archive.files}
    start = time.perf_counter()
    for index in range(len(next(iter(arrays.values())))):
        session.run(None, {key: value[index : index + 1] for key, value in arrays.items()})
    return time.perf_counter() - start


def run_measured(command: list[str]) -> tuple[float, int, str]:
    """Runs a command and returns its seconds, the peak memory of its process tree, and its standard output."""
    start = time.perf_counter()
    child = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT)
    peaks = [0]
    watcher = threading.Thread(target=watch_memory, args=(child, peaks), daemon=True)
    watcher.start()
    output, _ = child.communicate()
    seconds = time.perf_counter() - start
    watcher.join()
    return seconds, peaks[0], output


def watch_memory(child: "subprocess.Popen[str]", peaks: list[int]) -> None:
    """Updates `peaks[0]` with the proportional memory of the process tree until the child ends."""
    while child.poll() is None:
        peaks[0] = max(peaks[0], sum(map(own_memory, descendants(child.pid))))
        time.sleep(0.2)


def descendants(pid: int) -> list[int]:
    """Returns a process and all its descendants."""
    try:
        children = [
            int(word)
            for task in Path(f"/proc/{pid}/task").iterdir()
            for word in (task / "children").read_text().split()
        ]
    except OSError:
        return []
    return [pid, *(found for child in children for found in descendants(child))]


def own_memory(pid: int) -> int:
    """Returns the proportional set size of a process in bytes, 0 if it is gone."""
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Pss:")), 0)


def print_bundle(bundle: dict[str, Any]) -> None:
    """Prints one target's figures."""
    check = bundle["check"] or {"taken": 0, "nodes": 0}
    sizes = f"{bundle['size_before'] / 1e6:.2f} -> {bundle['size_after'] / 1e6:.2f} MB"
    print(f"  {bundle['target']}: passed={bundle['passed']} taken={check['taken']}/{check['nodes']} {sizes}")
    if bundle["failure"]:
        print(f"    {bundle['failure']}")
    verify = bundle["verify"] or {"runs": [], "failures": []}
    for failure in verify["failures"]:
        print(f"    {failure}")
    for run in verify["runs"]:
        accuracy = run["accuracy"]
        share = f" accuracy {accuracy['reference']:.3f} -> {accuracy['got']:.3f}" if accuracy else ""
        for output in run["outputs"]:
            figures = f"cosine {output['cosine']} sqnr {output['sqnr_db']} top1 {output['top1_agreement']}"
            print(f"    {run['device']} ({run['evidence']}, {run['samples']} samples): {figures}{share}")
        for failure in run["failures"]:
            print(f"    {run['device']}: {failure}")


if __name__ == "__main__":
    sys.exit(main())
