import base64
import json
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from bundle_models import PASSED, edit_json, make_bundle
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ed25519, rsa

from edgekit._files import digest_file
from edgekit._proc import run_process
from edgekit.bundle.archive import KINDS, Kind, list_files, write_archive
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.multi import join_bundles, open_index, opened_any, opened_bundle, sign_bundle
from edgekit.bundle.sign import make_key, sign_files
from edgekit.errors import BundleError, MissingExtraError, OutputError, UsageError

ENVELOPE, STATEMENT = "application/vnd.in-toto+json", "https://in-toto.io/Statement/v1"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("signed")
    make_key(folder / "key.pem")
    bundle = make_bundle(folder)
    sign_bundle(bundle.folder, folder / "key.pem", PASSED)
    return bundle


@pytest.fixture
def signed(original: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original.folder, tmp_path / "bundle"))


@pytest.fixture
def public(original: Bundle) -> Path:
    return original.folder.parent / "key.pem.pub"


def read_envelope(folder: Path) -> dict[str, Any]:
    envelope: dict[str, Any] = json.loads((folder / "signature.json").read_bytes())
    return envelope


def test_the_statement_is_in_totos_and_names_every_file_with_its_digest(signed: Path, original: Bundle) -> None:
    envelope = read_envelope(signed)
    statement = json.loads(base64.b64decode(envelope["payload"]))
    assert (envelope["payloadType"], statement["_type"]) == (ENVELOPE, STATEMENT)
    assert statement["predicateType"] == "https://in-toto.io/attestation/test-result/v0.1"
    assert statement["predicate"]["result"] == "PASSED"
    assert statement["predicate"]["passedTests"] == ["tiny-nnapi on host"]
    named = {subject["name"]: subject["digest"]["sha256"] for subject in statement["subject"]}
    assert named == {name: digest_file(path) for name, path in list_files(signed).items() if name != "signature.json"}
    assert named["manifest.json"] == original.sha256


def test_openssl_checks_the_signature(signed: Path, public: Path, tmp_path: Path) -> None:
    envelope = read_envelope(signed)
    payload = base64.b64decode(envelope["payload"])
    # DSSE's protocol.md: "DSSEv1" SP LEN(type) SP type SP LEN(body) SP body.
    (tmp_path / "pae").write_bytes(b"DSSEv1 28 application/vnd.in-toto+json " + f"{len(payload)} ".encode() + payload)
    (tmp_path / "raw").write_bytes(base64.b64decode(envelope["signatures"][0]["sig"]))
    argv = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin", "-in", str(tmp_path / "pae")]
    assert run_process([*argv, "-sigfile", str(tmp_path / "raw")], timeout_s=60).succeeded
    key, form = serialization.load_pem_public_key(public.read_bytes()), serialization.PublicFormat.SubjectPublicKeyInfo
    (tmp_path / "der").write_bytes(key.public_bytes(serialization.Encoding.DER, form))
    assert envelope["signatures"][0]["keyid"] == digest_file(tmp_path / "der")


def test_another_implementation_of_dsse_checks_the_signature(signed: Path, public: Path) -> None:
    dsse, signer = pytest.importorskip("securesystemslib.dsse"), pytest.importorskip("securesystemslib.signer")
    key = serialization.load_pem_public_key(public.read_bytes())
    envelope = read_envelope(signed)
    keyid = envelope["signatures"][0]["keyid"]
    theirs = [signer.SSlibKey.from_crypto(key, keyid=keyid)]
    assert dsse.Envelope.from_dict(read_envelope(signed)).verify(theirs, 1) == {keyid: theirs[0]}
    payload = base64.b64decode(envelope["payload"]).replace(b"PASSED", b"FAILED")
    envelope["payload"] = base64.b64encode(payload).decode()
    with pytest.raises(pytest.importorskip("securesystemslib.exceptions").VerificationError):
        dsse.Envelope.from_dict(envelope).verify(theirs, 1)


def test_a_signed_bundle_opens_with_the_public_key(signed: Path, public: Path, original: Bundle) -> None:
    assert open_bundle(signed, key=public).sha256 == original.sha256
    assert open_bundle(signed).manifest == original.manifest
    before = (signed / "signature.json").read_bytes()
    sign_bundle(signed, original.folder.parent / "key.pem", PASSED)
    assert (signed / "signature.json").read_bytes() == before


def test_every_file_but_the_evidence_is_covered(signed: Path, public: Path) -> None:
    (signed / "verify.json").write_text("{}")
    for name, path in list_files(signed).items():
        data = path.read_bytes()
        for place in {0, len(data) // 2, len(data) - 1}:
            changed = bytearray(data)
            changed[place] ^= 1
            path.write_bytes(changed)
            if name == "verify.json":
                open_bundle(signed, key=public)
                continue
            with pytest.raises(BundleError) as caught:
                open_bundle(signed, key=public)
            assert name in caught.value.message or "signature" in caught.value.message or "key" in caught.value.message
        path.write_bytes(data)
    open_bundle(signed, key=public)


def _rewrite(folder: Path, change: Callable[[dict[str, Any]], object]) -> None:
    edit_json(folder / "signature.json", change)


def _resign(folder: Path, change: Callable[[dict[str, Any]], object], key: Path, *, canonical: bool = True) -> None:
    """Signs another statement with the right key, as a signer with other software might."""
    private = serialization.load_pem_private_key(key.read_bytes(), None)
    assert isinstance(private, ed25519.Ed25519PrivateKey)
    envelope = read_envelope(folder)
    statement = json.loads(base64.b64decode(envelope["payload"]))
    change(statement)
    payload = encode_json(statement) if canonical else json.dumps(statement).encode()
    pae = b"DSSEv1 28 application/vnd.in-toto+json " + f"{len(payload)} ".encode() + payload
    envelope["payload"] = base64.b64encode(payload).decode()
    envelope["signatures"][0]["sig"] = base64.b64encode(private.sign(pae)).decode()
    (folder / "signature.json").write_bytes(encode_json(envelope))


def set_signature(**changed: str) -> Callable[[Path], None]:
    return lambda folder: _rewrite(folder, lambda envelope: envelope["signatures"][0].update(changed))


def put_signature(data: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / "signature.json").write_bytes(data)


EARLIER = encode_json({"algorithm": "ed25519", "key": "0", "schema_version": 1, "signature": ""})
DAMAGES = [
    pytest.param(lambda b: (b / "signature.json").unlink(), "is not signed", id="unsigned"),
    pytest.param(set_signature(keyid="0" * 64), "signed with another key", id="other key"),
    pytest.param(set_signature(sig=""), "was altered", id="empty"),
    pytest.param(set_signature(sig="A" * 88), "was altered", id="other signature"),
    pytest.param(set_signature(sig="é"), "was altered", id="no base64"),
    pytest.param(lambda b: _rewrite(b, lambda e: e.update(payload="")), "was altered", id="no payload"),
    pytest.param(
        lambda b: _rewrite(b, lambda e: e.update(payload=e["payload"] + "\n")), "was altered", id="line break"
    ),
    pytest.param(lambda b: _rewrite(b, lambda e: e.update(payloadType="none")), "malformed", id="no type"),
    pytest.param(lambda b: _rewrite(b, lambda e: e.update(signatures=[])), "malformed", id="no signature"),
    pytest.param(lambda b: _rewrite(b, lambda e: e.update(signatures=e["signatures"] * 2)), "malformed", id="two"),
    pytest.param(lambda b: _rewrite(b, lambda e: e.update(more="")), "malformed", id="unknown key"),
    pytest.param(put_signature(EARLIER), "format of an earlier edgekit", id="earlier format"),
    pytest.param(put_signature(b"{" * (1 << 24) + b"{"), "larger than", id="large"),
    pytest.param(put_signature(b"[" * 9_000), "malformed", id="deep"),
    pytest.param(put_signature(b"\xff"), "malformed", id="no text"),
    pytest.param(put_signature(b"5"), "malformed", id="a number"),
    pytest.param(
        lambda b: (b / "signature.json").write_bytes(b" " + (b / "signature.json").read_bytes()), "altered", id="spaces"
    ),
]
NO_FILES = [
    pytest.param(
        lambda b: ((b / "signature.json").unlink(), (b / "signature.json").mkdir()), "no regular file", id="folder"
    ),
    pytest.param(
        lambda b: (b / "signature.json").rename(b / "kept") and (b / "signature.json").symlink_to("kept"),
        "link",
        id="link",
    ),
]


@pytest.mark.parametrize(("damage", "message"), [*DAMAGES, *NO_FILES])
def test_a_bad_signature_is_refused(signed: Path, public: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(signed)
    with pytest.raises(BundleError, match=message) as caught:
        open_bundle(signed, key=public)
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("damage", "message"), DAMAGES)
def test_the_signature_of_an_archive_is_checked_like_that_of_a_folder(
    signed: Path, public: Path, tmp_path: Path, kind: Kind, damage: Callable[[Path], object], message: str
) -> None:
    damage(signed)
    write_archive(list_files(signed), tmp_path / "a", kind)
    with pytest.raises(BundleError, match=message), opened_any(tmp_path / "a", key=public):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_the_signature_of_a_joined_archive_counts(original: Bundle, public: Path, tmp_path: Path, kind: Kind) -> None:
    joined = join_bundles([original], tmp_path / "joined")
    write_archive(list_files(joined.folder), tmp_path / "unsigned", kind)
    with pytest.raises(BundleError, match="is not signed"), opened_any(tmp_path / "unsigned", key=public):
        pass
    sign_bundle(joined.folder, public.with_suffix(""), PASSED)
    write_archive(list_files(joined.folder), tmp_path / "signed", kind)
    with opened_any(tmp_path / "signed", key=public) as found:
        assert found.attested == PASSED
    with pytest.raises(BundleError, match="another key"), opened_any(tmp_path / "signed", key=make_key(tmp_path / "k")):
        pass
    index = json.loads((joined.folder / "index.json").read_bytes())
    renamed = encode_json({**index, "name": "other"})
    write_archive({**list_files(joined.folder), "index.json": renamed}, tmp_path / "a", kind)
    with pytest.raises(BundleError, match="altered after it was signed"), opened_any(tmp_path / "a", key=public):
        pass


@pytest.mark.parametrize(
    ("change", "canonical", "message"),
    [
        pytest.param(lambda s: s["subject"].pop(), True, "is of another", id="a file is missing"),
        pytest.param(lambda s: s["subject"].append(s["subject"][0]), True, "is of another", id="a file twice"),
        pytest.param(lambda s: s["subject"][0]["digest"].update(sha256="0"), True, "is of another", id="another file"),
        pytest.param(lambda s: s["subject"].reverse(), True, "order of files", id="another order"),
        pytest.param(lambda s: s.update(subject=[]), True, "altered after it was signed", id="no manifest"),
        pytest.param(lambda s: s.update(_type="https://in-toto.io/Statement/v0.1"), True, "malformed", id="older"),
        pytest.param(lambda s: s.update(predicateType="x"), True, "malformed", id="another predicate"),
        pytest.param(lambda s: s["predicate"].update(result="GOOD"), True, "malformed", id="another result"),
        pytest.param(lambda _: None, False, "is not formatted as edgekit writes it", id="another format"),
    ],
)
def test_a_statement_of_another_bundle_is_refused_though_the_key_is_right(
    signed: Path, public: Path, change: Callable[[dict[str, Any]], object], canonical: bool, message: str
) -> None:
    _resign(signed, change, public.with_suffix(""), canonical=canonical)
    with pytest.raises(BundleError, match=message):
        open_bundle(signed, key=public)


def test_a_field_of_a_later_edgekit_is_no_reason_to_refuse(signed: Path, public: Path) -> None:
    _resign(signed, lambda s: s["predicate"].update(later=1), public.with_suffix(""))
    assert open_bundle(signed, key=public).attested == PASSED
    assert open_bundle(signed).attested is None


def test_a_file_of_an_index_that_was_not_signed_is_refused(original: Bundle, public: Path, tmp_path: Path) -> None:
    joined = join_bundles([original], tmp_path / "joined")
    sign_files(joined.folder, {**joined.digests, "more": "0"}, PASSED, public.with_suffix(""))
    with pytest.raises(BundleError, match="is of another 'more'"):
        open_index(joined.folder, key=public)


def test_a_variant_that_another_signed_is_not_opened(signed: Path, public: Path, tmp_path: Path) -> None:
    write_archive(list_files(signed), tmp_path / "a.zip", "zip")
    other = make_key(tmp_path / "other")
    for place in (signed, tmp_path / "a.zip"):
        with opened_bundle(place, key=public, target="nnapi") as bundle:
            assert bundle.manifest.name == "tiny"
        assert bundle.folder.exists() == (place == signed)
        with pytest.raises(BundleError, match="signed with another key"), opened_bundle(place, key=other):
            pass


def test_without_cryptography_the_error_names_it(signed: Path, public: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives", None)
    with pytest.raises(MissingExtraError, match=r"need the package 'cryptography' .pip install cryptography"):
        open_bundle(signed, key=public)


@pytest.mark.parametrize("top", ["", "folder/"])
def test_a_bundle_lies_at_the_root_of_an_archive_or_in_its_one_folder(signed: Path, tmp_path: Path, top: str) -> None:
    files = list_files(signed)
    write_archive({f"{top}{name}": path for name, path in files.items()}, tmp_path / "a.zip", "zip")
    with opened_bundle(tmp_path / "a.zip", target="nnapi") as bundle:
        assert bundle.manifest.name == "tiny"
    write_archive({f"{top}{name}": files[name] for name in ("manifest.json",)}, tmp_path / "b.zip", "zip")
    with pytest.raises(BundleError, match="lacks the file"), opened_any(tmp_path / "b.zip"):
        pass


def test_an_archive_of_two_folders_is_no_bundle(signed: Path, tmp_path: Path) -> None:
    files = {f"{top}/{name}": path for top in "ab" for name, path in list_files(signed).items()}
    write_archive(files, tmp_path / "two.zip", "zip")
    (tmp_path / "empty").mkdir()
    for place in ("two.zip", "empty"):
        with pytest.raises(BundleError, match=r"'manifest\.json' .* is missing"), opened_any(tmp_path / place):
            pass


def test_archives_and_damaged_bundles_stay_unsigned(
    signed: Path, public: Path, tmp_path: Path, original: Bundle
) -> None:
    write_archive(list_files(signed), tmp_path / "a.zip", "zip")
    with pytest.raises(BundleError, match="is a file"):
        sign_bundle(tmp_path / "a.zip", public.with_suffix(""), PASSED)
    for place in (signed, tmp_path / "a.zip"):
        with pytest.raises(UsageError, match="is for 'nnapi', not 'qnn'"), opened_bundle(place, target="qnn"):
            pass
    (signed / "tiny.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match="has 0 bytes"):
        sign_bundle(signed, original.folder.parent / "key.pem", PASSED)


def test_a_new_key_is_private_and_overwrites_nothing(tmp_path: Path) -> None:
    public = make_key(tmp_path / "key")
    assert stat.S_IMODE((tmp_path / "key").stat().st_mode) == 0o600
    (tmp_path / "key").unlink()
    with pytest.raises(OutputError, match="is there already"):
        make_key(tmp_path / "key")
    assert public.exists()
    assert not (tmp_path / "key").exists()


def test_wrong_keys_are_named(signed: Path, public: Path, tmp_path: Path) -> None:
    private = public.with_suffix("")
    (tmp_path / "rsa").write_bytes(
        rsa.generate_private_key(65537, 2048).private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    locked = serialization.load_pem_private_key(private.read_bytes(), None).private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.BestAvailableEncryption(b"word")
    )
    (tmp_path / "locked").write_bytes(locked)
    (tmp_path / "long").write_bytes(b"#\n" * 8192 + private.read_bytes())
    (tmp_path / "commented").write_bytes(b"#\n" * 8000 + private.read_bytes())
    sign_bundle(signed, tmp_path / "commented", PASSED)
    for key, message in (
        (tmp_path / "none", "cannot read"),
        (public, "no private key"),
        (tmp_path / "long", "no private key"),
        (tmp_path / "rsa", "no Ed25519 private key"),
        (tmp_path / "locked", "without a password"),
    ):
        with pytest.raises(UsageError, match=message):
            sign_bundle(signed, key, PASSED)
    for key in (private, signed / "manifest.json"):
        with pytest.raises(UsageError, match="no public key"):
            open_bundle(signed, key=key)
    other = serialization.load_pem_private_key((tmp_path / "rsa").read_bytes(), None).public_key()
    (tmp_path / "rsa.pub").write_bytes(
        other.public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    with pytest.raises(UsageError, match="no Ed25519 public key"):
        open_bundle(signed, key=tmp_path / "rsa.pub")
