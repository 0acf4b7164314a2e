"""Findings of the fuzzer in bundles, each as a command: one line, exit code 2, nothing left."""

import json
from collections.abc import Callable
from pathlib import Path

import onnx
from bundle_models import make_bundle

from edgekit._files import digest_bytes
from edgekit.bundle.manifest import encode_json
from edgekit.cli.main import run_command


def test_a_bundle_whose_input_has_no_shape(refused: Callable[..., str], tmp_path: Path) -> None:
    folder = make_bundle(tmp_path, target="nnapi").folder
    manifest = json.loads((folder / "manifest.json").read_bytes())
    manifest["inputs"][0]["shape"] = None
    (folder / "manifest.json").write_bytes(encode_json(manifest))
    for kind in ("aar", "swiftpm", "react-native", "ort-package", "tar"):
        refused("package", str(folder), "--as", kind, "--allow-failed", "--out", "out")


def test_a_model_that_names_a_file_outside_the_bundle(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"of somebody else")
    folder = make_bundle(tmp_path).folder
    proto = onnx.load(str(folder / "tiny.onnx"))
    context = onnx.helper.make_node(
        "EPContext", ["x"], ["z"], domain="com.microsoft", embed_mode=0, ep_cache_context="../secret"
    )
    proto.graph.node.append(context)
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(proto, str(folder / "tiny.onnx"))
    manifest = json.loads((folder / "manifest.json").read_bytes())
    data = (folder / "tiny.onnx").read_bytes()
    manifest["files"]["tiny.onnx"] = {"sha256": digest_bytes(data), "size_bytes": len(data)}
    (folder / "manifest.json").write_bytes(encode_json(manifest))
    for command in (["verify", "--files-only"], ["verify", "--on", "host"], ["bench"]):
        assert "'../secret' outside its folder" in refused(command[0], str(folder), *command[1:])


def test_joining_never_takes_the_place_of_another_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path).folder
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    for out in ("..", ".", "mine"):
        refused("join", str(bundle), "--allow-failed", "--out", out)


def test_joining_with_a_bad_key_writes_nothing(refused: Callable[..., str], tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path).folder
    (tmp_path / "key.pem").write_text("no key")
    assert "no private key" in refused("join", str(bundle), "--allow-failed", "--key", "key.pem", "--out", "out")


def test_links_that_lead_in_a_circle(refused: Callable[..., str], tmp_path: Path) -> None:
    folder = make_bundle(tmp_path).folder
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("README.md")
    refused("inspect", str(folder), "--sizes")
    refused("verify", str(folder), "--files-only")


def test_a_report_that_links_to_itself_is_counted_as_a_link(tmp_path: Path) -> None:
    folder = make_bundle(tmp_path).folder
    (folder / "verify.json").unlink(missing_ok=True)
    (folder / "verify.json").symlink_to("verify.json")
    assert run_command(["inspect", str(folder), "--sizes"]) == 0


def test_a_package_is_not_written_over_a_folder(refused: Callable[..., str], tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, target="cpu").folder
    assert "it is a folder" in refused("package", str(bundle), "--as", "tar", "--allow-failed", "--out", "x/..")
