"""The pages in a real Chromium: they open offline without a word on the console, sort, filter, fold, zoom and print."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from chromium_pages import Browser
from demo_paths import CALIBRATION, MODEL
from msgspec.structs import replace
from selenium.webdriver.common.keys import Keys
from test_report_junit import BAD, DEAD, GOOD, _hostile, _report
from test_report_render import HOSTILE
from test_report_render import _report as _build

from edgekit.app.config import Cell
from edgekit.app.result import AppReport, CellResult, PackageResult, fail_cell, render_app
from edgekit.check.check import check_model
from edgekit.check.recommend import recommend_target
from edgekit.check.report import CheckedNode, CheckReport
from edgekit.cli.main import run_command
from edgekit.data.data_check import ALIKE
from edgekit.data.samples import list_samples
from edgekit.evidence import Evidence
from edgekit.jobs.forecast import forecast
from edgekit.jobs.quantize import QuantizeOptions, quantize_for
from edgekit.model.model import load_model
from edgekit.profile.events import Execution, Step, Tensor
from edgekit.profile.measure import Profiled
from edgekit.profile.nodes import add_roof_shares, list_nodes, list_operators, list_unasked
from edgekit.profile.profile import ProfileRun
from edgekit.profile.report import DeviceProfile, ProfileReport, Roof
from edgekit.recipe import Data, Recipe
from edgekit.report import profiles, tables, timing
from edgekit.report.checked import CheckedTarget, CheckSummary, list_blocks, list_facts, render_check
from edgekit.report.html import (
    Picture,
    describe_answers,
    draw_image,
    draw_worst,
    place_bars,
    render_page,
)
from edgekit.report.pages import make_page
from edgekit.report.profiles import HUES, MAX_SPANS
from edgekit.report.text import headline_build, headline_verify
from edgekit.target import find_group, load_target
from edgekit.verify.attribute import share_loss
from edgekit.verify.layers.comparison import LayerReport, Located
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.report import AttributionStep, VerifyReport
from edgekit.verify.two_models import ModelComparison

STEPS = share_loss(
    [
        AttributionStep(step="prepare", sqnr_db=120.0, top1_agreement=1.0, accuracy=0.9),
        AttributionStep(step="quantize", sqnr_db=25.0, top1_agreement=0.95, accuracy=0.85),
        AttributionStep(step="provider", sqnr_db=27.0, top1_agreement=0.9, accuracy=0.87),
    ],
    0.9,
)
LAYERS = tuple(
    LayerReport(
        name=f"conv{index}", op="Conv", tensor=f"c{index}", sqnr_db=60.0 - index, max_abs=0.1,
        own_sqnr_db=10.0 if index == 7 else 50.0, own_bias=0.0, arithmetic="int8", offset_steps=0.0,
        channel_steps=(28.0 if index == 7 else 0.4, 0.3),
    )
    for index in range(30)
)  # fmt: skip


def _full() -> VerifyReport:
    report = _report(GOOD, BAD, DEAD)
    return replace(report, attribution=STEPS, layers=LAYERS, attributed_device="emulated")


def _column(browser: Browser, name: str) -> list[str]:
    heads = [head.text.rstrip(" ↑↓") for head in browser.find("table.filtered thead th")]
    place = heads.index(name) + 1
    cells = browser.find(f"table.filtered tbody tr:not([hidden]) td:nth-child({place})")
    return [cell.text for cell in cells]


def test_a_page_sorts_and_filters_without_a_word_on_the_console(browser: Browser) -> None:
    runs = (replace(GOOD, device="b", samples=12), replace(BAD, device="a", samples=9))
    browser.open(render_page(_report(*runs, DEAD)))
    assert _column(browser, "device") == ["b", "a", "phone"]
    head = browser.find_one("table.filtered thead th")
    head.click()
    assert _column(browser, "device") == ["a", "b", "phone"]
    head.send_keys(Keys.ENTER)
    assert _column(browser, "device") == ["phone", "b", "a"]
    browser.find("table.filtered thead th")[3].click()
    assert _column(browser, "samples")[-1] == "12"
    browser.find_one("#failing").click()
    assert sorted(_column(browser, "device")) == ["a", "phone"]
    browser.find_one("#filter").send_keys("PHONE")
    assert _column(browser, "device") == ["phone"]


def test_the_chart_names_the_layer_under_the_pointer(browser: Browser) -> None:
    browser.open(render_page(_full()))
    browser.point_at(browser.find_one(".chart circle.bad"))
    assert browser.find_one(".chart .note").text == "conv7 (Conv): 53.0 dB so far, 10.0 dB own"
    assert len(browser.find(".chart circle")) == len(LAYERS)


def test_a_comparison_of_models_is_a_page_too(browser: Browser) -> None:
    good, bad = GOOD.outputs[0], replace(GOOD.outputs[0], name=HOSTILE, sqnr_db=9.0)
    report = ModelComparison(a="float", b=HOSTILE, samples=8, outputs=(good, bad), layers=LAYERS, device="arm64")
    page = render_page(report, min_sqnr_db=15.0)
    browser.open(page)
    assert HOSTILE not in page
    assert browser.find_one("header .fail").text == "fail"
    assert _column(browser, "result") == ["pass", "fail"]
    browser.find_one("#failing").click()
    assert _column(browser, "output") == [HOSTILE]
    assert len(browser.find(".chart circle.bad")) == 1
    assert "conv7" in browser.find_one("ul").text


def test_hostile_names_of_models_run_no_script(browser: Browser) -> None:
    page = render_page(_hostile())
    browser.open(page)
    browser.open(render_page(_build()))
    assert HOSTILE not in page
    assert len(browser.find("script")) == 1
    smuggled = page.replace("</body>", "<script>document.title = 'run'</script></body>")
    assert any("Content Security Policy" in line for line in browser.read_log(smuggled))
    assert browser.run("return document.title") != "run"


def test_a_page_follows_light_and_dark_and_prints_light(browser: Browser) -> None:
    browser.open(render_page(_full()))
    seen: dict[str, str] = {}
    for scheme, media in (("light", "screen"), ("dark", "screen"), ("dark", "print")):
        browser.set_scheme(scheme, media)
        seen[f"{scheme} {media}"] = browser.run("return getComputedStyle(document.body).backgroundColor")
    assert seen["light screen"] == seen["dark print"] == "rgb(255, 255, 255)"
    assert seen["dark screen"] != seen["light screen"]
    assert len(browser.ask("Page.printToPDF")["data"]) > 10_000


def test_the_worst_samples_of_an_image_model_are_shown_as_images(browser: Browser) -> None:
    image = np.random.default_rng(0).normal(size=(1, 3, 40, 60)).astype(np.float32)
    uri = draw_image(image)
    assert uri is not None
    browser.open(render_page(_full(), [Picture(sample=3, caption="sample 3", uri=uri)]))
    assert browser.run("return arguments[0].naturalWidth", browser.find_one("figure img")) == 60
    assert draw_image(np.moveaxis(image, 1, 3)) == uri
    for other in (image[0], image[:, :2], np.full_like(image, np.nan), np.zeros((1, 3, 2, 2), np.float32)):
        assert draw_image(other) is None
    assert draw_image(np.zeros((1, 1, 28, 28), np.uint8)) is not None


def test_a_page_of_a_large_build_stays_small_and_complete(browser: Browser) -> None:
    located = Located(layer="conv7", runs=2, cuts=0, found_by="tensors", layers=LAYERS * 40)
    outputs = tuple(replace(GOOD.outputs[0], name=f"y{index}", worst_sample=index) for index in range(6))
    runs = tuple(replace(GOOD, device=name, outputs=outputs, located=located) for name in ("a", "b", "c"))
    many = replace(_full(), runs=runs, layers=LAYERS * 40)
    bundles = tuple(replace(_build().bundles[0], target=f"t{index}", verify=many) for index in range(4))
    noise = np.random.default_rng(0).integers(0, 255, size=(8, 1, 224, 224, 3)).astype(np.uint8)
    inputs = list_samples([{"image": image} for image in noise], "noise")
    pictures = draw_worst(inputs, many)
    assert [picture.sample for picture in pictures] == list(range(6))
    assert pictures[0].caption == "sample 0: y0 on a; y0 on b; y0 on c"
    page = render_page(_build(bundles=bundles), {bundle.target: pictures for bundle in bundles})
    assert len(page.encode()) < 500_000
    assert "http:" not in page
    assert "https:" not in page
    browser.open(page)
    assert len(browser.find("figure img")) == 24


LONG = "a_model_with_a_rather_long_name_and_a_version_2.1.0-nnapi"


def _app() -> AppReport:
    """A run of 200 cells, one of which failed, and two packages, one of which could not be made."""
    cell = CellResult(
        model=LONG, target="nnapi", key="a" * 64, state="built", verdict="pass", headline="1 of 1 bundle passed.",
        bundle=f"{LONG}/nnapi/{LONG}-nnapi", sha256="b" * 64, report=f"{LONG}/nnapi/report.html", precision="int8",
        size_before=14_000_000, size_after=3_600_000, taken_macs=0.98, partitions=3, agreement="100.0% agree, 43.8 dB",
        evidence="same-binary (android), same-ep (android:x86_64)",
    )  # fmt: skip
    failed = fail_cell(Cell(model=LONG, target="qnn", path=Path(), data=Data(source=""), recipe=Recipe()), LONG * 3)
    package = PackageResult(name="app", kind="aar", key="c" * 64, state="built", path=f"packages/{LONG}.aar")
    lost = PackageResult(name=LONG, kind="tar", key="", state="failed", failure=f"{LONG}/qnn did not pass")
    return AppReport(
        app="edgekit.toml", out=Path("build"), cells=(cell,) * 199 + (failed,), packages=(package, lost), seconds=9.0
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """A page of each kind, with long names."""
    check = check_model(load_model(MODEL), load_target("coreml"))
    options, data = QuantizeOptions(method="minmax", layers=True), Data(source=str(CALIBRATION))
    recipe = Recipe(targets=("nnapi",), samples=16)
    quantized = quantize_for(MODEL, data, tmp_path_factory.mktemp("q") / "q.onnx", recipe, options)
    found, chosen = {"coreml": CheckedTarget(report=check)}, recommend_target({"coreml": check}, {})
    summary = CheckSummary(model=LONG, sha256="a" * 64, targets=found, recommended=chosen)
    full = replace(_full(), bundle=LONG)
    build = _build(bundles=(replace(_build().bundles[0], verify=full, check=check),))
    output = replace(GOOD.outputs[0], name=LONG)
    models = ModelComparison(a=LONG, b="float", samples=8, outputs=(output,), layers=LAYERS, device="arm64")
    return {
        "app": render_app(_app()),
        "build": render_page(build),
        "check": render_check(summary),
        "compare": render_page(models, min_sqnr_db=15.0),
        "forecast": make_page("forecast", timing, report=forecast(MODEL)),
        "quantize": render_page(quantized),
        "verify": render_page(full),
    }


@pytest.mark.parametrize("kind", ["app", "build", "check", "compare", "forecast", "quantize", "verify"])
def test_nothing_is_cut_off(kind: str, pages: dict[str, str], browser: Browser) -> None:
    assert browser.find_cut_off(pages[kind]) == []
    assert " 1 partitions" not in pages[kind]
    assert len(pages[kind].encode()) < 500_000


def test_a_bar_of_a_forecast_names_its_device(pages: dict[str, str], browser: Browser) -> None:
    browser.open(pages["forecast"])
    browser.point_at(browser.find(".chart svg :has(> title)")[0])
    assert browser.find_one(".chart .note").text.endswith(" ms")


def test_the_placement_strip_shows_partitions_and_cpu_in_order(pages: dict[str, str], browser: Browser) -> None:
    check = check_model(load_model(MODEL), load_target("coreml"))
    blocks = list(list_blocks(check))
    assert [(block.place, block.is_odd) for block in blocks] == [("taken", False), ("left", False), ("taken", True)]
    assert sum(block.count for block in blocks) == check.nodes
    browser.open(pages["check"])
    parts = browser.find(".strip i")
    assert [part.get_attribute("title").split(":")[0] for part in parts] == [
        "partition 0", "left to the CPU", "partition 1"
    ]  # fmt: skip
    widths = [part.rect["width"] for part in parts]
    assert widths == pytest.approx([sum(widths) * block.count / check.nodes for block in blocks], abs=2)
    many = replace(check, node_list=tuple(replace(check.node_list[0], partition=at) for at in range(6000)))
    assert sum(len(block.nodes) for block in list_blocks(many)) == 5000


def test_the_layers_of_a_device_are_a_chart_of_their_own(browser: Browser) -> None:
    notes = ("with tensors given out more nodes ran on the CPU: 4 Transpose",)
    located = Located(layer="conv3", runs=2, cuts=0, found_by="tensors", layers=LAYERS, notes=notes)
    browser.open(render_page(_report(replace(BAD, located=located))))
    assert [dot.get_attribute("r") for dot in browser.find(".chart circle.bad")] == ["6"]
    shown = browser.find_one("body").text
    assert "Layer by layer on arm64" in shown
    assert notes[0] in shown


def test_the_sample_numbers_are_those_of_the_samples_that_ran() -> None:
    """Of 16 samples, spread over 32: a run that ended after 3 of them had the first, the middle and one between."""
    assert replace(GOOD, samples=3, planned_samples=16).find_places(32) == (0, 16, 8)
    assert replace(GOOD, samples=4).find_places(16) == (0, 8, 4, 12)


def test_the_answers_of_the_worst_sample_and_what_became_what() -> None:
    wanted = np.array([[0.1, 0.9, 0.0], [0.8, 0.1, 0.1], [0.7, 0.2, 0.1]], np.float32)
    got = np.array([[0.1, 0.8, 0.1], [0.2, 0.1, 0.7], [0.2, 0.1, 0.7]], np.float32)
    one, other = (list_samples([{"y": row[None]} for row in rows], "rows") for rows in (wanted, got))
    (output,) = compare_outputs(one, other)
    assert describe_answers(output) == ": float class 0 (0.8), here class 2 (0.7)"
    assert [(change.wanted, change.got, change.samples) for change in output.changes] == [(0, 2, 2)]
    page = render_page(_report(replace(GOOD, outputs=(output,))))
    assert "class 0 became 2 in 2" in page
    assert describe_answers(replace(output, top1_agreement=None)) == ": float 0.8, here 0.7"


def test_the_first_sentence_is_the_verdict_and_its_reason() -> None:
    assert (
        headline_verify(_report(GOOD))
        == "It does what the float model does on emulated: at worst 100.0% agree, 30.0 dB."
    )
    assert headline_verify(_report(GOOD, BAD)).startswith("It fails: arm64: output 'y' has cosine 0.999")
    assert headline_verify(_report()).startswith("Nothing ran")
    good, *_ = _build().bundles
    passing = replace(good, verify=_report(GOOD), failure=None)
    assert headline_build(_build(bundles=(passing,))) == "1 of 1 bundle does what the float model does."
    failed = replace(good, target="qnn", path=None, failure="no room")
    assert headline_build(_build(bundles=(passing, failed))).endswith("; qnn: no room.")
    bad = replace(good, verify=_report(BAD), failure=None)
    unlike = f"input 'x' has a mean of 100 to 120 in the samples to calibrate with and of 0 to 1: {ALIKE}"
    assert headline_build(_build(bundles=(bad,), data_warnings=("few", unlike))).endswith(f" Next: {unlike}.")
    proven_elsewhere = _report(replace(GOOD, provider="CoreMLExecutionProvider"))
    open_one = replace(good, target="coreml", verify=proven_elsewhere, failure=None)
    why = "no run used CoreMLExecutionProvider: emulated shows what the file computes elsewhere. Next: buy one, so that"
    said = headline_build(_build(bundles=(open_one,), data_warnings=(unlike,)))
    assert said.startswith(f"The bundle is not proven; coreml: {why}")
    assert f"does what the float model does; coreml: not proven: {why}" in headline_build(
        _build(bundles=(passing, open_one))
    )


def test_bars_tell_the_share_of_the_added_error_and_begin_where_the_step_before_ended() -> None:
    steps = [AttributionStep(step="quantize", sqnr_db=1.0, top1_agreement=None, accuracy=None, noise_share=part)
             for part in (1.27, 0.4, -0.67, 0.4)]  # fmt: skip
    assert [bar.label for _, bar in place_bars(steps)] == ["61%", "19%", "takes 32% back", "19%"]
    unknown = place_bars([replace(steps[0], noise_share=part) for part in (None, 0.0)])
    assert [bar.label for _, bar in unknown] == ["-", "0%"]
    bars = [bar for _, bar in place_bars(STEPS)]
    assert [bar.kind for bar in bars] == ["loss", "loss", "gain"]
    assert bars[2].x + bars[2].width == pytest.approx(bars[1].x + bars[1].width)
    assert max(bar.x + bar.width for bar in bars) <= 100.1


def _node(at: int, *, taken: bool = True, reasons: tuple[str, ...] = (), **fields: Any) -> CheckedNode:
    return CheckedNode(
        name=f"n{at}", op="Conv", domain="ai.onnx", taken=taken, reasons=reasons, macs=10, bytes=10,
        partition=0 if taken else None, reads=(f"n{at - 1}",) if at else (), **fields,
    )  # fmt: skip


def _check_of(*nodes: CheckedNode) -> CheckReport:
    return CheckReport(target="t", model="m", sha256="0", evidence="predicted", settings={}, node_list=nodes, advice=())


def _page_of(*nodes: CheckedNode) -> str:
    report = _check_of(*nodes)
    recommended = recommend_target({"t": report}, {})
    found = {"t": CheckedTarget(report=report)}
    page = render_check(CheckSummary(model="m", sha256="0", targets=found, recommended=recommended))
    assert 'http-equiv="Content-Security-Policy" content="default-src \'none\'' in page
    return page


def test_the_tooltip_of_a_node_has_its_reasons(browser: Browser) -> None:
    browser.open(_page_of(_node(0), _node(1, taken=False, reasons=("too <odd>",)), _node(2)))
    (chip,) = browser.find(".chip.left")
    (tip,) = browser.find(".chip.left .tip")
    assert not tip.is_displayed()
    browser.point_at(chip)
    assert tip.is_displayed()
    assert "too <odd>" in tip.text
    assert "Conv n1" in tip.text


def test_taken_left_and_fatal_have_colours_of_their_own(browser: Browser) -> None:
    browser.open(_page_of(_node(0), _node(1, taken=False), _node(2, taken=False, fatal=True)))
    for scheme in ("light", "dark"):
        browser.set_scheme(scheme)
        colours = [chip.value_of_css_property("background-color") for chip in browser.find(".chip")]
        assert len(set(colours)) == 3
        assert browser.find(".chip")[0].value_of_css_property("color") != colours[0]


def test_a_page_has_a_few_elements_for_each_of_a_thousand_nodes(browser: Browser) -> None:
    browser.open(_page_of(*(_node(at, taken=at % 50 != 49) for at in range(1000))))
    for block in browser.find(".block:not([open]) > summary"):
        block.click()
    assert len(browser.find(".chip")) == 1000
    # 6.4 of each: a browser lays out tens of thousands in a second.
    assert browser.run("return document.querySelectorAll('*').length") < 8 * 1000


def test_the_page_of_the_command_loads_nothing_from_elsewhere(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "check.html"
    assert run_command(["check", str(MODEL), "--compare-ort", "--html", str(page)]) == 0
    browser.open(page.read_text())
    assert "ONNX Runtime's own checker" in browser.find("body")[0].text
    assert browser.run("return performance.getEntriesByType('resource').length") == 0
    assert len(browser.find("details.graph")) == len(find_group("all"))


def test_the_graph_has_a_block_for_each_partition_and_a_node_tells_what_it_reads() -> None:
    blocks = list(list_blocks(_check_of(_node(0), _node(1), _node(2, taken=False), _node(3))))
    assert [(block.place, len(block.nodes)) for block in blocks] == [("taken", 2), ("left", 1), ("taken", 1)]
    assert list(list_facts(blocks[1].nodes[0])) == ["Conv n2", "10 MACs, 10 bytes", "left to the CPU", "reads n1"]
    assert "2 nodes, 50.0% of MACs (2 Conv)" in blocks[0].summary


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
    ran = executions(MAX_SPANS // KERNELS)
    nodes = add_roof_shares(list_nodes(ran[:1], {}), Roof(float_gmacs=50, integer_gmacs=200, gbytes=10))
    profile = DeviceProfile(
        subject="net.onnx", device="host", evidence=Evidence.EMULATED, provider="CPUExecutionProvider", runs=len(ran),
        run_ms=2.0, nodes_ms=1.4, nodes=nodes, operators=list_operators(nodes), unasked=list_unasked(nodes),
        roof=Roof(float_gmacs=50, integer_gmacs=200, gbytes=10),
    )  # fmt: skip
    profiled = (Profiled(profile=profile, executions=ran),)
    run = ProfileRun(report=ProfileReport(profiles=(profile,)), profiled=profiled)
    return make_page("profile", tables, profiles, script="profile.js", hues=HUES, run=run)


@pytest.mark.slow
def test_a_hundred_thousand_kernels_are_shown_and_nothing_is_cut_off(page: str, browser: Browser) -> None:
    assert browser.find_cut_off(page) == []
    counted, drawn, pixels = browser.run(
        "const line = document.querySelector('.timeline'), pen = CanvasRenderingContext2D.prototype;"
        "const data = JSON.parse(line.querySelector('script').textContent), fill = pen.fillRect;"
        "let drawn = 0;"
        "pen.fillRect = function (...box) { drawn += 1; fill.apply(this, box); };"
        "line.querySelector('button[data-zoom=all]').click();"
        "return [data.spans.length / 4, drawn, data.rows * line.querySelector('canvas').clientWidth];"
    )
    assert counted == MAX_SPANS
    # A kernel stands for the others of its pixel, but for one that reaches into the next: what is drawn does not grow
    # with their number.
    assert 0 < drawn <= 2.1 * pixels < counted / 10


@pytest.mark.slow
def test_the_timeline_zooms_and_has_tooltips(page: str, browser: Browser) -> None:
    browser.open(page)
    canvas = browser.find_one(".timeline canvas")
    pixels = "return document.querySelector('.timeline canvas').toDataURL()"
    one_run = browser.run(pixels)
    canvas.send_keys("+++" + Keys.ARROW_LEFT * 60)
    browser.point_at(canvas, 3 - canvas.size["width"] // 2, 5 - canvas.size["height"] // 2)
    assert browser.find_one(".timeline .note").text == "Conv Conv_0: 0.009 ms"
    canvas.send_keys("0")
    assert browser.run(pixels) != one_run


@pytest.mark.slow
@pytest.mark.parametrize("hue", HUES)
def test_white_text_on_a_hue_has_the_contrast_of_wcag_aa(hue: str) -> None:
    red, green, blue = (((part / 255 + 0.055) / 1.055) ** 2.4 for part in bytes.fromhex(hue[1:]))
    assert 1.05 / (0.2126 * red + 0.7152 * green + 0.0722 * blue + 0.05) >= 4.5


def test_names_from_a_device_are_escaped(page: str) -> None:
    assert "</script><b>Evil" not in page
    assert page.count("</script>") == 2
