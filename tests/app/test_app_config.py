"""`edgekit.toml`: what it may say, and where an error stands."""

import json
from pathlib import Path

import jsonschema
import msgspec
import numpy as np
import onnx
import pytest
from demo_paths import CALIBRATION, MODEL
from fixture_types import Refused, Shown
from PIL import Image
from tiny_models import parse_model

from edgekit.app.config import find_position, list_cells, load_app
from edgekit.cli.main import COMMANDS, run_command
from edgekit.cli.schema import describe_file
from edgekit.data.images import read_image
from edgekit.errors import UsageError
from edgekit.model.state import State
from edgekit.package.variant import name_package
from edgekit.serialize import to_builtins

GOOD = f"""#:schema edgekit.schema.json
[models.digits]
path = "{MODEL}"
[models.digits.data]
source = "{CALIBRATION}"

[targets.nnapi]
settings = {{ api_level = 31 }}
[targets.mine]
target = "xnnpack"
thresholds = {{ min_cosine = 0.9 }}
"""

PACKED = f"""[models.b]
path = "{MODEL}"
data = {{ source = "d" }}
[packages.p]
as = "tar"
"""


def _load(folder: Path, text: str) -> None:
    (folder / "edgekit.toml").write_text(text)
    load_app(folder / "edgekit.toml")


def test_each_model_and_target_make_a_cell_with_the_options_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "edgekit.toml").write_text(GOOD)
    one, two = list_cells(load_app(tmp_path / "edgekit.toml"))
    assert (one.name, one.recipe.targets, one.recipe.settings) == ("digits/nnapi", ("nnapi",), {"api_level": "31"})
    assert (two.name, two.recipe.thresholds) == ("digits/mine", {"xnnpack": {"min_cosine": 0.9}})
    assert one.data.source == str(CALIBRATION)


def test_a_model_has_its_own_table_of_state(tmp_path: Path) -> None:
    more = '[models.digits.state]\nsteps = 4\nfeeds = { h = "new_h" }\n'
    (tmp_path / "edgekit.toml").write_text(GOOD + more)
    assert [cell.recipe.state for cell in list_cells(load_app(tmp_path / "edgekit.toml"))] == [
        State(steps=4, feeds={"h": "new_h"})
    ] * 2
    with pytest.raises(UsageError, match=r"line 13, column 1: models\.digits\.state\.steps: Expected `int` >= 1"):
        _load(tmp_path, GOOD + more.replace("4", "0"))


@pytest.mark.parametrize(
    ("old", "new", "where", "hint"),
    [
        ("source =", "sauce =", "line 5, column 1: models.digits.data.sauce: Object contains unknown field", "source"),
        ("api_level = 31", "api_level = true", "line 8, column 1: targets.nnapi.settings: Expected", "schema"),
        ("api_level =", "api_levle =", "line 8, column 1: targets.nnapi.settings: ", "api_level"),
        ("min_cosine", "min_cosin", "line 11, column 1: targets.mine.thresholds: ", "min_cosine"),
        ('target = "xnnpack"', 'target = "xnpack"', "line 10, column 1: targets.mine.target: ", "xnnpack"),
        ('target = "xnnpack"', "target = 3", "line 10, column 1: targets.mine.target: Expected `str`", "schema"),
        ("[targets.nnapi]", "[target.nnapi]", "line 7, column 1: target: Object contains unknown field", "targets"),
        (str(MODEL), "gone.onnx", "line 3, column 1: models.digits.path: there is no model", "path"),
        ("[models.digits.data]", 'targets = ["nnap"]\n[models.digits.data]', "line 4, column 1: models.", "nnapi"),
        ("thresholds = {", "thresholds = ", "(at line 11, column 15)", "place"),
        ("[targets.mine]", 'precision = "int9"\n[targets.mine]', "Invalid enum value 'int9'", "valid: auto, fp16"),
        ("[targets.mine]", f"{PACKED}[targets.mine]", "packages.p: a package holds one model", "NAME: digits, b"),
    ],
)  # fmt: skip
def test_an_error_names_line_column_and_key(old: str, new: str, where: str, hint: str, tmp_path: Path) -> None:
    assert old in GOOD
    with pytest.raises(UsageError) as raised:
        _load(tmp_path, GOOD.replace(old, new))
    assert where in raised.value.message
    assert hint in (raised.value.hint or "")


def test_a_missing_model_target_or_option_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"has no \[models\.NAME\]"):
        _load(tmp_path, "version = 1\n")
    with pytest.raises(UsageError, match=r"has no \[targets\.NAME\]"):
        _load(tmp_path, GOOD[: GOOD.index("[targets")])
    with pytest.raises(UsageError, match=r"line 14, column 1: packages\.p\.targets: the file has no target 'coreml'"):
        _load(tmp_path, GOOD + '[packages.p]\nas = "aar"\ntargets = ["coreml"]\n')
    with pytest.raises(UsageError, match="cannot read"):
        load_app(tmp_path / "gone.toml")


@pytest.mark.parametrize(
    ("group", "said"),
    [
        (
            '[groups.digits]\npath = "edgekit.toml"\n',
            "line 12, column 1: groups.digits: a model is called 'digits', too",
        ),
        ('[groups.g]\npath = "gone.toml"\n', r"line 13, column 1: groups\.g\.path: there is no group"),
        ('[groups.g]\npath = "edgekit.toml"\ntargets = ["coreml"]\n', "the file has no target 'coreml'"),
        ('[groups.g]\npath = "edgekit.toml"\ndata.golden = "x"\n', "a group has no golden build"),
    ],
)
def test_a_group_has_a_file_a_name_and_targets_of_its_own(tmp_path: Path, group: str, said: str) -> None:
    data = "data.source" if "data." in group else "[groups.{}.data]\nsource".format(group[8 : group.index("]")])
    with pytest.raises(UsageError, match=said):
        _load(tmp_path, f'{GOOD}{group}{data} = "x.npz"\n')


def test_an_error_finds_the_line_and_column_of_a_key() -> None:
    text = 'a = 1\n[b."c d"]\n  e.f = """\nx = 2\n"""\ng = { h = 1, i = 2 }\n[[j]]\nk = 3\n'
    assert find_position(text, ("a",)) == (1, 1)
    assert find_position(text, ("b", "c d", "e", "f")) == (3, 3)
    assert find_position(text, ("b", "c d", "x")) == (2, 1) == find_position(text, ("b",))
    assert find_position(text, ("b", "c d", "g", "i")) == (6, 14)
    assert find_position(text, ("j", "k")) == (8, 1)
    assert find_position(text, ("nowhere",)) == (1, 1)


def test_the_schema_takes_what_the_reader_takes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "edgekit.toml").write_text(GOOD)
    app = load_app(tmp_path / "edgekit.toml")
    assert run_command(["schema"]) == 0
    schema = json.loads(capsys.readouterr().out)
    assert schema == json.loads(json.dumps(describe_file()))
    given = {"models": to_builtins(app.table.models), "targets": to_builtins(app.table.targets)}
    jsonschema.validate(given, schema)
    with pytest.raises(jsonschema.ValidationError, match="sauce"):
        jsonschema.validate({**given, "sauce": 1}, schema)
    assert run_command(["schema", "--json"]) == 0
    commands = json.loads(capsys.readouterr().out)["commands"]
    assert commands.keys() == COMMANDS.keys()
    assert {"name", "words", "help", "required", "many", "choices"} <= commands["run"]["parameters"][0].keys()


def test_init_reads_the_model_and_states_its_guesses(tmp_path: Path, shown: Shown, refused: Refused) -> None:
    parse_model(
        "g (float[batch,3,height,width] image, int64 sr) => (float[N,C,H,W] y)"
        "<int64 wanted = {16000}> { wide = Equal(sr, wanted) y = If (wide) <"
        " then_branch = a () => (float[N,C,H,W] b) { b = Relu(image) },"
        " else_branch = c () => (float[N,C,H,W] d) { e = Neg(image) d = Relu(e) }> }",
        tmp_path / "net.onnx",
    )
    (tmp_path / "photos").mkdir()
    Image.fromarray(np.zeros((100, 140, 3), np.uint8)).save(tmp_path / "photos" / "a.jpg")
    words = ["init", str(tmp_path / "net.onnx"), "--images", str(tmp_path / "photos"), "--target", "xnnpack"]
    said = shown([*words, "--out", str(tmp_path / "edgekit.toml")])
    assert "freezing 'sr' at 16000 leaves 1 of 5 nodes" in said
    assert "images are taken as NCHW, 96 x 96, RGB, float32" in said
    (cell,) = list_cells(load_app(tmp_path / "edgekit.toml"))
    assert cell.recipe.dims == {"batch": 1, "height": 96, "width": 96}
    assert cell.recipe.freeze == {"sr": 16000}
    assert cell.data.preprocess is not None
    assert (cell.data.preprocess.size, cell.data.preprocess.layout) == ((96, 96), "NCHW")
    assert load_app(tmp_path / "edgekit.toml").table.packages == {}
    assert run_command([*words, "--as", "tar", "--out", str(tmp_path / "packed.toml")]) == 0
    assert load_app(tmp_path / "packed.toml").table.packages["app"].kind == "tar"
    assert (tmp_path / "edgekit.schema.json").is_file()
    assert "has this model already" in refused(*words, "--out", str(tmp_path / "edgekit.toml"))
    assert run_command(["init", str(tmp_path / "net.onnx"), "--out", str(tmp_path / "no.toml")]) == 2
    assert run_command([*words, "--target", "pnnapi", "--out", str(tmp_path / "no.toml")]) == 2
    assert run_command([*words, "--labels", "lables.txt", "--out", str(tmp_path / "no.toml")]) == 2
    assert not (tmp_path / "no.toml").exists()


def test_init_writes_paths_of_data_relative_to_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    parse_model("g (float[batch,length] x) => (float[N,M] y) { y = Relu(x) }", tmp_path / "net.onnx")
    np.savez("samples.npz", x=np.zeros((8, 4), np.float32))
    assert run_command(["init", "net.onnx", "--data", "samlpes.npz"]) == 2
    assert "'samlpes.npz' does not exist (check the path)" in capsys.readouterr().err
    assert not Path("edgekit.toml").exists()
    for data, named, length in (("samples.npz", str(tmp_path / "samples.npz"), 4), ("mine:samples", "mine:samples", 1)):
        out = tmp_path / data[:4] / "edgekit.toml"
        assert run_command(["init", "net.onnx", "--data", data, "--out", str(out)]) == 0
        (cell, *_) = list_cells(load_app(out))
        assert str(cell.data.source) == named
        assert cell.recipe.dims == {"batch": 1, "length": length}


@pytest.mark.parametrize(("count", "steps"), [(24, 12), (17, 16)])
def test_init_takes_samples_without_state_as_sequences(count: int, steps: int, tmp_path: Path) -> None:
    text = "g (float[1,4] x, float[1,4] h) => (float[1,4] y, float[1,4] hn) { hn = Add(h, x) y = Neg(hn) }"
    net, out = parse_model(text, tmp_path / "net.onnx"), str(tmp_path / "edgekit.toml")
    rows = np.zeros((count, 4), np.float32)
    for name, arrays, found in (("x", {"x": rows}, State(steps=steps)), ("h", {"x": rows, "h": rows}, State())):
        np.savez(tmp_path / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        assert run_command(["init", str(net), "--data", str(tmp_path / f"{name}.npz"), "--out", out]) == 0
        (cell, *_) = list_cells(load_app(Path(out)))
        assert (cell.recipe.state or State()) == found
        Path(out).unlink()


def test_init_reads_what_the_exporter_wrote_and_adds_a_model(tmp_path: Path) -> None:
    text = '<ir_version: 8, opset_import: ["" : 17]> g (float[1,3,h,w] images) => (float[1,3,h,w] y) {y = Relu(images)}'
    told = {"imgsz": "[320, 320]", "stride": "32", "task": "detect", "mean": "[0.5, 0.5, 0.5]", "std": "nonsense"}
    for name, facts in (("320n", told), ("other", {"imgsz": "[320, 99999999]", "task": "classify"})):
        proto = onnx.parser.parse_model(text)
        onnx.helper.set_model_props(proto, facts)
        onnx.save(proto, str(tmp_path / f"{name}.onnx"))
    (tmp_path / "photos").mkdir()
    Image.fromarray(np.full((50, 100, 3), 255, np.uint8)).save(tmp_path / "photos" / "a.png")
    (tmp_path / "labels.txt").write_text("0\n")
    out = ["--images", str(tmp_path / "photos"), "--target", "cpu", "--out", str(tmp_path / "edgekit.toml")]
    labels = ["--labels", str(tmp_path / "labels.txt")]
    assert run_command(["init", str(tmp_path / "320n.onnx"), *out, *labels, "--as", "tar"]) == 0
    assert "at_least" in (tmp_path / "edgekit.toml").read_text()
    assert run_command(["init", str(tmp_path / "other.onnx"), *out]) == 0
    first, second = list_cells(load_app(tmp_path / "edgekit.toml"))
    assert (first.model, second.model) == ("320n", "other")
    assert (first.recipe.dims, second.recipe.dims) == ({"h": 320, "w": 320}, {"h": 64, "w": 64})
    assert first.data.labels == tmp_path / "labels.txt"
    boxed, cut = first.data.preprocess, second.data.preprocess
    assert boxed is not None
    assert cut is not None
    assert (boxed.letterbox, boxed.resize, boxed.mean, boxed.std) == (114, None, (0.5, 0.5, 0.5), (1.0,))
    assert (cut.letterbox, cut.resize) == (None, 64)
    # A white picture, twice as wide as high, lies in the middle of a grey frame.
    image = read_image(tmp_path / "photos" / "a.png", msgspec.structs.replace(boxed, mean=(0.0,), scale=1.0))
    assert image.shape == (3, 320, 320)
    assert (image[:, 80:240] == 255).all()
    assert (image[:, :80] == 114).all()
    assert (image[:, 240:] == 114).all()
    assert name_package("320n") == "model-320n"
