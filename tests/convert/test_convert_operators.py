"""Operator configs: deterministic, without paths, accepted by ONNX Runtime's own parser."""

import importlib
from pathlib import Path
from typing import Any

import pytest
from convert_models import ARM, RUNTIME, ZOO, make_float, make_qdq, write_form
from onnxruntime.tools.reduced_build_config_parser import parse_config

from edgekit.convert.ort_format.operators import find_lacking, read_operators, write_operators
from edgekit.errors import ModelError, UsageError
from edgekit.model.model import load_model


def write_pair(folder: Path) -> tuple[Path, Path]:
    write_form(make_qdq(folder / "q.onnx"), folder / "q.ort", RUNTIME)
    write_form(make_float(folder / "f.onnx"), folder / "f.ort", ARM)
    return folder / "q.ort", folder / "f.ort"


def test_a_config_merges_models_and_is_read_by_onnx_runtime(tmp_path: Path) -> None:
    models = write_pair(tmp_path)
    write_operators(models, tmp_path / "ops.config", types=True)
    operators, types = parse_config(str(tmp_path / "ops.config"), True)
    assert operators["ai.onnx"][11] == {"Conv"}
    assert operators["com.microsoft"][1] == {"FusedConv"}
    assert types.is_typed_registration_needed("ai.onnx", "Conv", "float")
    assert not types.is_typed_registration_needed("ai.onnx", "Conv", "double")
    read = read_operators(tmp_path / "ops.config")
    assert read is not None
    assert {key: set(names) for key, names in read[0].items()} == {
        (domain, opset): names for domain, opsets in operators.items() for opset, names in opsets.items()
    }
    assert all(find_lacking(model, tmp_path / "ops.config") == () for model in models)


@pytest.mark.parametrize("types", [False, True])
def test_the_order_and_the_folder_of_models_leave_no_trace(tmp_path: Path, types: bool) -> None:
    first, second = write_pair(tmp_path / "a"), write_pair(tmp_path / "bb")
    write_operators(first, tmp_path / "one.config", types=types)
    write_operators(tuple(reversed(second)), tmp_path / "two.config", types=types)
    content = (tmp_path / "one.config").read_text()
    assert content == (tmp_path / "two.config").read_text()
    assert str(tmp_path) not in content
    # What saved optimisations bring has no limit: no node tells its types.
    assert ("QLinearConv{" in content) is False
    assert ('Conv{"inputs": {"0": ["float"]}}' in content) is types


@pytest.mark.parametrize("name", ["kws_dscnn_int8_qdq", "silero_vad_micro_transformer", "mnist_cnn_pytorch"])
@pytest.mark.skipif(not ZOO.is_dir(), reason="needs ../shared/zoo")
@pytest.mark.filterwarnings("ignore::ResourceWarning")  # of ONNX Runtime's tool
def test_types_are_those_of_onnx_runtime_s_own_tool(name: str, tmp_path: Path) -> None:
    write_form(load_model(ZOO / f"models/{name}.onnx"), tmp_path / "m.ort", ARM)
    own: Any = importlib.import_module("onnxruntime.tools.ort_format_model")
    own.create_config_from_models([tmp_path / "m.ort"], tmp_path / "own.config", True)
    write_operators([tmp_path / "m.ort"], tmp_path / "ours.config", types=True)

    def lines(path: Path) -> list[str]:
        return [line for line in path.read_text().splitlines() if not line.startswith("#")]

    assert lines(tmp_path / "ours.config") == lines(tmp_path / "own.config")
    assert any("{" in line for line in lines(tmp_path / "ours.config"))
    _, types = parse_config(str(tmp_path / "ours.config"), True)
    assert types.get_cpp_entries()
    assert find_lacking(tmp_path / "m.ort", tmp_path / "ours.config") == ()


def test_a_type_that_a_build_lacks_is_named(tmp_path: Path) -> None:
    quantized, floating = write_pair(tmp_path)
    write_operators([floating, quantized], tmp_path / "ops.config", types=True)
    assert find_lacking(floating, tmp_path / "ops.config") == ()
    limited = (
        (tmp_path / "ops.config")
        .read_text()
        .replace('Mul{"inputs": {"0": ["float"]}}', 'Mul{"inputs": {"0": ["double"]}}')
    )
    (tmp_path / "other.config").write_text(limited)
    assert find_lacking(floating, tmp_path / "other.config") == ("ai.onnx:Mul (input 0 float)",)
    (tmp_path / "bad.config").write_text('ai.onnx;11;Conv{"inputs": 3}\n')
    with pytest.raises(UsageError, match="limits an operator in no known way"):
        find_lacking(floating, tmp_path / "bad.config")


def test_what_a_build_lacks_is_named_and_one_with_all_operators_lacks_nothing(tmp_path: Path) -> None:
    quantized, floating = write_pair(tmp_path)
    write_operators([floating], tmp_path / "ops.config")
    lacking = find_lacking(quantized, tmp_path / "ops.config")
    assert ":QLinearConv:10" in "".join(lacking)
    assert "ai.onnx:DequantizeLinear:13" in lacking
    (tmp_path / "all.config").write_text("!no_ops_specified_means_all_ops_are_required\n")
    assert find_lacking(quantized, tmp_path / "all.config") == ()


def test_a_config_that_onnx_runtime_wrote_is_read(tmp_path: Path) -> None:
    content = 'ai.onnx;11,13;Conv{"inputs": {"0": ["float", "int8_t"]}},Relu\ncom.microsoft;1;QGemm\n'
    (tmp_path / "theirs.config").write_text("# a comment\n" + content)
    operators = {
        ("ai.onnx", 11): frozenset({"Conv", "Relu"}),
        ("ai.onnx", 13): frozenset({"Conv", "Relu"}),
        ("com.microsoft", 1): frozenset({"QGemm"}),
    }
    types = {("ai.onnx", "Conv"): frozenset({"input 0 float", "input 0 int8_t"})}
    assert read_operators(tmp_path / "theirs.config") == (operators, types)


def test_wrong_input_is_refused(tmp_path: Path) -> None:
    quantized, _ = write_pair(tmp_path)
    (tmp_path / "bad.config").write_text("ai.onnx;x;Conv\n")
    (tmp_path / "bad.ort").write_bytes(b"no")
    with pytest.raises(UsageError, match=r"line 1 of .* is no line of a config"):
        find_lacking(quantized, tmp_path / "bad.config")
    with pytest.raises(UsageError, match="cannot read the config"):
        find_lacking(quantized, tmp_path / "none.config")
    with pytest.raises(ModelError, match="no whole ORT-format file"):
        write_operators([tmp_path / "bad.ort"], tmp_path / "ops.config")
    with pytest.raises(UsageError, match="no model"):
        write_operators([], tmp_path / "ops.config")
