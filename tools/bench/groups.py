"""A group at true size: Whisper's encoder and decoder with drawn weights, built and run for 16 tokens end to end.

    python tools/bench/groups.py FOLDER [--target cpu] [--precision fp32] [--width 384] [--depth 4] [--device host]
                                 [--samples 16]

It says the CPU seconds of the build and of the verification, and what the metric found. Weights are drawn: what counts
is that the whole runs, its time and memory, not the text.
"""

import argparse
import os
import resource
from pathlib import Path

import numpy as np
import onnx
from architectures import speech_decoder, speech_encoder

from edgekit.bundle.group.group import open_group
from edgekit.devices.register import DeviceChoice
from edgekit.jobs.group import build_group
from edgekit.recipe import Data, Recipe
from edgekit.report.grouped import describe_group
from edgekit.verify.groups import choosing, verify_group

_WIRING = """[members.encoder]
model = "encoder.onnx"

[members.decoder]
model = "decoder.onnx"

[tokens]
start = [50258]
most = 16

[[stages]]
run = "encoder"

[[stages]]
run = "decoder"
repeat = true
text = { input = "ids", scores = "logits" }
"""


def write_models(folder: Path, depth: int, width: int, samples: int) -> Path:
    """Writes models, samples to calibrate with, four to verify with, and the wiring, and returns the last."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, made in (("encoder", speech_encoder(depth, width)), ("decoder", speech_decoder(depth, width))):
        proto = made.net.to_onnx()
        if name == "decoder":
            # Net makes every input float; these are tokens.
            next(each for each in proto.graph.input if each.name == "ids").type.tensor_type.elem_type = 7
        onnx.save(proto, str(folder / f"{name}.onnx"))
    rng = np.random.default_rng(0)
    for name, count in (("test", 4), ("sound", samples)):
        np.savez(folder / f"{name}.npz", mel=rng.normal(size=(count, 1, 80, 3000)).astype(np.float32))
    (folder / "whisper.toml").write_text(_WIRING)
    return folder / "whisper.toml"


def tell(step: str) -> None:
    """Prints a step, and how many CPU seconds were taken before it."""
    print(f"{sum(os.times()[:4]):.0f} CPU-s, load {os.getloadavg()[0]:.0f}: {step}", flush=True)


def main() -> None:
    """Builds the group for one target, and verifies it on one device."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--target", default="cpu")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--device", default="host")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--samples", type=int, default=16, help="to calibrate with")
    given = parser.parse_args()
    path = write_models(given.folder, given.depth, given.width, given.samples)
    sound, test, before = str(given.folder / "sound.npz"), str(given.folder / "test.npz"), sum(os.times()[:4])
    recipe = Recipe(targets=(given.target,), precision=given.precision)
    data, out = Data(source=sound, evaluation=test), given.folder / "out"
    report = build_group(path, data, out, recipe, verify=False, progress=tell)
    (target,) = report.targets
    built = sum(os.times()[:4])
    print(
        f"build: {built - before:.0f} CPU-s, {target.size_bytes / 1e6:.0f} MB, {target.failure or 'made'}", flush=True
    )
    if target.failure is None:
        choice = DeviceChoice(names=(given.device,))
        found = verify_group(open_group(out / f"whisper-{given.target}"), choosing(choice), progress=tell)
        print(*describe_group(found), sep="\n")
        print(f"verify: {sum(os.times()[:4]) - built:.0f} CPU-s: {found.verdict}")
    print(f"peak: {resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3:.0f} MB")


if __name__ == "__main__":
    main()
