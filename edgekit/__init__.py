"""Check, quantize, convert, bundle and verify ONNX models for phones and boards.

The names of the interface are loaded when they are used, so that `edgekit --help` need not wait for ONNX Runtime.
`__init__.pyi` shows them to people and type checkers.
"""

import importlib
import os
from types import FunctionType

# ONNX Runtime 1.29 and later upload usage events unless this is set before it is loaded (its PR 27379).
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

_HOMES = {
    "Bundle": "bundle.folder",
    "BuildReport": "report.summary",
    "Calibration": "quantize",
    "CheckReport": "check.report",
    "ConvertedModel": "convert.convert",
    "Data": "recipe",
    "EdgekitError": "errors",
    "Evidence": "evidence",
    "ForecastReport": "forecasts.forecast",
    "Golden": "bundle.golden",
    "Model": "model.model",
    "QuantPlan": "quantize",
    "QuantizedModel": "quantize",
    "Recipe": "recipe",
    "Samples": "data.samples",
    "Target": "target",
    "VerifyReport": "verify.report",
    "build": "jobs.build",
    "calibrate_model": "quantize",
    "check_model": "check.check",
    "convert_model": "convert.convert",
    "find_device": "devices.find",
    "forecast": "jobs.forecast",
    "load_app": "app.config",
    "load_model": "model.model",
    "load_recipe": "recipe",
    "load_samples": "data.samples",
    "load_target": "target",
    "make_golden": "bundle.golden",
    "open_bundle": "bundle.folder",
    "package_bundles": "package.package",
    "plan_quantization": "quantize",
    "prepare_model": "prepare.clean",
    "quantize_model": "quantize",
    "run_app": "app.run",
    "show": "report.html",
    "show_progress": "report.html",
    "target_names": "target",
    "to_json": "serialize",
    "verify_bundle": "verify.run",
}

__all__ = list(_HOMES)


def __getattr__(name: str) -> object:
    if name == "__version__":
        # Loaded here: `python -m edgekit` must import nothing before it has left the working folder (`__main__.py`).
        return importlib.import_module("importlib.metadata").version("edgekit-onnx")
    if name not in _HOMES:
        raise AttributeError(f"module 'edgekit' has no attribute '{name}'")
    # Reports lie below the pages that draw them: whoever takes them from here may end a notebook's cell with one.
    importlib.import_module("edgekit.serialize").NotebookPage.draw_page = _draw_page
    found = getattr(importlib.import_module(f"edgekit.{_HOMES[name]}"), name)
    return importlib.import_module("edgekit.facade").check_kinds(found) if isinstance(found, FunctionType) else found


def _draw_page(report: object) -> str:
    return str(importlib.import_module("edgekit.report.html").draw(report))


def __dir__() -> list[str]:
    return sorted(_HOMES)
