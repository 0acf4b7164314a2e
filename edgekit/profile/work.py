"""Multiply-accumulates of a kernel that ran, from the types and shapes that the profiler saw.

The graph cannot tell: ONNX Runtime fuses and rewrites nodes, and dynamic shapes are known only here.
"""

from collections.abc import Callable, Mapping
from math import isqrt, prod

from edgekit.profile.events import Step, Tensor

_INTEGERS = frozenset({"uint8", "int8", "uint16", "int16"})
_Counter = Callable[[Step], int]


def count_work(step: Step) -> int:
    """Returns the multiply-accumulates of a kernel, 0 for one that does not multiply or whose shapes say too little."""
    counter = _COUNTERS.get(step.op)
    return counter(step) if counter and step.outputs else 0


def multiplies(step: Step) -> bool:
    """Returns True for a kernel whose work can be counted."""
    return step.op in _COUNTERS


def computes_integers(step: Step) -> bool:
    """Returns True for a kernel that multiplies integers."""
    return bool(step.inputs) and step.inputs[0].dtype in _INTEGERS


def _elements(tensor: Tensor) -> int:
    return prod(tensor.shape)


def _conv(step: Step) -> int:
    # A weight is [M, C/group, kernel...], also where MLAS has reordered it: each number that is made sums over all but
    # its first axis. Scales and zero points are of lower rank.
    weight = next((tensor for tensor in step.inputs[1:] if len(tensor.shape) >= 3), None)
    return 0 if weight is None else _elements(step.outputs[0]) * prod(weight.shape[1:])


def _conv_transpose(step: Step) -> int:
    weight = next((tensor for tensor in step.inputs[1:] if len(tensor.shape) >= 3), None)
    return 0 if weight is None else _elements(step.inputs[0]) * prod(weight.shape[1:])


def _matmul(step: Step) -> int:
    return _elements(step.outputs[0]) * (step.inputs[0].shape or (1,))[-1] if step.inputs else 0


def _gemm(step: Step) -> int:
    # A is [M, K] and B [K, N], each of them perhaps transposed: the product of their sizes is M K N K, and the result
    # has M N.
    matrices = [tensor for tensor in step.inputs if len(tensor.shape) == 2]
    made = _elements(step.outputs[0])
    if len(matrices) < 2 or made == 0:
        return _matmul(step)
    return made * isqrt(_elements(matrices[0]) * _elements(matrices[1]) // made)


def _attention(step: Step) -> int:
    # Queries with keys, and weights with values. Attention of com.microsoft also projects its input [B, S, D] with a
    # weight [D, 3D].
    query = step.inputs[0].shape if step.inputs else ()
    if len(query) < 3:
        return 0
    other = step.inputs[1].shape if len(step.inputs) > 1 else ()
    if len(other) == 2:
        tokens, (depth, width) = prod(query[:-1]), other
        return tokens * depth * width + 2 * tokens * query[-2] * width // 3
    keys = other[-2] if len(other) >= 3 else query[-2]
    return 2 * prod(query) * keys


def _recurrent(step: Step) -> int:
    matrices = [tensor for tensor in step.inputs if len(tensor.shape) == 3]
    # X, W and R of [steps, rows, input], [directions, gates x hidden, input], [directions, gates x hidden, hidden].
    return prod(matrices[0].shape[:2]) * sum(map(_elements, matrices[1:3])) if len(matrices) >= 3 else 0


_COUNTERS: Mapping[str, _Counter] = {
    "Conv": _conv,
    "FusedConv": _conv,
    "NhwcFusedConv": _conv,
    "ConvInteger": _conv,
    "QLinearConv": _conv,
    "ConvTranspose": _conv_transpose,
    "MatMul": _matmul,
    "FusedMatMul": _matmul,
    "MatMulInteger": _matmul,
    "MatMulIntegerToFloat": _matmul,
    "DynamicQuantizeMatMul": _matmul,
    "QLinearMatMul": _matmul,
    "MatMulNBits": _matmul,
    "MatMulFpQ4": _matmul,
    "Gemm": _gemm,
    "FusedGemm": _gemm,
    "QGemm": _gemm,
    "LSTM": _recurrent,
    "GRU": _recurrent,
    "RNN": _recurrent,
    "DynamicQuantizeLSTM": _recurrent,
    "Attention": _attention,
    "QAttention": _attention,
    "MultiHeadAttention": _attention,
}
