"""Groups whose members have open dimensions: text as long as it is, state that grows, sizes that follow from others."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from group_models import make_talk, run_program, talk_on

from edgekit.bundle.golden import read_inputs, read_outputs
from edgekit.bundle.group.edgekit_pipeline import CHOSEN
from edgekit.bundle.group.group import open_group
from edgekit.bundle.group.wiring import Interface, Wiring, describe_interface, find_fault, resolve_wiring, run_pipeline
from edgekit.jobs.group import build_group
from edgekit.model.tensors import Tensors, TensorSpec
from edgekit.recipe import Data, Recipe

OPEN = {
    **{key: {0: "batch", 1: "new"} for key in ("ids", "positions", "logits")},
    **{key: {0: "batch", 1: "past"} for key in ("past.key", "past.value")},
    **{key: {0: "batch", 1: "past + new"} for key in ("mask", "present.key", "present.value")},
}


def make(folder: Path) -> Path:
    """Writes prefill of a fixed size and decode with all open, as a window of no size."""
    path = make_talk(folder, samples=6)
    proto = onnx.load(str(folder / "decode.onnx"))
    for value in (*proto.graph.input, *proto.graph.output):
        for axis, name in OPEN[value.name].items():
            value.type.tensor_type.shape.dim[axis].dim_param = name
    onnx.save(proto, str(folder / "decode.onnx"))
    return path


def test_a_growing_cache_works_in_edgekit_and_in_the_program_of_the_group(tmp_path: Path) -> None:
    data = Data(source=str(make(tmp_path).with_name("talk.npz")), evaluation=str(tmp_path / "talk.npz"))
    report = build_group(
        tmp_path / "talk.toml", data, tmp_path / "out", Recipe(targets=("cpu",), precision="fp32"), verify=False
    )
    assert "'past' 6, 7, 8, 9" in " ".join(report.targets[0].notes)
    group = open_group(tmp_path / "out" / "talk-cpu")
    prompts = [sample["prompt"][0].tolist() for sample in read_inputs(group.golden)]
    assert [result[CHOSEN].tolist() for result in read_outputs(group.golden)] == [talk_on(prompt) for prompt in prompts]
    assert run_program(group.folder).startswith("6 of 6")


def test_a_target_that_needs_fixed_sizes_names_the_member_without(tmp_path: Path, refused: Callable[..., str]) -> None:
    make(tmp_path)
    said = refused(
        "group", "build", "talk.toml", "--data", "talk.npz", "--target", "cpu", "--target", "qnn", "--out", "o"
    )
    assert "member 'decode': the model has dynamic dimensions without a number" in said
    assert 'dims = { "batch" = SIZE, "new" = SIZE, "past" = SIZE } in [members.decode]' in said
    text = (tmp_path / "talk.toml").read_text()
    (tmp_path / "talk.toml").write_text(text.replace("repeat = true", "repeats = true"))
    assert "edgekit group takes a .toml" in refused("check", "talk.toml")
    assert "did you mean 'repeat'?" in refused("group", "build", "talk.toml", "--data", "talk.npz", "--out", "o")


def spec(name: str, *shape: int | str | None, dtype: str = "int64") -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape)


def run(stage: Mapping[str, Any], mine: Interface, data: Tensors) -> list[dict[str, list[Any]]]:
    """Returns what a stage that says 5, 6, 7 is given each time."""
    raw = {"stages": [{"run": "m", "repeat": True, **stage}], "tokens": {"start": [3, 4], "most": 3}}
    wiring = resolve_wiring(msgspec.convert(raw, Wiring), {"m": mine})
    assert find_fault(wiring, {"m": mine}) is None
    seen: list[dict[str, list[Any]]] = []

    def answer(_: str, samples: Sequence[Tensors]) -> list[Tensors]:
        seen.extend({name: value.tolist() for name, value in sample.items()} for sample in samples)
        ids, past = samples[0]["ids"], samples[0].get("past.key", np.zeros((1, 0)))
        state = {"present.key": np.concatenate([past, ids], 1)} if "past.key" in mine.inputs else {}
        return [{"logits": np.eye(9)[None, [4 + len(seen)] * ids.shape[1]], **state}]

    assert run_pipeline(wiring, {"m": mine}, [data], answer)[0][CHOSEN].tolist() == [5, 6, 7]
    return seen


TEXT = {"input": "ids", "scores": "logits", "mask": "mask", "positions": "positions"}
ROLES = [spec("positions", "b", "new"), spec("mask", "b", None)]
LOGITS = spec("logits", "b", "new", 9, dtype="float32")


def test_with_an_empty_cache_the_first_step_reads_all_tokens_and_later_ones_the_new_token() -> None:
    mine = describe_interface(
        [spec("ids", "b", "new"), *ROLES, spec("past.key", "b", "past")], [LOGITS, spec("present.key", "b", None)]
    )
    seen = run({"text": TEXT}, mine, {})
    assert [each["ids"] for each in seen] == [[[3, 4]], [[5]], [[6]]]
    assert [each["positions"] for each in seen] == [[[0, 1]], [[2]], [[3]]]
    assert [each["mask"] for each in seen] == [[[1] * 2], [[1] * 3], [[1] * 4]]
    assert [each["past.key"] for each in seen] == [[[]], [[3, 4]], [[3, 4, 5]]]


def test_without_a_cache_each_step_reads_all_tokens_filled_up_to_a_size_that_another_input_sets() -> None:
    free = describe_interface([spec("ids", "b", "new"), *ROLES], [LOGITS])
    seen = run({"text": TEXT}, free, {})
    assert [each["ids"] for each in seen] == [[[3, 4]], [[3, 4, 5]], [[3, 4, 5, 6]]]
    assert [each["mask"] for each in seen] == [[[1] * 2], [[1] * 3], [[1] * 4]]
    bound = describe_interface([spec("ids", "b", "rows"), spec("sound", "b", "rows")], [LOGITS])
    seen = run({"text": {"input": "ids", "scores": "logits"}}, bound, {"sound": np.zeros((1, 4), np.int64)})
    assert [each["ids"] for each in seen] == [[[3, 4, 0, 0]], [[3, 4, 5, 0]], [[3, 4, 5, 6]]]


@pytest.mark.parametrize("shape", [("b", "s", 4), (1, "s", "t"), (1, 0), ()])
def test_text_inputs_have_no_other_dynamic_axis(shape: tuple[int | str, ...]) -> None:
    mine = describe_interface([spec("ids", *shape)], [LOGITS])
    raw = {"stages": [{"run": "m", "text": {"input": "ids", "scores": "logits"}}], "tokens": {"start": [1]}}
    fault = find_fault(resolve_wiring(msgspec.convert(raw, Wiring), {"m": mine}), {"m": mine})
    assert fault is not None
    assert "cannot fill" in fault[0]
