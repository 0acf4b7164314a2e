"""Charts of a page: the waterfall of the loss, the layers, and images of samples."""

import base64
from collections.abc import Sequence
from io import BytesIO

import msgspec
import numpy as np
from PIL import Image

from edgekit.data.samples import Samples, select_samples, spread_indices
from edgekit.model.tensors import Array
from edgekit.report.pages import Chart, Mark
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

    A bar's label is the share of all added error that the step adds, or takes back; the added shares sum to 100 %.
    """
    ends, level = [0.0], 0.0
    for step in steps:
        level += step.noise_share or 0.0
        ends.append(level)
    # Without any loss all ends are 0, and the scale would divide by zero.
    low, high = min(ends), max(*ends, 1e-9)
    scale = 100.0 / (high - low)
    bars: list[tuple[AttributionStep, Mark]] = []
    shares = share_out([step.noise_share for step in steps])
    for step, share, start, end in zip(steps, shares, ends, ends[1:], strict=False):
        is_gain = end < start
        bar = Mark(
            x=(min(start, end) - low) * scale,
            # A step that changes nothing still needs a visible bar.
            width=max(abs(end - start) * scale, 0.4),
            kind="gain" if is_gain else "loss",
            label="-" if share is None else f"takes {share}% back" if is_gain else f"{share}%",
        )
        bars.append((step, bar))
    return tuple(bars)


def share_out(parts: Sequence[float | None]) -> list[int | None]:
    """Returns parts as integer percentages of the sum of the positive ones; the positive ones sum to exactly 100."""
    if not (total_gain := sum(part for part in parts if part and part > 0)):
        return [None if part is None else 0 for part in parts]
    exact = [None if part is None else 100 * abs(part) / total_gain for part in parts]
    percents = [None if value is None else int(value) for value in exact]
    positive = [index for index, part in enumerate(parts) if part and part > 0]
    # Largest remainders first (Hamilton's method), so that no share is off by more than one.
    missing = 100 - sum(percents[index] or 0 for index in positive)
    for index in sorted(positive, key=lambda index: (exact[index] or 0) % 1, reverse=True)[:missing]:
        percents[index] = (percents[index] or 0) + 1
    return percents


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
    """Returns a tensor of one image as a data URI (PNG or JPEG, the smaller), None if it is no image."""
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
    uris: list[str] = []
    for image_format in ("png", "jpeg"):
        buffer = BytesIO()
        image.save(buffer, image_format, optimize=True, quality=80)
        # The image is embedded in the page, because a report is one file and loads nothing.
        uris.append(f"data:image/{image_format};base64,{base64.b64encode(buffer.getvalue()).decode()}")
    return min(uris, key=len)


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
