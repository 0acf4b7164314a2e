"""The manifest, and the README and code for apps that are made from it."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import msgspec
import numpy as np
import pytest
from bundle_models import make_bundle, make_contents
from tiny_models import parse_model

from edgekit.bundle.checks import read_bounded
from edgekit.bundle.folder import write_bundle
from edgekit.bundle.manifest import MAX_MANIFEST_BYTES, decode_manifest, encode_json, render_schema
from edgekit.bundle.snippets import EVIDENCE_LEVELS, quote_cpp, quote_kotlin, quote_swift, render_snippets
from edgekit.data.images import Preprocess
from edgekit.data.samples import list_samples
from edgekit.devices.find import find_device
from edgekit.errors import BundleError, TargetError
from edgekit.evidence import Evidence
from edgekit.model.model import load_model
from edgekit.recipe import Licence, Recipe, TensorNotes
from edgekit.target import load_target, target_names


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A manifest as edgekit writes it."""
    return (make_bundle(tmp_path_factory.mktemp("bundle"), target="cpu").folder / "manifest.json").read_bytes()


def validate(manifest: bytes) -> None:
    jsonschema.Draft202012Validator(json.loads(render_schema())).validate(json.loads(manifest))


def test_an_oversized_manifest_is_not_read_beyond_the_limit(tmp_path: Path) -> None:
    with (tmp_path / "manifest.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 9)
    read = read_bounded(tmp_path, "manifest.json")
    assert len(read) == MAX_MANIFEST_BYTES + 1
    with pytest.raises(BundleError, match="larger than"):
        decode_manifest(read, "manifest.json")


@pytest.mark.parametrize("target", target_names())
def test_real_manifests_fit_the_schema(tmp_path: Path, target: str) -> None:
    validate((make_bundle(tmp_path, target=target).folder / "manifest.json").read_bytes())


def test_the_schema_refuses_invalid_manifests(tmp_path: Path) -> None:
    manifest: dict[str, Any] = json.loads((make_bundle(tmp_path).folder / "manifest.json").read_bytes())
    for change in ({"precision": "int7"}, {"unknown": 1}, {"fallback": "cpu"}, {"schema_version": 3}):
        with pytest.raises(jsonschema.ValidationError):
            validate(json.dumps({**manifest, **change}).encode())
    del manifest["licence"]
    with pytest.raises(jsonschema.ValidationError, match="'licence' is a required"):
        validate(json.dumps(manifest).encode())


@pytest.mark.parametrize(
    "alter",
    [
        pytest.param(lambda data: data.replace(b"\n  ", b"\n   ", 1), id="white space"),
        pytest.param(lambda data: data.rstrip(), id="last newline"),
        pytest.param(lambda data: data.replace(b'"form": ', b'"form": "full", "form": '), id="a key twice"),
        pytest.param(lambda data: data.replace(b'"tiny"', b'"\\u0074iny"'), id="escaped letter"),
        pytest.param(lambda data: json.dumps(json.loads(data)).encode(), id="other tool"),
    ],
)
def test_the_same_manifest_in_another_format_is_refused(written: bytes, alter: Callable[[bytes], bytes]) -> None:
    assert alter(written) != written
    with pytest.raises(BundleError, match="altered"):
        decode_manifest(alter(written), "other")


def test_a_manifest_states_what_an_app_needs(tmp_path: Path) -> None:
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


def test_an_input_has_the_layout_of_the_operator_that_reads_it_or_of_the_preprocessing(tmp_path: Path) -> None:
    text = "(float[1,2,4,4] x, float[1,2,4,4] z) => (float[1,2,4,4] y) <float[2,2,1,1] w = {1, 2, 3, 4}>"
    text = f'<ir_version: 9, opset_import: ["" : 17]> g {text} {{ c = Conv(x, w)  y = Add(c, z) }}'
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    row = {name: np.ones((1, 2, 4, 4), np.float32) for name in "xz"}
    contents = make_contents(tmp_path, model=model, samples=list_samples([row] * 3, "ones"))
    pictures = msgspec.structs.replace(contents, preprocess=Preprocess(size=(4, 4), layout="NHWC"))
    for each, layouts in ((contents, ["NCHW", ""]), (pictures, ["NHWC", "NHWC"])):
        assert [spec.layout for spec in write_bundle(each, tmp_path / layouts[1] / "out").manifest.inputs] == layouts


def test_unknown_licences_are_said_to_be_unknown_and_nothing_of_a_state_that_is_not_there(tmp_path: Path) -> None:
    text = (make_bundle(tmp_path).folder / "manifest.json").read_text()
    assert '"state"' not in text
    assert '"licence": {\n    "data": "unknown",\n    "model": "unknown"\n  }' in text


def test_a_strange_key_is_refused_in_one_line(written: bytes) -> None:
    with pytest.raises(BundleError, match="malformed") as caught:
        decode_manifest(encode_json({**json.loads(written), "a\nb" * 999: 1}), "odd")
    assert "\n" not in caught.value.message
    assert len(caught.value.message) < 400


HOSTILE = 'a"; System.exit(1) // ${b} \\(c)\n\u2028é\x00'


@pytest.mark.parametrize("target", target_names())
def test_every_key_and_option_of_the_manifest_is_set(tmp_path: Path, target: str) -> None:
    bundle = make_bundle(tmp_path, target=target)
    sources = [path for path in (bundle.folder / "app").iterdir() if path.suffix in {".h", ".kt", ".py", ".swift"}]
    code = "".join(path.read_text() for path in sources)
    entries = {**bundle.manifest.session_config, **bundle.manifest.provider_options}
    words = (bundle.manifest.model_file, *entries, *entries.values())
    assert [word for word in words if json.dumps(word) not in code and quote_cpp(word) not in code] == []


@pytest.mark.parametrize("target", target_names())
def test_a_readme_states_what_an_app_needs(tmp_path: Path, target: str) -> None:
    bundle = make_bundle(tmp_path, target=target)
    text, manifest = (bundle.folder / "README.md").read_text(), bundle.manifest
    assert "README.md" in manifest.files
    assert "| input | `x` | float32 | [1, 8] |" in text
    for key, value in manifest.session_config.items():
        assert f"| `{key}` | `{value}` |" in text
    for name, platform in manifest.platforms.items():
        assert f"### {name}" in text
        assert all(f"| `{key}` | `{value}` |" in text for key, value in platform.provider_options.items())
    if "android" in manifest.platforms:
        assert 'implementation("com.microsoft.onnxruntime:onnxruntime-android:1.29.0")' in text
    assert all(f"| {entry.device} |" in text for entry in manifest.verification)
    assert "by device" not in text


@pytest.mark.parametrize("name", target_names())
def test_the_readme_states_the_evidence_of_each_device(name: str) -> None:
    target = load_target(name)
    for entry in target.verification:
        level = Evidence.SAME_EP if name == "cpu" else EVIDENCE_LEVELS[entry.device]
        assert find_device(entry.device, target).evidence is level


def test_a_hostile_name_cannot_leave_its_line_in_the_readme(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    named = msgspec.structs.replace(contents, source=msgspec.structs.replace(contents.source, name="x\n# evil()"))
    folder = write_bundle(named, tmp_path / "out").folder
    assert all("\n# evil()" not in path.read_text() for path in (folder / "README.md", *(folder / "app").iterdir()))


def test_hostile_text_stays_inside_its_literal() -> None:
    assert quote_kotlin(HOSTILE) == r'"a\"; System.exit(1) // \${b} \\(c)\u000a\u2028\u00e9\u0000"'
    assert quote_swift(HOSTILE) == r'"a\"; System.exit(1) // ${b} \\(c)\u{a}\u{2028}\u{e9}\u{0}"'
    assert quote_cpp(HOSTILE) == r'"a\042; System.exit(1) // ${b} \134(c)\012\342\200\250\303\251\000"'


@pytest.mark.parametrize(
    ("template", "rendered"),
    [
        (b"{{ manifest.target }}", {"note.txt": "nnapi"}),
        (None, {}),
        (b"{{ manifest.nothing }}", None),
        (b"{% if %}", None),
        (b"{{ ''.__class__.__mro__ }}", None),
        (b"\xff\xfe\x00", None),
    ],
)
def test_a_private_target_has_snippets(tmp_path: Path, template: bytes | None, rendered: dict[str, str] | None) -> None:
    manifest, target = make_bundle(tmp_path).manifest, load_target("nnapi")
    target = msgspec.structs.replace(target, folder=tmp_path / "own")
    if template is not None:
        (tmp_path / "own" / "app").mkdir(parents=True)
        (tmp_path / "own" / "app" / "note.txt.j2").write_bytes(template)
    if rendered is not None:
        assert render_snippets(target, manifest) == rendered
        return
    with pytest.raises(TargetError, match=r"note\.txt\.j2' is malformed"):
        render_snippets(target, manifest)
