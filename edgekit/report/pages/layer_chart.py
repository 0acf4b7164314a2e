"""The layers of a quantized model as bars: the lower the ratio when one alone is quantized, the higher its bar."""

from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from edgekit.report.summary import ActivationReport

CHART_HEIGHT = 180
BAR_WIDTH = 9
# 20 dB is an error of a tenth of the signal; 35 dB one of less than a fiftieth.
_GOOD_DB, _BAD_DB, _BEST_DB = 35.0, 20.0, 60.0


class Bar(msgspec.Struct, frozen=True, kw_only=True):
    """One layer: where its bar lies in pixels from the upper left corner, how harmful it is, and what to say of it."""

    x: int
    y: int
    height: int
    harm: Literal["none", "some", "much"]
    title: str


def draw_layers(layers: Sequence[ActivationReport]) -> Iterator[Bar]:
    """Yields a bar for each layer whose ratio was measured, in the order of the graph.

    Below 20 dB alone a tensor nearly always costs accuracy, above 35 dB it does not.
    """
    measured = [(layer, layer.sqnr_db) for layer in layers if layer.sqnr_db is not None]
    for index, (layer, ratio) in enumerate(measured):
        span = f"{layer.low:.4g} to {layer.high:.4g}"
        height = round(max(2.0, CHART_HEIGHT * (1 - max(0.0, min(ratio, _BEST_DB)) / _BEST_DB)))
        yield Bar(
            x=index * BAR_WIDTH,
            y=CHART_HEIGHT - height,
            height=height,
            harm="much" if ratio < _BAD_DB else "some" if ratio < _GOOD_DB else "none",
            title=f"{layer.tensor} ({layer.op}): {ratio:.1f} dB, {layer.bits} bits, {span}",
        )
