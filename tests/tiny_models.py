"""Tiny models given in onnx's text form."""

from pathlib import Path
from typing import Any

import onnx
from onnx import parser


def parse_model(text: str, path: Path, **fields: Any) -> Path:
    """Writes a model given in onnx's text form and returns its path; `fields` are set on the ModelProto."""
    model = parser.parse_model(text)
    for name, value in fields.items():
        setattr(model, name, value)
    onnx.save(model, str(path))
    return path
