"""`edgekit check`."""

from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Answer, Option, as_command
from edgekit.cli.screen import print_table, show_line, show_remarks
from edgekit.jobs.check import check_targets, describe_checks
from edgekit.progress import Progress
from edgekit.report import checked
from edgekit.report.forecasts import describe_forecast


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
    return Answer(describe_checks(summary), lambda: show_checks(summary), verdict)


def show_checks(summary: checked.CheckSummary) -> None:
    """Prints the checks by target (verdict, nodes not taken, advice), and then which target to use."""
    for name, report in summary.targets.items():
        show_line(checked.describe_check(report))
        if report.taken < report.nodes:
            print_table(checked.table_check(report))
        show_remarks(checked.describe_as_is(report, summary.as_is.get(name)))
        show_remarks(checked.describe_built(summary, name))
        show_remarks(checked.list_check_remarks(report, summary.observed.get(name)))
        show_remarks(line for _, line in checked.list_advice(report.advice))
    if summary.refusal is not None:
        show_line(f"refused on any target: {summary.refusal}; judged without what ONNX Runtime does to a graph")
    for line in summary.fixed_axes:
        show_line(f"fixed axis: {line}")
    if fates := checked.describe_fates(next(iter(summary.targets.values()))):
        show_line(fates)
    for line in checked.list_ort_opinions(summary.ort, summary.targets) if summary.ort is not None else ():
        show_line(line)
    show_line(checked.describe_runtimes(summary.minimum_ort))
    chosen = checked.describe_recommendation(summary.recommended, summary.shipped, summary.assumed)
    show_line(f"recommendation: {chosen}")
    if summary.forecast is not None:
        show_line(describe_forecast(summary.forecast))
