import json
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import pytest
from bundle_models import make_bundle, make_contents

from edgekit._files import digest_file
from edgekit.bundle.checks import read_bounded
from edgekit.bundle.folder import open_bundle, write_bundle
from edgekit.bundle.manifest import MAX_MANIFEST_BYTES, decode_manifest, encode_json, render_schemas
from edgekit.data.images import Preprocess
from edgekit.errors import BundleError
from edgekit.recipe import Licence, Recipe, TensorNotes
from edgekit.target import target_names

V1 = (Path(__file__).parent / "manifest_v1.json").read_bytes()


def validate(manifest: bytes) -> None:
    jsonschema.Draft202012Validator(json.loads(render_schemas()["manifest.schema.json"])).validate(json.loads(manifest))


def test_of_a_manifest_that_is_too_large_no_more_is_read_than_shows_it(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 9)
    read = read_bounded(tmp_path, "manifest.json")
    assert len(read) == MAX_MANIFEST_BYTES + 1
    with pytest.raises(BundleError, match="larger than"):
        decode_manifest(read, "manifest.json")


@pytest.mark.parametrize("target", target_names())
def test_real_manifests_fit_the_schema(tmp_path: Path, target: str) -> None:
    bundle = make_bundle(tmp_path, target=target)
    validate((bundle.folder / "manifest.json").read_bytes())


def test_the_schema_says_no(tmp_path: Path) -> None:
    manifest: dict[str, Any] = json.loads((make_bundle(tmp_path).folder / "manifest.json").read_bytes())
    for change in ({"precision": "int7"}, {"unknown": 1}, {"fallback": "cpu"}, {"schema_version": 3}):
        with pytest.raises(jsonschema.ValidationError):
            validate(json.dumps({**manifest, **change}).encode())
    del manifest["licence"]
    with pytest.raises(jsonschema.ValidationError, match="'licence' is a required"):
        validate(json.dumps(manifest).encode())


def test_a_manifest_of_version_1_is_read() -> None:
    manifest = decode_manifest(V1, "old")
    assert manifest.schema_version == 2
    assert manifest.name == "tiny"
    assert (manifest.licence, manifest.fallback, manifest.platforms) == (Licence(), (), {})
    assert manifest.tested.onnxruntime == "1.31.1"
    assert manifest.placement.node_list == manifest.files["check.json"].sha256
    assert manifest.golden.chosen == ()
    validate(encode_json(manifest))


def test_a_bundle_of_version_1_stays_open(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path, labels=(0, 1, 2, 3, 4, 0)).folder
    new = json.loads((folder / "manifest.json").read_bytes())
    (folder / "golden" / "expected.npz").unlink()
    del new["files"]["golden/expected.npz"]
    old = json.loads(V1)
    told = {
        key: new[key]
        for key in ("files", "settings", "minimum_ort", "session_config", "thresholds", "verification")
        if key in old
    }
    (folder / "manifest.json").write_bytes(encode_json({**old, **told}))
    bundle = open_bundle(folder)
    assert bundle.golden.has_labels
    assert bundle.sha256 == digest_file(folder / "manifest.json")


def test_vectors_of_numbers_of_an_earlier_manifest_are_values(tmp_path: Path) -> None:
    manifest: dict[str, Any] = json.loads((make_bundle(tmp_path).folder / "manifest.json").read_bytes())
    manifest.pop("readings", None)
    read = decode_manifest(encode_json(manifest | {"numbers": ["y"]}), "manifest.json")
    assert {name: reading.kind for name, reading in (read.readings or {}).items()} == {"y": "values"}
    with pytest.raises(BundleError, match="numbers"):
        decode_manifest(encode_json(manifest | {"numbers": 3}), "manifest.json")


@pytest.mark.parametrize("version", [0, 3, "1", None])
def test_other_versions_are_refused(version: object) -> None:
    with pytest.raises(BundleError, match="malformed"):
        decode_manifest(encode_json({**json.loads(V1), "schema_version": version}), "other")


@pytest.mark.parametrize(
    "altered",
    [
        pytest.param(V1.replace(b"\n  ", b"\n   ", 1), id="white space"),
        pytest.param(V1.rstrip(), id="last newline"),
        pytest.param(V1.replace(b'"form": "onnx"', b'"form": "full", "form": "onnx"'), id="a key twice"),
        pytest.param(V1.replace(b'"tiny"', b'"\\u0074iny"'), id="escaped letter"),
        pytest.param(json.dumps(json.loads(V1)).encode(), id="other tool"),
    ],
)
def test_another_spelling_of_the_same_manifest_is_refused(altered: bytes) -> None:
    with pytest.raises(BundleError, match="altered"):
        decode_manifest(altered, "old")


def test_it_says_what_an_app_must_know(tmp_path: Path) -> None:
    recipe = Recipe(
        targets=("all",),
        licence=Licence(model="Apache-2.0", data="CC-BY-4.0"),
        tensors={"y": TensorNotes(postprocessing="softmax"), "x": TensorNotes(layout="NC")},
    )
    contents = msgspec.structs.replace(
        make_contents(tmp_path, target="qnn"), recipe=recipe, preprocess=Preprocess(size=(8, 1))
    )
    manifest = write_bundle(contents, tmp_path / "out").manifest
    (x,), (y,) = manifest.inputs, manifest.outputs
    assert (x.layout, x.preprocessing) == ("NC", Preprocess(size=(8, 1)))
    assert x.value_range is not None
    assert x.value_range[0] < 0 < x.value_range[1]
    assert y.postprocessing == "softmax"
    assert manifest.licence.data == "CC-BY-4.0"
    assert manifest.fallback == ("xnnpack", "cpu")
    assert manifest.tested.socs == ("SM8750",)
    assert manifest.platforms["android"].provider_options["soc_model"] == "69"
    assert {name: share.nodes for name, share in manifest.placement.providers.items()} == {
        "QNNExecutionProvider": contents.check.taken,
        "CPUExecutionProvider": contents.check.nodes - contents.check.taken,
    }
    words = manifest.provenance.command.split()
    assert words[:7] == ["edgekit", "build", "tiny.onnx", "--data", "DATA", "--target", "qnn"]
    assert "soc_model=69" in words
    assert words[-4:] == ["--preprocess", "FILE", "--out", "OUT"]
    assert manifest.provenance.recipe["licence"] == {"data": "CC-BY-4.0", "model": "Apache-2.0"}


def test_unknown_licences_are_said_to_be_unknown(tmp_path: Path) -> None:
    text = (make_bundle(tmp_path).folder / "manifest.json").read_text()
    assert '"licence": {\n    "data": "unknown",\n    "model": "unknown"\n  }' in text


def test_a_strange_key_is_refused_in_one_line() -> None:
    with pytest.raises(BundleError, match="malformed") as caught:
        decode_manifest(encode_json({**json.loads(V1), "a\nb" * 999: 1}), "odd")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400
