"""`edgekit package`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, as_command
from edgekit.cli.main import YES
from edgekit.cli.release import Allowance, show_doubts
from edgekit.cli.screen import print_table, show_json, show_line, show_lines
from edgekit.jobs.release import package_verified
from edgekit.package.package import FORMS, Kind
from edgekit.package.variant import Identity, parse_extras
from edgekit.report.tables import list_size_remarks, table_sizes
from edgekit.serialize import to_builtins


@as_command
def command(
    bundles: Annotated[tuple[Path, ...], Argument()],
    kind: Annotated[Kind, Option("What kind of package.", words="--as", type=click.Choice(sorted(FORMS)))],
    out: Annotated[Path, Option("A file, or a new folder.", "PATH")],
    name: Annotated[str, Option("The name of the package; default: the model's.", "NAME", default="")],
    group: Annotated[str, Option("The Maven group of an AAR.  [default: edgekit.models]", "NAME", default="")],
    package_version: Annotated[
        str, Option("The version of the package; default: derived from its content.", "X", default="")
    ],
    key: Annotated[Path | None, Option("Pack only what this public key signed.", "FILE")],
    extras: Annotated[
        tuple[str, ...],
        Option("What to add of each bundle: golden, forms, onnx, or all.", "NAME,...", "--with"),
    ],
    allowed: Allowance,
    as_json: options.Json,
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
    names = Identity(name=name, group=group, version=package_version)
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
