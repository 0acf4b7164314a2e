import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
from bundle_models import PASSED, edit_json, make_contents

from edgekit.bundle.archive import KINDS, list_files, write_archive
from edgekit.bundle.folder import Bundle, open_bundle, write_bundle
from edgekit.bundle.manifest import encode_json
from edgekit.bundle.multi import (
    Index,
    choose_variant,
    extract_variant,
    find_bundles,
    join_bundles,
    open_index,
    opened_any,
    opened_bundle,
    sign_bundle,
)
from edgekit.bundle.sign import make_key
from edgekit.errors import BundleError, OutputError, UsageError
from edgekit.target import find_group, load_target


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("multi")
    contents = make_contents(folder)
    made = [
        write_bundle(msgspec.structs.replace(contents, target=load_target(name)), folder / f"tiny-{name}")
        for name in find_group("all")
    ]
    (made[0].folder / "verify.json").write_text("{}")
    return made


@pytest.fixture
def folder(bundles: list[Bundle], tmp_path: Path) -> Path:
    return join_bundles(bundles, tmp_path / "multi").folder


def test_variants_are_unpacked_unchanged_and_shared_files_are_stored_once(
    bundles: list[Bundle], folder: Path, tmp_path: Path
) -> None:
    multi = open_index(folder)
    for bundle in bundles:
        out = extract_variant(multi, bundle.manifest.target, tmp_path / bundle.manifest.target)
        assert (out.manifest, out.sha256) == (bundle.manifest, bundle.sha256)
    stored = [path.read_bytes() for path in list_files(folder).values()]
    assert len(stored) == len(set(stored))
    assert len([data for data in stored if data == (bundles[0].folder / "golden" / "inputs.npz").read_bytes()]) == 1
    assert (folder / open_index(folder).index.variants[0].model_file).is_file()


def test_the_order_of_the_bundles_changes_no_byte(bundles: list[Bundle], folder: Path, tmp_path: Path) -> None:
    other = join_bundles(bundles[::-1], tmp_path / "other").folder
    first, second = list_files(folder), list_files(other)
    assert {name: path.read_bytes() for name, path in first.items()} == {
        name: path.read_bytes() for name, path in second.items()
    }


def test_the_only_variant_need_not_be_named(bundles: list[Bundle], tmp_path: Path) -> None:
    folder = join_bundles(bundles[:1], tmp_path / "one").folder
    with opened_bundle(folder) as bundle:
        assert bundle.sha256 == bundles[0].sha256


def test_a_package_is_no_bundle_and_is_told_which_ones_it_holds(bundles: list[Bundle], tmp_path: Path) -> None:
    name = bundles[0].folder.name
    entries = {f"bundles/{name}/{file}": path for file, path in list_files(bundles[0].folder).items()}
    write_archive({**entries, "README.md": bundles[0].folder / "README.md"}, tmp_path / "p.zip", "zip")
    with pytest.raises(BundleError, match=f"p.zip' is a package of {name} "), opened_any(tmp_path / "p.zip"):
        pass
    shutil.unpack_archive(tmp_path / "p.zip", tmp_path / "unpacked")
    with pytest.raises(BundleError, match=f"it holds bundles/{name}: name one"), opened_any(tmp_path / "unpacked"):
        pass


@pytest.mark.parametrize("kind", KINDS)
def test_a_variant_is_opened_from_an_archive(bundles: list[Bundle], folder: Path, tmp_path: Path, kind: str) -> None:
    entries = {f"top/{name}": path for name, path in list_files(folder).items()}
    write_archive(entries, tmp_path / "archive", "zip" if kind == "zip" else "tar")
    with opened_bundle(tmp_path / "archive", target="qnn") as bundle:
        assert bundle.sha256 in {made.sha256 for made in bundles}
    with pytest.raises(UsageError, match=r"several targets .choose one: --target coreml or"), opened_bundle(folder):
        pass
    with pytest.raises(UsageError, match=r"no variant 'qn'.*did you mean 'qnn'"), opened_bundle(folder, target="qn"):
        pass
    with pytest.raises(UsageError, match="is for"), opened_bundle(bundles[0].folder, target="other"):
        pass


def test_one_signature_covers_every_variant(folder: Path, tmp_path: Path) -> None:
    public = make_key(tmp_path / "key")
    sign_bundle(folder, tmp_path / "key", PASSED)
    with opened_any(folder, key=public):
        pass
    for name, path in list_files(folder).items():
        data = path.read_bytes()
        path.write_bytes(data[:-2] + bytes([data[-2] ^ 1]) + data[-1:])
        if name.endswith("verify.json"):
            continue
        with pytest.raises(BundleError), opened_any(folder, key=public):
            pass
        path.write_bytes(data)


def _edit_index(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    return lambda folder: edit_json(folder / "index.json", edit)


def _change_index(**fields: object) -> Callable[[Path], object]:
    return _edit_index(lambda raw: raw["variants"][0].update(fields))


def _drop_variants(folder: Path) -> None:
    """Leaves one variant with its folder: what it shared with the others is shared no more."""
    _edit_index(lambda raw: raw["variants"].__delitem__(slice(1, None)))(folder)
    (kept,) = json.loads((folder / "index.json").read_bytes())["variants"]
    for other in (folder / "variants").iterdir():
        if other.name != kept["target"]:
            shutil.rmtree(other)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        pytest.param(lambda f: (f / "extra").touch(), "holds 'extra'", id="extra"),
        pytest.param(lambda f: shutil.rmtree(f / "shared"), "lacks the file 'shared/", id="no shared"),
        pytest.param(lambda f: (f / "variants/qnn/manifest.json").unlink(), "is missing", id="no manifest"),
        pytest.param(_change_index(folder="../x"), "no safe folder", id="folder climbs"),
        pytest.param(_change_index(target="../x", folder="variants/../x"), "no safe folder", id="target climbs"),
        pytest.param(_change_index(target="a/b", folder="variants/a/b"), "no safe folder", id="nested"),
        pytest.param(_change_index(model_file="variants/x"), "contradicts", id="other model"),
        pytest.param(_edit_index(lambda raw: next(iter(raw["shared"].values())).update(sha256="0" * 64)), "contradicts",
                     id="other digest of a shared file"),
        pytest.param(_edit_index(lambda raw: raw["shared"].clear()), "contradicts", id="nothing shared"),
        pytest.param(_edit_index(lambda raw: raw["variants"].append(raw["variants"][0])), "contradicts", id="twice"),
        pytest.param(_edit_index(lambda raw: raw["variants"].reverse()), "contradicts", id="other order"),
        pytest.param(_edit_index(lambda raw: raw["variants"].clear()), "contradicts", id="no variant"),
        pytest.param(_drop_variants, "contradicts", id="a variant less"),
        pytest.param(_change_index(more=1), "malformed", id="unknown key"),
        pytest.param(lambda f: (f / "index.json").write_bytes(b"[" * 10_000), "malformed", id="deep"),
    ],
)  # fmt: skip
def test_a_damaged_folder_is_refused(folder: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(folder)
    with pytest.raises(BundleError, match=message), opened_any(folder):
        pass


def test_external_weights_stay_with_their_model(bundles: list[Bundle], tmp_path: Path) -> None:
    parts = []
    for bundle in bundles[:2]:
        manifest = bundle.manifest
        files = {**manifest.files, "tiny.onnx.data": manifest.files["tiny.onnx"]}
        out = Path(shutil.copytree(bundle.folder, tmp_path / manifest.target))
        shutil.copy(out / "tiny.onnx", out / "tiny.onnx.data")
        changed = msgspec.structs.replace(manifest, files=files, forms={"onnx": ("tiny.onnx", "tiny.onnx.data")})
        (out / "manifest.json").write_bytes(encode_json(changed))
        parts.append(open_bundle(out))
    index = join_bundles(parts, tmp_path / "multi").index
    assert [variant.model_file for variant in index.variants] == [
        f"variants/{variant.target}/tiny.onnx" for variant in index.variants
    ]


def test_only_one_bundle_of_a_target_and_model_is_joined(bundles: list[Bundle], tmp_path: Path) -> None:
    ancestry = msgspec.structs.replace(bundles[0].manifest.ancestry, source="0" * 64)
    stranger = msgspec.structs.replace(
        bundles[1], manifest=msgspec.structs.replace(bundles[1].manifest, ancestry=ancestry)
    )
    for chosen, message in (
        ([], "no bundle"),
        ([bundles[0], bundles[0]], "two bundles are for the target"),
        ([bundles[0], stranger], "different models"),
    ):
        with pytest.raises(UsageError, match=message):
            join_bundles(chosen, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_folder_of_other_files_is_neither_replaced_nor_opened_nor_is_an_archive_signed(
    bundles: list[Bundle], tmp_path: Path
) -> None:
    for _ in range(2):  # the second replaces the first
        join_bundles(bundles[:1], tmp_path / "joined")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").touch()
    with pytest.raises(OutputError, match="is a folder with other files"):
        join_bundles(bundles[:1], tmp_path / "other")
    with pytest.raises(BundleError, match="is no bundle and holds none"):
        find_bundles([tmp_path / "other"])
    with pytest.raises(BundleError, match="file' is a file"):
        sign_bundle(tmp_path / "other" / "file", tmp_path / "key", PASSED)


@pytest.mark.parametrize(
    ("providers", "system", "version", "soc", "target", "provider"),
    [
        (["QNN", "Nnapi"], "android", "34", "SM8750", "qnn", "QNN"),
        (["QNN", "Xnnpack", "Nnapi"], "android", "34", "SM8650", "xnnpack", "Xnnpack"),
        (["Nnapi"], "android", "29", "", "nnapi", "Nnapi"),
        (["Nnapi", "Xnnpack"], "android", "28", "", "xnnpack", "Xnnpack"),
        (["CoreML", "Xnnpack"], "ios", "17.2", "", "coreml", "CoreML"),
        (["CoreML", "Xnnpack"], "ios", "15.9", "", "xnnpack", "Xnnpack"),
        (["CPU"], "linux", "", "", "cpu", "CPU"),
        ([], "windows", "", "", "cpu", "CPU"),
    ],
)
def test_a_runtime_gets_the_variant_of_its_provider(
    folder: Path, providers: list[str], system: str, version: str, soc: str, target: str, provider: str
) -> None:
    index = open_index(folder).index
    names = [f"{name}ExecutionProvider" for name in providers]
    choice = choose_variant(index, providers=names, system=system, version=version, soc=soc)
    assert choice is not None
    assert (choice.variant.target, choice.provider) == (target, f"{provider}ExecutionProvider")


def test_a_runtime_without_a_bundle_of_its_own_gets_that_of_another_or_none(folder: Path) -> None:
    index: Index = open_index(folder).index
    others = msgspec.structs.replace(index, variants=tuple(v for v in index.variants if v.target != "cpu"))
    choice = choose_variant(others, providers=["CPUExecutionProvider"], system="windows")
    assert choice is not None
    assert (choice.variant.target, choice.provider) == ("xnnpack", "CPUExecutionProvider")
    only = msgspec.structs.replace(index, variants=tuple(v for v in index.variants if v.target == "qnn"))
    assert choose_variant(only, providers=["CPUExecutionProvider"], system="android") is None
