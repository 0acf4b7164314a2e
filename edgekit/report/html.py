"""Builds, verifications and quantizations as one HTML page each, and any report as the output of a notebook's cell.

First come the charts of these pages: the waterfall of the loss, the layers, and images of samples.
"""

import base64
import html
import importlib
import sys
from collections.abc import Mapping, Sequence
from io import BytesIO
from itertools import accumulate

import msgspec
import numpy as np
from PIL import Image

from edgekit.check.recommend import recommend_target
from edgekit.check.report import CheckReport
from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.machine import find_module
from edgekit.model.tensors import Array
from edgekit.progress import Progress, say_nothing
from edgekit.report import checked, tables, text
from edgekit.report.checked import CheckedTarget, CheckSummary, render_check
from edgekit.report.pages import Chart, Mark, make_page
from edgekit.report.summary import ActivationReport, BuildReport, QuantizeReport
from edgekit.serialize import escape_controls
from edgekit.verify.layers.comparison import LayerReport, Located, find_first_bad
from edgekit.verify.metrics.outputs import OutputReport
from edgekit.verify.report import AttributionStep, VerifyReport
from edgekit.verify.two_models import ModelComparison

# More points could not be distinguished in the chart.
_MAX_LAYERS, _MAX_LOCATED, _WORST_SHOWN = 150, 100, 40
_MAX_DB = 80.0
_LEFT, _RIGHT, _TOP, _BOTTOM = 50.0, 990.0, 12.0, 222.0
_THUMBNAIL_PX = 112
_MAX_PICTURES = 6


class Picture(msgspec.Struct, frozen=True, kw_only=True):
    """A sample as an image that is embedded in the page."""

    sample: int
    caption: str
    uri: str


def place_bars(steps: Sequence[AttributionStep]) -> tuple[tuple[AttributionStep, Mark], ...]:
    """Returns each step with its bar of a waterfall chart, in percent of the chart's width.

    A bar's label is the share of all added error that the step adds, or takes back.
    """
    parts = [step.noise_share or 0.0 for step in steps]
    ends = list(accumulate(parts, initial=0.0))
    # Without any loss all ends are 0, and the scales would divide by zero.
    low, high, added = min(ends), max(*ends, 1e-9), max(sum(part for part in parts if part > 0), 1e-9)
    scale = 100.0 / (high - low)
    bars: list[tuple[AttributionStep, Mark]] = []
    for step, part, start in zip(steps, parts, ends, strict=False):
        share = f"{abs(part) / added:.0%}"
        bar = Mark(
            x=(min(start, start + part) - low) * scale,
            # A step that changes nothing still needs a visible bar.
            width=max(abs(part) * scale, 0.4),
            kind="gain" if part < 0 else "loss",
            label="-" if step.noise_share is None else f"takes {share} back" if part < 0 else share,
        )
        bars.append((step, bar))
    return tuple(bars)


def place_layers(layers: Sequence[LayerReport], located: Located | None = None) -> Chart:
    """Returns a chart of layers by their SQNR, from 0 to 80 dB; a value that is not finite is drawn at the bottom.

    If there are too many layers, those with the lowest own SQNR are drawn, and others at even distances. The layer
    marked as bad is the one that `located` names, or else the first that stands out.
    """
    max_points = _MAX_LAYERS if located is None else _MAX_LOCATED
    ranked = sorted(range(len(layers)), key=lambda index: _height(layers[index].own_sqnr_db), reverse=True)
    kept = {*ranked[:_WORST_SHOWN], *spread_indices(len(layers), max_points - _WORST_SHOWN)}
    shown = [layers[index] for index in sorted(range(len(layers)) if len(layers) <= max_points else kept)]
    named = None if located is None else next((layer for layer in layers if layer.name == located.layer), None)
    bad = find_first_bad(layers) if located is None else named
    # A single layer is drawn at the left.
    step = (_RIGHT - _LEFT) / max(1, len(shown) - 1)
    xs = [round(_LEFT + index * step, 1) for index in range(len(shown))]
    marks = tuple(
        Mark(
            x=x,
            y=_height(layer.own_sqnr_db),
            radius=6 if layer is bad else 3.5,
            kind="bad" if layer is bad else "",
            title=f"{layer.name} ({layer.op}): {_decibels(layer.sqnr_db)} so far, {_decibels(layer.own_sqnr_db)} own",
        )
        for x, layer in zip(xs, shown, strict=True)
    )
    sofar = " ".join(f"{x},{_height(layer.sqnr_db)}" for x, layer in zip(xs, shown, strict=True))
    grid = tuple((_height(db), str(db)) for db in (0, 20, 40, 60, 80))
    return Chart(marks=marks, lines={"sofar": sofar}, rows=grid, edges=(44, 995, 0, 240), height=240)


def draw_worst(inputs: Samples, report: VerifyReport | ModelComparison) -> tuple[Picture, ...]:
    """Returns the worst sample of each output as an image, if it has one; `inputs` are the samples that ran."""
    if isinstance(report, ModelComparison):
        named = [(output.name, output) for output in report.outputs]
    else:
        each = [(run, output) for run in report.runs for output in run.outputs]
        named = [(f"{output.name} on {run.device}{describe_answers(output)}", output) for run, output in each]
    captions: dict[int, list[str]] = {}
    for caption, output in named:
        if output.worst_sample is not None:
            captions.setdefault(output.worst_sample, []).append(caption)
    chosen = sorted(list(captions)[:_MAX_PICTURES])
    pictures: list[Picture] = []
    for sample, tensors in zip(chosen, select_samples(inputs, chosen), strict=False):
        if (uri := next(filter(None, map(draw_image, tensors.values())), None)) is not None:
            caption = f"sample {sample}: {'; '.join(captions[sample])}"
            pictures.append(Picture(sample=sample, caption=caption, uri=uri))
    return tuple(pictures)


def draw_image(value: Array) -> str | None:
    """Returns a tensor of one image as a data URI, None if it is no image."""
    if value.dtype.kind not in "fiu" or value.ndim != 4 or value.shape[0] != 1 or not np.isfinite(value).all():
        return None
    # NCHW or NHWC; smaller planes are features, not images.
    layouts = (np.moveaxis(value[0], 0, 2), value[0])
    planes = next((each for each in layouts if each.shape[2] in {1, 3} and min(each.shape[:2]) >= 8), None)
    if planes is None:
        return None
    values = planes.astype(np.float64)
    low, high = float(values.min()), float(values.max())
    # How the model's inputs are normalised is unknown, so the values are scaled to the full range.
    shades = ((values - low) * (255.0 / (high - low)) if high > low else values * 0.0).astype(np.uint8)
    image = Image.fromarray(shades if shades.shape[2] == 3 else shades[:, :, 0])
    image.thumbnail((_THUMBNAIL_PX, _THUMBNAIL_PX))
    buffer = BytesIO()
    image.save(buffer, "jpeg", optimize=True, quality=80)
    # The image is embedded in the page, because a report is one file and loads nothing.
    return f"data:image/jpeg;base64,{base64.b64encode(buffer.getvalue()).decode()}"


def describe_answers(output: OutputReport) -> str:
    """Returns the answers of both models in the worst sample, "" if they are not known."""
    if (answers := output.worst_answers) is None:
        return ""
    form = "{value:.4g}" if output.top1_agreement is None else "class {place} ({value:.4g})"
    wanted, got = (form.format(place=side.place, value=side.value) for side in (answers.wanted, answers.got))
    return f": float {wanted}, here {got}"


def _height(db: float | None) -> float:
    share = min(max((db or 0.0) / _MAX_DB, 0.0), 1.0)
    return round(_BOTTOM - share * (_BOTTOM - _TOP), 1)


def _decibels(db: float | None) -> str:
    return "not finite" if db is None else f"{db:.1f} dB"


# 20 dB is an error of a tenth of the signal; 35 dB one of less than a fiftieth.
_GOOD_DB, _BAD_DB, _BEST_DB = 35.0, 20.0, 60.0


def draw_bar(layer: ActivationReport) -> Mark:
    """Returns the bar of an activation, higher (in percent) if the SQNR is lower when it alone is quantized."""
    sqnr_db = _BEST_DB if layer.sqnr_db is None else layer.sqnr_db
    return Mark(
        x=0.0,
        height=round(max(1.0, 100.0 * (1 - max(0.0, min(sqnr_db, _BEST_DB)) / _BEST_DB)), 1),
        # A tensor that alone gives less than 20 dB nearly always costs accuracy; above 35 dB it does not.
        kind="much" if sqnr_db < _BAD_DB else "some" if sqnr_db < _GOOD_DB else "none",
        title=f"{layer.tensor} ({layer.op}): {sqnr_db:.1f} dB, {layer.bits} bits, {layer.low:.4g} to {layer.high:.4g}",
    )


# What the templates may call.
_MODULES = (sys.modules[__name__], checked, tables, text)


_Report = BuildReport | CheckReport | ModelComparison | QuantizeReport | VerifyReport
_PAGES: Mapping[type, str] = {
    BuildReport: "build", ModelComparison: "compare", QuantizeReport: "quantize", VerifyReport: "verify",
}  # fmt: skip
_HEIGHT = 700
_TEXT = "text/plain"


def render_page(
    report: _Report,
    pictures: Sequence[Picture] | Mapping[str, Sequence[Picture]] = (),
    *,
    min_sqnr_db: float | None = None,
) -> str:
    """Returns a report as an HTML page.

    `pictures` are the images of the worst samples, of a build by target. A comparison of two models is judged by
    `min_sqnr_db`, as the command judges it.
    """
    if isinstance(report, CheckReport):
        found = {report.target: CheckedTarget(report=report)}
        recommended = recommend_target({report.target: report}, {})
        summary = CheckSummary(model=report.model, sha256=report.sha256, targets=found, recommended=recommended)
        return render_check(summary)
    name, given = _PAGES[type(report)], pictures or {}
    return make_page(name, *_MODULES, report=report, pictures=given, min_sqnr_db=min_sqnr_db)


class Page(msgspec.Struct, frozen=True, kw_only=True):
    """A report as an HTML page, `height` pixels high in a notebook, which calls `_repr_html_`."""

    page: str
    height: int

    def _repr_html_(self) -> str:
        return frame_page(self.page, self.height)


def frame_page(page: str, height: int) -> str:
    """Returns a page in a frame of this height in pixels."""
    # The sandbox allows scripts only: names in the page come from untrusted models.
    style = f"width: 100%; height: {height}px; border: 0"
    return f'<iframe sandbox="allow-scripts" style="{style}" srcdoc="{html.escape(page)}"></iframe>'


def show(report: _Report, *, height: int = _HEIGHT) -> Page:
    """Returns a report for display in a notebook: the same page as `--html`, in a frame of this height in pixels."""
    return Page(page=render_page(report), height=height)


def draw(report: _Report) -> str:
    """Returns the HTML that a notebook shows for a report at the end of a cell."""
    return frame_page(render_page(report), _HEIGHT)


def show_progress() -> Progress:
    """Returns a function for `progress=` that shows the current step in a notebook, in one line.

    Outside a notebook the function shows nothing.
    """
    if find_module("IPython") is None or importlib.import_module("IPython").get_ipython() is None:
        return say_nothing
    # As plain text: names of tensors and files come from untrusted models.
    line = importlib.import_module("IPython.display").display({_TEXT: ""}, raw=True, display_id=True)
    return lambda step: line.update({_TEXT: escape_controls(step)}, raw=True)
