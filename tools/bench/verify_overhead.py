"""What verification costs beyond the inference that it needs, and how its memory grows with the samples.

    python tools/bench/verify_overhead.py [--zoo ../shared/zoo] [--model vww_96_float] [--rounds 3]

Time: `verify` of 500 samples on `host` against the float model and the bundle's model run over the same samples in
the same kind of child process, in turns, the least of several. Memory: the peak of a process that verifies 50 and one
that verifies 5,000 samples.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from zoo_tasks import read_inputs

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.folder import open_bundle
from edgekit.devices.bundled import make_job, plan_run
from edgekit.devices.find import find_device
from edgekit.devices.register import DeviceChoice
from edgekit.model import load_model
from edgekit.pipeline import build
from edgekit.recipe import Data, Recipe
from edgekit.samples import load_samples
from edgekit.target import load_target
from edgekit.verify.on_devices import verify_with


def verify(bundle: Path, model: Path, data: Path) -> float:
    """Returns the seconds of a verification on the host."""
    start = time.perf_counter()
    report = verify_with(open_bundle(bundle), model, Data(source=str(data)), DeviceChoice(names=("host",)))
    seconds = time.perf_counter() - start
    if report.runs[0].failure or not report.runs[0].outputs:
        sys.exit(f"the run failed: {report.runs[0].failures}")
    return seconds


def infer(bundle: Path, model: Path, data: Path) -> float:
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
        seconds = {"verify": verify, "infer": infer}[kind](*map(Path, paths))
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
                 for _ in range(options.rounds) for kind in ("infer", "verify")]  # fmt: skip
        least = {kind: min(seconds for name, seconds in asked if name == kind) for kind in ("infer", "verify")}
        ratio = least["verify"] / least["infer"]
        small, large = (measure_child("verify", bundle, model, work / f"{count}.npz")[1] for count in (50, 5000))
    print(
        f"{options.model}: 500 samples: inference {least['infer']:.2f} s, verify {least['verify']:.2f} s: {ratio:.2f}x"
    )
    print(f"peak memory: 50 samples {small / 1e6:.0f} MB, 5000 {large / 1e6:.0f} MB: +{(large - small) / 1e6:.0f} MB")
    return int(ratio > 1.2 or large - small > 100e6)


if __name__ == "__main__":
    sys.exit(main())
