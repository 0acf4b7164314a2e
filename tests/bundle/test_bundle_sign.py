import base64
import json
import shutil
import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from bundle_models import make_bundle
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

from edgekit._proc import run_process
from edgekit.bundle.archive import list_files, write_archive
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.bundle.opening import open_recorded, opened_any, opened_bundle, sign_bundle
from edgekit.bundle.sign import make_key
from edgekit.errors import BundleError, OutputError, UsageError


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("signed")
    make_key(folder / "key.pem")
    bundle = make_bundle(folder)
    sign_bundle(bundle.folder, folder / "key.pem")
    return bundle


@pytest.fixture
def signed(original: Bundle, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original.folder, tmp_path / "bundle"))


@pytest.fixture
def public(original: Bundle) -> Path:
    return original.folder.parent / "key.pem.pub"


def test_a_signed_bundle_opens_with_the_public_key(signed: Path, public: Path, original: Bundle) -> None:
    assert open_bundle(signed, key=public).sha256 == original.sha256
    assert open_bundle(signed).manifest == original.manifest


def test_any_library_can_check_the_signature(signed: Path, public: Path, tmp_path: Path) -> None:
    signature = json.loads((signed / "signature.json").read_bytes())["signature"]
    (tmp_path / "raw").write_bytes(base64.b64decode(signature))
    argv = ["openssl", "pkeyutl", "-verify", "-pubin", "-inkey", str(public), "-rawin"]
    checked = run_process(
        [*argv, "-in", str(signed / "manifest.json"), "-sigfile", str(tmp_path / "raw")], timeout_s=60
    )
    assert checked.succeeded


def test_signing_twice_gives_the_same_bytes(signed: Path, original: Bundle) -> None:
    before = (signed / "signature.json").read_bytes()
    sign_bundle(signed, original.folder.parent / "key.pem")
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


def _rewrite(folder: Path, change: Callable[[dict[str, str]], object]) -> None:
    raw = json.loads((folder / "signature.json").read_bytes())
    change(raw)
    (folder / "signature.json").write_bytes(encode_json(raw))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda b: (b / "signature.json").unlink(), "is not signed", id="unsigned"),
        pytest.param(
            lambda b: _rewrite(b, lambda s: s.update(key="0" * 64)), "signed with another key", id="other key"
        ),
        pytest.param(lambda b: _rewrite(b, lambda s: s.update(signature="")), "was altered", id="empty"),
        pytest.param(
            lambda b: _rewrite(b, lambda s: s.update(signature="A" * 88)), "was altered", id="other signature"
        ),
        pytest.param(lambda b: _rewrite(b, lambda s: s.update(signature="é")), "was altered", id="no base64"),
        pytest.param(lambda b: _rewrite(b, lambda s: s.update(algorithm="none")), "malformed", id="no algorithm"),
        pytest.param(lambda b: _rewrite(b, lambda s: s.update(more="")), "malformed", id="unknown key"),
        pytest.param(lambda b: (b / "signature.json").write_bytes(b"{" * 20_000), "larger than", id="large"),
        pytest.param(lambda b: (b / "signature.json").write_bytes(b"[" * 9_000), "malformed", id="deep"),
        pytest.param(lambda b: (b / "signature.json").write_bytes(b"\xff"), "malformed", id="no text"),
        pytest.param(
            lambda b: ((b / "signature.json").unlink(), (b / "signature.json").mkdir()), "no regular file", id="folder"
        ),
    ],
)
def test_a_bad_signature_is_refused(signed: Path, public: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(signed)
    with pytest.raises(BundleError, match=message) as caught:
        open_bundle(signed, key=public)
    assert "\n" not in caught.value.message


def test_a_linked_signature_is_refused(signed: Path, public: Path, tmp_path: Path) -> None:
    (signed / "signature.json").rename(tmp_path / "kept")
    (signed / "signature.json").symlink_to(tmp_path / "kept")
    with pytest.raises(BundleError, match="link"):
        open_bundle(signed, key=public)


def test_a_bundle_of_another_key_is_refused(signed: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="signed with another key"):
        open_bundle(signed, key=make_key(tmp_path / "other"))


def test_an_archive_keeps_the_signature(signed: Path, public: Path, tmp_path: Path) -> None:
    write_archive(list_files(signed), tmp_path / "a.zip", "zip")
    with opened_bundle(tmp_path / "a.zip", key=public) as bundle:
        assert bundle.manifest.name == "tiny"
    assert not bundle.folder.exists()


def test_an_archive_is_held_to_the_key(signed: Path, public: Path, tmp_path: Path) -> None:
    write_archive(list_files(signed), tmp_path / "a.zip", "zip")
    other = make_key(tmp_path / "other")
    with pytest.raises(BundleError, match="with another key"), opened_any(tmp_path / "a.zip", key=other):
        pass
    (signed / "signature.json").unlink()
    write_archive(list_files(signed), tmp_path / "b.zip", "zip")
    with pytest.raises(BundleError, match="is not signed"), opened_any(tmp_path / "b.zip", key=public):
        pass


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
    with pytest.raises(BundleError, match=r"'manifest\.json' .* is missing"), opened_any(tmp_path / "two.zip"):
        pass


def test_an_archive_is_not_signed_nor_of_another_target(signed: Path, public: Path, tmp_path: Path) -> None:
    write_archive(list_files(signed), tmp_path / "a.zip", "zip")
    with pytest.raises(BundleError, match="is a file"):
        sign_bundle(tmp_path / "a.zip", public.with_suffix(""))
    for place in (signed, tmp_path / "a.zip"):
        with pytest.raises(UsageError, match="is for 'nnapi', not 'qnn'"), opened_bundle(place, target="qnn"):
            pass


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(BundleError, match=r"'manifest\.json' .* is missing"), opened_any(tmp_path / "empty"):
        pass


def test_an_earlier_build_is_opened_by_its_targets(signed: Path, tmp_path: Path) -> None:
    shutil.copytree(signed, tmp_path / "build" / "tiny-nnapi")
    found = open_recorded(tmp_path / "build", "tiny", ["nnapi", "qnn"])
    assert {target: recorded.manifest.name for target, recorded in found.items()} == {"nnapi": "tiny"}
    assert found["nnapi"].folder == tmp_path / "build" / "tiny-nnapi"
    with pytest.raises(UsageError, match=r"holds no bundle .* tiny-qnn or tiny-cpu"):
        open_recorded(tmp_path / "build", "tiny", ["qnn", "cpu"])


def test_a_damaged_bundle_is_not_signed(signed: Path, original: Bundle) -> None:
    (signed / "tiny.onnx").write_bytes(b"")
    with pytest.raises(BundleError, match="has 0 bytes"):
        sign_bundle(signed, original.folder.parent / "key.pem")


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
    for key, message in (
        (tmp_path / "none", "cannot read"),
        (public, "no private key"),
        (tmp_path / "rsa", "no Ed25519 private key"),
        (tmp_path / "locked", "without a password"),
    ):
        with pytest.raises(UsageError, match=message):
            sign_bundle(signed, key)
    for key in (private, signed / "manifest.json"):
        with pytest.raises(UsageError, match="no public key"):
            open_bundle(signed, key=key)
