"""Which ONNX Runtime a model file needs."""

from pathlib import Path

import onnx
import pytest
from onnx import helper
from tiny_models import parse_model

from edgekit._ort import VERSION
from edgekit.convert.needs import find_needed_ort
from edgekit.convert.ort_form import OrtOptions, write_ort
from edgekit.model.model import load_model


def relu_of(path: Path, ir_version: int, opset: int, domain: str = "") -> Path:
    text = f'<ir_version: 8, opset_import: ["" : {opset}]> g (float[1,3] x) => (float[1,3] y) {{ y = Relu(x) }}'
    model = onnx.load(parse_model(text, path))
    model.ir_version = ir_version
    if domain:
        model.opset_import.append(helper.make_opsetid(domain, 99))
    onnx.save(model, path)
    return path


def test_a_file_of_ort_format_tells_it_too(tmp_path: Path) -> None:
    for opset, needed in ((17, ""), (22, "1.22.0")):
        source = load_model(relu_of(tmp_path / f"{opset}.onnx", 10, opset))
        write_ort(source, tmp_path / f"{opset}.ort", OrtOptions(style="runtime", cpu="arm"))
        assert find_needed_ort([tmp_path / f"{opset}.ort"]) == needed


@pytest.mark.parametrize(
    ("ir_version", "opset", "needed"),
    [(8, 17, ""), (10, 21, ""), (10, 22, "1.22.0"), (11, 21, "1.23.0"), (12, 17, "1.24.0"),
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
