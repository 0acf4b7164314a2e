"""Signing a bundle, and refusing one that is not signed by a given key.

The signature is Ed25519 (RFC 8032) over the bytes of `manifest.json` as they lie in the file, so that any library can
check it; the manifest holds the sha256 of every other file.
"""

import base64
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgekit._files import digest_bytes, write_file, write_new
from edgekit.bundle.manifest.manifest import check_canonical, convert_strictly, decode_plain, encode_json
from edgekit.errors import BundleError, MissingExtraError, OutputError, UsageError

SIGNATURE = "signature.json"

# Keys and signatures have some hundred bytes; a large file under their name is not read whole.
_MAX_BYTES = 1 << 14
_KEY_HINT = "edgekit sign --new-key FILE makes a pair"


class Signature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who signed which file: `key` is the sha256 of the public key's 32 bytes, `signature` is in base64."""

    schema_version: Literal[1] = 1
    algorithm: Literal["ed25519"] = "ed25519"
    key: str
    signature: str


def make_key(path: Path) -> Path:
    """Writes a new private key, for its owner's eyes only, and the public key beside it, whose path is returned.

    Raises:
        OutputError: one of the files is there already, or the folder cannot be written.
        MissingExtraError: `cryptography` is not installed.
    """
    serialization, ed25519 = _load_library()
    public = path.with_name(f"{path.name}.pub")
    for place in (path, public):
        if place.exists():
            raise OutputError(f"'{place}' is there already", hint="a key is never overwritten: give another name")
    key: Any = ed25519.Ed25519PrivateKey.generate()
    pem = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    # Created with its mode, not changed to it: there is no moment at which others can read the key.
    write_new(path, [pem], mode=0o600)
    write_file(
        public,
        key.public_key().public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo),
    )
    return public


def sign_manifest(file: Path, key: Path) -> Signature:
    """Signs a manifest or index with a private key in PEM, and writes `signature.json` beside it.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key without a password.
        OutputError: the folder cannot be written.
        MissingExtraError: `cryptography` is not installed.
    """
    serialization, ed25519 = _load_library()
    private = _load_key(key, "private", lambda data: serialization.load_pem_private_key(data, password=None))
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UsageError(f"'{key}' is no Ed25519 private key", hint=_KEY_HINT)
    signed: Any = private
    signature = Signature(
        key=_fingerprint(signed.public_key(), serialization),
        signature=base64.b64encode(signed.sign(file.read_bytes())).decode(),
    )
    write_file(file.parent / SIGNATURE, encode_json(signature))
    return signature


def check_signature(data: bytes, folder: Path, key: Path) -> Signature:
    """Returns the signature in a folder if the private half of a public key in PEM signed these bytes of its manifest.

    Raises:
        BundleError: there is no signature, it is malformed, was made with another key, or the manifest was altered.
        UsageError: the key cannot be read, or is no Ed25519 public key.
        MissingExtraError: `cryptography` is not installed.
    """
    serialization, ed25519 = _load_library()
    public = _load_key(key, "public", serialization.load_pem_public_key)
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise UsageError(f"'{key}' is no Ed25519 public key", hint=_KEY_HINT)
    signature = _read_signature(folder)
    wanted = _fingerprint(public, serialization)
    # Said apart from a wrong signature: another signer is a question of trust, an altered file is not.
    if signature.key != wanted:
        raise BundleError(
            f"'{folder}' is signed with another key: {signature.key[:16]!r}, not '{wanted[:16]}' (of their sha256)",
            hint="ask who signed it for the public key, and whether to trust it",
        )
    if not _verifies(public, signature.signature, data):
        raise BundleError(
            f"the manifest of '{folder}' was altered after it was signed, or its signature was",
            hint="do not use it: fetch it again",
        )
    return signature


def _read_signature(folder: Path) -> Signature:
    place = folder / SIGNATURE
    if not os.path.lexists(place):
        raise BundleError(f"'{folder}' is not signed", hint="sign it: edgekit sign BUNDLE --key FILE")
    if place.is_symlink() or not place.is_file():
        raise BundleError(f"'{place}' is a link or no regular file", hint="fetch the bundle again")
    with place.open("rb") as file:
        data = file.read(_MAX_BYTES + 1)
    if len(data) > _MAX_BYTES:
        raise BundleError(f"'{place}' is larger than {_MAX_BYTES} bytes", hint="edgekit did not write it")
    raw = decode_plain(data, str(place))
    signature = convert_strictly(raw, Signature, str(place))
    check_canonical(raw, data, str(place))
    return signature


def _load_library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an optional extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "signatures need the package 'cryptography'", hint="pip install cryptography"
        ) from error
    return serialization, ed25519


def _load_key(path: Path, half: str, load: Callable[[bytes], object]) -> object:
    from cryptography.exceptions import UnsupportedAlgorithm  # noqa: PLC0415 - an optional extra

    try:
        with path.open("rb") as file:
            return load(file.read(_MAX_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read the {half} key '{path}': {error.strerror}", hint=_KEY_HINT) from error
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:
        raise UsageError(f"'{path}' is no {half} key in PEM without a password", hint=_KEY_HINT) from error


def _verifies(public: Any, signature: str, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an optional extra

    try:
        raw = base64.b64decode(signature, validate=True)
        public.verify(raw, data)
    except (InvalidSignature, ValueError):
        return False
    # base64 has several spellings of the same bytes: only the canonical one is taken, so that the file cannot be
    # varied.
    return base64.b64encode(raw).decode() == signature


def _fingerprint(public: Any, serialization: Any) -> str:
    return digest_bytes(public.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw))
