"""Check, quantize, convert, bundle and verify ONNX models for phones and boards.

The names of the interface are loaded when they are used, so that `edgekit --help` need not wait for ONNX Runtime.
`__init__.pyi` shows them to people and type checkers.
"""

import importlib
import os
from types import FunctionType

# ONNX Runtime 1.29 and later upload usage events unless this is set before it is loaded (its PR 27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# The module of each name: the lines of the stub say `from MODULE import NAME as NAME`. Python reads it by itself, since
# `python -m edgekit` must import nothing before it has left the working folder (`__main__.py`).
with open(__file__.rpartition(".")[0] + ".pyi", encoding="utf-8") as _stub:  # noqa: PTH123 - see above
    _HOMES = {words[-1]: words[1] for words in map(str.split, _stub) if words[:1] == ["from"]}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Loaded here for the same reason.
        return importlib.import_module("importlib.metadata").version("edgekit-onnx")
    if name not in _HOMES:
        raise AttributeError(f"module 'edgekit' has no attribute '{name}'")
    # Reports lie below the pages that draw them: whoever takes them from here may end a notebook's cell with one.
    importlib.import_module("edgekit.serialize").NotebookPage.draw_page = _draw_page
    found = getattr(importlib.import_module(_HOMES[name]), name)
    return importlib.import_module("edgekit.facade").check_kinds(found) if isinstance(found, FunctionType) else found


def _draw_page(report: object) -> str:
    return str(importlib.import_module("edgekit.report.html").draw(report))


def __dir__() -> list[str]:
    return sorted(_HOMES)
