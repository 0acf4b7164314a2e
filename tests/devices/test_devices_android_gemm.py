"""Weights and flags of NNAPI in Android's own library: sessions fail exactly where check says so."""

import sys
from pathlib import Path

import pytest
from devices_models import float_conv, present, text_model

from edgekit.check.check import check_model
from edgekit.devices.find import find_device
from edgekit.devices.observe import Observed, compare_placement, observe_placement, observe_target
from edgekit.model.model import load_model
from edgekit.prepare.fix import fix_model
from edgekit.prepare.rewrites.products import UNSIGNED_WEIGHTS
from edgekit.target import load_target

pytestmark = pytest.mark.slow

CHANNELS = "int8-per-channel"
CASES = [
    pytest.param(spelling, weight, api, id=f"{spelling.partition('(')[0]}-{weight}-{api}")
    for spelling in ("Gemm<transB=1>(d, f)", "Gemm<transB=0>(d, f)", "MatMul(d, f)")
    for weight in ("int8", "int8-per-channel", "uint8")
    for api in ("27", "29")
]


def gemm(path: Path, spelling: str, weight: str) -> Path:
    """A product of a quantized input and a constant of 4 x 4, quantized again."""
    dtype, _, per_channel = weight.partition("-")
    zero, count = (128 if dtype == "uint8" else 0), 4 if per_channel else 1
    axis = "<axis=0>" if "transB=1" in spelling else "<axis=1>"
    shape = "[4]" if per_channel else ""
    values = ", ".join(str((7 * index) % 100 + zero) for index in range(16))
    constants = (
        f"{dtype}[4,4] w = {{{values}}}, float{shape} s = {{{', '.join(['0.01'] * count)}}},"
        f"{dtype}{shape} z = {{{', '.join([str(zero)] * count)}}},"
        "float xs = {0.02}, uint8 xz = {128}, float ys = {0.05}, uint8 yz = {128}"
    )
    body = (
        f"(float[2,4] x) => (float[2,4] y) <{constants}> {{ q = QuantizeLinear(x, xs, xz)"
        f" d = DequantizeLinear(q, xs, xz) f = DequantizeLinear{axis}(w, s, z) a = {spelling}"
        " r = QuantizeLinear(a, ys, yz) y = DequantizeLinear(r, ys, yz) }"
    )
    return text_model(path, body)


@pytest.mark.parametrize(("spelling", "weight", "api"), CASES)
def test_a_session_fails_exactly_where_check_says_so(spelling: str, weight: str, api: str, tmp_path: Path) -> None:
    target = load_target("nnapi", {"api_level": api})
    device = present("android:x86_64", target)
    model = load_model(gemm(tmp_path / "m.onnx", spelling, weight))
    report = check_model(model, target)
    seen = observe_placement(model, target, device)
    if weight == CHANNELS and "transB=0" in spelling and api != "27":
        # The network is built, and NNAPI cannot compute it: that shows when it is compiled, and only looking does not.
        assert report.is_refused
        return
    assert report.is_refused == (seen.failure is not None)
    is_kept = weight.startswith("int8") and "transB=1" in spelling
    assert report.is_refused == (is_kept and (weight, api) != (CHANNELS, "27"))
    if seen.failure is None:
        assert compare_placement(report, seen, device).disagreements == ()
        return
    fixed = fix_model(model, tmp_path / "fixed.onnx", [UNSIGNED_WEIGHTS]).model
    again = observe_placement(fixed, target, device)
    assert again.failure is None
    assert compare_placement(check_model(fixed, target), again, device).disagreements == ()


def test_without_litert_nnapi_is_skipped_with_the_command_and_still_observed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = load_target("nnapi")
    present("android:x86_64", target)
    monkeypatch.setitem(sys.modules, "ai_edge_litert", None)  # as if it were not installed
    missing = find_device("android:x86_64", target).find_missing()
    assert missing is not None
    assert missing.command == "pip install ai-edge-litert==2.3.0"
    assert find_device("android:x86_64", load_target("xnnpack")).find_missing() is None
    seen = observe_target(load_model(float_conv(tmp_path / "m.onnx")), target)
    assert isinstance(seen, Observed)
    assert (seen.failure, seen.disagreements) == (None, ())
