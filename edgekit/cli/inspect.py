"""`edgekit inspect`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_contents, show_json
from edgekit.inspect import inspect_model


@click.command(short_help="Print what a model contains.")
@options.MODEL
@options.CUSTOM_OPS
@options.JSON
def command(model: Path, custom_ops: tuple[Path, ...], as_json: bool) -> int:
    """Print what MODEL (.onnx or .ort) contains: inputs, outputs, operators, weights, work.

    \b
    Example:
      edgekit inspect model.onnx
    """
    report = inspect_model(model, custom_ops=custom_ops)
    show_json(report) if as_json else show_contents(report)
    return YES
