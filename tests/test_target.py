"""Targets and recipes are data: read strictly, with their parameters set, and what is wrong is told in one line."""

import re
import shutil
from pathlib import Path

import pytest

import edgekit.target
from edgekit.errors import TargetError, UsageError
from edgekit.model.tensors import TensorSpec
from edgekit.recipe import (
    PrecisionChoice,
    Recipe,
    choose_precision,
    load_recipe,
    load_targets,
    refuse_profiles,
    takes_any_size,
)
from edgekit.target import Target, load_target, read_version, target_names

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize("name", target_names())
def test_every_shipped_target_loads(name: str) -> None:
    target = load_target(name)
    assert target.name == name
    # A device's name is no setting: it stands for those of its chip.
    defaults = {key: parameter.default for key, parameter in target.parameters.items() if not parameter.names}
    assert target.settings == defaults
    assert target.verification
    assert not any(
        f"{{{key}}}" in value for value in target.session.provider_options.values() for key in target.settings
    )


def test_a_parameter_reaches_the_provider_options() -> None:
    assert load_target("qnn", {"soc_model": "43"}).session.provider_options["soc_model"] == "43"


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ({}, {}),
        ({"layout": "NCHW"}, {"NNAPI_FLAG_USE_NCHW": "1"}),
        ({"cpu": "off"}, {"NNAPI_FLAG_CPU_DISABLED": "1"}),
        (
            {"cpu": "off", "layout": "NCHW", "api_level": "28"},
            {"NNAPI_FLAG_CPU_DISABLED": "1", "NNAPI_FLAG_USE_NCHW": "1"},
        ),
    ],
)
def test_flags_of_nnapi_reach_the_session_and_its_platforms(settings: dict[str, str], options: dict[str, str]) -> None:
    session = load_target("nnapi", settings).session
    assert (session.provider_options, session.platforms["android"].provider_options) == (options, options)


@pytest.mark.parametrize("forms", ['["runtime"]', '["onnx", "full"]'])
@pytest.mark.parametrize("told", [True, False])
def test_a_form_that_the_provider_cannot_use_is_refused(forms: str, told: bool, tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "targets" / "xnnpack", tmp_path / "mine")
    text = (folder / "target.toml").read_text()
    assert 'forms = ["onnx"]' in text
    # What edgekit's own targets say of a provider holds for a target of somebody's own.
    text = text if told else re.sub(r"\[conversion\.unusable\]\n(.+\n)+", "", text)
    (folder / "target.toml").write_text(text)
    assert load_target(str(folder)).conversion.forms == ("onnx",)
    (folder / "target.toml").write_text(text.replace('forms = ["onnx"]', f"forms = {forms}"))
    with pytest.raises(TargetError, match=r"which XnnpackExecutionProvider cannot use: .+") as caught:
        load_target(str(folder))
    assert caught.value.hint in {"leave 'runtime' out of its forms", "leave 'full' out of its forms"}
    other = text.replace('forms = ["onnx"]', f"forms = {forms}").replace("XnnpackExecution", "CPUExecution")
    if not told:
        (folder / "target.toml").write_text(other)
        assert len(load_target(str(folder)).conversion.forms) > 0


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("qnm", {}, "did you mean 'qnn'"),
        ("qnn", {"soc_modle": "43"}, "did you mean 'soc_model'"),
        ("qnn", {"soc_model": "99999"}, "no soc_model"),
        ("nnapi", {"api_level": "31x"}, "whole number"),
        ("nnapi", {"api_level": "5"}, "from 27 to"),
    ],
)
def test_a_wrong_name_or_value_is_refused(name: str, settings: dict[str, str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        load_target(name, settings)


def test_a_folder_is_a_target_without_python(tmp_path: Path) -> None:
    folder = shutil.copytree(Path(edgekit.target.__file__).parent.parent / "targets/nnapi", tmp_path / "mine")
    text = (folder / "target.toml").read_text().replace('name = "nnapi"', 'name = "mine"')
    (folder / "target.toml").write_text(text)
    assert load_target(str(folder)).name == "mine"


def test_an_unknown_key_is_named(tmp_path: Path) -> None:
    folder = shutil.copytree(ROOT / "targets/nnapi", tmp_path / "bad")
    (folder / "target.toml").write_text('colour = "red"\n' + (folder / "target.toml").read_text())
    with pytest.raises(TargetError, match="colour"):
        load_target(str(folder))


def test_the_oldest_onnxruntime_may_be_a_parameter() -> None:
    assert load_target("xnnpack").minimum_ort == "1.29.0"
    assert load_target("xnnpack", {"ort": "1.17.3"}).minimum_ort == "1.17.3"


def test_versions_compare_by_number() -> None:
    assert sorted(["1.31.0", "1.9", "", "1.29.1"], key=read_version) == ["", "1.9", "1.29.1", "1.31.0"]


@pytest.mark.parametrize("value", ["../x", "x", "x:1x", "x:1x3,", "x:1x3 y:1"])
def test_a_value_that_does_not_fit_its_form_is_refused(value: str) -> None:
    whole = dict.fromkeys(("profile_min", "profile_opt", "profile_max"), "x:1x3,y.1:8")
    assert load_target("tensorrt", whole).session.provider_options["trt_profile_min_shapes"] == "x:1x3,y.1:8"
    with pytest.raises(UsageError, match="is no profile_min of 'tensorrt'") as caught:
        load_target("tensorrt", {"profile_min": value})
    assert "as input:1x3x224x224" in caught.value.hint


def test_options_of_nvidia_are_settings_and_an_empty_one_is_left_to_the_provider() -> None:
    cuda = load_target("cuda").session.provider_options
    assert {"device_id", "arena_extend_strategy", "cudnn_conv_algo_search", "enable_cuda_graph"} <= cuda.keys()
    assert "gpu_mem_limit" not in cuda
    chosen = {
        "device_id": "2",
        "gpu_mem_limit": "1024",
        "arena_extend_strategy": "kSameAsRequested",
        "enable_cuda_graph": "1",
    }
    assert load_target("cuda", chosen).session.provider_options.items() >= chosen.items()
    asked = {
        "device_id": "1",
        "gpu_mem_limit": "2147483648",
        "max_workspace_size": "1073741824",
        "min_subgraph_size": "5",
    }
    session = load_target("tensorrt", asked).session
    assert session.provider_options["trt_max_workspace_size"] == "1073741824"
    assert session.provider_options["trt_min_subgraph_size"] == "5"
    assert not any(name.startswith("trt_profile") for name in session.provider_options)
    # What TensorRT leaves goes to CUDA, on the same GPU and within the same memory.
    (behind,) = session.chain or ()
    assert behind.provider == "CUDAExecutionProvider"
    assert behind.provider_options == {"device_id": "1", "gpu_mem_limit": "2147483648"}
    for name, value in (("gpu_mem_limit", "0"), ("gpu_mem_limit", "2GB"), ("device_id", "-1")):
        with pytest.raises(UsageError, match=f"is no {name}"):
            load_target("cuda", {name: value})


@pytest.mark.parametrize(
    ("least", "usual", "most"),
    [("", "x:1", "x:2"), ("x:2", "x:1", "x:3"), ("x:1", "x:1x1", "x:1"), ("x:1", "y:1", "x:1")],
)
def test_profiles_that_do_not_rise_are_refused(least: str, usual: str, most: str) -> None:
    with pytest.raises(UsageError, match="of input 'x' do not rise"):
        load_target("tensorrt", {"profile_min": least, "profile_opt": usual, "profile_max": most})


def test_profiles_say_of_each_open_input_what_fits_its_shape() -> None:
    inputs = (TensorSpec(name="x", dtype="float32", shape=("n", 3)), TensorSpec(name="k", dtype="float32", shape=(4,)))
    allowed = _profiled("x:1x3", "x:4x3", "x:8x3")
    refuse_profiles([allowed, load_target("cpu")], inputs)
    assert takes_any_size([allowed, load_target("cpu")])
    assert not takes_any_size([load_target("tensorrt")])
    for shape, message in (
        ("k:4", "lack input 'x'"),
        ("x:1x4", "does not fit"),
        ("x:1x3,z:1", "'z', which is no input"),
    ):
        with pytest.raises(UsageError, match=message):
            refuse_profiles([_profiled(shape, shape, shape)], inputs)


def _profiled(least: str, usual: str, most: str) -> Target:
    return load_target("tensorrt", {"profile_min": least, "profile_opt": usual, "profile_max": most})


def test_one_limit_is_changed_and_the_others_stay() -> None:
    (target,) = load_targets(Recipe(targets=("cpu",), thresholds={"cpu": {"min_sqnr_db": 33.0}}))
    usual = load_target("cpu").thresholds
    assert (target.thresholds.min_sqnr_db, target.thresholds.min_cosine) == (33.0, usual.min_cosine)
    assert target.thresholds.min_taken_macs == usual.min_taken_macs


@pytest.mark.parametrize(
    ("changes", "said"),
    [({"min_cosin": 0.9}, "min_cosin"), ({"min_cosine": "high"}, "min_cosine"), ({"gate": "no"}, "gate")],
)
def test_a_limit_that_is_none_is_refused_by_its_name(changes: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=rf"\[thresholds.cpu\].*{said}"):
        load_targets(Recipe(targets=("cpu",), thresholds={"cpu": changes}))


def test_limits_of_a_target_that_is_not_built_are_refused() -> None:
    with pytest.raises(UsageError, match="'qnn', which is not built"):
        load_targets(Recipe(targets=("cpu",), thresholds={"qnn": {"min_cosine": 0.9}}))


@pytest.mark.parametrize(
    ("word", "meant"), [("w8a8", "int8"), ("w8a16", "int16"), ("w4a16", "w4a16"), ("auto", "int8")]
)
def test_a_precision_may_be_told_by_its_bits(word: PrecisionChoice, meant: str) -> None:
    assert choose_precision(load_target("qnn"), word) == meant
    if word in {"w8a16", "w4a16"}:
        with pytest.raises(UsageError, match=f"does not take {meant}"):
            choose_precision(load_target("nnapi"), word)


def test_a_recipe_leaves_out_forms_on_devices_too() -> None:
    (target,) = load_targets(Recipe(targets=("cpu",), forms=("onnx",)))
    assert target.conversion.forms == ("onnx",)
    assert {each.form for each in target.verification} == {"onnx"}
    assert load_targets(Recipe(targets=("qnn",), forms=("context", "onnx")))[0] == load_target("qnn")
    with pytest.raises(UsageError, match="target 'qnn' loads none of the forms full"):
        load_targets(Recipe(targets=("qnn",), forms=("full",)))


def test_a_setting_may_be_a_number_in_a_file(tmp_path: Path) -> None:
    (tmp_path / "r.toml").write_text("[settings]\napi_level = 31\n")
    assert load_recipe(tmp_path / "r.toml").settings == {"api_level": "31"}


@pytest.mark.parametrize(
    ("text", "hint"),
    [
        ("target = ['cpu']", "did you mean 'targets'?"),
        ("[metric]\nname = 'top1'\nmax_drp = 1", "did you mean 'max_drop'?"),
        ("[outputs]\ny = 'clases'", "valid: classes, embedding"),
        ("forms = ['onnx', 'orx']", "valid: context, full"),
        ("samples = 'all'", "the keys are dims"),
    ],
)
def test_a_wrong_key_or_value_is_told_what_is_valid_there(tmp_path: Path, text: str, hint: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(UsageError) as caught:
        load_recipe(tmp_path / "r.toml")
    assert hint in caught.value.hint
