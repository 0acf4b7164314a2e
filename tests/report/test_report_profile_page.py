"""The page of a profile in a real Chromium: a hundred thousand kernels, at three widths, pointed at and zoomed."""

from pathlib import Path

import pytest
from chromium_pages import CUT_OFF, open_page
from selenium import webdriver
from selenium.webdriver.common.keys import Keys

from edgekit.evidence import Evidence
from edgekit.profile.events import Execution, Step, Tensor
from edgekit.profile.measure import Profiled
from edgekit.profile.nodes import add_roof_shares, list_nodes, list_operators, list_unasked
from edgekit.profile.profile import ProfileRun
from edgekit.profile.report import DeviceProfile, ProfileReport, Roof
from edgekit.report.profiles import MOST_SPANS, render_profile

pytestmark = pytest.mark.slow

OPS = ("Conv", "Add", "Transpose", "</script><b>Evil", "Softmax")
KERNELS = 200
DATA = Tensor(dtype="float", shape=(1, 8, 8, 8))
WEIGHT = Tensor(dtype="float", shape=(8, 8, 3, 3))


def executions(runs: int) -> tuple[Execution, ...]:
    steps = tuple(
        Step(
            name=f"{OPS[i % 5]}_{i}", op=OPS[i % 5], provider="CPUExecutionProvider", start_us=10 * i,
            duration_us=9 - i % 5, self_us=9 - i % 5, thread=1, depth=0, inputs=(DATA, WEIGHT), outputs=(DATA,),
            bytes=6400, spread=False,
        )
        for i in range(KERNELS)
    )  # fmt: skip
    return tuple(Execution(start_us=0, duration_us=10 * KERNELS, steps=steps) for _ in range(runs))


@pytest.fixture(scope="module")
def page() -> str:
    ran = executions(MOST_SPANS // KERNELS)
    nodes = add_roof_shares(list_nodes(ran[:1], {}), Roof(float_gmacs=50, integer_gmacs=200, gbytes=10))
    profile = DeviceProfile(
        subject="net.onnx", device="host", evidence=Evidence.EMULATED, provider="CPUExecutionProvider", runs=len(ran),
        run_ms=2.0, nodes_ms=1.4, nodes=nodes, operators=list_operators(nodes), unasked=list_unasked(nodes),
        roof=Roof(float_gmacs=50, integer_gmacs=200, gbytes=10),
    )  # fmt: skip
    profiled = (Profiled(profile=profile, executions=ran),)
    return render_profile(ProfileRun(report=ProfileReport(profiles=(profile,)), profiled=profiled))


@pytest.mark.parametrize("width", [400, 800, 1400])
def test_a_hundred_thousand_kernels_are_shown_and_nothing_is_cut_off(
    width: int, page: str, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    assert open_page(browser, page, tmp_path / "p.html") == []
    assert browser.execute_script(CUT_OFF) == []
    counted, drawn_ms = browser.execute_script(
        "const line = document.querySelector('.timeline');"
        "return [JSON.parse(line.querySelector('script').textContent).spans.length / 4, Number(line.dataset.drawn)];"
    )
    assert counted == MOST_SPANS
    assert drawn_ms < 3000


def test_the_time_line_zooms_and_names_what_it_is_pointed_at(
    page: str, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    assert open_page(browser, page, tmp_path / "p.html") == []
    canvas = browser.find_element("css selector", ".timeline canvas")
    pixels = "return document.querySelector('.timeline canvas').toDataURL()"
    one_run = browser.execute_script(pixels)
    canvas.send_keys("+++" + Keys.ARROW_LEFT * 60)
    webdriver.ActionChains(browser).move_to_element_with_offset(
        canvas, 3 - canvas.size["width"] // 2, 5 - canvas.size["height"] // 2
    ).perform()
    assert browser.find_element("css selector", ".timeline .note").text == "Conv Conv_0: 0.009 ms"
    canvas.send_keys("0")
    assert browser.execute_script(pixels) != one_run


def test_a_stranger_s_names_stay_text(page: str) -> None:
    assert "</script><b>Evil" not in page
    assert page.count("</script>") == 2
