"""`edgekit prepare`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_json, show_line, showing_progress
from edgekit.model import load_model
from edgekit.prepare import prepare_model


@click.command(short_help="Fix shapes and clean the graph, as a provider will see it.")
@options.MODEL
@options.DIM
@click.option("--opset", type=click.IntRange(min=13), metavar="N", help="Convert to this opset.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The prepared model.")
@options.JSON
@options.verbosity
def command(model: Path, dims: tuple[str, ...], opset: int | None, out: Path, as_json: bool, volume: int) -> int:
    """Fix the shapes of MODEL and clean its graph, as a provider will see it.

    \b
    Example:
      edgekit prepare model.onnx --dim batch=1 --out prepared.onnx
    """
    with showing_progress(volume):
        prepared = prepare_model(load_model(model), out, options.parse_dims(dims), opset=opset)
    show_json(prepared) if as_json else show_line(f"{out}: {prepared.node_count} nodes, opset {prepared.opsets}")
    return YES
