"""`edgekit group`."""

from pathlib import Path

import click

from edgekit.bundle.group.group import opened_group
from edgekit.cli import options
from edgekit.cli.screen import show_json, show_line, show_lines, showing_progress
from edgekit.devices.register import DeviceChoice
from edgekit.jobs.group import build_group
from edgekit.recipe import PRECISIONS, PrecisionChoice
from edgekit.report.tables import describe_group, describe_group_build
from edgekit.verify.groups import choosing, verify_group

_FILE = click.Path(path_type=Path)


@click.group(short_help="Build or verify several models that belong together, as encoder and decoder.")
def command() -> None:
    """Build or verify several models that belong together.

    Such are encoder and decoder, prefill and decode, detector and classifier.

    \b
    Example:
      edgekit group build speech.toml --data audio.npz --target cpu --target qnn --out bundles
      edgekit group verify bundles/speech-cpu
    """


@command.command(short_help="Make a verified folder of the group for each target.")
@click.argument("group", type=_FILE)
@options.DATA
@options.PREPROCESS
@click.option("--eval", "evaluation", metavar="DATA", help="Samples to verify with; else some of --data are kept back.")
@click.option("--labels", type=_FILE, metavar="FILE", help="What the whole should give for each --eval sample.")
@click.option(
    "--target", "targets", multiple=True, metavar="NAME", help="A target, its folder, all (the default), or auto."
)
@options.SET
@click.option("--precision", type=click.Choice(PRECISIONS, case_sensitive=False), help="Default: auto.")
@options.SAMPLES
@click.option("--recipe", type=_FILE, metavar="FILE", help="Options of `edgekit build` for every member (.toml).")
@click.option("--verify/--no-verify", default=True, help="Run each group on what imitates its device here.")
@click.option("--out", required=True, type=_FILE, metavar="DIR", help="Where the folders go.")
@options.ACCEPT_UNPROVEN
@options.JSON
@options.verbosity
def build(
    group: Path,
    data: str,
    preprocess: Path | None,
    evaluation: str | None,
    labels: Path | None,
    targets: tuple[str, ...],
    settings: dict[str, str],
    precision: PrecisionChoice | None,
    samples: int | None,
    recipe: Path | None,
    verify: bool,
    out: Path,
    accept_unproven: bool,
    as_json: bool,
    volume: int,
) -> int:
    """Make a verified folder for each target of GROUP, a .toml that names models and what feeds what.

    The float models run the whole on every sample: that calibrates each member, and says what the whole should give.

    \b
    Example:
      edgekit group build speech.toml --data audio.npz --eval test.npz --labels texts.txt --target cpu --out bundles

    Exit code 0: every target passed. 1: one failed. 2: an input is wrong, nothing was written. 3: one is not proven.
    """
    tables = {"settings": settings}
    chosen = options.choose_recipe(
        recipe, tables, {"targets": targets, "precision": precision, "samples": samples}, None
    )
    given = options.read_data(data, preprocess, evaluation=evaluation, labels=labels)
    with showing_progress(volume) as progress:
        report = build_group(group, given, out, chosen, verify=verify, progress=progress)
    show_json(report) if as_json else show_lines(describe_group_build(report))
    return options.exit_code(report.verdict, accept_unproven=accept_unproven)


@command.command(short_help="Run a group on devices, from its inputs to its result.")
@click.argument("folder", type=_FILE)
@options.ON
@options.ON_FILE
@click.option("--require", multiple=True, metavar="DEVICE", help="Like --on, and a failure where it does not run.")
@options.DEVICE_SET
@click.option("--key", type=_FILE, metavar="FILE", help="Refuse what the owner of this public key (PEM) did not sign.")
@options.ACCEPT_UNPROVEN
@options.JSON
@options.verbosity
def verify(
    folder: Path,
    names: tuple[str, ...],
    on_file: Path | None,
    require: tuple[str, ...],
    settings: dict[str, str],
    key: Path | None,
    accept_unproven: bool,
    as_json: bool,
    volume: int,
) -> int:
    """Run FOLDER, made by `edgekit group build`, on devices: each member by itself, and the whole.

    FOLDER may be the archive that `edgekit package` wrote; then nothing is written into it.

    \b
    Example:
      edgekit group verify bundles/speech-qnn --require qnn-htp-sim
      edgekit group verify speech.tar --key release.pem.pub

    Exit code 0: every device that ran passed. 1: one failed. 2: the usage or an input is wrong. 3: it is not proven.
    """
    choice = DeviceChoice(
        names=tuple(dict.fromkeys((*names, *require))),
        file=on_file,
        settings=settings,
    )
    with showing_progress(volume) as progress, opened_group(folder, key=key) as group:
        report = verify_group(group, choosing(choice), required=require, progress=progress)
    if as_json:
        show_json(report)
    else:
        show_lines(describe_group(report))
        show_line(f"{report.group}-{report.target}: {report.verdict}")
    return options.exit_code(report.verdict, accept_unproven=accept_unproven)
