"""Each parameter of a target changes what is taken: a case where it does, with the reason."""

from pathlib import Path

import pytest
from check_models import check_file, check_text, save_text, why_not
from msgspec.structs import replace

from edgekit._ort import CPU_PROVIDER
from edgekit.check.check import check_model
from edgekit.devices.ios.ios import IosSimulator
from edgekit.devices.observe import observe_placement
from edgekit.errors import UsageError
from edgekit.model.model import load_model
from edgekit.target import load_target, target_names

RESIZE = 'g (float[1,2,4,4] x) => (float[1,2,8,8] y) <float[4] f = {1,1,2,2}> { y = Resize<mode = "linear">(x, , f) }'
CONV = "g (float[1,2,4,4] x, float[2,2,1,1] w0) => (float[1,2,4,4] y) <float[2,2,1,1] w = {1,2,3,4}> { y = Conv(x, w) }"
GATHER = "g (float16[4,2] x) => (float16[1,2] y) <int64[1] i = {1}> { y = Gather(x, i) }"
BLOCKS = 'g (float16[1,4,2,2] x) => (float16[1,1,4,4] y) { y = DepthToSpace<blocksize = 2, mode = "DCR">(x) }'
WIDE = """g (uint16[1,4] x, uint16[4,2] w) => (uint16[1,2] y) <float s = {0.1}, uint16 z = {0}>
    { a = com.microsoft.DequantizeLinear(x, s, z) b = com.microsoft.DequantizeLinear(w, s, z) c = MatMul(a, b)
    y = com.microsoft.QuantizeLinear(c, s, z) }"""
BRANCHES = """g (bool[1] c, float[1,4] x) => (float[1,4] y) {
    [n0] y = If(c) <then_branch = t () => (float[1,4] u) { [n1] u = Sqrt(x) },
    else_branch = e () => (float[1,4] v) { [n2] v = Abs(x) }> }"""
ERF = "g (float[1,4] x) => (float[1,4] y) { y = Erf(x) }"
ELU = "g (float[2,4] x) => (float[2,4] y) { y = Elu(x) }"
HALF = "g (float16[1,3,4,4] x) => (float16[1,3,4,4] y) { y = Softmax(x) }"
OPEN = "g (float[N,4] x) => (float[N,2] y) <float[4,2] w = {1,2,3,4,5,6,7,8}> { y = MatMul(x, w) }"
UPWARDS = "g (float[1,2,4,4] x, float[2,2,2,2] w) => (float[1,2,5,5] y) { y = ConvTranspose(x, w) }"
BIASED = "g (float[1,2] x) => (float[1,2] y) <float[2,2] w = {1,2,3,4}, float[1,2] b = {1,2}> { y = Gemm(x, w, b) }"
CUBES = "g (float[1,3,4] x) => (float[1,3,2] y) <float[4,2] w = {1, 2, 3, 4, 5, 6, 7, 8}> { y = MatMul(x, w) }"
HALF_SUM = "g (float16[1,4,8] x) => (float16[1,1,8] y) <int64[1] a = {1}> { r = Relu(x) y = ReduceSum(r, a) }"
CASES = [
    ("nnapi", {"api_level": "27"}, {"api_level": "28"}, BIASED, "needs api_level 28"),
    ("nnapi", {"api_level": "29"}, {"api_level": "31"}, RESIZE, "the others need api_level 30"),
    ("nnapi", {"api_level": "28", "layout": "NCHW"}, {"api_level": "28"}, CONV, "api_level 29"),
    ("coreml", {"ios": "15"}, {"ios": "17"}, GATHER, "it needs ios 16 or newer, not 15"),
    ("coreml", {"ios": "16"}, {"ios": "17"}, BLOCKS, "it needs ios 17 or newer, not 16"),
    ("coreml", {"processor": "x86_64"}, {"processor": "arm64"}, HALF_SUM, "its input is float16, which is not taken"),
    (
        "coreml",
        {"model_format": "NeuralNetwork"},
        {"model_format": "MLProgram"},
        ERF,
        "it needs model_format MLProgram",
    ),
    ("qnn", {"htp_arch": "69"}, {"htp_arch": "73"}, WIDE, "input 1 is uint16"),
    ("qnn", {"soc_model": "30"}, {"soc_model": "69"}, ELU, "v68"),
    ("qnn", {"phone": "Galaxy S21"}, {"phone": "Galaxy S25"}, ELU, "v68"),
    ("xnnpack", {"ort": "1.16.3"}, {"ort": "1.29.0"}, CUBES, "rank 3 of input 0 is above 2"),
    ("xnnpack", {"ort": "1.16.3"}, {"ort": "1.21.0"}, HALF, "fp16 kernels came with ORT 1.21"),
    ("xnnpack", {"ort": "1.26.0"}, {"ort": "1.29.0"}, OPEN, "dimension 0 of input 0 is dynamic"),
    ("cuda", {"layout": "NHWC"}, {"layout": "NCHW"}, UPWARDS, "input 1 is computed; it must be a constant"),
]


@pytest.mark.parametrize(
    ("target", "less", "more", "body", "reason"), CASES, ids=lambda value: str(value) if isinstance(value, dict) else ""
)
def test_a_parameter_of_a_target_decides_whether_a_node_is_taken(
    target: str, less: dict[str, str], more: dict[str, str], body: str, reason: str
) -> None:
    refused, taken = check_text(body, target, less), check_text(body, target, more)
    assert reason in why_not(refused)
    assert (why_not(taken), all(node.taken for node in taken)) == ("", True)


_PC_ONLY = ("directml", "tensorrt", "webgpu")


def test_every_parameter_has_a_case() -> None:
    tested = {(target, name) for target, less, more, *_ in CASES for name in (*less, *more)}
    tested |= {("nnapi", "cpu"), ("cpu", "arch"), ("cpu", "weights"), ("qnn", "blocks"), ("openvino", "precision_hint")}
    # What these set is told to the provider, and changes no placement that the rules tell (test_target.py).
    told = ("tf32", "cudnn_search", "device_id", "gpu_mem_limit", "arena_extend_strategy", "enable_cuda_graph")
    tested |= {("cuda", name) for name in told}
    tested |= {(name, parameter) for name in _PC_ONLY for parameter in load_target(name).parameters}
    known = {(name, parameter) for name in target_names() for parameter in load_target(name).parameters}
    assert known == tested


def test_without_its_cpu_nnapi_may_fail(tmp_path: Path) -> None:
    path = save_text("g (float[4] x) => (float[4] y) { y = Relu(x) }", tmp_path / "m.onnx")
    on, off = (check_file(path, "nnapi", {"cpu": cpu}) for cpu in ("on", "off"))
    assert (on.verdict, on.risks, off.verdict, len(off.risks)) == ("yes", (), "maybe", 1)


@pytest.mark.parametrize("enters", ["0", "1"])
def test_an_option_of_core_ml_lets_bodies_be_placed(enters: str, tmp_path: Path) -> None:
    """Held against the provider itself where `ios-sim` is installed."""
    model, target = load_model(save_text(BRANCHES, tmp_path / "m.onnx")), load_target("coreml")
    options = {**target.session.provider_options, "EnableOnSubgraphs": enters}
    platforms = {"ios": replace(target.session.platforms["ios"], provider_options=options)}
    session = replace(target.session, provider_options=options, platforms=platforms)
    changed = replace(target, session=session)
    taken = {node.op: node.taken for node in check_model(model, changed).node_list}
    assert taken == {"If": False, "Sqrt": enters == "1", "Abs": False}
    if IosSimulator().find_missing() is None:
        seen = observe_placement(model, changed, IosSimulator()).providers
        names = {node.name: node.op for node in check_model(model, changed).node_list}
        assert {names[name]: provider != CPU_PROVIDER for name, provider in seen.items()} == taken


def test_an_architecture_stands_for_a_soc() -> None:
    assert load_target("qnn", {"htp_arch": "73"}).session.provider_options["soc_model"] == "43"
    assert load_target("qnn", {"soc_model": "36"}).settings["htp_arch"] == "69"
    assert load_target("qnn", {"soc_model": "43", "htp_arch": "73"}).settings["soc_model"] == "43"
    with pytest.raises(UsageError, match="contradicts"):
        load_target("qnn", {"soc_model": "36", "htp_arch": "73"})


def test_a_resize_of_the_width_alone_is_a_risk() -> None:
    text = RESIZE.replace("{1,1,2,2}", "{1,1,1,2}").replace("[1,2,8,8]", "[1,2,4,8]")
    (node,) = check_text(text, "nnapi", {"api_level": "31"})
    assert (node.taken, len(node.risks)) == (True, 1)
    (node,) = check_text(RESIZE, "nnapi", {"api_level": "31"})
    assert node.risks == ()


def test_a_softmax_over_channels_is_a_risk_of_xnnpack_s_layout() -> None:
    body = """g (uint8[1,4,2,2] p) => (uint8[1,4,2,2] y) <float s = {0.5}, float t = {0.00390625}, uint8 z = {0}>
        { a = DequantizeLinear(p, s, z) b = Softmax<axis=1>(a) y = QuantizeLinear(b, t, z) }"""
    (softmax,) = (node for node in check_text(body, "xnnpack") if node.op == "Softmax")
    assert not softmax.taken
    assert "a Conv before it changes the layout" in softmax.risks[0]
    (last,) = (node for node in check_text(body.replace("axis=1", "axis=3"), "xnnpack") if node.op == "Softmax")
    assert (last.taken, last.risks) == (True, ())
