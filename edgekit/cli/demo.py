"""`edgekit demo`."""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Option, as_command
from edgekit.cli.screen import show_json, showing_progress
from edgekit.cli.terminal import show_build
from edgekit.jobs.build import build
from edgekit.recipe import Data, Recipe


@as_command
def command(
    out: Annotated[Path, Option("Where they go.", "DIR", default="edgekit-demo")],
    as_json: options.Json,
    volume: options.Volume,
) -> int:
    """Build and verify four bundles of the demo model, a small network trained on handwritten digits.

    \b
    Example:
      edgekit demo --out build/demo

    Exit code 0: none failed; the table says what is not proven on this machine. 1: one failed.
    """
    recipe = Recipe(targets=("nnapi", "coreml", "qnn", "xnnpack"))
    with as_file(files("edgekit") / "demo") as folder, showing_progress(volume) as progress:
        data = Data(
            source=str(folder / "calibration.npz"),
            evaluation=str(folder / "evaluation.npz"),
            labels=folder / "evaluation_labels.npy",
        )
        report = build(folder / "digits_mobilenet.onnx", data, out, recipe, progress=progress)
    show_json(report) if as_json else show_build(report)
    return options.exit_code(report.verdict, accept_unproven=True)
