"""Findings of the fuzzer in models and data, each as a command: one line, exit code 2, nothing left."""

import contextlib
import os
import shutil
import sqlite3
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from bundle_models import save_classifier
from fixture_types import Refused
from onnx import helper
from test_soundness import LOOP, TWO, call_itself
from tiny_models import save_net

from edgekit.cli.main import run_command
from edgekit.prepare.interface import name_nodes


def write_model(text: str, change: Callable[[onnx.ModelProto], object], path: Path) -> str:
    proto = onnx.parser.parse_model(text)
    change(proto)
    path.write_bytes(proto.SerializeToString())
    return str(path)


@pytest.mark.parametrize(
    "command",
    [["inspect"], ["inspect", "--sizes"], ["check"], ["prepare", "--out", "p.onnx"], ["convert", "--out", "c"]],
)
def test_local_functions_that_call_themselves_are_refused(command: list[str], refused: Refused, tmp_path: Path) -> None:
    assert "calls itself" in refused(*command, write_model(TWO, call_itself, tmp_path / "m.onnx"))


def test_a_loop_with_too_few_inputs_is_refused(refused: Refused, tmp_path: Path) -> None:
    loop = write_model(LOOP, lambda proto: proto.graph.node[0].input.__delitem__(slice(1, None)), tmp_path / "m.onnx")
    assert "has 1 inputs" in refused("inspect", loop, "--sizes")
    assert "has 1 inputs" in refused("diff", loop, loop)


NESTED = "x = " + "[" * 3000 + "]" * 3000
HUGE = "x = " + "9" * 5000


@pytest.mark.parametrize("text", [NESTED, HUGE, "a" + ".a" * 3000 + " = 1"], ids=["nested", "huge", "dotted"])
def test_toml_that_python_cannot_parse_is_refused(refused: Refused, tmp_path: Path, text: str) -> None:
    model, toml = str(save_classifier(tmp_path / "m.onnx").path), str(tmp_path / "x.toml")
    Path(toml).write_text(text)
    (tmp_path / "target").mkdir()
    shutil.copy(toml, tmp_path / "target/target.toml")
    np.savez(tmp_path / "s.npz", x=np.zeros((2, 1, 8), np.float32))
    assert "malformed" in refused("build", model, "--data", "s.npz", "--recipe", toml, "--out", "b")
    assert "malformed" in refused("prepare", model, "--embed-preprocess", toml, "--out", "p.onnx")
    assert "malformed" in refused("compare", model, model, "--data", "s.npz", "--labels", toml, "--metric", toml)
    refused("bench", model, "--on-file", toml)
    assert "malformed" in refused("targets", "target")


def test_a_pipe_in_a_targets_folder_is_not_waited_for(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "target").mkdir()
    os.mkfifo(tmp_path / "target/target.toml")
    assert "it is a pipe" in refused("targets", "target")


@pytest.mark.parametrize(
    "header",
    [
        "",
        "(" * 300,
        "lambda: 0",
        "{'a': {",
        "'''",
        "{'descr': '<f4', 'shape': (",
        "{'descr': '<f4'}",
        f"{{'descr': '{'x' * 99}', 'fortran_order': False, 'shape': (2, 8)}}",
        *(
            f"{{'descr': '<f4', 'fortran_order': False, 'shape': {shape}}}"
            for shape in ("(-1, 8)", "(2.5,)", "(10**14, 8)")
        ),
        "{'descr': '<f4', 'fortran_order': False, 'shape': (100000000000000, 8)}",
    ],
)
def test_malformed_headers_of_arrays_are_refused(refused: Refused, tmp_path: Path, header: str) -> None:
    model = str(save_classifier(tmp_path / "m.onnx").path)
    data = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header.encode() + b"\0" * 64
    with zipfile.ZipFile(tmp_path / "s.npz", "w") as archive:
        archive.writestr("x.npy", data)
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder/x.npy").write_bytes(data)
    (tmp_path / "l.npy").write_bytes(data)
    np.savez(tmp_path / "good.npz", x=np.zeros((2, 1, 8), np.float32))
    refused("compare", model, model, "--data", "s.npz")
    refused("compare", model, model, "--data", "folder")
    refused("compare", model, model, "--data", "good.npz", "--labels", "l.npy", "--metric", "top1")
    refused("compare", model, model, "--data", "good.npz", "--labels", "l.npy", "--metric", "miou")


def test_models_with_flipped_bits_are_refused_or_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    data = save_classifier(tmp_path / "m.onnx").path.read_bytes()
    codes = set[int]()
    for at in range(0, len(data) * 8, 37):
        flipped = bytearray(data)
        flipped[at // 8] ^= 1 << at % 8
        (tmp_path / "f.onnx").write_bytes(flipped)
        command = ["convert", "f.onnx", "--no-check", "--level", "disabled", "--style", "full", "--out", "c"]
        codes.add(run_command(command))
    # A bit of a weight makes another model, one of a field no model.
    assert codes == {0, 2}
    assert "Traceback" not in capsys.readouterr().err


def test_thousands_of_nodes_of_one_name_are_renamed_quickly() -> None:
    nodes = [helper.make_node("Relu", [f"t{index}"], [f"t{index + 1}"], name="same") for index in range(8000)]
    value = helper.make_tensor_value_info
    graph = helper.make_graph(nodes, "g", [value("t0", 1, [1, 4])], [value("t8000", 1, [1, 4])])
    began = time.process_time()
    name_nodes(graph)
    # It took more than 4 s where each node tried all names before its own.
    assert time.process_time() - began < 2
    assert len({node.name for node in graph.node}) == 8000


def test_paths_that_no_system_takes_are_refused(refused: Refused) -> None:
    for command in (["diff", "x" * 5000, "y"], ["verify", "x" * 5000], ["inspect", "x" * 5000, "--sizes"]):
        assert len(refused(*command)) < 3000


@pytest.mark.parametrize(
    "line", ["scale = nan", "mean = [inf]", "size = [0, 8]", "size = [999999, 999999]", "resize = -1"]
)
def test_preprocessing_that_makes_no_image_is_refused(refused: Refused, tmp_path: Path, line: str) -> None:
    size = "" if line.startswith("size") else "size = [8, 8]\n"
    (tmp_path / "p.toml").write_text(f"{size}{line}\n")
    model = str(save_classifier(tmp_path / "m.onnx").path)
    assert "is no preprocessing" in refused("compare", model, model, "--data", "x", "--preprocess", "p.toml")


def test_a_history_that_is_no_text_is_refused(refused: Refused, tmp_path: Path) -> None:
    with contextlib.closing(sqlite3.connect(tmp_path / "h.sqlite")) as database, database:
        database.execute("CREATE TABLE runs (id INTEGER PRIMARY KEY, time, bundle, target, passed, report)")
        database.execute("INSERT INTO runs VALUES (1, 't', 'b', 'cpu', 1, CAST(x'ff7b' AS TEXT))")
    assert "h.sqlite" in refused("runs", "list", "--history", "h.sqlite")
    assert "h.sqlite" in refused("runs", "show", "1", "--history", "h.sqlite")


@pytest.mark.parametrize("name", ["a.png", "a.npy", "a.npz", "test_data_set_0/input_0.pb"])
def test_a_pipe_among_the_samples_is_not_waited_for(refused: Refused, tmp_path: Path, name: str) -> None:
    model = str(save_classifier(tmp_path / "m.onnx").path)
    (tmp_path / "data" / name).parent.mkdir(parents=True)
    os.mkfifo(tmp_path / "data" / name)
    (tmp_path / "p.toml").write_text("size = [8, 8]\n")
    assert "is a pipe" in refused("compare", model, model, "--data", "data", "--preprocess", "p.toml")


def test_a_pipe_among_the_images_of_a_draft_is_not_waited_for(refused: Refused, tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    os.mkfifo(tmp_path / "images" / "a.png")
    text = """<ir_version: 9, opset_import: ["" : 17]> g (float[1,3,8,8] x) => (float[1,3,8,8] y) { y = Relu(x) }"""
    model = write_model(text, lambda _: None, tmp_path / "m.onnx")
    words = ("init", model, "--images", "images", "--target", "cpu", "--out", "e.toml")
    assert "is a pipe, not a file" in refused(*words)


def test_a_link_to_a_device_without_end_is_no_sample(refused: Refused, tmp_path: Path) -> None:
    folder = tmp_path / "sets" / "test_data_set_0"
    folder.mkdir(parents=True)
    (folder / "input_0.pb").symlink_to("/dev/zero")
    model = str(save_classifier(tmp_path / "m.onnx").path)
    assert "is a device, not a file" in refused("compare", model, model, "--data", "sets")


def test_an_input_that_nothing_can_hold_is_not_drawn(refused: Refused, tmp_path: Path) -> None:
    text = """<ir_version: 9, opset_import: ["" : 17]>
    g (float[1,3,1000000000,1] x) => (float[1,3,1000000000,1] y) { y = Relu(x) }"""
    model = write_model(text, lambda _: None, tmp_path / "m.onnx")
    assert "3000000000 values, too many to draw" in refused("bench", model, "--on", "host", "--runs", "2")


@pytest.mark.parametrize(
    "command",
    [("compare", "m.onnx", "--data", "s.npz"), ("bench", "--on", "host"), ("profile",), ("tune",)],
)
def test_a_slice_behind_a_window_that_does_not_fit_ends_no_command(
    command: tuple[str, ...], refused: Refused, tmp_path: Path
) -> None:
    """ONNX Runtime fails an assertion on such a model, which ends its process."""
    text = "(float[1,1,4,4] x) => (float[a,b,c,d] y) { e = Conv(x, w) y = Slice(e, zero, two, two) }"
    two = {"zero": np.array([0]), "two": np.array([2])}
    save_net(text, tmp_path / "m.onnx", w=np.ones((2, 1, 9, 9), np.float32), **two)
    np.savez(tmp_path / "s.npz", x=np.ones((2, 1, 1, 4, 4), np.float32))
    assert "an input is too small for this network" in refused(command[0], "m.onnx", *command[1:])


@pytest.mark.parametrize("command", ["inspect", "check", "bench", "tune"])
def test_weights_that_are_cut_off_are_told_at_once(command: str, refused: Refused, tmp_path: Path) -> None:
    proto = onnx.load(str(save_classifier(tmp_path / "m.onnx").path))
    onnx.save(proto, str(tmp_path / "m.onnx"), save_as_external_data=True, location="w", size_threshold=0)
    os.truncate(tmp_path / "w", 9)
    assert "external data 'w', which has 9: it is cut off" in refused(command, "m.onnx")


def test_sizes_that_do_not_fit_each_other_are_told_without_the_words_of_onnx_runtime(
    refused: Refused, tmp_path: Path
) -> None:
    save_net("(float[n,4] x, float[m,4] z) => (float[k,4] y) { y = Add(x, z) }", tmp_path / "m.onnx")
    told = refused("prepare", "m.onnx", "--dim", "n=3", "--dim", "m=4", "--out", "p.onnx")
    assert "'m.onnx': sizes do not fit at node 'Add_y' (Add)" in told.replace(str(tmp_path), "")
    assert "ONNXRuntimeError" not in told


def test_a_model_is_not_prepared_over_itself(refused: Refused, tmp_path: Path) -> None:
    save_classifier(tmp_path / "m.onnx")
    assert "would be written over one that is read" in refused("prepare", "m.onnx", "--out", "m.onnx")
