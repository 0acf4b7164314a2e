"""`edgekit quantize` gives awkward models a correct INT8 form, or refuses them in one line."""

import json
import re
from pathlib import Path

import numpy as np
import onnx
import pytest
from hard_models import REFUSED, TAKEN, Hard

from edgekit.cli.main import run_command

pytestmark = pytest.mark.slow

WORST_DB = {"no values at all": 80.0, "as many values as are not zero": -20.0}
"""Where values decide how many there are, 8 bits leave another number of them, and that is told: by the least ratio."""


def quantize(hard: Hard, folder: Path, target: str = "nnapi") -> int:
    onnx.save(hard.proto, str(folder / "m.onnx"))
    np.savez(folder / "d.npz", **hard.data)  # type: ignore[arg-type]
    dims = [part for name, size in hard.dims.items() for part in ("--dim", f"{name}={size}")]
    arguments = ["quantize", str(folder / "m.onnx"), "--data", str(folder / "d.npz"), "--target", target]
    return run_command([*arguments, *dims, "--out", str(folder / "q.onnx"), "--json"])


@pytest.mark.parametrize("name", TAKEN)
def test_it_becomes_a_correct_model(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert quantize(TAKEN[name], tmp_path) == 0, capsys.readouterr().err
    report = json.loads(capsys.readouterr().out)
    assert report["quantized_nodes"] > 0
    ratio = report["predicted"]["sqnr_db"]
    assert ratio == WORST_DB[name] if name in WORST_DB else ratio > 29.9


@pytest.mark.parametrize("name", REFUSED)
def test_it_is_refused_in_one_line(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    hard, pattern = REFUSED[name]
    assert quantize(hard, tmp_path) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1
    assert re.search(pattern, message), message
    assert not (tmp_path / "q.onnx").exists()


def test_the_same_rows_in_batches_give_the_same_bytes(tmp_path: Path) -> None:
    hard = TAKEN["opset 7"]
    rows = np.concatenate(list(hard.data["x"]))
    onnx.save(hard.proto, str(tmp_path / "m.onnx"))
    (tmp_path / "mixed").mkdir()
    for index, (start, end) in enumerate([(0, 5), (5, 6), (6, 10), (10, 12)]):
        np.savez(tmp_path / "mixed" / f"{index}.npz", x=rows[start:end])
    np.savez(tmp_path / "fours.npz", x=rows.reshape(3, 4, 3, 12, 12))
    np.savez(tmp_path / "ones.npz", x=rows[:, None])
    for data in ("mixed", "fours.npz", "ones.npz"):
        arguments = ["quantize", str(tmp_path / "m.onnx"), "--data", str(tmp_path / data), "--target", "nnapi", "-q"]
        assert run_command([*arguments, "--out", str(tmp_path / f"{data}.onnx")]) == 0
    made = {(tmp_path / f"{data}.onnx").read_bytes() for data in ("mixed", "fours.npz", "ones.npz")}
    assert len(made) == 1
