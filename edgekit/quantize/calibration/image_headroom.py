"""Headroom for image-to-image networks, whose inputs may be brighter than the samples."""

from collections.abc import Mapping

from edgekit.graph.graph import Graph
from edgekit.model.outputs import StatedOutput
from edgekit.quantize.accuracy.output_kinds import WHITES, may_be_image
from edgekit.quantize.calibration.calibrate import Calibration
from edgekit.quantize.ranges import TensorRange, snap_range

# Samples whose brightest pixel is below 1 / 1.25 of white are not photographs, or have another scale; and widening a
# range by a quarter costs a third of a bit. Chosen by hand: tests/quantize/test_quantize_ranges.py.
_MOST_HEADROOM = 1.25


def makes_images(graph: Graph, outputs: Mapping[str, StatedOutput]) -> bool:
    """Returns True if an output of a graph is stated to be an image, or, if nothing is stated, may be one."""
    return any(_is_image(graph, name, outputs) for name in graph.outputs)


def add_image_headroom(graph: Graph, calibration: Calibration) -> Calibration:
    """Returns a calibration in which the ranges of an image-to-image network leave room for white.

    If the brightest pixel of all samples is 0.9, a white wall would be clipped and come out darker. Activations of such
    a network grow about in proportion to its input, so every range is multiplied by white / (brightest pixel), at most
    1.25, with every range method. This is done if pixels lie between 0 and 1, or 0 and 255, and the brightest one is
    at least white / 1.25.
    """
    seen = calibration.ranges["minmax"]
    fed = [value.name for value in graph.proto.input if _is_image(graph, value.name, {})]
    whites = [white for name in fed for white in _find_white(seen, name)]
    if not makes_images(graph, calibration.outputs) or not whites or len(whites) < len(fed):
        return calibration
    white = max(whites)
    growth = max(1.0, *(white / seen[name].high for name in fed))
    images = {name for name in seen if _holds_pixels(graph, name, seen[name], white, calibration.outputs)}

    def widen(name: str, its: TensorRange) -> TensorRange:
        least = white if name in images else 0.0
        return snap_range(TensorRange(low=its.low * growth, high=max(its.high * growth, least)))

    return calibration.map_ranges(widen)


def _find_white(seen: Mapping[str, TensorRange], name: str) -> list[float]:
    """Returns the value of white in an input; an empty list if its values are not such pixels."""
    its = seen.get(name, TensorRange(low=-1.0, high=0.0))
    return [white for white in WHITES if its.low >= 0 and white / _MOST_HEADROOM <= its.high <= white]


def _holds_pixels(
    graph: Graph, name: str, seen: TensorRange, white: float, outputs: Mapping[str, StatedOutput]
) -> bool:
    """Returns True if a tensor is an input (possibly resized) or output of a graph whose values may be pixels."""
    if name in graph.outputs:
        return _is_image(graph, name, outputs) and white / _MOST_HEADROOM <= seen.high <= _MOST_HEADROOM * white
    while name in graph.producers and graph.producers[name].op_type in {"Resize", "Upsample"}:
        name = graph.producers[name].input[0]
    return name not in graph.producers and _is_image(graph, name, {})


def _is_image(graph: Graph, name: str, outputs: Mapping[str, StatedOutput]) -> bool:
    if name in outputs:
        return outputs[name].kind == "image"
    return graph.is_float(name) and may_be_image(graph.static_shape(name) or ())
