"""Signs bundles, and checks their signatures with a given public key.

What is signed is an in-toto statement about the bundle's files and its verification, in a DSSE envelope.
"""

import base64
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from edgekit._files import digest_bytes, write_file, write_new
from edgekit.bundle.checks import read_bounded
from edgekit.bundle.manifest import decode_json, decode_strictly, encode_json
from edgekit.errors import BundleError, MissingExtraError, OutputError, UsageError, reading, reraised
from edgekit.machine import spell_install

SIGNATURE = "signature.json"
_SIGN = "edgekit sign BUNDLE --key FILE"
_PAYLOAD_TYPE: Literal["application/vnd.in-toto+json"] = "application/vnd.in-toto+json"


class _Strict(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, rename="camel"):
    pass


class Digest(_Strict, frozen=True, kw_only=True):
    """The digest of a file."""

    sha256: str


class Subject(_Strict, frozen=True, kw_only=True):
    """A file of the bundle, by its name with `/`; in-toto calls it a resource descriptor."""

    name: str
    digest: Digest


class AttestedOutput(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The agreement of an output with the float model; figures that are not defined for it are None."""

    name: str
    sqnr_db: float | None
    cosine: float | None
    top1_agreement: float | None


class AttestedRun(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The run of a bundle on one device: the kind of evidence, the nodes by provider, and the agreement of outputs.

    `accuracy` and `metric` are the device's figures, None and empty without labels; `latency_ms` is the median.
    """

    bundle: str
    device: str
    evidence: str
    provider: str
    passed: bool
    samples: int
    provider_nodes: dict[str, int]
    outputs: tuple[AttestedOutput, ...]
    accuracy: float | None
    metric: dict[str, float]
    latency_ms: float | None
    versions: dict[str, str]


class TestResult(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """The results of verification: in-toto's predicate "test-result", with the figures as an extension.

    `configuration` names the manifests, which hold the thresholds. A test is a bundle, or a bundle on a device; a
    warning means "not proven". `edgekit_allowed` names bundles that were signed although they did not pass, and why.
    """

    # Otherwise pytest would collect it as a test.
    __test__ = False

    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: tuple[Subject, ...]
    passed_tests: tuple[str, ...] = ()
    warned_tests: tuple[str, ...] = ()
    failed_tests: tuple[str, ...] = ()
    edgekit_runs: tuple[AttestedRun, ...] = ()
    edgekit_allowed: tuple[str, ...] = ()


class Statement(_Strict, frozen=True, kw_only=True):
    """The signed content: every file that the digest of a bundle covers, and the results of verification."""

    type: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(
        default="https://in-toto.io/Statement/v1", name="_type"
    )
    subject: tuple[Subject, ...]
    predicate_type: Literal["https://in-toto.io/attestation/test-result/v0.1"] = (
        "https://in-toto.io/attestation/test-result/v0.1"
    )
    predicate: TestResult


class EnvelopeSignature(_Strict, frozen=True, kw_only=True):
    """A signature `sig` in base64; `keyid` is the sha256 of the public key's DER (SubjectPublicKeyInfo)."""

    keyid: str
    sig: str


class Envelope(_Strict, frozen=True, kw_only=True):
    """A payload in base64, and the one signature over its pre-authentication encoding."""

    payload: str
    payload_type: Literal["application/vnd.in-toto+json"] = _PAYLOAD_TYPE
    signatures: tuple[EnvelopeSignature]


def list_subjects(digests: Mapping[str, str]) -> tuple[Subject, ...]:
    """Returns files with their sha256 as subjects, sorted by name."""
    return tuple(Subject(name=name, digest=Digest(sha256=digests[name])) for name in sorted(digests))


def encode_preauth(payload: bytes) -> bytes:
    """Returns DSSE's pre-authentication encoding of a payload (protocol.md, v1.0), which is the signed bytes."""
    kind = _PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def _spell(data: bytes) -> str:
    return base64.b64encode(data).decode()


def decode_base64(text: str) -> bytes | None:
    """Returns the bytes, None if the text is not canonical base64: each signature must have a single spelling."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return data if _spell(data) == text else None


# Keys have some hundred bytes; of a large file only this much is read.
_MAX_BYTES = 1 << 14
_KEY_HINT = "edgekit sign --new-key FILE makes a pair"


def make_key(path: Path) -> Path:
    """Writes a new private key that only its owner can read, and the public key beside it; returns the latter's path.

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
    # Created with its mode, so that others can never read the key.
    write_new(path, [pem], mode=0o600)
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    write_file(public, key.public_key().public_bytes(serialization.Encoding.PEM, form))
    return public


def require_private_key(key: Path) -> None:
    """Checks, before anything is written, that a private key can be read.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key without a password.
        MissingExtraError: `cryptography` is not installed.
    """
    _load_key(key, "private")


def sign_files(folder: Path, digests: Mapping[str, str], result: TestResult, key: Path) -> str:
    """Signs the digests of a folder's files, and the results of verification, with a private key in PEM.

    Writes `signature.json` into the folder, and returns the id of the key.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key without a password.
        OutputError: the folder cannot be written.
        MissingExtraError: `cryptography` is not installed.
    """
    signer, keyid = _load_key(key, "private")
    payload = encode_json(Statement(subject=list_subjects(digests), predicate=result))
    signature = EnvelopeSignature(keyid=keyid, sig=_spell(signer.sign(encode_preauth(payload))))
    write_file(folder / SIGNATURE, encode_json(Envelope(payload=_spell(payload), signatures=(signature,))))
    return keyid


def check_signature(data: bytes, name: str, folder: Path, key: Path) -> Statement:
    """Checks the signature of a folder with a public key in PEM, and returns its statement.

    `data` are the bytes of its manifest or index, `name` the name of that file: the statement must have its digest.

    Raises:
        BundleError: there is no signature, it is malformed, was made with another key, or the manifest was altered.
        UsageError: the key cannot be read, or is no Ed25519 public key.
        MissingExtraError: `cryptography` is not installed.
    """
    public, key_id = _load_key(key, "public")
    place = folder / SIGNATURE
    if not os.path.lexists(place):
        raise BundleError(f"'{folder}' is not signed", hint=f"sign it: {_SIGN}")
    enclosed = read_bounded(folder, SIGNATURE)
    raw = decode_json(enclosed, str(place))
    if isinstance(raw, dict) and "algorithm" in raw:
        raise BundleError(f"'{place}' has the format of an earlier edgekit", hint=f"sign it again: {_SIGN}")
    envelope = decode_strictly(enclosed, Envelope, str(place))
    (signature,) = envelope.signatures
    _require_key(signature.keyid, key_id, str(folder))
    payload = decode_base64(envelope.payload)
    if payload is None or not _verifies(public, signature.sig, encode_preauth(payload)):
        raise BundleError(f"the signature of '{folder}' was altered", hint="do not use it: fetch it again")
    # The payload is decoded only now, after its signature was checked.
    statement = decode_strictly(payload, Statement, f"{place} (payload)")
    if digest_bytes(data) not in [one.digest.sha256 for one in statement.subject if one.name == name]:
        words = f"'{name}' of '{folder}' was altered after it was signed"
        raise BundleError(words, hint="do not use it: fetch it again")
    return statement


# These bytes come before the digest of a run, so that the signed bytes can never be those of a bundle's statement.
_RUN = b"edgekit recorded run\n"


class DigestSignature(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A signature of one digest, in base64, and the id of the key."""

    keyid: str
    signature: str


def sign_digest(digest: str, key: Path) -> DigestSignature:
    """Signs the sha256 of a recorded run with a private key in PEM.

    Raises:
        UsageError: the key cannot be read, or is no Ed25519 private key without a password.
        MissingExtraError: `cryptography` is not installed.
    """
    signer, keyid = _load_key(key, "private")
    return DigestSignature(keyid=keyid, signature=_spell(signer.sign(_RUN + digest.encode())))


def check_digest_signature(seal: DigestSignature | None, digest: str, what: str, key: Path) -> None:
    """Checks the signature of a recorded run's digest with a public key in PEM; `what` names the run in the error.

    Raises:
        BundleError: there is no signature, it was made with another key, or the run was altered.
        UsageError: the key cannot be read, or is no Ed25519 public key.
        MissingExtraError: `cryptography` is not installed.
    """
    public, key_id = _load_key(key, "public")
    if seal is None:
        words = f"'{what}' is not signed"
        raise BundleError(words, hint="ask for one that is: edgekit verify --export FILE --sign-run KEY")
    _require_key(seal.keyid, key_id, what)
    if not _verifies(public, seal.signature, _RUN + digest.encode()):
        raise BundleError(f"'{what}' was altered after it was signed", hint="do not use it: fetch it again")


def _require_key(keyid: str, wanted: str, what: str) -> None:
    # A valid signature of another key: the user decides whether to trust it.
    if keyid != wanted:
        words = f"'{what}' is signed with another key: {keyid[:16]!r}, not '{wanted[:16]}' (of their sha256)"
        raise BundleError(words, hint="ask who signed it for the public key, and whether to trust it")


def _load_library() -> tuple[Any, Any]:
    absent = MissingExtraError("signatures need the package 'cryptography'", hint=spell_install("cryptography"))
    with reraised(ImportError, absent):
        from cryptography.hazmat.primitives import serialization  # noqa: PLC0415 - an optional extra
        from cryptography.hazmat.primitives.asymmetric import ed25519  # noqa: PLC0415
    return serialization, ed25519


def _load_key(path: Path, half: Literal["public", "private"]) -> tuple[Any, str]:
    """Returns a key, and its id: the sha256 of the public key in DER, as `openssl pkey -pubin -outform DER` writes."""
    (serialization, ed25519), is_public = _load_library(), half == "public"
    from cryptography.exceptions import InternalError, UnsupportedAlgorithm  # noqa: PLC0415 - an optional extra

    malformed = UsageError(f"'{path}' is no {half} key in PEM without a password", hint=_KEY_HINT)
    with reraised((ValueError, TypeError, InternalError, UnsupportedAlgorithm), malformed):
        with reading(f"the {half} key '{path}'", UsageError, _KEY_HINT), path.open("rb") as file:
            data = file.read(_MAX_BYTES)
        key: Any = (
            serialization.load_pem_public_key(data)
            if is_public
            else serialization.load_pem_private_key(data, password=None)
        )
    if not isinstance(key, ed25519.Ed25519PublicKey if is_public else ed25519.Ed25519PrivateKey):
        raise UsageError(f"'{path}' is no Ed25519 {half} key", hint=_KEY_HINT)
    encoding, form = serialization.Encoding.DER, serialization.PublicFormat.SubjectPublicKeyInfo
    return key, digest_bytes((key if is_public else key.public_key()).public_bytes(encoding, form))


def _verifies(public: Any, signature: str, data: bytes) -> bool:
    from cryptography.exceptions import InvalidSignature  # noqa: PLC0415 - an optional extra

    if (raw := decode_base64(signature)) is None:
        return False
    try:
        public.verify(raw, data)
    except (InvalidSignature, ValueError):
        return False
    return True
