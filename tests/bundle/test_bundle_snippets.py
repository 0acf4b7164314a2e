import json
from pathlib import Path

import msgspec
import pytest
from bundle_models import make_bundle, make_contents

from edgekit.bundle.folder import write_bundle
from edgekit.bundle.snippets import LEVELS, quote_cpp, quote_kotlin, quote_swift, render_snippets
from edgekit.devices.find import find_device
from edgekit.errors import TargetError
from edgekit.evidence import Evidence
from edgekit.target import load_target, target_names

HOSTILE = 'a"; System.exit(1) // ${b} \\(c)\n\u2028é\x00'


@pytest.mark.parametrize("target", target_names())
def test_every_key_and_option_of_the_manifest_is_set(tmp_path: Path, target: str) -> None:
    bundle = make_bundle(tmp_path, target=target)
    code = "".join(
        path.read_text()
        for path in sorted((bundle.folder / "app").iterdir())
        if path.suffix in {".h", ".kt", ".py", ".swift"}
    )
    entries = {**bundle.manifest.session_config, **bundle.manifest.provider_options}
    words = (bundle.manifest.model_file, *entries, *entries.values())
    assert [word for word in words if json.dumps(word) not in code and quote_cpp(word) not in code] == []


@pytest.mark.parametrize("target", target_names())
def test_the_readme_says_what_an_app_needs(tmp_path: Path, target: str) -> None:
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
def test_the_readme_knows_how_good_the_evidence_of_a_device_is(name: str) -> None:
    target = load_target(name)
    for entry in target.verification:
        level = Evidence.SAME_EP if name == "cpu" else LEVELS[entry.device]
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
def test_a_private_target_brings_its_own_snippets_and_malformed_ones_are_refused(
    tmp_path: Path, template: bytes | None, rendered: dict[str, str] | None
) -> None:
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
