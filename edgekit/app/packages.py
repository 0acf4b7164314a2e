"""Makes the packages of an app from the bundles that passed; a package is remade only if one of its bundles changed."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from edgekit._files import digest_bytes, staged_entries, write_file
from edgekit.app.config import App, KeyTable
from edgekit.app.result import CellResult, PackageResult, read_kept
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.group.group import GROUP, is_group
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.sign import check_signature, require_private_key
from edgekit.errors import BundleError, EdgekitError, UsageError
from edgekit.jobs.release import Allowed, package_verified, sign_verified
from edgekit.package.package import FORMS
from edgekit.package.variant import Identity, name_package, sort_bundles

_FOLDER, _KEPT = "packages", "packages.json"


def pack_all(app: App, cells: Sequence[CellResult]) -> tuple[PackageResult, ...]:
    """Returns the packages of an app, remade where they are out of date."""
    known = read_kept(app.out / _FOLDER / _KEPT, dict[str, PackageResult]) or {}
    results = tuple(_pack(app, name, cells, known.get(name)) for name in app.table.packages)
    if results:
        write_file(app.out / _FOLDER / _KEPT, encode_json({result.name: result for result in results}))
    return results


def require_keys(app: App) -> None:
    """Refuses keys that cannot sign, before anything is built that needs a signature.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key.
        MissingExtraError: `cryptography` is not installed.
    """
    if app.table.keys is not None:
        require_private_key(app.path.parent / app.table.keys.sign)


def sign_all(app: App, cells: Sequence[CellResult]) -> None:
    """Signs the bundles that may be released, if the app has a key and they do not have its signature yet.

    Raises:
        EdgekitError: a key cannot be read, or a bundle is not whole.
    """
    keys = app.table.keys
    if keys is None:
        return
    for cell in cells:
        if not cell.bundle or not _may_be_released(app, cell):
            continue
        folder = app.out / cell.bundle
        try:
            name = GROUP if is_group(folder) else MANIFEST
            check_signature((folder / name).read_bytes(), name, folder, _public(app, keys))
        except BundleError:
            allowed = Allowed(unproven=app.table.verify.accept_unproven)
            sign_verified(folder, app.path.parent / keys.sign, allowed=allowed)


def _public(app: App, keys: KeyTable) -> Path:
    return app.path.parent / (keys.check or f"{keys.sign}.pub")


def _pack(app: App, name: str, cells: Sequence[CellResult], known: PackageResult | None) -> PackageResult:
    table = app.table.packages[name]
    model, providers = table.model or next(iter((*app.table.models, *app.table.groups))), FORMS[table.kind].providers
    wanted = [cell for cell in cells if cell.model == model and cell.target in (table.targets or app.table.targets)]
    # A bundle that failed is left out; if the table names its target, the package fails.
    good = [cell for cell in wanted if cell.bundle and (table.allow_failed or _may_be_released(app, cell))]
    left_out = tuple(cell.target for cell in wanted if cell not in good)
    facts = {"package": table, "bundles": [cell.sha256 for cell in good], "keys": app.table.keys}
    key = digest_bytes(encode_json(facts))
    result = PackageResult(name=name, kind=table.kind, key=key, state="failed", left_out=left_out)
    missing = next((target for target in table.targets if target in left_out), None)
    if missing is not None:
        return msgspec.structs.replace(result, failure=f"{model}/{missing} did not pass, and is not packed")
    if known is not None and known.key == key and known.failure is None and (app.out / known.path).exists():
        return msgspec.structs.replace(known, state="kept")
    folders = [app.out / cell.bundle for cell in good]
    try:
        if model in app.table.groups:
            if len(folders) != 1:
                words = f"an archive holds the group {model} for one target, and it passed for {len(folders)}"
                raise UsageError(words, hint='say which: targets = ["NAME"]')
        elif not table.targets:
            # As for a build's folder: those that fit, the NPU first. Named targets keep the order of the file.
            fitting = sort_bundles([open_bundle(folder) for folder in folders])
            folders = [found.folder for found in fitting if not providers or found.manifest.provider in providers]
        if not folders:
            return msgspec.structs.replace(result, failure=f"no bundle of {model} passed that a {table.kind} can hold")
        return _write(app, result, model, folders)
    except EdgekitError as error:
        return msgspec.structs.replace(result, failure=str(error))


def _write(app: App, result: PackageResult, model: str, folders: Sequence[Path]) -> PackageResult:
    table = app.table.packages[result.name]
    suffix = f".{FORMS[table.kind].archive}" if FORMS[table.kind].archive else ""
    # A group is packed under its own name.
    name = table.name or ("" if model in app.table.groups else name_package(model))
    names = Identity(name=name, group=table.group, version=table.version)
    allowed = Allowed(unproven=app.table.verify.accept_unproven, failed=table.allow_failed)
    keys = None if app.table.keys is None else _public(app, app.table.keys)
    with staged_entries(app.out / _FOLDER) as staging:
        place = staging / f"{result.name}{suffix}"
        report, _ = package_verified(
            folders, table.kind, place, names=names, extras=table.extras, allowed=allowed, key=keys
        )
    return msgspec.structs.replace(
        result,
        state="built",
        path=f"{_FOLDER}/{place.name}",
        sha256=report.sha256,
        size_bytes=report.size_bytes,
        bundles=tuple(variant.name for variant in report.bundles) or tuple(folder.name for folder in folders),
    )


def _may_be_released(app: App, cell: CellResult) -> bool:
    return cell.passed or (cell.verdict == "not proven" and app.table.verify.accept_unproven)
