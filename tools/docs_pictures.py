"""Renews the screenshots of HTML reports in docs/images, from the demo's model: `python tools/docs_pictures.py`.

Needs chromium (`apt-get install chromium`). Each screenshot has 96 colours, so that it stays small.
"""

import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

ROOT = Path(__file__).parents[1]
DEMO = ROOT / "edgekit" / "demo"
WIDTH = 1000
PICTURES: dict[str, tuple[int, list[str]]] = {
    "check": (1000, ["check", "model.onnx", "--target", "xnnpack"]),
    "quantize": (980, ["quantize", "model.onnx", "--data", "samples.npz", "--target", "xnnpack", "--out", "q.onnx"]),
    "verify": (1020, ["verify", "bundles/model-nnapi", "--on", "android:x86_64"]),
}
"""The height of each picture, and the command whose `--html` it shows."""


def draw_pictures(work: Path) -> None:
    """Builds the demo in a folder, and writes each picture."""
    for source, name in (("digits_mobilenet.onnx", "model.onnx"), ("calibration.npz", "samples.npz")):
        (work / name).symlink_to(DEMO / source)
    _run_edgekit(work, ["build", "model.onnx", "--data", "samples.npz", "--target", "nnapi", "--out", "bundles"])
    for name, (height, command) in PICTURES.items():
        _run_edgekit(work, [*command, "--html", f"{name}.html"])
        _photograph(work / f"{name}.html", work / f"{name}.png", height)
        with Image.open(work / f"{name}.png") as picture:
            picture.convert("RGB").quantize(96).save(ROOT / "docs" / "images" / f"{name}.png", optimize=True)


def _run_edgekit(work: Path, arguments: list[str]) -> None:
    command = [sys.executable, "-m", "edgekit", *arguments, "--quiet"]
    subprocess.run(command, cwd=work, check=True, stdout=subprocess.DEVNULL)


def _photograph(page: Path, out: Path, height: int) -> None:
    options = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'chromium'}",
    ]
    size = f"--window-size={WIDTH},{height}"
    command = ["chromium", *options, size, f"--screenshot={out}", page.as_uri()]
    subprocess.run(command, check=True, capture_output=True, timeout=120)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        draw_pictures(Path(folder))
