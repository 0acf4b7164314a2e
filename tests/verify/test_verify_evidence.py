"""A verdict rests on what is digested and what was just measured: verify.json, outside the digests, decides nothing."""

import json
import os
from pathlib import Path

import msgspec
import pytest
from bundle_models import make_bundle, make_contents
from verify_devices import InProcess

from edgekit.bundle.folder import LAYERS, VERIFY, Bundle, open_bundle, write_bundle
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.bundle.multi import extract_variant, join_bundles
from edgekit.bundle.sign import make_key
from edgekit.errors import BundleError
from edgekit.inspect.diff import compare_versions
from edgekit.jobs.release import Allowed, join_verified, sign_verified
from edgekit.verify.causes.attribute import keep_attribution
from edgekit.verify.layers.comparison import LayerReport
from edgekit.verify.layers.evidence import LayerEvidence, encode_evidence, read_evidence
from edgekit.verify.report import VerifyReport
from edgekit.verify.run import verify_bundle
from edgekit.verify.saved import read_known, write_report

BAD = LayerReport(
    name="mul", op="MatMul", tensor="xw", sqnr_db=30.0, max_abs=0.1, own_sqnr_db=30.0, own_bias=0.0,
    altered="its attribute 'axis' is 1, in the float model 0",
)  # fmt: skip
ORDER = ("xnnpack", "nnapi")
WORDS = "layer 'mul' (MatMul) does not compute what the float model does"


def make_failing(folder: Path, target: str = "nnapi") -> Bundle:
    """Returns a bundle in which the build found a layer that is not the float model's, though the outputs agree."""
    evidence = encode_evidence(LayerEvidence(layers=(BAD,)))
    contents = msgspec.structs.replace(make_contents(folder, target=target), layers=evidence)
    return write_bundle(contents, folder / f"tiny-{target}")


def verify_again(bundle: Bundle) -> VerifyReport:
    """Verifies as `edgekit verify BUNDLE` does, on a device that is honest."""
    return keep_attribution(verify_bundle(bundle, [InProcess()]), read_known(bundle))


def test_a_failing_layer_fails_whatever_becomes_of_verify_json(tmp_path: Path) -> None:
    bundle = make_failing(tmp_path)
    report = verify_again(bundle)
    assert WORDS in report.failures[0]
    assert report.first_bad_layer == "mul"
    write_report(bundle, msgspec.structs.replace(report, layers=(), first_bad_layer=None))
    assert not verify_again(open_bundle(bundle.folder)).passed
    (bundle.folder / VERIFY).unlink()
    assert not verify_again(open_bundle(bundle.folder)).passed


def test_a_failing_layer_outlives_join(tmp_path: Path) -> None:
    joined = join_bundles([make_failing(tmp_path)], tmp_path / "joined")
    assert WORDS in verify_again(extract_variant(joined, "nnapi", tmp_path / "one")).failures[0]


def test_a_bundle_that_keeps_less_is_said_to(tmp_path: Path) -> None:
    bundle = write_bundle(
        msgspec.structs.replace(make_contents(tmp_path), layers=encode_evidence(LayerEvidence())), tmp_path / "whole"
    )
    assert verify_again(bundle).notes == ()
    (tmp_path / "in").mkdir()
    less = make_bundle(tmp_path / "in")
    said = json.loads((less.folder / "manifest.json").read_bytes())
    said["golden"]["chosen"] = []
    (less.folder / "manifest.json").write_bytes(encode_json(said))
    notes = verify_again(open_bundle(less.folder)).notes
    assert [note.split(":")[0] for note in notes] == [
        "no layer was held against the float model's",
        "the bundle has no self-test",
    ]


def test_a_forged_verify_json_fails_no_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    good = verify_again(bundle)
    assert good.passed
    write_report(bundle, msgspec.structs.replace(good, layers=(BAD,), first_bad_layer="mul", alterations=("forged",)))
    report = verify_again(open_bundle(bundle.folder))
    assert (report.passed, report.layers, report.first_bad_layer) == (True, (), None)


def test_a_forged_verify_json_releases_no_failing_layer(tmp_path: Path) -> None:
    bundle = make_failing(tmp_path)
    good = msgspec.structs.replace(verify_again(bundle), layers=(), first_bad_layer=None)
    assert good.passed
    write_report(bundle, good)
    with pytest.raises(BundleError, match="has a layer that is not the float model's"):
        join_verified([bundle.folder], tmp_path / "joined")


@pytest.mark.parametrize("targets", [("nnapi",), ("nnapi", "xnnpack")])
def test_a_joined_folder_is_not_signed_where_a_layer_fails(tmp_path: Path, targets: tuple[str, ...]) -> None:
    """Two targets share the file of their layers, which then lies beside neither manifest."""
    make_key(tmp_path / "key")
    bundles = [make_failing(tmp_path, target) for target in targets]
    for bundle in bundles:
        write_report(bundle, msgspec.structs.replace(verify_again(bundle), layers=(), first_bad_layer=None))
    joined = join_bundles(bundles, tmp_path / "joined").folder
    assert (joined / "variants" / "nnapi" / LAYERS).is_file() is (len(targets) == 1)
    with pytest.raises(BundleError, match="has a layer that is not the float model's"):
        sign_verified(joined, tmp_path / "key")
    assert not (joined / "signature.json").exists()
    signed, doubts = sign_verified(joined, tmp_path / "key", allowed=Allowed(failed=True))
    assert len(doubts) == len(targets)
    assert signed.attested.result == "FAILED"
    assert signed.attested.failed_tests == tuple(f"tiny-{target}" for target in sorted(targets, key=ORDER.index))


def test_digests_cover_what_was_found_of_the_layers(tmp_path: Path) -> None:
    bundle = make_failing(tmp_path)
    (bundle.folder / LAYERS).write_bytes(encode_evidence(LayerEvidence()))
    with pytest.raises(BundleError, match=r"layers\.json"):
        open_bundle(bundle.folder)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"layers": 3}', b'{"other": 1}', b"[" * 100_000])
def test_malformed_evidence_is_refused(tmp_path: Path, content: bytes) -> None:
    bundle = write_bundle(msgspec.structs.replace(make_contents(tmp_path), layers=content), tmp_path / "tiny-nnapi")
    with pytest.raises(BundleError, match=r"layers\.json' is malformed"):
        read_evidence(bundle)


@pytest.mark.parametrize("forged", [b"{", b"[]", b'{"bundle": "x"}'])
def test_diff_is_not_stopped_by_a_verify_json_that_is_none(tmp_path: Path, forged: bytes) -> None:
    bundle = make_bundle(tmp_path)
    (bundle.folder / VERIFY).write_bytes(forged)
    assert compare_versions(bundle.folder, bundle.folder).is_same


def test_diff_shows_no_figures_of_another_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    write_report(bundle, verify_again(bundle))
    facts = json.loads((bundle.folder / VERIFY).read_bytes())
    (bundle.folder / VERIFY).write_text(json.dumps(facts | {"bundle_sha256": "0" * 64}))
    (tmp_path / "other").mkdir()
    assert compare_versions(make_bundle(tmp_path / "other").folder, bundle.folder).accuracy == ()


def test_a_pipe_in_the_place_of_verify_json_is_no_history(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    os.mkfifo(bundle.folder / VERIFY)
    assert read_known(bundle) is None
