"""The Swift package: its files and what they say. No Swift compiler runs here; `docs/how-to/package.md` says so."""

import json
import shutil
from pathlib import Path

import pytest
from bundle_models import tuned_for
from fixture_types import MakeOnce
from package_loaders import CPU, QNN, XNNPACK, read_all

from edgekit.bundle.folder import open_bundle
from edgekit.bundle.manifest import MachineClass, SessionSetting
from edgekit.errors import OutputError, UsageError
from edgekit.package.package import package_bundles
from edgekit.package.variant import Identity
from edgekit.tune.tune import apply_setting

pytestmark = pytest.mark.slow

COREML = "digits_mobilenet-coreml"


@pytest.fixture(scope="session")
def package(bundles: Path, make_once: MakeOnce) -> Path:
    def pack(folder: Path) -> None:
        report = package_bundles((bundles,), "swiftpm", folder / "package")
        assert [variant.name for variant in report.bundles] == [COREML, XNNPACK, CPU]

    return make_once("swift", pack) / "package"


def test_the_package_names_its_module_platform_and_dependency(package: Path) -> None:
    text = (package / "Package.swift").read_text()
    assert text.startswith("// swift-tools-version:5.7\n")
    assert 'name: "DigitsMobilenet"' in text
    assert '.iOS("16.0")' in text
    assert 'from: "1.29.0"' in text
    assert {path.name for path in (package / "Sources" / "DigitsMobilenet").iterdir()} == {
        "Bundles.swift", "Loader.swift", "Resources", "SelfTest.swift", "Sizes.swift", "Variant.swift",
    }  # fmt: skip


def test_the_table_has_every_key_option_and_digest(package: Path, bundles: Path) -> None:
    table = ((package / "Sources" / "DigitsMobilenet") / "Bundles.swift").read_text()
    for name in (COREML, XNNPACK):
        manifest = open_bundle(bundles / name).manifest
        options = manifest.platforms["ios"].provider_options
        for key, value in {**manifest.session_config, **options}.items():
            assert f"(key: {json.dumps(key)}, value: {json.dumps(value)})" in table
        for file in (manifest.model_file, "golden/expected.npz"):
            assert f"(name: {json.dumps(file)}, sha256: {json.dumps(manifest.files[file].sha256)})" in table


def test_the_table_has_the_tuned_settings_of_a_bundle(bundles: Path, tmp_path: Path) -> None:
    shutil.copytree(bundles / XNNPACK, tmp_path / "bundle")
    phone = MachineClass(system="ios", machine="arm64", cores=6)
    setting = SessionSetting(arena=False, provider_options={"intra_op_num_threads": "2"})
    apply_setting(tmp_path / "bundle", tuned_for(phone, setting))
    package_bundles((tmp_path / "bundle",), "swiftpm", tmp_path / "p")
    (table,) = (tmp_path / "p").rglob("Bundles.swift")
    text = " ".join(table.read_text().split())
    assert (
        'TunedSession( system: "ios", machine: "arm64", cores: 6, level: 99, threads: 0, isBeyondSwift: true,' in text
    )
    assert 'isBeyondSwift: true, providerOptions: [ (key: "intra_op_num_threads", value: "2"), ],' in text


def test_the_same_bundles_give_the_same_package(package: Path, bundles: Path, tmp_path: Path) -> None:
    package_bundles((bundles,), "swiftpm", tmp_path / "again")
    assert read_all(package) == read_all(tmp_path / "again")


def test_a_swift_package_refuses_qnn_and_a_folder_with_files(bundles: Path, package: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="QNNExecutionProvider cannot be used"):
        package_bundles((bundles / QNN,), "swiftpm", tmp_path / "no")
    with pytest.raises(OutputError, match="holds something already"):
        package_bundles((bundles,), "swiftpm", package)
    with pytest.raises(UsageError, match="--name 'a b' cannot name a package"):
        package_bundles((bundles,), "swiftpm", tmp_path / "no", names=Identity(name="a b"))
