"""`edgekit prepare`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.terminal import show_json, show_line, showing_progress
from edgekit.model import load_model
from edgekit.prepare import Fix, fix_model, prepare_model


@click.command(short_help="Fix shapes and clean the graph, as a provider will see it.")
@options.MODEL
@options.DIM
@click.option("--shape", "shapes", multiple=True, metavar="INPUT=1,3,224,224", help="All dimensions of an input.")
@click.option("--opset", type=click.IntRange(min=13), metavar="N", help="Convert to this opset.")
@click.option("--outputs", metavar="A,B", help="Keep these outputs only, and what they need.")
@click.option("--freeze", "constants", multiple=True, metavar="INPUT=NUMBER", help="Make an input a constant.")
@click.option("--fix/--no-fix", default=True, help="Apply the rewrites that check calls automatic (the default).")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="FILE", help="The prepared model.")
@options.JSON
@options.verbosity
def command(
    model: Path,
    dims: tuple[str, ...],
    shapes: tuple[str, ...],
    opset: int | None,
    outputs: str | None,
    constants: tuple[str, ...],
    fix: bool,
    out: Path,
    as_json: bool,
    volume: int,
) -> int:
    """Fix the shapes of MODEL and clean its graph, as a provider will see it.

    \b
    Example:
      edgekit prepare model.onnx --dim batch=1 --outputs scores,boxes --out prepared.onnx
    """
    source = load_model(model)
    with showing_progress(volume) as progress:
        progress("prepare the model")
        prepared = prepare_model(
            source,
            out,
            {**options.parse_dims(dims), **options.parse_shapes(shapes, source)},
            opset=opset,
            outputs=outputs.split(",") if outputs else (),
            constants=options.parse_numbers(constants),
        )
        fixes: tuple[Fix, ...] = ()
        if fix:
            fixed = fix_model(prepared, out)
            prepared, fixes = fixed.model, fixed.fixes
    if as_json:
        show_json({"model": prepared, "fixes": fixes})
    else:
        show_line(f"{out}: {prepared.node_count} nodes, opset {prepared.opsets.get('ai.onnx')}")
        for applied in fixes:
            show_line(f"- {applied.id}: {len(applied.nodes)} nodes")
    return YES
