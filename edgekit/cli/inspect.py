"""`edgekit inspect`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_contents, show_json, show_sizes
from edgekit.inspect.inspect import inspect_model
from edgekit.inspect.sizes import measure_sizes


@click.command(short_help="Print what a model contains, or where its bytes are.")
@options.MODEL
@options.CUSTOM_OPS
@options.DIM
@click.option("--sizes", is_flag=True, help="Bytes file by file and layer by layer; MODEL may be a bundle.")
@options.JSON
def command(model: Path, custom_ops: tuple[Path, ...], dims: tuple[str, ...], sizes: bool, as_json: bool) -> int:
    """Print what MODEL (.onnx or .ort) contains: inputs, outputs, operators, weights, work.

    \b
    Example:
      edgekit inspect model.onnx --dim batch=1
      edgekit inspect bundles/model-nnapi --sizes
    """
    if sizes:
        measured = measure_sizes(model)
        show_json(measured) if as_json else show_sizes(measured)
        return YES
    report = inspect_model(model, custom_ops=custom_ops, dims=options.parse_dims(dims))
    show_json(report) if as_json else show_contents(report)
    return YES
