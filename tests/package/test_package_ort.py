"""ONNX Runtime's own model package, opened by ONNX Runtime's own C API."""

import hashlib
import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from fixture_types import MakeOnce
from package_loaders import (
    PLAIN,
    QNN,
    XNNPACK,
    find_library,
    find_qnn,
    require_program,
    run_program,
)  # fmt: skip

from edgekit.bundle.archive import list_files, unpack_archive
from edgekit.bundle.folder import open_bundle
from edgekit.package.package import PackageReport, package_bundles

pytestmark = pytest.mark.slow

HERE = Path(__file__).parent
NAME = "digits_mobilenet"


@pytest.fixture(scope="session")
def chosen(bundles: Path, demo_build: Path) -> tuple[Path, ...]:
    return bundles / QNN, bundles / XNNPACK, demo_build / PLAIN


@pytest.fixture(scope="session")
def package(chosen: tuple[Path, ...], make_once: MakeOnce) -> Path:
    def pack(folder: Path) -> None:
        package_bundles(chosen, "ort-package", folder / "package")
        shutil.copytree(chosen[-1] / "golden", folder / "golden")

    return make_once("ort-package", pack) / "package"


@pytest.fixture(scope="session")
def program(chosen: tuple[Path, ...], make_once: MakeOnce) -> Path:
    """`standalone/open_package.cc`, which calls the model package API of the library in the wheel."""
    compiler = require_program("clang++", "clang")

    def compile_program(folder: Path) -> None:
        package_bundles(chosen, "tar", folder / "board.tar", extras=("all",))
        unpack_archive(folder / "board.tar", folder / "board")
        out, source = folder / "open_package", HERE / "standalone" / "open_package.cc"
        run_program([compiler, "-std=c++17", "-I", folder / "board" / "cpp", source, "-o", out, "-ldl"])

    return make_once("ort-package-program", compile_program) / "open_package"


def test_onnxruntime_chooses_the_cpu_variant_and_runs_a_shared_model(program: Path, package: Path) -> None:
    shown = run_program([program, find_library(), package, NAME])
    assert shown.splitlines() == [f"chosen: {PLAIN}", "self-test passed"]
    assert _component(package)[PLAIN]["executor_info"]["ort"]["model_file"].startswith("sha256:")


@pytest.mark.long
def test_onnxruntime_chooses_the_npu_variant_with_its_options(program: Path, package: Path) -> None:
    shown = run_program([program, find_library(), package, NAME, "QNNExecutionProvider", find_qnn()])
    assert f"chosen: {QNN}" in shown
    assert "self-test passed" in shown


def test_onnxruntime_sets_the_session_options_of_the_manifests(package: Path, chosen: tuple[Path, ...]) -> None:
    variants = _component(package)
    assert variants.keys() == {QNN, XNNPACK, PLAIN}
    for name, variant in variants.items():
        manifest = open_bundle(next(folder for folder in chosen if folder.name == name)).manifest
        assert variant["ep"] == manifest.provider
        assert variant["executor_info"]["ort"]["session_options"] == manifest.session_config
        assert variant["executor_info"]["ort"].get("provider_options", {}) == manifest.provider_options
    assert variants[QNN]["compatibility_string"].startswith("v2:")


def test_onnxruntime_refuses_an_invalid_session_key(program: Path, package: Path, tmp_path: Path) -> None:
    shutil.copytree(package.parent / "golden", tmp_path / "golden")
    shutil.copytree(package, tmp_path / "package")
    file = tmp_path / "package" / NAME / "component.json"
    component = json.loads(file.read_bytes())
    for key in component["variants"][PLAIN]["executor_info"]["ort"]["session_options"]:
        component["variants"][PLAIN]["executor_info"]["ort"]["session_options"][key] = "x" * 100_000
    file.write_text(json.dumps(component))
    assert "longer than maximum length" in run_program([program, find_library(), tmp_path / "package", NAME], code=1)


def test_shared_files_lie_once_under_the_digest_that_onnxruntime_computes(package: Path) -> None:
    assets = sorted((package / "shared_assets").iterdir())
    assert len(assets) >= 3
    for asset in assets:
        lines = [
            f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {name}\n" for name, path in list_files(asset).items()
        ]
        assert asset.name == f"sha256-{hashlib.sha256(''.join(lines).encode()).hexdigest()}"
    for name, variant in _component(package).items():
        for file, entry in variant["additional_metadata"]["files"].items():
            place = _resolve(package, name, entry)
            assert hashlib.sha256(place.read_bytes()).hexdigest() == entry["sha256"], file


def test_the_same_bundles_give_the_same_package(package: Path, chosen: tuple[Path, ...], tmp_path: Path) -> None:
    report: PackageReport = package_bundles(chosen, "ort-package", tmp_path / "again")
    files = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in list_files(package).items()}
    assert report.files == files


def _component(package: Path) -> dict[str, Any]:
    variants: dict[str, Any] = json.loads((package / NAME / "component.json").read_bytes())["variants"]
    return variants


def _resolve(package: Path, variant: str, entry: Mapping[str, str]) -> Path:
    head, _, tail = entry["path"].partition("/")
    if head.startswith("sha256:"):
        return package / "shared_assets" / head.replace(":", "-") / tail
    return package / NAME / variant / entry["path"]
