"""`edgekit diff`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import show_json, show_lines
from edgekit.inspect.diff import compare_versions
from edgekit.report import tables

_FILE = click.Path(path_type=Path)


@click.command(short_help="Say what is different between two versions of a bundle, or of a model.")
@click.argument("old", type=_FILE)
@click.argument("new", type=_FILE)
@click.option("--target", metavar="NAME", help="Which variant of bundles of several targets.")
@options.JSON
def command(old: Path, new: Path, target: str | None, as_json: bool) -> int:
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
