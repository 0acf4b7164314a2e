import json
from pathlib import Path

import pytest
from bundle_models import make_bundle
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.manifest import encode_json
from edgekit.errors import BundleError

NAMES = st.sampled_from(
    [
        "../x",
        "/etc/passwd",
        "a\\b",
        "",
        ".",
        "..",
        "a\x00b",
        "x" * 5000,
        "golden",
        "golden/..",
        "./tiny.onnx",
        "é",
        "\ud800",
    ]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | NAMES,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9) | NAMES, inner, max_size=3),
    max_leaves=5,
)
FUZZ = settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return make_bundle(tmp_path_factory.mktemp("fuzz"))


def spell(manifest: object) -> bytes:
    """Returns JSON as edgekit spells it where it can, so that what is tried is the content."""
    try:
        return encode_json(manifest)
    except (ValueError, UnicodeError):
        return json.dumps(manifest).encode()


def opens_or_is_refused(bundle: Bundle, manifest: bytes) -> bool:
    """Says whether a changed manifest is refused in one line, or describes exactly the files that are there."""
    file = bundle.folder / "manifest.json"
    kept = file.read_bytes()
    try:
        file.write_bytes(manifest)
        return open_bundle(bundle.folder).manifest.files == bundle.manifest.files
    except BundleError as error:
        return "\n" not in error.message
    finally:
        file.write_bytes(kept)


@FUZZ
@given(place=st.integers(0, 10_000), data=st.binary(max_size=4), length=st.integers(0, 4))
def test_changed_bytes_do_no_harm(bundle: Bundle, place: int, data: bytes, length: int) -> None:
    text = (bundle.folder / "manifest.json").read_bytes()
    start = place % len(text)
    assert opens_or_is_refused(bundle, text[:start] + data + text[start + length :])


@FUZZ
@given(value=JSON, data=st.data())
def test_changed_values_do_no_harm(bundle: Bundle, value: object, data: st.DataObject) -> None:
    manifest = json.loads((bundle.folder / "manifest.json").read_bytes())
    node = manifest
    while isinstance(node, dict) and node:
        key = data.draw(st.sampled_from(sorted(node)))
        if not isinstance(node[key], dict) or not node[key] or data.draw(st.booleans()):
            node[key] = value
            break
        node = node[key]
    assert opens_or_is_refused(bundle, spell(manifest))


@FUZZ
@given(name=NAMES | st.text(max_size=12))
def test_changed_names_do_no_harm(bundle: Bundle, name: str) -> None:
    manifest = json.loads((bundle.folder / "manifest.json").read_bytes())
    manifest["files"][name] = manifest["files"]["tiny.onnx"]
    manifest["forms"] = {"onnx": [name]}
    assert opens_or_is_refused(bundle, spell(manifest))


def test_the_fuzzed_bundle_is_whole(bundle: Bundle, tmp_path: Path) -> None:
    assert open_bundle(bundle.folder) == bundle
    assert list(tmp_path.iterdir()) == []
