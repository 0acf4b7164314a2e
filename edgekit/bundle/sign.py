"""Signing a bundle, and refusing one that is not signed by a given key.

The signature is Ed25519 (RFC 8032) over a statement that names every file with its sha256, in the form of
`edgekit.bundle.statement`, which other tools read too.
"""

import base64
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import digest_bytes, write_file, write_new
from edgekit.bundle.statement import (
    SIGNATURE,
    Statement,
    TestResult,
    decode_base64,
    encode_envelope,
    encode_preauth,
    list_subjects,
    read_envelope,
    read_statement,
)
from edgekit.errors import BundleError, MissingExtraError, OutputError, UsageError

# Keys have some hundred bytes; a large file under their name is not read whole.
_MAX_BYTES = 1 << 14
_KEY_HINT = "edgekit sign --new-key FILE makes a pair"


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


def require_private_key(key: Path) -> None:
    """Refuses what is no private key to sign with, before anything is written that is to be signed.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key without a password.
        MissingExtraError: `cryptography` is not installed.
    """
    _load_private(key)


def sign_files(folder: Path, digests: Mapping[str, str], result: TestResult, key: Path) -> str:
    """Signs the digests of a folder's files, and what was verified of them, with a private key in PEM.

    Writes `signature.json` into the folder, and returns the id of the key.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key without a password.
        OutputError: the folder cannot be written.
        MissingExtraError: `cryptography` is not installed.
    """
    serialization, _ = _load_library()
    signer = _load_private(key)
    keyid = _identify(signer.public_key(), serialization)
    statement = Statement(subject=list_subjects(digests), predicate=result)
    write_file(folder / SIGNATURE, encode_envelope(statement, keyid, signer.sign))
    return keyid


def check_signature(data: bytes, name: str, folder: Path, key: Path) -> Statement:
    """Returns the statement in a folder if the private half of a public key in PEM signed it, and it names these bytes.

    `data` are the bytes of its manifest or index, `name` that file.

    Raises:
        BundleError: there is no signature, it is malformed, was made with another key, or the manifest was altered.
        UsageError: the key cannot be read, or is no Ed25519 public key.
        MissingExtraError: `cryptography` is not installed.
    """
    public, wanted = _load_public(key)
    envelope = read_envelope(folder)
    (signature,) = envelope.signatures
    _require_key(signature.keyid, wanted, str(folder))
    payload = decode_base64(envelope.payload)
    if payload is None or not _verifies(public, signature.sig, encode_preauth(payload)):
        raise BundleError(f"the signature of '{folder}' was altered", hint="do not use it: fetch it again")
    statement = read_statement(payload, folder)
    if digest_bytes(data) not in [one.digest.sha256 for one in statement.subject if one.name == name]:
        raise BundleError(
            f"'{name}' of '{folder}' was altered after it was signed", hint="do not use it: fetch it again"
        )
    return statement


class Seal(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A signature of one digest, in base64, and the id of the key that made it."""

    keyid: str
    signature: str


def seal_digest(digest: str, key: Path) -> Seal:
    """Signs the sha256 of a recorded run with a private key in PEM.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key without a password.
        MissingExtraError: `cryptography` is not installed.
    """
    serialization, _ = _load_library()
    signer = _load_private(key)
    signature = base64.b64encode(signer.sign(_name_run(digest))).decode()
    return Seal(keyid=_identify(signer.public_key(), serialization), signature=signature)


def check_seal(seal: Seal | None, digest: str, what: str, key: Path) -> None:
    """Refuses a digest that the private half of a public key in PEM did not sign; `what` names it in the error.

    Raises:
        BundleError: there is no signature, it was made with another key, or what it signs was altered.
        UsageError: the key cannot be read, or is no Ed25519 public key.
        MissingExtraError: `cryptography` is not installed.
    """
    public, wanted = _load_public(key)
    if seal is None:
        raise BundleError(
            f"'{what}' is not signed", hint="ask for one that is: edgekit verify --export FILE --sign-run KEY"
        )
    _require_key(seal.keyid, wanted, what)
    if not _verifies(public, seal.signature, _name_run(digest)):
        raise BundleError(f"'{what}' was altered after it was signed", hint="do not use it: fetch it again")


def _name_run(digest: str) -> bytes:
    """Returns what is signed: no statement of a bundle begins like it, so that one cannot stand for the other."""
    return b"edgekit recorded run\n" + digest.encode()


def _load_public(key: Path) -> tuple[Any, str]:
    """Returns a public key, and its id."""
    serialization, ed25519 = _load_library()
    public = _load_key(key, "public", serialization.load_pem_public_key)
    if not isinstance(public, ed25519.Ed25519PublicKey):
        raise UsageError(f"'{key}' is no Ed25519 public key", hint=_KEY_HINT)
    return public, _identify(public, serialization)


def _require_key(keyid: str, wanted: str, what: str) -> None:
    # Said apart from a wrong signature: another signer is a question of trust, an altered file is not.
    if keyid != wanted:
        raise BundleError(
            f"'{what}' is signed with another key: {keyid[:16]!r}, not '{wanted[:16]}' (of their sha256)",
            hint="ask who signed it for the public key, and whether to trust it",
        )


def _load_library() -> tuple[Any, Any]:
    try:
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an optional extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    except ImportError as error:
        raise MissingExtraError(
            "signatures need the package 'cryptography'", hint="pip install cryptography"
        ) from error
    return serialization, ed25519


def _load_private(key: Path) -> Any:
    serialization, ed25519 = _load_library()
    private = _load_key(key, "private", lambda data: serialization.load_pem_private_key(data, password=None))
    if not isinstance(private, ed25519.Ed25519PrivateKey):
        raise UsageError(f"'{key}' is no Ed25519 private key", hint=_KEY_HINT)
    return private


def _load_key(path: Path, half: str, load: Callable[[bytes], object]) -> object:
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm  # noqa: PLC0415 - an optional extra

    try:
        with path.open("rb") as file:
            return load(file.read(_MAX_BYTES))
    except OSError as error:
        raise UsageError(f"cannot read the {half} key '{path}': {error.strerror}", hint=_KEY_HINT) from error
    except (ValueError, TypeError, InternalError, UnsupportedAlgorithm) as error:
        raise UsageError(f"'{path}' is no {half} key in PEM without a password", hint=_KEY_HINT) from error


def _verifies(public: Any, signature: str, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an optional extra

    raw = decode_base64(signature)
    if raw is None:
        return False
    try:
        public.verify(raw, data)
    except (InvalidSignature, ValueError):
        return False
    return True


def _identify(public: Any, serialization: Any) -> str:
    """Returns the sha256 of a public key in DER, as `openssl pkey -pubin -outform DER` writes it."""
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return digest_bytes(public.public_bytes(encoding, form))
