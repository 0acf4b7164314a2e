"""Which ONNX Runtime a model file needs, by what it says of itself."""

from collections.abc import Iterable
from pathlib import Path

from edgekit._ort import VERSION
from edgekit.convert.ort_format.report import inspect_ort
from edgekit.model.skim import skim_model
from edgekit.target import read_version

# The newest IR version and the newest opset of ai.onnx with which a session is made; anything newer is refused at load.
# Measured 2026-11-22 with the wheels 1.19.2, 1.20.1, 1.22.1, 1.23.2, 1.24.4, 1.26.0, 1.28.0 to 1.30.0, 1.31.1 and
# 1.32.0: a model of one Relu.
_LOADS = (
    ("", 10, 21),
    ("1.22.0", 10, 22),
    ("1.23.0", 11, 23),
    ("1.24.0", 13, 25),
    ("1.26.0", 13, 26),
    ("1.32.0", 14, 28),
)


def find_needed_ort(files: Iterable[Path]) -> str:
    """Returns the oldest ONNX Runtime that reads all of these files, "" where the oldest that was tried does, 1.19.

    ORT-format files are of version 6, which has been read since 1.15.

    Raises:
        ModelError: a file is damaged.
    """
    return max((_find_reader(*_read_versions(path)) for path in files), key=read_version, default="")


def _read_versions(path: Path) -> tuple[int, int]:
    """Returns the IR version of a file and its opset of ai.onnx."""
    if path.suffix == ".ort":
        report = inspect_ort(path)
        return report.ir_version, report.opsets.get("ai.onnx", 0)
    model = skim_model(path)
    return model.ir_version, max((entry.version for entry in model.opset_import if not entry.domain), default=0)


def _find_reader(ir_version: int, opset: int) -> str:
    # What no table knows was read by the ONNX Runtime that made the file.
    return next((ort for ort, ir, newest in _LOADS if ir_version <= ir and opset <= newest), VERSION)
