"""`edgekit build`, and `edgekit demo`, which builds the demo model."""

from importlib.resources import as_file, files
from pathlib import Path
from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Answer, Option, as_command
from edgekit.cli.screen import print_table, show_line, show_remarks
from edgekit.jobs.build import build
from edgekit.progress import Progress
from edgekit.recipe import Data, Recipe
from edgekit.report import text
from edgekit.report.summary import BuildReport


@as_command
def build_command(
    model: options.ModelFile,
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    evaluation: options.EvaluationSource,
    labels: Annotated[Path | None, Option("The class of each --eval sample.", "FILE")],
    golden: Annotated[
        Path | None,
        Option("Take the float reference of this earlier build, so that another CPU makes the same bytes.", "DIR"),
    ],
    targets: Annotated[
        tuple[str, ...],
        Option("A target, its folder, all (the default), pc, or auto: what this machine runs.", "NAME", "--target"),
    ],
    settings: options.Settings,
    dims: options.DimsOrBuckets,
    shapes: options.Shapes,
    freeze: options.Freeze,
    pad: options.Pad,
    precision: options.PrecisionWord,
    samples: options.SampleCount,
    steps: options.Steps,
    fix: Annotated[
        bool | None,
        Option("Rewrite the graph where a target then takes more (the default).", words="--fix/--no-fix", default=None),
    ],
    max_drop: Annotated[float | None, options.max_drop("At most this percentage of answers may change.")],
    recipe: options.RecipeFile,
    cache: options.CacheFolder,
    time_budget: Annotated[
        float | None,
        options.time_budget(
            "Limit planning and verifying to this time; calibrating, converting and starting devices come on top"
        ),
    ],
    verify: Annotated[bool, options.verify_option("bundle")],
    out: Annotated[Path, Option("Where the bundles go.", "DIR")],
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Make a verified bundle of MODEL for each target.

    \b
    Example:
      edgekit build model.onnx --data samples.npz --target nnapi --target qnn --dim batch=1 --out bundles

    Exit code 0: every bundle passed. 1: one failed. 2: an input is wrong, nothing was written. 3: one is not proven.
    """
    options.require_suffix(out)
    tables = {**options.parse_buckets(dims, shapes, model), "pad": pad, "freeze": freeze, "settings": settings}
    given = {"targets": targets, "precision": precision, "samples": samples, "max_drop": max_drop, "fix": fix}
    chosen = options.choose_recipe(recipe, tables, given, steps)
    samples_from = options.read_data(data, preprocess, evaluation=evaluation, labels=labels, golden=golden)
    report = build(
        model, samples_from, out, chosen, verify=verify, cache=cache, time_budget_s=time_budget, progress=progress
    )
    return Answer(report, lambda: show_build(report), report.verdict, accept_unproven)


@as_command
def demo_command(
    out: Annotated[Path, Option("Where they go.", "DIR", default="edgekit-demo")], progress: Progress
) -> Answer:
    """Build and verify four bundles of the demo model, a small network trained on handwritten digits.

    \b
    Example:
      edgekit demo --out build/demo

    Exit code 0: none failed; the table says what is not proven on this machine. 1: one failed.
    """
    recipe = Recipe(targets=("nnapi", "coreml", "qnn", "xnnpack"))
    with as_file(files("edgekit") / "demo") as folder:
        calibration, evaluation = (str(folder / f"{name}.npz") for name in ("calibration", "evaluation"))
        data = Data(source=calibration, evaluation=evaluation, labels=folder / "evaluation_labels.npy")
        report = build(folder / "digits_mobilenet.onnx", data, out, recipe, progress=progress)
    return Answer(report, lambda: show_build(report), report.verdict, accept_unproven=True)


def show_build(report: BuildReport) -> None:
    """Prints a build: the table, the remarks, and the path of the report."""
    print_table(text.table_build(report))
    if not report.passed:
        show_line(text.headline_build(report))
    show_remarks(text.list_remarks(report))
    show_line(f"report: {report.report}")
