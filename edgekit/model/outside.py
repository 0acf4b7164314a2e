"""Models whose large weights stay in their files, beside the graph or inside the model's own."""

from pathlib import Path

import onnx

from edgekit.model.model import LARGE_BYTES, Model, read_proto
from edgekit.model.skim import point_into


def read_outside(model: Model) -> onnx.ModelProto:
    """Returns the protobuf of a model whose large weights stay in files of its folder: its own, or those beside it.

    Raises:
        ModelError: the file is gone or unreadable, or weights are cut off.
    """
    is_inside = keeps_inside(model.path) and not model.external_files
    return point_into(model.path) if is_inside else read_proto(model, weights=False)


def keeps_inside(path: Path) -> bool:
    """Returns True for a model in ONNX's format that is so large that most of it are weights inside."""
    return path.suffix == ".onnx" and path.is_file() and path.stat().st_size >= LARGE_BYTES
