"""`edgekit inspect`."""

from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Option, as_command
from edgekit.cli.main import YES
from edgekit.cli.screen import print_table, show_json
from edgekit.inspect.inspect import inspect_model
from edgekit.inspect.sizes import measure_sizes
from edgekit.report import tables, text


@as_command
def command(
    model: options.ModelFile,
    custom_ops: options.CustomOps,
    dims: options.Dims,
    freeze: options.Freeze,
    sizes: Annotated[bool, Option("Bytes file by file and layer by layer; MODEL may be a bundle.")],
    as_json: options.Json,
) -> int:
    """Print what MODEL (.onnx or .ort) contains: inputs, outputs, operators, weights, work.

    \b
    Example:
      edgekit inspect model.onnx --dim batch=1
      edgekit inspect bundles/model-nnapi --sizes
    """
    if sizes:
        measured = measure_sizes(model)
        if as_json:
            show_json(measured)
            return YES
        print_table(tables.table_files(measured))
        if measured.layers:
            print_table(tables.table_layer_sizes(measured))
        return YES
    report = inspect_model(model, custom_ops=custom_ops, dims=dims, freeze=freeze)
    show_json(report) if as_json else print_table(text.table_contents(report))
    return YES
