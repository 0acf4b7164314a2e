"""`edgekit group`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit.bundle.group.group import opened_group
from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Option, subcommand
from edgekit.cli.options import Devices, Required, add_required
from edgekit.cli.screen import show_lines
from edgekit.jobs.group import build_group
from edgekit.progress import Progress
from edgekit.report.tables import describe_group, describe_group_build
from edgekit.verify.on_devices import choosing, verify_group


@click.group
def group_command() -> None:
    """Build or verify several models that belong together.

    For example encoder and decoder, prefill and decode, or detector and classifier.

    \b
    Example:
      edgekit group build speech.toml --data audio.npz --target cpu --target qnn --out bundles
      edgekit group verify bundles/speech-cpu
    """


@subcommand(group_command, "build", "Make a verified folder of the group for each target.")
def build(
    group: Annotated[Path, Argument()],
    data: options.DataSource,
    preprocess: options.PreprocessFile,
    evaluation: options.EvaluationSource,
    labels: Annotated[Path | None, Option("The expected result of the whole group for each --eval sample.", "FILE")],
    targets: Annotated[tuple[str, ...], Option("A target, its folder, all (default), or auto.", "NAME", "--target")],
    settings: options.Settings,
    precision: options.PrecisionWord,
    samples: options.SampleCount,
    recipe: Annotated[Path | None, Option("Options of `edgekit build` for every member (.toml).", "FILE")],
    verify: Annotated[bool, options.verify_option("group")],
    out: Annotated[Path, Option("Where the folders go.", "DIR")],
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Make a verified folder for each target of GROUP, a .toml that names models and which output feeds which input.

    The float models run from end to end on every sample: that calibrates each member, and gives the reference results.

    \b
    Example:
      edgekit group build speech.toml --data audio.npz --eval test.npz --labels texts.txt --target cpu --out bundles

    Exit code 0: every target passed. 1: one failed. 2: an input is wrong, nothing was written. 3: one is not proven.
    """
    options.require_suffix(out)
    tables = {"settings": settings}
    chosen = options.choose_recipe(recipe, tables, {"targets": targets, "precision": precision, "samples": samples})
    samples_data = options.read_data(data, preprocess, evaluation=evaluation, labels=labels)
    report = build_group(group, samples_data, out, chosen, verify=verify, progress=progress)
    return Answer(report, lambda: show_lines(describe_group_build(report)), report.verdict, accept_unproven)


@subcommand(group_command, "verify", "Run a group on devices, from its inputs to its result.")
def verify(
    folder: Annotated[Path, Argument()],
    choice: Devices,
    require: Required,
    key: options.PublicKey,
    accept_unproven: options.AcceptUnproven,
    progress: Progress,
) -> Answer:
    """Run FOLDER, made by `edgekit group build`, on devices: each member by itself, and the whole group.

    FOLDER may be an archive that `edgekit package` wrote; nothing is written into an archive.

    \b
    Example:
      edgekit group verify bundles/speech-qnn --require qnn-htp-sim
      edgekit group verify speech.tar --key release.pem.pub

    Exit code 0: every device that ran passed. 1: one failed. 2: the usage or an input is wrong. 3: it is not proven.
    """
    with opened_group(folder, key=key) as group:
        report = verify_group(group, choosing(add_required(choice, require)), required=require, progress=progress)
    lines = (*describe_group(report), f"{report.group}-{report.target}: {report.verdict}")
    return Answer(report, lambda: show_lines(lines), report.verdict, accept_unproven)
