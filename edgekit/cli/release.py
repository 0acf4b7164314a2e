"""Commands that release bundles: package, join and sign."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from edgekit._files import work_folder
from edgekit.bundle.archive import KINDS, list_files, write_archive
from edgekit.bundle.archive import Kind as ArchiveKind
from edgekit.bundle.sign import TestResult, make_key, require_private_key
from edgekit.cli.declare import Answer, Argument, From, Option, as_command
from edgekit.cli.options import AcceptUnproven, require_suffix
from edgekit.cli.screen import print_table, show_line, show_lines
from edgekit.errors import UsageError
from edgekit.jobs.release import Allowed, Doubt, join_verified, package_verified, sign_verified
from edgekit.package.package import Kind
from edgekit.package.variant import Identity, parse_extras
from edgekit.report.tables import list_size_remarks, table_files
from edgekit.serialize import to_builtins

AllowFailed = Annotated[bool, Option("Accept bundles that failed or were not verified; the result says so.")]


def choose_allowed(accept_unproven: AcceptUnproven, allow_failed: AllowFailed) -> Allowed:
    """Returns which bundles may be released although they did not pass."""
    return Allowed(unproven=accept_unproven, failed=allow_failed)


Allowance = Annotated[Allowed, From(choose_allowed)]


def show_doubts(doubts: Sequence[Doubt]) -> None:
    """Prints on stderr which bundles were released although they did not pass."""
    for doubt in doubts:
        show_line(f"allowed: bundle '{doubt.bundle}' {doubt.reason}", aside=True)


def describe_attested(result: TestResult) -> str:
    """Returns the result of the verification that a signature attests, as text."""
    devices = ", ".join(dict.fromkeys(run.device for run in result.edgekit_runs))
    failed = "".join(f"; not passed: {name}" for name in result.failed_tests)
    failed += "".join(f"; not proven: {name}" for name in result.warned_tests)
    return f"its verification {result.result}" + (f" on {devices}" if devices else "") + failed


@as_command
def package_command(
    bundles: Annotated[tuple[Path, ...], Argument()],
    kind: Annotated[Kind, Option("What kind of package.", words="--as")],
    out: Annotated[Path, Option("A file (.zip, .tar), or a new folder.", "PATH")],
    name: Annotated[str, Option("The name of the package; default: the model's.", "NAME", default="")],
    group: Annotated[str, Option("The Maven group of an AAR.  [default: edgekit.models]", "NAME", default="")],
    package_version: Annotated[str, Option("The package's version; default: from its content.", "X", default="")],
    key: Annotated[Path | None, Option("Pack only what this public key signed.", "FILE")],
    extras: Annotated[tuple[str, ...], Option("What to add: golden, forms, onnx, or all.", "NAME,...", "--with")],
    allowed: Allowance,
) -> Answer:
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
    require_suffix(out, f".{kind}" if kind in KINDS else "")
    names = Identity(name=name, group=group, version=package_version)
    added = parse_extras(extras)
    report, doubts = package_verified(bundles, kind, out, allowed=allowed, key=key, names=names, extras=added)
    show_doubts(doubts)

    def show() -> None:
        for variant in report.bundles:
            show_line(f"{variant.name}: {variant.provider}, {variant.precision}, {len(variant.files)} files")
        print_table(table_files(report.sizes))
        for excluded in report.left_out:
            show_line(f"left out: {excluded.path}: {excluded.reason}")
        show_lines(report.remarks if report.store is None else report.store.remarks)
        show_lines(list_size_remarks(report))
        show_line(f"{report.out} (sha256 {report.sha256})")

    return Answer({**to_builtins(report), "allowed": doubts}, show)


@as_command
def join_command(
    bundles: Annotated[tuple[Path, ...], Argument()],
    out: Annotated[Path, Option("A folder, or an archive: .zip or .tar.", "PATH")],
    key: Annotated[Path | None, Option("Sign the index with this private key.", "FILE")],
    allowed: Allowance,
) -> Answer:
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
    kind: ArchiveKind | None = next((kind for kind in KINDS if out.suffix == f".{kind}"), None)
    require_suffix(out, "" if kind is None else f".{kind}")
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
    lines = [f"{one.target}: {one.provider}, {one.precision}, {one.model_file}" for one in joined.index.variants]
    lines.append(f"{out} ({joined.sha256}): {len(joined.index.shared)} files are stored once for several targets")
    value = {"out": out, "sha256": joined.sha256, "index": joined.index, "allowed": doubts}
    return Answer(value, lambda: show_lines(lines))


@as_command
def sign_command(
    bundle: Annotated[Path | None, Argument()],
    key: Annotated[Path | None, Option("The private key, Ed25519 in PEM.", "FILE")],
    new_key: Annotated[Path | None, Option("Make a key: FILE is private, FILE.pub goes to others.", "FILE")],
    allowed: Allowance,
) -> Answer:
    """Check BUNDLE (a folder for one target or several) and sign its files, or make a key to sign with.

    BUNDLE/signature.json is an in-toto statement in a DSSE envelope: the sha256 of every file, and what was verified,
    where, with which figures. Sign after edgekit verify and before you pack: an archive keeps the signature.

    \b
    Example:
      edgekit sign --new-key release.pem
      edgekit sign bundles/model-nnapi --key release.pem
      edgekit verify bundles/model-nnapi --key release.pem.pub

    Exit code 0: signed. 2: the bundle is incomplete, failed its verification or is not proven, the key is wrong, or
    `cryptography` is not installed.
    """
    if new_key is not None and bundle is None and key is None:
        public = make_key(new_key)
        return Answer({"private": new_key, "public": public}, lambda: show_line(f"{new_key}, {public}"))
    if bundle is None or key is None or new_key is not None:
        raise UsageError("give either BUNDLE and --key FILE, or --new-key FILE", hint="edgekit sign --help shows both")
    signed, doubts = sign_verified(bundle, key, allowed=allowed)
    show_doubts(doubts)
    line = f"signed {bundle} ({signed.sha256}) with key {signed.key[:16]}: {describe_attested(signed.attested)}"
    return Answer({**to_builtins(signed), "allowed": doubts}, lambda: show_line(line))
