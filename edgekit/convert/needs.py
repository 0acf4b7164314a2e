"""Which ONNX Runtime a model file needs, by what it says of itself."""

from collections.abc import Iterable
from pathlib import Path

from edgekit._ort import VERSION
from edgekit.convert.ort_format.report import inspect_ort
from edgekit.model.skim import skim_model
from edgekit.model.versions import READS, find_reader
from edgekit.target import read_version


def find_needed_ort(files: Iterable[Path]) -> str:
    """Returns the oldest ONNX Runtime that reads all of these files, "" where the oldest that was tried does, 1.19.

    ORT-format files are of version 6, which has been read since 1.15.

    Raises:
        ModelError: a file is damaged.
    """
    # What no table knows was read by the ONNX Runtime that made the file.
    needed = [find_reader(*_read_versions(path)) or VERSION for path in files]
    newest = max(needed, key=read_version, default="")
    return "" if newest == READS[0].since else newest


def _read_versions(path: Path) -> tuple[int, int]:
    """Returns the IR version of a file and its opset of ai.onnx."""
    if path.suffix == ".ort":
        report = inspect_ort(path)
        return report.ir_version, report.opsets.get("ai.onnx", 0)
    model = skim_model(path)
    return model.ir_version, max((entry.version for entry in model.opset_import if not entry.domain), default=0)
