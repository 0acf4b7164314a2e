"""`edgekit sign`."""

from pathlib import Path
from typing import Annotated

from edgekit.bundle.sign import make_key
from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, as_command
from edgekit.cli.main import YES
from edgekit.cli.release import Allowance, describe_attested, show_doubts
from edgekit.cli.screen import show_json, show_line
from edgekit.errors import UsageError
from edgekit.jobs.release import sign_verified
from edgekit.serialize import to_builtins


@as_command
def command(
    bundle: Annotated[Path | None, Argument()],
    key: Annotated[Path | None, Option("The private key, Ed25519 in PEM.", "FILE")],
    new_key: Annotated[Path | None, Option("Make a key: FILE is private, FILE.pub goes to others.", "FILE")],
    allowed: Allowance,
    as_json: options.Json,
) -> int:
    """Check BUNDLE (a folder of one target or of several) and sign its files, or make a key to sign with.

    BUNDLE/signature.json is an in-toto statement in a DSSE envelope: the sha256 of every file, and what was verified,
    where, with which figures. Sign after edgekit verify and before you pack: an archive keeps the signature.

    \b
    Example:
      edgekit sign --new-key release.pem
      edgekit sign bundles/model-nnapi --key release.pem
      edgekit verify bundles/model-nnapi --key release.pem.pub

    Exit code 0: signed. 2: the bundle is not whole, failed its verification or is not proven, the key is wrong, or
    `cryptography` is not installed.
    """
    if new_key is not None and bundle is None and key is None:
        public = make_key(new_key)
        show_json({"private": new_key, "public": public}) if as_json else show_line(f"{new_key}, {public}")
        return YES
    if bundle is None or key is None or new_key is not None:
        raise UsageError("give either BUNDLE and --key FILE, or --new-key FILE", hint="edgekit sign --help shows both")
    signed, doubts = sign_verified(bundle, key, allowed=allowed)
    show_doubts(doubts)
    if as_json:
        show_json({**to_builtins(signed), "allowed": doubts})
    else:
        said = describe_attested(signed.attested)
        show_line(f"signed {bundle} ({signed.sha256}) with key {signed.key[:16]}: {said}")
    return YES
