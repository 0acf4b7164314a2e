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
from edgekit.target import Target, load_target, target_names

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
    named = msgspec.structs.replace(contents, source=msgspec.structs.replace(contents.source, name="x\n# evil"))
    assert "\n# evil" not in (write_bundle(named, tmp_path / "out").folder / "README.md").read_text()


def test_hostile_text_stays_inside_its_literal() -> None:
    assert quote_kotlin(HOSTILE) == r'"a\"; System.exit(1) // \${b} \\(c)\u000a\u2028\u00e9\u0000"'
    assert quote_swift(HOSTILE) == r'"a\"; System.exit(1) // ${b} \\(c)\u{a}\u{2028}\u{e9}\u{0}"'
    assert quote_cpp(HOSTILE) == r'"a\042; System.exit(1) // ${b} \134(c)\012\342\200\250\303\251\000"'


def test_a_hostile_model_name_cannot_leave_a_comment(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    named = msgspec.structs.replace(contents, source=msgspec.structs.replace(contents.source, name="x\nevil()"))
    app = write_bundle(named, tmp_path / "out").folder / "app"
    assert all("\nevil()" not in path.read_text() for path in app.iterdir())


def private_target(folder: Path, template: str) -> Target:
    (folder / "app").mkdir(parents=True)
    (folder / "app" / "note.txt.j2").write_text(template)
    return msgspec.structs.replace(load_target("nnapi"), folder=folder)


def test_a_private_target_brings_its_own_snippets(tmp_path: Path) -> None:
    manifest = make_bundle(tmp_path).manifest
    assert render_snippets(private_target(tmp_path / "t", "{{ manifest.target }}"), manifest) == {"note.txt": "nnapi"}


@pytest.mark.parametrize("template", ["{{ manifest.nothing }}", "{% if %}", "{{ ''.__class__.__mro__ }}"])
def test_a_malformed_template_is_refused(tmp_path: Path, template: str) -> None:
    manifest = make_bundle(tmp_path).manifest
    with pytest.raises(TargetError, match=r"note\.txt\.j2' is malformed"):
        render_snippets(private_target(tmp_path / "t", template), manifest)


def test_a_target_without_templates_has_no_snippets(tmp_path: Path) -> None:
    target = msgspec.structs.replace(load_target("nnapi"), folder=tmp_path / "none")
    assert render_snippets(target, make_bundle(tmp_path).manifest) == {}


def test_a_template_that_is_no_text_is_refused(tmp_path: Path) -> None:
    manifest, target = make_bundle(tmp_path).manifest, private_target(tmp_path / "t", "")
    (target.folder / "app" / "note.txt.j2").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TargetError, match=r"note\.txt\.j2' is malformed"):
        render_snippets(target, manifest)
