"""Converts models on x86-64 and on emulated 64-bit Arm, and compares bytes: `python convert_arm64.py MODEL...`.

Models must have static shapes. A pair that differs must have been announced by `describe_traits`.
"""

import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "tests/convert"))
sys.path.insert(0, str(Path(__file__).parents[2] / "tests"))

from arm64_saver import convert_on_arm64

from edgekit.convert.host_traits import describe_traits
from edgekit.convert.ort_form import OrtOptions, Style, write_ort
from edgekit.convert.ort_format.report import read_graph
from edgekit.model.model import load_model
from edgekit.model.skim import skim_model

STYLES: tuple[Style, ...] = ("full", "runtime")


def main() -> int:
    """Prints a line for each model and style; returns 1 if files differ and it was not announced."""
    surprises = 0
    for path in map(Path, sys.argv[1:]):
        for style in STYLES:
            with tempfile.TemporaryDirectory() as folder:
                here = Path(folder) / "here.ort"
                write_ort(load_model(path), here, OrtOptions(style=style, cpu="arm"))
                there = convert_on_arm64(path, Path(folder) / "there.ort", style)
                equal = here.read_bytes() == there.read_bytes()
                traits = describe_traits(skim_model(path).graph, read_graph(here).nodes)
            surprises += not equal and not traits
            state = "equal" if equal else "differs"
            print(f"{path.name:40} {style:8} {state:8} {'; '.join(traits)}", flush=True)
    return 1 if surprises else 0


if __name__ == "__main__":
    sys.exit(main())
