"""`edgekit init`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit._files import write_file
from edgekit.app.config import FILE, load_app
from edgekit.app.draft import draft_app
from edgekit.cli import options
from edgekit.cli.declare import Option, as_command
from edgekit.cli.main import YES
from edgekit.cli.schema import describe_file
from edgekit.cli.screen import show_line, show_remarks
from edgekit.devices.register import choose_here
from edgekit.errors import UsageError
from edgekit.model.model import load_model
from edgekit.package.package import FORMS, Kind
from edgekit.recipe import Recipe
from edgekit.serialize import to_json


@as_command
def command(
    model: options.ModelFile,
    images: Annotated[Path | None, Option("A folder of images to feed it.", "DIR")],
    data: Annotated[str | None, Option("Sample inputs: .npz, folder, or module:function.", "DATA")],
    labels: Annotated[Path | None, Option("The class of each evaluation sample.", "FILE")],
    targets: Annotated[
        tuple[str, ...], Option(None, "NAME", "--target", default=("nnapi", "xnnpack"), show_default=True)
    ],
    package: Annotated[
        Kind | None, Option("Pack the bundles as this kind of package.", words="--as", type=click.Choice(sorted(FORMS)))
    ],
    out: Annotated[Path, Option(None, "FILE", default=FILE, show_default=True)],
) -> int:
    """Write an edgekit.toml for MODEL, with what the model can tell and guesses that are marked as such.

    A file that is there gets the model added, for the targets and packages that it has.

    \b
    Example:
      edgekit init model.onnx --images photos --target nnapi --target xnnpack --as aar
      edgekit run

    Exit code 0: written. 2: an input is wrong, or the file has the model already.
    """
    known = load_app(out) if out.exists() else None
    if known is not None and load_model(model).name in known.table.models:
        raise UsageError(f"'{out}' has this model already", hint="change it there, or give another --out")
    draft = draft_app(
        model,
        out.parent,
        data=data,
        images=images,
        labels=labels,
        targets=choose_here(Recipe(targets=targets)).targets,
        package=package,
        beside="" if known is None else out.read_text(),
    )
    write_file(out, draft.text.encode())
    # Beside it: editors find it by the first line, without a network.
    write_file(out.parent / "edgekit.schema.json", to_json(describe_file()).encode())
    show_remarks(draft.remarks)
    show_line(f"{out}: edgekit run {out} builds, verifies and packs what it names")
    return YES
