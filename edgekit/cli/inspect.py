"""Commands about the contents of files: inspect, diff and operators."""

from pathlib import Path
from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Option, as_command
from edgekit.cli.screen import print_table, show_lines
from edgekit.convert.ort_format.operators import find_lacking, list_operators, write_operators
from edgekit.errors import UsageError
from edgekit.inspect.diff import compare_versions
from edgekit.inspect.inspect import inspect_model, measure_sizes
from edgekit.report import tables, text


@as_command
def inspect_command(
    model: options.ModelFile,
    custom_ops: options.CustomOps,
    dims: options.Sizes,
    freeze: options.Freeze,
    sizes: Annotated[bool, Option("Bytes file by file and layer by layer; MODEL may be a bundle.")],
) -> Answer:
    """Print what MODEL (.onnx or .ort) contains: inputs, outputs, operators, weights, work.

    \b
    Example:
      edgekit inspect model.onnx --dim batch=1
      edgekit inspect bundles/model-nnapi --sizes
    """
    if sizes:
        measured = measure_sizes(model)
        shown = [tables.table_files({file.name: file.size_bytes for file in measured.files})]
        shown += [tables.table_layer_sizes(measured)] if measured.layers else []
        return Answer(measured, lambda: print_table(*shown))
    report = inspect_model(model, custom_ops=custom_ops, dims=dims, freeze=freeze)
    return Answer(report, lambda: print_table(text.table_contents(report)))


@as_command
def diff_command(
    old: Annotated[Path, Argument()],
    new: Annotated[Path, Argument()],
    target: Annotated[str | None, Option("Which variant of bundles of several targets.", "NAME")],
) -> Answer:
    """Say what is different between OLD and NEW: files, placement, layers, accuracy, size.

    Both are bundles (folders or archives) or both are models (.onnx or .ort). Accuracy is read from their verify.json.

    \b
    Example:
      edgekit diff release-1/model-nnapi release-2/model-nnapi

    Exit code, as that of diff: 0: they are the same. 1: they are different. 2: one cannot be read.
    """
    delta = compare_versions(old, new, target=target)
    return Answer(delta, lambda: show_lines(tables.list_changes(delta)), delta.is_same)


@as_command
def operators_command(
    models: options.ModelFiles,
    out: Annotated[Path | None, Option("Write the config of a build for MODELS.", "FILE")],
    types: Annotated[bool, Option("Limit each operator to the data types of its nodes too, for a smaller build.")],
    compare: Annotated[Path | None, Option("List the operators of MODELS that this config lacks.", "CONFIG")],
) -> Answer:
    """Write the operators config that lets a custom build of ONNX Runtime run MODELS (.ort), or say what a build lacks.

    \b
    Example:
      edgekit operators converted/*.ort --types --out required.config
    """
    if types and out is None and compare is not None:
        raise UsageError("--types says what to list or to write", hint="leave it out: --compare looks at types itself")
    if out is not None:
        write_operators(models, out, types=types)
    lacking = {str(model): find_lacking(model, compare) for model in models} if compare else {}
    operators = list_operators(models, types=types)
    lines = list(operators) if not compare and out is None else []
    texts = {model: f"lacks {', '.join(names)}" if names else "has all it needs" for model, names in lacking.items()}
    lines += (f"{model}: {text}" for model, text in texts.items())
    value = {"operators": operators, "out": out, "lacking": lacking}
    return Answer(value, lambda: show_lines(lines), not any(lacking.values()))
