"""Scales that do not fit each other: a bias is stored in steps of its input's scale times its weight's."""

from collections.abc import Iterator

import msgspec
import numpy as np

from edgekit.graph.graph import Node
from edgekit.model.tensors import Array
from edgekit.verify.layers.weights import Initializers
from edgekit.verify.matching.order import DEQUANTIZE

_BIASED = frozenset({"Conv", "ConvTranspose", "Gemm"})
# A product of two float32 scales is exact to 1e-7; a scale that is off by 1 % moves the largest value by 2.5 steps.
_TOLERANCE = 0.01
# Where fewer fit, the quantizer has another rule for biases, and one that does not fit tells nothing.
_MOST_FIT = 0.5


class _Bias(msgspec.Struct, frozen=True, kw_only=True):
    """A node with a quantized bias: the tensor that it reads, and the bias' scale by that of input and weight."""

    node: str
    reads: str
    ratios: Array

    @property
    def fits(self) -> bool:
        """True if no channel is off."""
        return bool(np.all(np.abs(self.ratios - 1.0) <= _TOLERANCE))


def find_mismatched_scales(stored: Initializers) -> dict[str, str]:
    """Returns, by the tensor or else the node that is to blame, which scales of a model do not fit those behind it.

    The scale of a bias is that of the input times that of the weight (ONNX's quantization of QLinearConv: one product
    of integers is one step of the bias). A device adds the integers and does not look at the bias' own scale. Where at
    least half of a model's biases hold to that, one that does not is a scale that was changed: that of the tensor if
    all who read it disagree by one factor, else one of the node's own.
    """
    known = list(_list_biases(stored))
    if not known or sum(bias.fits for bias in known) < _MOST_FIT * len(known):
        return {}
    unfit: dict[str, str] = {}
    readers: dict[str, list[Array]] = {}
    for bias in known:
        readers.setdefault(bias.reads, []).append(bias.ratios)
    for bias in known:
        if not bias.fits:
            alike = readers[bias.reads]
            ratio = float(np.median(bias.ratios))
            is_tensor = all(np.all(np.abs(ratios / ratio - 1.0) <= _TOLERANCE) for ratios in alike)
            words = f"its scale does not fit the bias of '{bias.node}', by a factor of {1.0 / ratio:.3g}"
            own = "the scale of its weight or bias is not what it was"
            unfit[bias.reads if is_tensor else bias.node] = words if is_tensor else own
    return unfit


def _list_biases(stored: Initializers) -> Iterator[_Bias]:
    for node in stored.graph.nodes:
        parts = [stored.rounded.get(name) for name in node.input[:3]]
        if node.op_type not in _BIASED or len(parts) < 3 or any(part is None for part in parts):
            continue
        found, weight, bias = (_read_scale(part, stored) for part in parts if part is not None)
        if found is None or weight is None or bias is None or found.size != 1 or not _is_whole(node):
            continue
        if weight.size not in {1, bias.size} and bias.size != 1:
            continue
        with np.errstate(divide="ignore", invalid="ignore"):
            ratios = np.atleast_1d(bias / (found.reshape(()) * weight))
        yield _Bias(node=node.name, reads=stored.find_source(node.input[0]), ratios=ratios)


def _read_scale(node: Node, stored: Initializers) -> Array | None:
    """Returns the scale of a DQ node, None where it is computed."""
    if node.op_type != DEQUANTIZE or node.input[1] not in stored.tensors:
        return None
    return np.asarray(stored.read(node.input[1]), dtype=np.float64).reshape(-1)


def _is_whole(node: Node) -> bool:
    """Returns True for a node whose product and bias are added as they are."""
    return all(node.attributes.get(name, 1.0) == 1.0 for name in ("alpha", "beta"))
