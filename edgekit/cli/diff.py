"""`edgekit diff`."""

from pathlib import Path
from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, as_command
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import show_json, show_lines
from edgekit.inspect.diff import compare_versions
from edgekit.report import tables


@as_command
def command(
    old: Annotated[Path, Argument()],
    new: Annotated[Path, Argument()],
    target: Annotated[str | None, Option("Which variant of bundles of several targets.", "NAME")],
    as_json: options.Json,
) -> int:
    """Say what is different between OLD and NEW: files, placement, layers, accuracy, size.

    Both are bundles (folders or archives) or both are models (.onnx or .ort). Accuracy is what their verify.json say.

    \b
    Example:
      edgekit diff release-1/model-nnapi release-2/model-nnapi

    Exit code, as that of diff: 0: they are the same. 1: they are different. 2: one cannot be read.
    """
    delta = compare_versions(old, new, target=target)
    show_json(delta) if as_json else show_lines(tables.list_changes(delta))
    return YES if delta.is_same else NO
