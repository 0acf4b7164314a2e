"""`edgekit join`."""

from pathlib import Path
from typing import Annotated

from edgekit._files import work_folder
from edgekit.bundle.archive import KINDS, Kind, list_files, write_archive
from edgekit.bundle.sign import require_private_key
from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, as_command
from edgekit.cli.main import YES
from edgekit.cli.release import Allowance, show_doubts
from edgekit.cli.screen import show_json, show_line
from edgekit.jobs.release import join_verified, sign_verified


@as_command
def command(
    bundles: Annotated[tuple[Path, ...], Argument()],
    out: Annotated[Path, Option("A folder, or an archive: .zip or .tar.", "PATH")],
    key: Annotated[Path | None, Option("Sign the index with this private key.", "FILE")],
    allowed: Allowance,
    as_json: options.Json,
) -> int:
    """Put BUNDLES, or all of a build's folder, into one folder or archive with an index.

    Files that several targets have are stored once. `index.json` says which target to take on which operating system
    and chip, in which order; `edgekit verify PATH --target NAME` opens one of them. Same bundles, same bytes.

    \b
    Example:
      edgekit join bundles --out model.zip
      edgekit join bundles/model-qnn bundles/model-xnnpack --out model --key release.pem

    Exit code 0: written. 2: a bundle is damaged, failed its verification, is not proven or does not fit the others,
    and nothing was written.
    """
    kind: Kind | None = next((kind for kind in KINDS if out.suffix == f".{kind}"), None)
    if key is not None:
        require_private_key(key)
    with work_folder() as work:
        place = out if kind is None else work / "joined"
        joined, doubts = join_verified(bundles, place, allowed=allowed)
        if key is not None:
            sign_verified(joined.folder, key, allowed=allowed)
        if kind is not None:
            write_archive(list_files(joined.folder), out, kind)
    show_doubts(doubts)
    if as_json:
        show_json({"out": out, "sha256": joined.sha256, "index": joined.index, "allowed": doubts})
        return YES
    for variant in joined.index.variants:
        show_line(f"{variant.target}: {variant.provider}, {variant.precision}, {variant.model_file}")
    show_line(f"{out} ({joined.sha256}): {len(joined.index.shared)} files are stored once for several targets")
    return YES
