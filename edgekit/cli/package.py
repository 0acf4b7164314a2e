"""`edgekit package`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.screen import print_table, show_json, show_line, show_lines
from edgekit.cli.terminal import show_doubts
from edgekit.jobs.release import Allowed, package_verified
from edgekit.package.package import FORMS, Kind
from edgekit.package.variant import Names, parse_extras
from edgekit.report.tables import list_size_remarks, table_sizes
from edgekit.serialize import to_builtins


@click.command(short_help="Pack bundles for an app: AAR, Swift or npm package, zip, tar, or ORT's own model package.")
@click.argument("bundles", nargs=-1, required=True, type=click.Path(path_type=Path))
@click.option("--as", "kind", required=True, type=click.Choice(sorted(FORMS)), help="What kind of package.")
@click.option("--out", required=True, type=click.Path(path_type=Path), metavar="PATH", help="A file, or a new folder.")
@click.option("--name", default="", metavar="NAME", help="What the package is called; else as the model.")
@click.option("--group", default="", metavar="NAME", help="The Maven group of an AAR.  [default: edgekit.models]")
@click.option("--package-version", default="", metavar="X", help="Its version; else it follows from the content.")
@click.option("--key", type=click.Path(path_type=Path), metavar="FILE", help="Pack only what this public key signed.")
@click.option(
    "--with",
    "extras",
    multiple=True,
    metavar="NAME,...",
    help="What goes along besides: golden, forms, onnx, or all of each bundle.",
)
@options.ACCEPT_UNPROVEN
@options.ALLOW_FAILED
@options.JSON
def command(
    bundles: tuple[Path, ...],
    kind: Kind,
    out: Path,
    name: str,
    group: str,
    package_version: str,
    key: Path | None,
    extras: tuple[str, ...],
    accept_unproven: bool,
    allow_failed: bool,
    as_json: bool,
) -> int:
    """Pack BUNDLES, or all that fit of a build's folder, into one package with code that opens and tests them.

    An app tries the bundles in the order in which they are given. Same bundles, same bytes. A package carries the form
    of the model that its loader opens and the golden samples of the self-test; --with adds all golden samples, the
    other forms, the ONNX form, or everything, so that `edgekit verify` opens the bundle in it.

    \b
    Example:
      edgekit package bundles/model-qnn bundles/model-xnnpack --as aar --out maven
      edgekit package bundles --as tar --out model.tar

    Exit code 0: written. 2: a bundle is damaged, failed its verification, is not proven or does not fit, and nothing
    was written.
    """
    names = Names(name=name, group=group, version=package_version)
    allowed = Allowed(unproven=accept_unproven, failed=allow_failed)
    report, doubts = package_verified(
        bundles, kind, out, allowed=allowed, key=key, names=names, extras=parse_extras(extras)
    )
    show_doubts(doubts)
    if as_json:
        show_json({**to_builtins(report), "allowed": doubts})
        return YES
    for variant in report.bundles:
        show_line(f"{variant.name}: {variant.provider}, {variant.precision}, {len(variant.files)} files")
    print_table(table_sizes(report))
    for left in report.left_out:
        show_line(f"left out: {left.path}: {left.reason}")
    show_lines(report.remarks if report.store is None else report.store.remarks)
    show_lines(list_size_remarks(report))
    show_line(f"{report.out} (sha256 {report.sha256})")
    return YES
