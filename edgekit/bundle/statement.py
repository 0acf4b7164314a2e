"""What a signature says: an in-toto statement of a bundle's files and of its verification, in a DSSE envelope.

Both are formats of others, so that others can check them: https://github.com/secure-systems-lab/dsse (v1.0), and
https://github.com/in-toto/attestation, `spec/v1/statement.md` and `spec/predicates/test-result.md`. Fields of edgekit's
own begin with `edgekit`, as the parsing rules there ask of extensions.
"""

import base64
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from edgekit.bundle.manifest.checks import read_bounded
from edgekit.bundle.manifest.manifest import check_canonical, convert_strictly, decode_plain, encode_json
from edgekit.errors import BundleError

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
    """How far an output lay from the float model; figures that are not defined for it are None."""

    name: str
    sqnr_db: float | None
    cosine: float | None
    top1_agreement: float | None


class AttestedRun(msgspec.Struct, frozen=True, kw_only=True, rename="camel"):
    """What one device did with a bundle: how good its word is, what its provider took, and how far it lay.

    `accuracy` and `metric` are the device's figures, None without labels; `latency_ms` is the median.
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
    """What was verified: in-toto's predicate "test-result", with the figures as an extension.

    `configuration` names the manifests, which hold the thresholds. A test is a bundle, or a bundle on a device.
    One that warns is not proven. `edgekit_allowed` says why something was signed that did not pass.
    """

    # Else pytest takes it for one of its own.
    __test__ = False

    result: Literal["PASSED", "WARNED", "FAILED"]
    configuration: tuple[Subject, ...]
    passed_tests: tuple[str, ...] = ()
    warned_tests: tuple[str, ...] = ()
    failed_tests: tuple[str, ...] = ()
    edgekit_runs: tuple[AttestedRun, ...] = ()
    edgekit_allowed: tuple[str, ...] = ()


class Statement(_Strict, frozen=True, kw_only=True):
    """What is signed: every file that the digest of a bundle covers, and what was verified of them."""

    type: Literal["https://in-toto.io/Statement/v1"] = msgspec.field(
        default="https://in-toto.io/Statement/v1", name="_type"
    )
    subject: tuple[Subject, ...]
    predicate_type: Literal["https://in-toto.io/attestation/test-result/v0.1"] = (
        "https://in-toto.io/attestation/test-result/v0.1"
    )
    predicate: TestResult


class EnvelopeSignature(_Strict, frozen=True, kw_only=True):
    """Who signed: `keyid` is the sha256 of the public key's DER (SubjectPublicKeyInfo); `sig` is in base64."""

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
    """Returns DSSE's PAE (protocol.md, v1.0): the type goes into what is signed, and no length can be mistaken."""
    kind = _PAYLOAD_TYPE.encode()
    return b"DSSEv1 %d %b %d %b" % (len(kind), kind, len(payload), payload)


def encode_envelope(statement: Statement, keyid: str, sign: Callable[[bytes], bytes]) -> bytes:
    """Returns the file that holds a statement and what `sign` makes of it."""
    payload = encode_json(statement)
    signature = EnvelopeSignature(keyid=keyid, sig=base64.b64encode(sign(encode_preauth(payload))).decode())
    return encode_json(Envelope(payload=base64.b64encode(payload).decode(), signatures=(signature,)))


def read_envelope(folder: Path) -> Envelope:
    """Returns the envelope in a folder; nothing in it is believed yet.

    Raises:
        BundleError: there is none, it is malformed, a link, or in the form of an earlier edgekit.
    """
    place = folder / SIGNATURE
    if not os.path.lexists(place):
        raise BundleError(f"'{folder}' is not signed", hint=f"sign it: {_SIGN}")
    data = read_bounded(folder, SIGNATURE)
    raw = decode_plain(data, str(place))
    if isinstance(raw, dict) and "algorithm" in raw:
        raise BundleError(f"'{place}' has the form of an earlier edgekit", hint=f"sign it again: {_SIGN}")
    envelope = convert_strictly(raw, Envelope, str(place))
    check_canonical(raw, data, str(place))
    return envelope


def read_statement(payload: bytes, folder: Path) -> Statement:
    """Returns the statement that an envelope held, which is to be believed once its signature was checked.

    Raises:
        BundleError: it is no statement as edgekit writes them.
    """
    source = f"{folder / SIGNATURE} (payload)"
    raw = decode_plain(payload, source)
    statement = convert_strictly(raw, Statement, source)
    # Readers disagree on keys that come twice: one of them would not see what was signed.
    check_canonical(raw, payload, source)
    return statement


def check_subjects(statement: Statement, digests: Mapping[str, str], folder: Path) -> None:
    """Refuses a statement whose subjects are not these files with their sha256, all of them and no others.

    Raises:
        BundleError: a file differs, is missing, or is not among the subjects.
    """
    wanted = list_subjects(digests)
    if statement.subject == wanted:
        return
    stated, there = ({(one.name, one.digest.sha256) for one in side} for side in (statement.subject, wanted))
    name = next(iter(sorted(name for name, _ in stated ^ there)), "order of files")
    raise BundleError(f"the signature of '{folder}' is of another {name[:200]!r}", hint="do not use it: fetch it again")


def decode_base64(text: str) -> bytes | None:
    """Returns the bytes, None where it is no base64 in its one canonical spelling: several would be one signature."""
    try:
        data = base64.b64decode(text, validate=True)
    except ValueError:
        return None
    return data if base64.b64encode(data).decode() == text else None
