"""A stranger's bundle is data: it may not name code, files or machines, nor tell apps and devices different things."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import onnx
import pytest
from bundle_models import edit_json, make_bundle, make_contents

from edgekit._files import digest_bytes, digest_file
from edgekit.bundle.folder import open_bundle, read_target, write_bundle
from edgekit.bundle.multi import join_bundles, open_index
from edgekit.cli.main import run_command
from edgekit.devices.find import DeviceChoice
from edgekit.errors import BundleError, UsageError
from edgekit.target import Session, load_target
from edgekit.verify.on_devices import find_devices

Change = Callable[[dict[str, Any]], None]


def forge(folder: Path, manifest: Change, target: Change | None = None) -> Path:
    """Rewrites a bundle as an adversary would: the digests of what was changed are right again."""
    file = edit_json(folder / "target.json", target or (lambda _: None))
    entry = {"sha256": digest_file(file), "size_bytes": file.stat().st_size}
    edit_json(folder / "manifest.json", manifest)
    edit_json(folder / "manifest.json", lambda said: said["files"].update({"target.json": entry}))
    return folder


def set_session(key: str, value: str, *, place: str = "config") -> tuple[Change, Change]:
    named = "session_config" if place == "config" else place
    return (lambda said: said[named].update({key: value})), lambda told: told["session"][place].update({key: value})


def set_both(key: str, value: object) -> tuple[Change, Change]:
    return (lambda said: said.update({key: value})), (lambda told: told.update({key: value}))


FORBIDDEN, MALFORMED = "is not for a bundle to set", "cannot be"


@pytest.mark.parametrize(
    ("target", "place", "key", "value", "why"),
    [
        ("qnn", "config", "ep.context_enable", "1", FORBIDDEN),
        ("qnn", "config", "ep.context_file_path", "/tmp/x.onnx", FORBIDDEN),
        ("qnn", "config", "session.optimized_model_external_initializers_file_name", "x", FORBIDDEN),
        ("qnn", "config", "session.intra_op.allow_spinning", "../x", MALFORMED),
        ("qnn", "provider_options", "backend_path", "./evil.so", FORBIDDEN),
        ("qnn", "provider_options", "profiling_file_path", "p.csv", FORBIDDEN),
        ("qnn", "provider_options", "soc_model", "69;rm", MALFORMED),
        ("openvino", "provider_options", "load_config", '{"CPU":{"CACHE_DIR":"x"}}', MALFORMED),
        ("openvino", "provider_options", "load_config", '{"CPU":{"NUM_STREAMS":"../x"}}', MALFORMED),
        ("openvino", "provider_options", "load_config", '{"CPU":{"NUM_STREAMS":"2"}},"/tmp/x"', MALFORMED),
        ("openvino", "provider_options", "load_config", "/tmp/config.json", MALFORMED),
        ("tensorrt", "provider_options", "trt_profile_min_shapes", "/tmp/x:1", MALFORMED),
        ("tensorrt", "provider_options", "trt_int8_calibration_table_name", "../table", MALFORMED),
        ("tensorrt", "provider_options", "trt_engine_cache_path", "/tmp", FORBIDDEN),
        ("tensorrt", "provider_options", "trt_extra_plugin_lib_paths", "evil.so", FORBIDDEN),
    ],
)
def test_options_that_use_files_are_refused(
    tmp_path: Path, target: str, place: str, key: str, value: str, why: str
) -> None:
    folder = forge(make_bundle(tmp_path, target=target).folder, *set_session(key, value, place=place))
    with pytest.raises(BundleError, match=f"'{key}' in (session_config|{place}) .*{why}"):
        open_bundle(folder)


@pytest.mark.parametrize(
    ("target", "place", "key", "value"),
    [
        ("nnapi", "config", "session.set_denormal_as_zero", "1"),
        ("openvino", "provider_options", "load_config", '{"CPU":{"INFERENCE_PRECISION_HINT":"f32"}}'),
        ("openvino", "provider_options", "load_config",
         '{"CPU":{"NUM_STREAMS":"2","INFERENCE_NUM_THREADS":"4"},"GPU":{"PERFORMANCE_HINT":"LATENCY"}}'),
        ("tensorrt", "provider_options", "trt_engine_cache_enable", "1"),
    ],
)  # fmt: skip
def test_known_session_options_are_accepted(tmp_path: Path, target: str, place: str, key: str, value: str) -> None:
    folder = forge(make_bundle(tmp_path, target=target).folder, *set_session(key, value, place=place))
    manifest = open_bundle(folder).manifest
    assert (manifest.session_config if place == "config" else manifest.provider_options)[key] == value


def test_options_of_a_single_platform_are_checked_too(tmp_path: Path) -> None:
    forged = {"platforms": {"android": {"provider_options": {"backend_path": "/x"}}}}
    folder = make_bundle(tmp_path, target="qnn").folder
    forge(folder, lambda said: said.update(forged), lambda told: told["session"].update(forged))
    with pytest.raises(BundleError, match=r"platforms\.android"):
        open_bundle(folder)


def test_a_users_target_with_a_forbidden_option_is_refused_on_loading(tmp_path: Path) -> None:
    contents = make_contents(tmp_path)
    target = load_target("nnapi")
    session = Session(config={"ep.context_enable": "1"}, platforms=target.session.platforms)
    contents = msgspec.structs.replace(contents, target=msgspec.structs.replace(target, session=session))
    with pytest.raises(BundleError, match=FORBIDDEN):
        write_bundle(contents, tmp_path / "out")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("session_config", {"session.set_denormal_as_zero": "1"}),
        ("provider", "CPUExecutionProvider"),
        ("platforms", {}),
        ("minimum_ort", "1.2"),
        ("verification", []),
        ("fallback", []),
    ],
)
def test_loaders_and_devices_read_the_same_options(tmp_path: Path, key: str, value: object) -> None:
    folder = forge(make_bundle(tmp_path).folder, lambda said: said.update({key: value}))
    with pytest.raises(BundleError, match=f"contradict each other in '{key}'"):
        open_bundle(folder)


def test_code_that_a_bundle_names_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "trap.py").write_text("from pathlib import Path\nPath('sprung').touch()\ndef f(*_): return 1.0\n")
    monkeypatch.chdir(tmp_path)
    folder = make_bundle(tmp_path, labels=(0, 1, 2, 3, 4, 0)).folder
    thresholds = json.loads((folder / "manifest.json").read_bytes())["thresholds"]
    command = ["verify", str(folder), "--on", "host"]
    for name, is_code in (("top1", False), ("trap:f", True)):
        forge(folder, *set_both("thresholds", {**thresholds, "task": {"name": name}}))
        assert (run_command(command) == 2) is is_code
    assert run_command([*command, "--max-metric-drop", "1"]) == 2
    assert not (tmp_path / "sprung").exists()
    run_command([*command, "--metric", "trap:f"])
    assert (tmp_path / "sprung").exists()


@pytest.mark.parametrize("device", ["ssh:root@example.test", "adb:emulator-5554", "adb"])
def test_a_bundle_cannot_choose_a_device(tmp_path: Path, device: str) -> None:
    plan = [{"device": device, "form": "onnx", "samples": 1}]
    bundle = open_bundle(forge(make_bundle(tmp_path).folder, *set_both("verification", plan)))
    target = read_target(bundle)
    with pytest.raises(UsageError, match="no bundle may choose"):
        find_devices(bundle, target, DeviceChoice())
    assert find_devices(bundle, target, DeviceChoice(names=(device,)))[0].name.startswith(device[:3])


@pytest.mark.parametrize("version", ["1.31.1</version><x>", "1.31.1' + evil + '", "", "1.31.1\nimplementation 'x'"])
@pytest.mark.parametrize("is_name", [False, True])
def test_text_that_is_no_version_does_not_reach_build_files(tmp_path: Path, version: str, *, is_name: bool) -> None:
    said = {version: "1.31.1"} if is_name else {"onnxruntime": version}
    folder = forge(make_bundle(tmp_path).folder, lambda raw: raw["versions"].update(said))
    with pytest.raises(BundleError, match="no version"):
        open_bundle(folder)


@pytest.mark.parametrize(
    ("key", "value"), [("provider", "CPUExecutionProvider"), ("socs", ["1"]), ("systems", {}), ("fallback", [])]
)
def test_an_index_must_agree_with_its_manifests(tmp_path: Path, key: str, value: object) -> None:
    joined = join_bundles([make_bundle(tmp_path)], tmp_path / "joined").folder
    edit_json(joined / "index.json", lambda index: index["variants"][0].update({key: value}))
    with pytest.raises(BundleError, match="contradicts"):
        open_index(joined)


def test_a_linked_report_is_not_joined(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path)
    (tmp_path / "secret").write_text("{}")
    (bundle.folder / "verify.json").symlink_to(tmp_path / "secret")
    assert not list(join_bundles([bundle], tmp_path / "joined").folder.rglob("verify.json"))


@pytest.mark.parametrize(
    ("chained", "message"),
    [
        ({"provider": "OtherExecutionProvider", "provider_options": {}}, "'OtherExecutionProvider' in chain"),
        (
            {"provider": "CUDAExecutionProvider", "provider_options": {"user_compute_stream": "1"}},
            "'user_compute_stream' in chain .*is not for a bundle to set",
        ),
    ],
)
def test_fallback_providers_are_checked_too(tmp_path: Path, chained: dict[str, Any], message: str) -> None:
    folder = make_bundle(tmp_path, target="tensorrt").folder
    (behind,) = open_bundle(folder).manifest.chain or ()
    assert (behind.provider, behind.provider_options) == ("CUDAExecutionProvider", {"device_id": "0"})
    forge(folder, lambda said: said.update(chain=[chained]), lambda told: told["session"].update(chain=[chained]))
    with pytest.raises(BundleError, match=message):
        open_bundle(folder)


def test_a_bundle_whose_input_has_no_shape_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    folder = make_bundle(tmp_path, target="nnapi").folder
    edit_json(folder / "manifest.json", lambda said: said["inputs"][0].update(shape=None))
    for kind in ("aar", "swiftpm", "react-native", "ort-package", "tar"):
        refused("package", str(folder), "--as", kind, "--allow-failed", "--out", "out")


def test_a_model_that_names_a_file_outside_the_bundle_is_refused(refused: Callable[..., str], tmp_path: Path) -> None:
    (tmp_path / "secret").write_bytes(b"of somebody else")
    folder = make_bundle(tmp_path).folder
    proto = onnx.load(str(folder / "tiny.onnx"))
    outside: dict[str, Any] = {"domain": "com.microsoft", "embed_mode": 0, "ep_cache_context": "../secret"}
    proto.graph.node.append(onnx.helper.make_node("EPContext", ["x"], ["z"], **outside))
    proto.opset_import.append(onnx.helper.make_opsetid("com.microsoft", 1))
    onnx.save(proto, str(folder / "tiny.onnx"))
    data = (folder / "tiny.onnx").read_bytes()
    entry = {"sha256": digest_bytes(data), "size_bytes": len(data)}
    edit_json(folder / "manifest.json", lambda said: said["files"].update({"tiny.onnx": entry}))
    for command in (["verify", "--files-only"], ["verify", "--on", "host"], ["bench"]):
        assert "'../secret' outside its folder" in refused(command[0], str(folder), *command[1:])


def test_circular_links_are_refused_and_that_of_a_report_is_counted(
    refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = make_bundle(tmp_path).folder
    (folder / "verify.json").symlink_to("verify.json")
    assert run_command(["inspect", str(folder), "--sizes"]) == 0
    (folder / "README.md").unlink()
    (folder / "README.md").symlink_to("README.md")
    refused("inspect", str(folder), "--sizes")
    refused("verify", str(folder), "--files-only")


def test_nothing_is_written_over_another_folder_or_with_a_bad_key(refused: Callable[..., str], tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path).folder
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("years of work")
    for out in ("..", ".", "mine"):
        refused("join", str(bundle), "--allow-failed", "--out", out)
    bundle = make_bundle(tmp_path).folder
    (tmp_path / "key.pem").write_text("no key")
    assert "no private key" in refused("join", str(bundle), "--allow-failed", "--key", "key.pem", "--out", "out")
    bundle = make_bundle(tmp_path, target="cpu").folder
    assert "it is a folder" in refused("package", str(bundle), "--as", "tar", "--allow-failed", "--out", "x/..")
