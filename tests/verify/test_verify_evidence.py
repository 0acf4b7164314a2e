"""A verdict rests on what is digested and what was just measured: verify.json, outside the digests, decides nothing."""

import json
import os
from pathlib import Path

import pytest
from bundle_models import make_bundle, make_contents
from msgspec.structs import replace
from verify_devices import InProcess

from edgekit.bundle.folder import LAYERS, VERIFY, Bundle, open_bundle, write_bundle
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.multi import extract_variant, join_bundles
from edgekit.errors import BundleError
from edgekit.inspect.diff import compare_versions
from edgekit.report.text import list_verify_remarks
from edgekit.verify.attribute import keep_attribution
from edgekit.verify.layers.comparison import LayerEvidence, LayerReport, read_evidence
from edgekit.verify.report import VerifyReport, read_known, write_report
from edgekit.verify.run import verify_bundle

BAD = LayerReport(
    name="mul", op="MatMul", tensor="xw", sqnr_db=30.0, max_abs=0.1, own_sqnr_db=30.0, own_bias=0.0,
    arithmetic="int8", offset_steps=2.0, channel_steps=(9.4, 0.3),
)  # fmt: skip
WORDS = "layer 'mul' (MatMul) is the first whose result is not the float model's: given the same values"


def make_suspect(folder: Path, target: str = "nnapi") -> Bundle:
    """Returns a bundle in which the build found a layer that is not the float model's, though the outputs agree."""
    evidence = encode_json(LayerEvidence(layers=(BAD,)))
    contents = replace(make_contents(folder, target=target), layers=evidence)
    return write_bundle(contents, folder / f"tiny-{target}")


def verify_again(bundle: Bundle) -> VerifyReport:
    """Verifies as `edgekit verify BUNDLE` does, on a device that is honest."""
    return keep_attribution(verify_bundle(bundle, [InProcess()]), read_known(bundle))


def test_a_layer_that_stands_out_is_told_and_fails_no_bundle(tmp_path: Path) -> None:
    bundle = make_suspect(tmp_path)
    report = verify_again(bundle)
    assert report.passed
    assert report.first_bad_layer == "mul"
    clean = tmp_path / "clean"
    clean.mkdir()
    assert any(WORDS in line for line in list_verify_remarks(report))
    assert not any(WORDS in line for line in list_verify_remarks(verify_again(make_bundle(clean))))


def test_what_was_found_of_layers_outlives_join(tmp_path: Path) -> None:
    joined = join_bundles([make_suspect(tmp_path)], tmp_path / "joined")
    assert verify_again(extract_variant(joined, "nnapi", tmp_path / "one")).first_bad_layer == "mul"


def test_a_bundle_that_keeps_less_is_said_to(tmp_path: Path) -> None:
    bundle = write_bundle(replace(make_contents(tmp_path), layers=encode_json(LayerEvidence())), tmp_path / "whole")
    assert verify_again(bundle).notes == ()
    (tmp_path / "in").mkdir()
    less = make_bundle(tmp_path / "in")
    said = json.loads((less.folder / "manifest.json").read_bytes())
    said["golden"]["chosen"] = []
    (less.folder / "manifest.json").write_bytes(encode_json(said))
    notes = verify_again(open_bundle(less.folder)).notes
    assert [note.split(":")[0] for note in notes] == [
        "the layers were not compared with the float model's",
        "the bundle has no self-test",
    ]


def test_a_forged_verify_json_fails_no_bundle(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    good = verify_again(bundle)
    assert good.passed
    write_report(bundle, replace(good, layers=(BAD,), first_bad_layer="mul", alterations=("forged",)))
    report = verify_again(open_bundle(bundle.folder))
    assert (report.passed, report.layers, report.first_bad_layer) == (True, (), None)


def test_digests_cover_what_was_found_of_the_layers(tmp_path: Path) -> None:
    bundle = make_suspect(tmp_path)
    (bundle.folder / LAYERS).write_bytes(encode_json(LayerEvidence()))
    with pytest.raises(BundleError, match=r"layers\.json"):
        open_bundle(bundle.folder)


@pytest.mark.parametrize("content", [b"", b"[]", b'{"layers": 3}', b'{"other": 1}', b"[" * 100_000])
def test_malformed_evidence_is_refused(tmp_path: Path, content: bytes) -> None:
    bundle = write_bundle(replace(make_contents(tmp_path), layers=content), tmp_path / "tiny-nnapi")
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
