"""What verification costs beyond the inference that it needs, and how its memory grows with the samples.

    python tools/bench/verify_overhead.py [--zoo ../shared/zoo] [--model vww_96_float] [--rounds 3]

The inference that `verify` of 500 samples on `host` needs is two runs over them: the float model as it stands, without
optimisation, and the bundle's model as an app opens it. Three processes take turns, and the least of several counts:

- bare: numpy and onnxruntime alone open both models, one after another, and run them over the rows of the `.npz`;
- apart: the same, with the bundle's model in a child process that gets samples and gives outputs through files, as the
  device `host` does: a model that kills its process must not take the gate with it;
- verify: what `edgekit verify --data` does once its modules are loaded.

The promise is held against "apart", and the ratio to "bare" is printed beside it: what lies between them is the start
of a second Python with its imports, which is the same for nets of any size. Memory: the peak of a process that verifies
50 and one that verifies 5,000 samples.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
from zoo_tasks import read_inputs

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.folder import open_bundle
from edgekit.data.samples import load_samples
from edgekit.devices.bundled import make_job, plan_run
from edgekit.devices.find import find_device
from edgekit.devices.process.child import describe_job
from edgekit.devices.register import DeviceChoice
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.recipe import Data, Recipe
from edgekit.target import load_target
from edgekit.verify.on_devices import verify_with

ort: Any = onnxruntime
KINDS = ("bare", "apart", "verify")


def verify(bundle: Path, model: Path, data: Path) -> float:
    """Returns the seconds of a verification on the host."""
    start = time.perf_counter()
    report = verify_with(open_bundle(bundle), model, Data(source=str(data)), DeviceChoice(names=("host",)))
    seconds = time.perf_counter() - start
    if report.runs[0].failure or not report.runs[0].outputs:
        sys.exit(f"the run failed: {report.runs[0].failures}")
    return seconds


def apart(bundle: Path, model: Path, data: Path) -> float:
    """Returns the seconds of both inferences alone: the float model here, the bundle's model on the host device."""
    start = time.perf_counter()
    opened = open_bundle(bundle)
    samples = load_samples(str(data), opened.manifest.inputs)
    session = CpuSession(load_model(model).path, SessionSettings(level=Level.DISABLED))
    for sample in samples:
        session.run(sample)
    host = find_device("host", load_target("nnapi"))
    with work_folder() as work:
        host.run_job(make_job(opened, plan_run(opened, host, samples.count), samples), work)
    return time.perf_counter() - start


def bare(bundle: Path, model: Path, data: Path) -> float:
    """Returns the seconds of both inferences with numpy and onnxruntime alone."""
    opened = open_bundle(bundle)
    samples = load_samples(str(data), opened.manifest.inputs)
    host = find_device("host", load_target("nnapi"))
    far = describe_job(make_job(opened, plan_run(opened, host, samples.count), samples))
    plain, fast = ort.SessionOptions(), ort.SessionOptions()
    plain.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    for key, value in far.session_config.items():
        fast.add_session_config_entry(key, value)
    start = time.perf_counter()
    with np.load(data) as archive:
        rows = {name: archive[name] for name in archive.files}
    for path, settings in ((str(model), plain), (far.model, fast)):
        session = ort.InferenceSession(path, settings, providers=["CPUExecutionProvider"])
        shapes = {spec.name: spec.shape for spec in session.get_inputs()}
        for index in range(samples.count):
            one = {name: value[index] for name, value in rows.items()}
            given = {name: value[None] if len(shapes[name]) > value.ndim else value for name, value in one.items()}
            session.run(None, given)
        del session
    return time.perf_counter() - start


def measure_child(kind: str, *paths: Path) -> tuple[float, int]:
    """Returns the seconds and the peak memory in bytes of a measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, __file__, "--child", kind, *map(str, paths)], capture_output=True, text=True, check=True
    )
    seconds, peak = done.stdout.split()[-2:]
    return float(seconds), int(peak)


def main() -> int:
    """Prints the ratio and the growth; 1 where one is more than the project promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--zoo", type=Path, default=Path("../shared/zoo"))
    parser.add_argument("--model", default="vww_96_float")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--child", nargs=4)
    options = parser.parse_args()
    if options.child:
        kind, *paths = options.child
        seconds = {"verify": verify, "apart": apart, "bare": bare}[kind](*map(Path, paths))
        status = Path("/proc/self/status").read_text()  # ru_maxrss also counts the parent before the exec
        print(seconds, 1024 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")))
        return 0
    inputs, _ = read_inputs(options.zoo, options.model)
    model = options.zoo / "models" / f"{options.model}.onnx"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        for count in (50, 500, 5000):
            rows = {
                name: np.resize(value, (count, *value.shape[1:])).astype(np.float32) for name, value in inputs.items()
            }
            np.savez(work / f"{count}.npz", **rows)  # type: ignore[arg-type] # numpy's own stub
        source = load_model(model)
        dims = {str(dim or f"{spec.name}:{axis}"): 1 for spec in source.inputs
                for axis, dim in enumerate(spec.shape or ()) if not isinstance(dim, int)}  # fmt: skip
        recipe = Recipe(targets=("nnapi",), dims=dims, samples=32)
        build(model, Data(source=str(work / "50.npz")), work / "out", recipe, verify=False)
        bundle = work / "out" / f"{options.model}-nnapi"
        asked = [(kind, measure_child(kind, bundle, model, work / "500.npz")[0])
                 for _ in range(options.rounds) for kind in KINDS]  # fmt: skip
        least = {kind: min(seconds for name, seconds in asked if name == kind) for kind in KINDS}
        ratio = least["verify"] / least["apart"]
        small, large = (measure_child("verify", bundle, model, work / f"{count}.npz")[1] for count in (50, 5000))
    print(
        f"{options.model}: 500 samples: inference bare {least['bare']:.2f} s, apart {least['apart']:.2f} s, verify"
        f" {least['verify']:.2f} s: {ratio:.2f}x of apart, {least['verify'] / least['bare']:.2f}x of bare"
    )
    print(f"peak memory: 50 samples {small / 1e6:.0f} MB, 5000 {large / 1e6:.0f} MB: +{(large - small) / 1e6:.0f} MB")
    return int(ratio > 1.2 or large - small > 100e6)


if __name__ == "__main__":
    sys.exit(main())
