"""Which ONNX Runtime a model file needs."""

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import helper
from tiny_models import parse_model

from edgekit._ort import VERSION
from edgekit.cli.main import run_command
from edgekit.convert.convert import find_needed_ort
from edgekit.convert.ort_form import OrtOptions, write_ort
from edgekit.errors import ModelError
from edgekit.model.model import load_model
from edgekit.prepare.opset import MAX_IR_VERSION, MAX_OPSET, lower_model


def relu_of(path: Path, ir_version: int, opset: int, domain: str = "") -> Path:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[1,3] x) => (float[1,3] y) {{ y = Relu(x) }}'
    model = onnx.load(parse_model(text, path))
    model.ir_version = ir_version
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 99))
    onnx.save(model, path)
    return path


def test_a_file_of_ort_format_tells_it_too(tmp_path: Path) -> None:
    for opset, needed in ((17, "1.18.0"), (22, "1.22.0")):
        source = load_model(relu_of(tmp_path / f"{opset}.onnx", 10, opset))
        write_ort(source, tmp_path / f"{opset}.ort", OrtOptions(style="runtime", cpu="arm"))
        assert find_needed_ort([tmp_path / f"{opset}.ort"]) == needed


@pytest.mark.parametrize(
    ("ir_version", "opset", "needed"),
    [(8, 17, ""), (9, 20, "1.17.0"), (10, 21, "1.18.0"), (10, 22, "1.22.0"), (11, 21, "1.23.0"), (12, 17, "1.24.0"),
     (13, 26, "1.26.0"), (14, 17, "1.32.0"), (8, 28, "1.32.0"), (99, 17, VERSION)],
)  # fmt: skip
def test_a_newer_ir_version_or_opset_needs_a_newer_onnxruntime(
    tmp_path: Path, ir_version: int, opset: int, needed: str
) -> None:
    assert find_needed_ort([relu_of(tmp_path / "m.onnx", ir_version, opset)]) == needed


def test_the_newest_of_several_files_counts_and_opsets_of_other_domains_do_not(tmp_path: Path) -> None:
    files = [relu_of(tmp_path / "a.onnx", 8, 17, domain="com.microsoft"), relu_of(tmp_path / "b.onnx", 10, 22)]
    assert find_needed_ort(files[:1]) == ""
    assert find_needed_ort(files) == find_needed_ort(reversed(files)) == "1.22.0"
    assert find_needed_ort([]) == ""


def test_what_is_newer_than_this_onnxruntime_is_lowered_by_every_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("d.npz", x=np.ones((8, 1, 3), np.float32))
    for ir_version, opset in ((14, 17), (13, 28)):
        relu_of(tmp_path / "m.onnx", ir_version, opset)
        lowered = lower_model(load_model(Path("m.onnx")), tmp_path / "lowered")
        assert (lowered.ir_version <= MAX_IR_VERSION, lowered.opsets["ai.onnx"]) == (True, min(opset, MAX_OPSET))
        # Once lowered, it is left as it is.
        assert lower_model(lowered, tmp_path / "again") is lowered
    given = Path("m.onnx").read_bytes()
    build = ["build", "m.onnx", "--data", "d.npz", "--target", "cpu", "--no-verify", "--out", "out", "-q"]
    commands = (
        ["check", "m.onnx", "--target", "cpu"],
        build,
        ["bench", "m.onnx", "--runs", "1", "-q"],
        ["compare", "m.onnx", "m.onnx", "--data", "d.npz", "-q"],
    )
    for command in commands:
        assert run_command(command) == 0, (command, capsys.readouterr())
    assert Path("m.onnx").read_bytes() == given


def test_what_cannot_be_lowered_names_the_onnxruntime_that_reads_it(tmp_path: Path) -> None:
    text = '<ir_version: 10, opset_import: ["" : 20]> g (float[1,3] x) => (float[1,3] y) { y = Gelu(x) }'
    model = load_model(parse_model(text, tmp_path / "m.onnx"))
    with pytest.raises(ModelError, match=r"has opset 20, and ONNX Runtime 1.16.3 reads up to 19: .*Gelu") as caught:
        lower_model(model, tmp_path / "lowered", "1.16.3")
    assert "ONNX Runtime 1.18.0 reads it as it is" in caught.value.hint
    assert not (tmp_path / "lowered").exists()


def test_convert_lowers_to_the_onnxruntime_of_a_device_and_refuses_a_format_that_it_does_not_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, out = str(relu_of(tmp_path / "m.onnx", 11, 22)), tmp_path / "out"
    assert run_command(["convert", model, "--ort", "1.18.0", "--onnx", "--out", str(out)]) == 0
    assert "loads from ONNX Runtime 1.18.0 on" in capsys.readouterr().out
    assert all(file.suffix in {".ort", ".onnx"} for file in out.iterdir())
    assert find_needed_ort(out.iterdir()) == "1.18.0"
    lowered = onnx.load(out / "model.onnx")
    assert (lowered.ir_version <= 10, lowered.opset_import[0].version) == (True, 21)
    for version, words in (("1.15.1", "full needs ONNX Runtime 1.1"), ("1.2", "no ONNX Runtime that was tried")):
        assert run_command(["convert", model, "--ort", version, "--out", str(tmp_path / "no")]) == 2
        assert words in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
    assert run_command(["convert", model, "--ort", "1.28.0", "--target", "nnapi", "--out", str(tmp_path / "no")]) == 2
    assert "target 'nnapi' needs ONNX Runtime 1.29.0, and --ort says 1.28.0" in capsys.readouterr().err


def test_check_says_which_onnxruntime_the_device_must_have(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = str(relu_of(tmp_path / "m.onnx", 8, 26))
    assert run_command(["check", model, "--target", "qnn", "--target", "directml"]) in {0, 1}
    shown = capsys.readouterr().out
    assert "ONNX Runtime on the device: 1.26.0 or newer for qnn, directml" in shown
