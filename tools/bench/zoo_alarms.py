"""Builds and verifies real models of ../shared/zoo on all devices of their targets, and counts accusations of lying.

    python tools/bench/zoo_alarms.py [MODEL]... [--target NAME]... [--runs 3] [--samples 24]

Each bundle is verified with its own golden samples, then with other random eval samples, on every device that its
target names and that this machine has. `false_alarms.py` defines an accusation; a figure below a limit is none, and a
run that the device refuses does not count.
"""

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from build_zoo import DIMS
from false_alarms import MOST_SHARE, list_accusations
from zoo_tasks import ZOO

from edgekit.bundle.folder import open_bundle, read_target
from edgekit.bundle.golden import make_golden
from edgekit.data.samples import load_samples, select_samples
from edgekit.devices.find import DeviceChoice
from edgekit.errors import EdgekitError
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.recipe import Data, Recipe
from edgekit.verify.on_devices import find_devices
from edgekit.verify.report import VerifyReport
from edgekit.verify.run import verify_bundle

MODELS = (
    "mnist_cnn_pytorch", "kws_dscnn_float", "vww_96_float", "squeezenet1.1_fp32", "ultraface_rfb320",
    "mobilenetv2_1.0_224_fp32", "magika_v3_3", "silero_vad_micro_transformer",
)  # fmt: skip


def verify_model(name: str, targets: tuple[str, ...], runs: int, samples: int, work: Path) -> Iterator[VerifyReport]:
    """Yields the verifications of one model's bundles."""
    subprocess.run([sys.executable, str(ZOO / "inputs.py"), name, "--out", str(work)], check=True)
    for kind, most in (("calib", 32), ("eval", 256)):
        with np.load(work / f"{kind}.npz") as rows:
            np.savez(work / f"{kind}.npz", **{key: value[:most] for key, value in rows.items()})
    source = ZOO / "models" / f"{name}.onnx"
    recipe = Recipe(targets=targets, dims={k: int(v) for k, _, v in (dim.partition("=") for dim in DIMS.get(name, ()))})
    data = Data(source=str(work / "calib.npz"), evaluation=str(work / "eval.npz"))
    report = build(source, data, work / "out", recipe, verify=False, time_budget_s=5.0)
    rng = np.random.default_rng(0)
    for summary in report.bundles:
        if summary.path is None:
            print(f"{name} for {summary.target}: no bundle: {summary.failure}", flush=True)
            continue
        bundle = open_bundle(summary.path)
        devices = find_devices(bundle, read_target(bundle), DeviceChoice())
        yield verify_bundle(bundle, devices)
        every = load_samples(str(work / "eval.npz"), bundle.manifest.inputs, None)
        for index in range(runs - 1):
            chosen = sorted(rng.choice(every.count, size=min(samples, every.count), replace=False).tolist())
            place = work / f"golden-{summary.target}-{index}"
            golden = make_golden(load_model(source), select_samples(every, chosen), place)
            yield verify_bundle(bundle, devices, golden=golden)


def main() -> int:
    """Prints the accusations, model by model, and returns 1 if there are too many."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=MODELS)
    parser.add_argument("--target", action="append", default=[])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=24)
    args = parser.parse_args()
    targets = tuple(args.target) or ("nnapi", "xnnpack", "qnn", "coreml", "cpu")
    done, refused, accused = 0, 0, 0
    for name in args.models:
        with tempfile.TemporaryDirectory() as work:
            try:
                for report in verify_model(name, targets, args.runs, args.samples, Path(work)):
                    whole = [run for run in report.runs if run.failure is None]
                    done, refused = done + len(whole), refused + len(report.runs) - len(whole)
                    found = list(list_accusations(report))
                    accused += bool(found)
                    for words in found:
                        print(f"{report.bundle}: {words}", flush=True)
            except EdgekitError as error:
                print(f"{name}: {error}", flush=True)
        print(f"{name}: {accused} of {done} honest runs accused so far, {refused} refused by the device", flush=True)
    return 0 if accused <= max(1, MOST_SHARE * done) else 1


if __name__ == "__main__":
    sys.exit(main())
