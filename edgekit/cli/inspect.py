"""Commands that look at a model: inspect, diff, operators, and check."""

from pathlib import Path
from typing import Annotated

from edgekit.check.report import count_of
from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Option, as_command
from edgekit.cli.screen import print_table, show_line, show_lines, show_remarks
from edgekit.convert.ort_format.operators import find_lacking, list_operators, write_operators
from edgekit.errors import UsageError
from edgekit.inspect.diff import compare_versions
from edgekit.inspect.inspect import inspect_model, measure_sizes
from edgekit.jobs.check import check_targets, describe_checks
from edgekit.progress import Progress
from edgekit.report import checked, tables, text
from edgekit.report.checked import describe_taken
from edgekit.report.tables import format_bytes
from edgekit.report.timing import describe_forecast
from edgekit.target import read_version


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


@as_command
def check_command(
    model: options.ModelFile,
    targets: options.TargetNames,
    settings: options.Settings,
    dims: options.Sizes,
    freeze: options.Freeze,
    recipe: options.RecipeFile,
    observe: Annotated[bool, Option("Try the real provider too, if it can run here.")],
    html: options.HtmlFile,
    compare_ort: Annotated[bool, Option("Say what ONNX Runtime's own checker says, and why that differs.")],
    progress: Progress,
) -> Answer:
    """Say node by node what each target would take of MODEL, why not, and what to do.

    \b
    Example:
      edgekit check model.onnx --target nnapi --set api_level=31 --dim batch=1
      edgekit check model.onnx --target qnn --observe --html check.html

    The verdict is about the model after prepare and build. If a target takes more or less of the unchanged file, the
    line below says so.

    Exit code 0: no target's verdict is "no". 1: one is, the real provider refused the model, or a phone of the recipe's
    [forecast] is forecast to miss its limit. 3: none of these, but an interval of a forecast includes its limit.
    """
    tables = {"settings": settings, "dims": dims, "freeze": freeze}
    chosen = options.choose_recipe(recipe, tables, {"targets": targets})
    summary = check_targets(model, chosen, progress, observe=observe, compare_ort=compare_ort)
    options.write_page(html, lambda: checked.render_check(summary))
    verdict = "fail" if summary.is_refused else "pass" if summary.forecast is None else summary.forecast.verdict

    def show() -> None:
        oldest: dict[str, list[str]] = {}
        for name, found in summary.targets.items():
            oldest.setdefault(found.minimum_ort, []).append(name)
            report = found.report
            settings = "".join(f"; {key} {value}" for key, value in report.settings.items() if value)
            integers = f", {report.integer_macs:.0%} in integers" if report.integer_macs else ""
            crossing = f"{count_of(report.crossings, 'crossing')} of {format_bytes(report.crossing_bytes)}"
            taken = f"{describe_taken(report.placed)}{integers} and {report.taken_bytes:.0%} of bytes"
            where = f"in {count_of(report.partitions, 'partition')}, {crossing} (predicted{settings})"
            show_line(f"{report.target}: {report.verdict}; {taken} {where}")
            if report.taken < report.nodes:
                print_table(checked.table_check(report))
            show_remarks(checked.list_check_remarks(summary, name))
        if summary.refusal is not None:
            show_line(f"refused on any target: {summary.refusal}; judged without what ONNX Runtime does to a graph")
        for line in summary.fixed_axes:
            show_line(f"fixed axis: {line}")
        if fates := checked.describe_fates(next(iter(summary.targets.values())).report):
            show_line(fates)
        for line in checked.list_ort_opinions(summary.ort, summary.targets) if summary.ort is not None else ():
            show_line(line)
        loads = (f"{version} or newer for {', '.join(oldest[version])}" for version in sorted(oldest, key=read_version))
        show_line(f"ONNX Runtime on the device: {'; '.join(loads)}")
        show_line(f"recommendation: {checked.describe_recommendation(summary)}")
        if summary.forecast is not None:
            show_line(describe_forecast(summary.forecast))

    return Answer(describe_checks(summary), show, verdict)
