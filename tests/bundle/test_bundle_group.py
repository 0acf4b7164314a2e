"""Groups of models: the wiring is settled and judged, the pipeline does what an app would, the folder is checked."""

import hashlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import onnxruntime
import pytest
from bundle_models import edit_json, flip_byte
from fixture_types import MakeOnce, present
from group_models import make_digits, make_talk, run_program, talk_on
from tiny_models import parse_model, spec

from edgekit.bundle.edgekit_pipeline import CHOSEN, PipelineError, cut_boxes
from edgekit.bundle.golden import read_inputs, read_outputs
from edgekit.bundle.group import GROUP, Group, find_equal_weights, open_group
from edgekit.bundle.wiring import (
    Crop,
    Interface,
    Wiring,
    describe_interface,
    find_fault,
    resolve_wiring,
    run_pipeline,
)
from edgekit.errors import BundleError, DataError
from edgekit.jobs.group import build_group
from edgekit.model.model import load_model
from edgekit.model.tensors import Tensors, TensorSpec
from edgekit.prepare.opset import MAX_IR_VERSION, MAX_OPSET, read_opset
from edgekit.recipe import Data, Recipe
from edgekit.report.tables import GroupBuild


def talk_members() -> dict[str, Interface]:
    caches = [spec(f"past.{name}", 1, 4, 2) for name in ("key", "value")]
    grown = [spec(f"present.{name}", 1, 5, 2) for name in ("key", "value")]
    made = [spec(f"present.{name}", 1, 3, 2) for name in ("key", "value")]
    whole = {"dtype": "int64"}
    return {
        "prefill": describe_interface([spec("ids", 1, 3, **whole)], [spec("logits", 1, 3, 7), *made]),
        "decode": describe_interface([spec("ids", 1, 1, **whole), *caches], [spec("logits", 1, 1, 7), *grown]),
    }


def wire(*stages: dict[str, Any], tokens: dict[str, Any] | None = None) -> Wiring:
    plain: dict[str, Any] = {"stages": list(stages)}
    return msgspec.convert(plain | ({"tokens": tokens} if tokens else {}), Wiring)


TEXT = {"input": "ids", "scores": "logits"}
TALK = ({"run": "prefill", "text": TEXT}, {"run": "decode", "repeat": True, "text": TEXT})


def test_a_wiring_is_completed_by_names_and_its_own_entries_stay() -> None:
    wiring = resolve_wiring(wire(*TALK, tokens={"start": [1]}), talk_members())
    decode = wiring.stages[1]
    assert decode.feeds == {"past.key": "prefill.present.key", "past.value": "prefill.present.value"}
    assert decode.state == {"past.key": "present.key", "past.value": "present.value"}
    assert [stage.text.align for stage in wiring.stages if stage.text] == ["right", "right"]
    assert find_fault(wiring, talk_members()) is None
    stated = {**TALK[1], "feeds": {"past.key": "data.k"}, "state": {"past.key": "present.key"}}
    wiring = resolve_wiring(wire(TALK[0], stated, tokens={"start": [1]}), talk_members())
    assert wiring.stages[1].feeds["past.key"] == "data.k"
    assert wiring.stages[1].state == {"past.key": "present.key"}


PLAIN = {
    "one": describe_interface([spec("x", 1, 4)], [spec("y", 1, 4)]),
    "two": describe_interface([spec("y", 1, 4), spec("z", 1, 2)], [spec("w", 1, 3), spec("k", 1, dtype="int64")]),
}
ONE: dict[str, Any] = {"run": "one", "feeds": {"x": "data.x"}}
BARE: dict[str, Any] = {"run": "two", "feeds": {"z": "data.z"}}
FEEDS = {"y": "one.y", "z": "data.z"}
TWO: dict[str, Any] = {"run": "two", "feeds": FEEDS}
BOX = {"input": "y", "image": "data.p", "boxes": "one.y", "scores": "one.y", "result": "w"}


@pytest.mark.parametrize(
    ("stages", "tokens", "said"),
    [
        ((ONE,), None, "runs 'two' in 0 stages"),
        ((ONE, TWO, ONE), None, "runs 'one' in 2 stages"),
        ((ONE, TWO, {"run": "three"}), None, "'three', which is no member"),
        ((TWO, ONE), None, "'two' that is fed from 'one.y', and no stage before"),
        ((ONE, {**TWO, "feeds": {"y": "one.y"}}), None, "leaves 'z' empty"),
        ((ONE, {**TWO, "feeds": {**FEEDS, "q": "data.q"}}), None, "fills 'q', which is no input"),
        ((ONE, {**TWO, "feeds": {"y": "one.nothing", "z": "data.z"}}), None, "'one.nothing', which is no output"),
        ((ONE, {**TWO, "feeds": {"y": "data.y", "z": "one.y"}}), None, "feeds [z: float32[1,2]]"),
        ((ONE, {**TWO, "feeds": {"y": "data.", "z": "data.z"}}), None, "is fed from 'data.'"),
        ((ONE, {**TWO, "repeat": True}), None, "repeats and reads no text"),
        ((ONE, {**TWO, "state": {"y": "w"}}), None, "has state and runs once"),
        ((ONE, TWO), {"start": [1]}, "has tokens and no stage with text"),
        ((ONE, {**TWO, "text": {"input": "y", "scores": "w"}}), {"start": [1]}, "fills 'y' twice"),
        ((ONE, {**BARE, "text": {"input": "y", "scores": "w"}}), {"start": [1]}, "int64"),
        ((ONE, {**BARE, "text": {"input": "y", "scores": "v"}}), {"start": [1]}, "'v'"),
        ((ONE, {**BARE, "crop": {**BOX, "boxes": "two.w"}}), None, "'two.w', and no stage"),
        ((ONE, {**BARE, "crop": {**BOX, "result": "r"}}), None, "chooses by 'r'"),
        ((ONE, {**BARE, "crop": {**BOX, "result": "k"}}), None, "chooses by [k: int64[1]], whose whole numbers"),
        ((ONE, TWO), {"start": "one.y"}, "tokens"),
    ],
)
def test_a_wrong_wiring_is_refused(stages: Sequence[dict[str, Any]], tokens: dict[str, Any] | None, said: str) -> None:
    fault = present(find_fault(wire(*stages, tokens=tokens), PLAIN))
    assert said in fault[0] + fault[1]


def test_a_valid_wiring_is_accepted() -> None:
    assert find_fault(wire(ONE, TWO), PLAIN) is None
    assert find_fault(wire(ONE, {**BARE, "crop": BOX}), PLAIN) is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"stages": []},
        {"stages": [ONE] * 17},
        {"stages": [ONE], "tokens": {"start": [1], "most": 1_000_000}},
        {"stages": [ONE], "tokens": {"start": [-1]}},
        {"stages": [ONE], "tokens": {"start": [1] * 5000}},
        {"stages": [{**ONE, "crop": {**BOX, "most": 65}}]},
        {"stages": [{**ONE, "code": "x"}]},
    ],
)
def test_a_wiring_has_limits_of_size(wrong: dict[str, Any]) -> None:
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(wrong, Wiring)


def test_text_without_a_cache_is_read_from_the_left_until_it_is_full() -> None:
    members = {"m": describe_interface([spec("ids", 1, 3, dtype="int64")], [spec("logits", 1, 3, 9)])}
    wiring = resolve_wiring(
        wire({"run": "m", "repeat": True, "text": TEXT}, tokens={"start": [4], "end": 8, "pad": 7}), members
    )
    seen: list[list[int]] = []

    def run(_: str, samples: Sequence[Tensors]) -> list[Tensors]:
        seen.extend(sample["ids"][0].tolist() for sample in samples)
        # The row of the last token says one more than it; the others say the end.
        logits = np.zeros((1, 3, 9))
        logits[..., 8] = 1
        row = sum(token != 7 for token in seen[-1]) - 1
        logits[0, row, seen[-1][row] + 1] = 2
        return [{"logits": logits}]

    assert run_pipeline(wiring, members, [{}], run)[0][CHOSEN].tolist() == [5, 6, 7]
    assert seen == [[4, 7, 7], [4, 5, 7], [4, 5, 6]]


READER = describe_interface([spec("ids", 1, 1, dtype="int64")], [spec("logits", 1, 4)])
READ = {"run": "m", "repeat": True, "text": {**TEXT, "align": "right"}}


def test_the_end_token_ends_one_text_and_not_its_neighbour_and_the_next_stage_waits_for_all() -> None:
    members = {"m": READER, "n": READER}
    stages = (READ, {"run": "n", "feeds": {"ids": "data.first"}})
    wiring = resolve_wiring(wire(*stages, tokens={"start": "data.first", "end": 3, "most": 5}), members)
    counts: list[tuple[str, int]] = []

    def run(member: str, samples: Sequence[Tensors]) -> list[Tensors]:
        counts.append((member, len(samples)))
        return [{"logits": np.eye(4)[[(int(sample["ids"][0, 0]) + 1) % 4]]} for sample in samples]

    results = run_pipeline(wiring, members, [{"first": np.array([[first]])} for first in (0, 2, 3)], run)
    assert [result[CHOSEN].tolist() for result in results] == [[1, 2], [], [0, 1, 2]]
    assert counts == [("m", 3), ("m", 2), ("m", 2), ("m", 1), ("n", 3)]


@pytest.mark.parametrize(
    ("tokens", "said"), [([], "a sample has no tokens in 'data.first'"), ([1], "'m' gave an empty 'logits'")]
)
def test_empty_text_and_empty_scores_are_errors(tokens: list[int], said: str) -> None:
    wiring = resolve_wiring(wire(READ, tokens={"start": "data.first"}), {"m": READER})
    with pytest.raises(DataError, match=said):
        run_pipeline(wiring, {"m": READER}, [{"first": np.array(tokens)}], lambda *_: [{"logits": np.zeros((0, 4))}])


def test_boxes_are_cropped_from_left_to_right() -> None:
    image = np.arange(64, dtype=np.float32).reshape(1, 1, 8, 8)
    boxes = np.array([[[4, 0, 8, 4], [0, 0, 2, 2], [2, 2, 2, 8], [0, 4, 4, 8], [0, 0, np.nan, 2]]], np.float32)
    crop = msgspec.to_builtins(msgspec.convert({**BOX, "least": 0.5, "most": 2}, Crop))
    scores, wanted = np.array([[0.9, 0.4, 1.0, 0.6, 1.0]], np.float32), msgspec.to_builtins(spec("y", 1, 1, 2, 2))
    found = cut_boxes(crop, wanted, image, boxes, scores)
    # Of 4 x 4 pixels the means of 2 x 2; what has no area, and what scores too little, is no box.
    assert [picture.reshape(-1).tolist() for picture in found] == [[36.5, 38.5, 52.5, 54.5], [8.5, 10.5, 24.5, 26.5]]
    again = cut_boxes({**crop, "units": "shares"}, wanted, image, boxes / 8, scores)
    assert np.array_equal(np.stack(found), np.stack(again))
    assert [len(cut_boxes({**crop, "most": most}, wanted, image, boxes, scores)) for most in (1, 9)] == [1, 2]
    with pytest.raises(PipelineError, match="no boxes can be cut out"):
        cut_boxes(crop, wanted, image, boxes[..., :3], boxes[..., 0])


def build_into(folder: Path, make: Callable[[Path], Path], **files: str) -> GroupBuild:
    """Builds a group for the CPU."""
    path = make(folder)
    source = str(folder / files["data"])
    data = Data(source=source, evaluation=source, labels=folder / files["labels"] if "labels" in files else None)
    report = build_group(path, data, folder / "out", Recipe(targets=("cpu",), precision="fp32"), verify=False)
    assert report.targets[0].failure is None
    return report


@pytest.fixture(scope="module")
def talk(make_once: MakeOnce) -> Path:
    return make_once("talk", lambda folder: build_into(folder, make_talk, data="talk.npz")) / "out" / "talk-cpu"


@pytest.fixture(scope="module")
def digits(make_once: MakeOnce) -> Path:
    def fill(folder: Path) -> None:
        build_into(folder, make_digits, data="digits.npz", labels="digits.txt")

    return make_once("boxes", fill) / "out" / "digits-cpu"


@pytest.fixture
def copied(talk: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(talk, tmp_path / "talk"))


def test_prefill_and_decode_give_the_tokens_of_a_model_without_a_cache(talk: Path) -> None:
    group = open_group(talk)
    prompts = [sample["prompt"][0].tolist() for sample in read_inputs(group.golden)]
    assert [result[CHOSEN].tolist() for result in read_outputs(group.golden)] == [talk_on(prompt) for prompt in prompts]


def test_equal_weights_are_stored_once_and_both_models_load_them(talk: Path) -> None:
    group = open_group(talk)
    models = [talk / member.model_file for member in group.manifest.members.values()]
    (weights,) = talk.glob("**/weights-*.data")
    assert {path.parent for path in models} == {weights.parent}
    assert find_equal_weights([load_model(path) for path in models]) < weights.stat().st_size < 31_000
    assert all(path.stat().st_size < 3000 for path in models)
    assert group.size_bytes == weights.stat().st_size + sum(path.stat().st_size for path in models)
    for path in models:
        assert onnxruntime.InferenceSession(str(path)).get_outputs()[0].name == "logits"


def test_the_program_of_a_group_gives_the_results_of_edgekit(talk: Path, digits: Path) -> None:
    assert run_program(talk).startswith("24 of 24 golden samples")
    assert run_program(digits).startswith("24 of 24 golden samples")
    # It leaves nothing behind by which the group would be refused.
    open_group(talk)


def test_a_member_is_a_bundle_of_its_own(talk: Path, tmp_path: Path) -> None:
    bundle = open_group(talk).nested["decode"].extract(talk, tmp_path / "decode")
    assert bundle.manifest.forms["onnx"][0] == "decode.onnx"
    assert "load | `decode.onnx`" in (bundle.folder / "README.md").read_text()
    assert "decode.onnx" in (bundle.folder / "app" / "ModelSession.kt").read_text()


def test_external_weights_are_shared_and_prompts_that_are_cut_off_are_counted(tmp_path: Path) -> None:
    def make(folder: Path) -> Path:
        path = make_talk(folder, samples=4)
        np.savez(folder / "talk.npz", prompt=np.ones((4, 1, 9), np.int64))
        proto = onnx.load(str(folder / "decode.onnx"))
        proto.graph.initializer.add().CopyFrom(onnx.numpy_helper.from_array(np.ones(600, np.float32), "alone"))
        proto.graph.node.add().CopyFrom(onnx.helper.make_node("Identity", ["alone"], ["more"]))
        proto.graph.output.add().CopyFrom(onnx.helper.make_tensor_value_info("more", 1, [600]))
        onnx.save(
            proto, str(folder / "decode.onnx"), save_as_external_data=True, location="decode.bin", size_threshold=1024
        )
        return path

    notes = build_into(tmp_path, make, data="talk.npz").targets[0].notes
    assert "8 samples begin with more tokens than the 6 that 'prefill' takes: further tokens are cut off" in notes
    group = open_group(tmp_path / "out" / "talk-cpu")
    names = group.manifests["decode"].forms["onnx"]
    session = onnxruntime.InferenceSession(str(group.folder / group.manifest.members["decode"].model_file))
    assert [name.partition("-")[0] for name in names[:2]] == ["decode.onnx", "weights"]
    assert "more" in [output.name for output in session.get_outputs()]


def stage(raw: dict[str, Any], place: int) -> dict[str, Any]:
    found: dict[str, Any] = raw["wiring"]["stages"][place]
    return found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda raw: stage(raw, 1)["feeds"].update({"past.key": "prefill.logits"}), "feeds .past.key"),
        (lambda raw: stage(raw, 1)["feeds"].update({"past.key": "other.logits"}), "no stage before it has that name"),
        (lambda raw: raw["wiring"]["tokens"].update(most=10**6), "malformed"),
        (lambda raw: raw["members"].update({"../x": raw["members"]["decode"]}), "no safe folder"),
        (lambda raw: raw["members"]["decode"].update(model_file="members/decode/other.onnx"), "contradicts"),
        (lambda raw: raw["members"]["decode"]["manifest"].update(sha256="0" * 64), "its sha256 is not that in"),
        (lambda raw: raw.update(target="qnn"), "contradicts"),
        (lambda raw: raw["files"].pop("README.md"), "does not list"),
        (lambda raw: raw["files"].update({"../outside": raw["files"]["README.md"]}), "lacks the file"),
        (lambda raw: raw["shared"].clear(), "contradicts"),
        (lambda raw: raw.update(code="x"), "malformed"),
        (lambda raw: raw["metric"].update(name=3), "malformed"),
        (lambda raw: raw["metric"].update(name="os:system"), "code that no bundle may run"),
    ],
)
def test_an_altered_group_is_refused(copied: Path, change: Callable[[dict[str, Any]], object], said: str) -> None:
    edit_json(copied / GROUP, change)
    with pytest.raises(BundleError, match=said):
        open_group(copied)


def test_a_folder_of_another_kind_names_what_opens_it(copied: Path, refused: Callable[..., str]) -> None:
    assert f"it holds a group of models: edgekit group verify '{copied}'" in refused("verify", str(copied))
    assert "it holds talk: name one of them" in refused("group", "verify", str(copied.parent))
    member = str(copied / "members" / "decode")
    assert f"it holds one model: edgekit verify '{member}'" in refused("group", "verify", member)


def test_an_altered_file_of_a_group_is_refused_by_edgekit_and_its_own_program(copied: Path) -> None:
    (weights,) = copied.glob("models/weights-*.data")
    flip_byte(weights)
    assert "was altered" in run_program(copied)
    with pytest.raises(BundleError, match="was altered"):
        open_group(copied)


def test_a_group_has_the_same_bytes_when_it_is_built_again(talk: Path, tmp_path: Path) -> None:
    build_into(tmp_path, make_talk, data="talk.npz")
    assert open_group(tmp_path / "out" / "talk-cpu").sha256 == open_group(talk).sha256


def test_models_that_share_nothing_keep_their_forms(digits: Path) -> None:
    group: Group = open_group(digits)
    assert {manifest.form for manifest in group.manifests.values()} == {"full"}
    assert not list(group.folder.glob("models"))


def test_members_newer_than_this_onnxruntime_are_lowered(tmp_path: Path) -> None:
    def make(folder: Path) -> Path:
        path = make_digits(folder)
        for name, ir_version, opset in (
            # ONNX Runtime 1.32 reads all that this onnx writes.
            ("detector", min(MAX_IR_VERSION + 1, onnx.IR_VERSION), 17),
            ("classifier", MAX_IR_VERSION, min(MAX_OPSET + 1, onnx.defs.onnx_opset_version())),
        ):
            proto = onnx.load(folder / f"{name}.onnx")
            proto.ir_version, proto.opset_import[0].version = ir_version, opset
            onnx.save(proto, folder / f"{name}.onnx")
        return path

    report = build_into(tmp_path, make, data="digits.npz", labels="digits.txt")
    assert report.members["detector"] == hashlib.sha256((tmp_path / "detector.onnx").read_bytes()).hexdigest()
    shipped = [onnx.load(file) for file in (tmp_path / "out" / "digits-cpu").rglob("*.onnx")]
    assert shipped
    assert all(proto.ir_version <= MAX_IR_VERSION and read_opset(proto) <= MAX_OPSET for proto in shipped)


def test_a_group_without_token_choice_needs_a_metric(tmp_path: Path, refused: Callable[..., str]) -> None:
    parse_model("(float[1,3] x) => (float[1,3] y) { y = Relu(x) }", tmp_path / "relu.onnx")
    np.savez(tmp_path / "d.npz", x=np.ones((4, 1, 3), np.float32))
    (tmp_path / "g.toml").write_text('[members.m]\nmodel = "relu.onnx"\n[[stages]]\nrun = "m"\n')
    said = refused("group", "build", "g.toml", "--data", "d.npz", "--out", "out")
    assert "'g.toml' names no metric" in said
    (tmp_path / "g.toml").write_text(
        '[members.m]\nmodel = "relu.onnx"\n[[stages]]\nrun = "m"\n[metric]\nname = "os:system"\n'
    )
    assert "code that no bundle may run" in refused("group", "build", "g.toml", "--data", "d.npz", "--out", "out")
    (tmp_path / "g.toml").write_text('[members.m]\nmodel = "relu.onnx"\nlayers = 3\n[[stages]]\nrun = "m"\n')
    assert "unknown field `layers`" in refused("group", "build", "g.toml", "--data", "d.npz", "--out", "out")
    (tmp_path / "g.toml").write_text('[members.m]\nmodel = "none.onnx"\n[[stages]]\nrun = "m"\n')
    assert "none.onnx" in refused("group", "build", "g.toml", "--data", "d.npz", "--out", "out")
    assert "speech.toml" in refused("group", "build", "speech.toml", "--data", "d.npz", "--out", "out")
    assert "group.json" in refused("group", "verify", ".")


# Groups whose members have open dimensions: text as long as it is, state that grows, sizes that follow from others.

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


def read_spec(name: str, *shape: int | str | None, dtype: str = "int64") -> TensorSpec:
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


OPENED_TEXT = {"input": "ids", "scores": "logits", "mask": "mask", "positions": "positions"}
ROLES = [read_spec("positions", "b", "new"), read_spec("mask", "b", None)]
LOGITS = read_spec("logits", "b", "new", 9, dtype="float32")


def test_with_an_empty_cache_the_first_step_reads_all_tokens_and_later_ones_the_new_token() -> None:
    mine = describe_interface(
        [read_spec("ids", "b", "new"), *ROLES, read_spec("past.key", "b", "past")],
        [LOGITS, read_spec("present.key", "b", None)],
    )
    seen = run({"text": OPENED_TEXT}, mine, {})
    assert [each["ids"] for each in seen] == [[[3, 4]], [[5]], [[6]]]
    assert [each["positions"] for each in seen] == [[[0, 1]], [[2]], [[3]]]
    assert [each["mask"] for each in seen] == [[[1] * 2], [[1] * 3], [[1] * 4]]
    assert [each["past.key"] for each in seen] == [[[]], [[3, 4]], [[3, 4, 5]]]


def test_without_a_cache_each_step_reads_all_tokens_filled_up_to_a_size_that_another_input_sets() -> None:
    free = describe_interface([read_spec("ids", "b", "new"), *ROLES], [LOGITS])
    seen = run({"text": OPENED_TEXT}, free, {})
    assert [each["ids"] for each in seen] == [[[3, 4]], [[3, 4, 5]], [[3, 4, 5, 6]]]
    assert [each["mask"] for each in seen] == [[[1] * 2], [[1] * 3], [[1] * 4]]
    bound = describe_interface([read_spec("ids", "b", "rows"), read_spec("sound", "b", "rows")], [LOGITS])
    seen = run({"text": {"input": "ids", "scores": "logits"}}, bound, {"sound": np.zeros((1, 4), np.int64)})
    assert [each["ids"] for each in seen] == [[[3, 4, 0, 0]], [[3, 4, 5, 0]], [[3, 4, 5, 6]]]


@pytest.mark.parametrize("shape", [("b", "s", 4), (1, "s", "t"), (1, 0), ()])
def test_text_inputs_have_no_other_dynamic_axis(shape: tuple[int | str, ...]) -> None:
    mine = describe_interface([read_spec("ids", *shape)], [LOGITS])
    raw = {"stages": [{"run": "m", "text": {"input": "ids", "scores": "logits"}}], "tokens": {"start": [1]}}
    fault = present(find_fault(resolve_wiring(msgspec.convert(raw, Wiring), {"m": mine}), {"m": mine}))
    assert "cannot fill" in fault[0]
