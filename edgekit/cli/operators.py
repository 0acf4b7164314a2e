"""`edgekit operators`."""

from pathlib import Path
from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Option, as_command
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import show_json, show_line
from edgekit.convert.ort_format.operators import find_lacking, list_operators, write_operators
from edgekit.errors import UsageError


@as_command
def command(
    models: options.ModelFiles,
    out: Annotated[Path | None, Option("Write the config of a build for MODELS.", "FILE")],
    types: Annotated[bool, Option("Limit each operator to the data types of its nodes too, for a smaller build.")],
    compare: Annotated[
        Path | None, Option("List the operators of MODELS that a build with this config lacks.", "CONFIG")
    ],
    as_json: options.Json,
) -> int:
    """Write the operators config that lets a custom build of ONNX Runtime run MODELS (.ort), or say what a build lacks.

    \b
    Example:
      edgekit operators converted/*.ort --types --out required.config
    """
    if types and out is None and compare is not None:
        raise UsageError(
            "--types says what to list or to write", hint="leave it out: --compare looks at types by itself"
        )
    if out is not None:
        write_operators(models, out, types=types)
    lacking = {str(model): find_lacking(model, compare) for model in models} if compare else {}
    if as_json:
        show_json({"operators": list_operators(models, types=types), "out": out, "lacking": lacking})
    elif not compare and out is None:
        for line in list_operators(models, types=types):
            show_line(line)
    for model, names in () if as_json else lacking.items():
        show_line(f"{model}: {'lacks ' + ', '.join(names) if names else 'has all it needs'}")
    return NO if any(lacking.values()) else YES
