"""What in a converted file comes from the machine that converted it.

ONNX Runtime on x86-64 and on 64-bit Arm gives the same file for the same model, save in these cases (measured on 108
pairs of files: four kinds of exception).
"""

from collections.abc import Sequence

import onnx

from edgekit.convert.ort_format.report import OrtNode
from edgekit.model.model import iterate_graphs

# What gives the same bits on every machine: moves of data, comparisons, and the arithmetic that IEEE 754 rounds.
_EXACT_OPS = frozenset({
    "Abs", "Add", "And", "ArgMax", "ArgMin", "Cast", "CastLike", "Ceil", "Clip", "Compress", "Concat", "Constant",
    "ConstantOfShape", "DepthToSpace", "DequantizeLinear", "Div", "Equal", "Expand", "EyeLike", "Flatten", "Floor",
    "Gather", "GatherElements", "GatherND", "Greater", "GreaterOrEqual", "Identity", "Less", "LessOrEqual", "Max",
    "Min", "Mul", "Neg", "NonZero", "Not", "OneHot", "Or", "Pad", "QuantizeLinear", "Range", "Reciprocal", "Relu",
    "Reshape", "Round", "Scatter", "ScatterElements", "ScatterND", "Shape", "Sign", "Size", "Slice", "SpaceToDepth",
    "Split", "Sqrt", "Squeeze", "Sub", "Tile", "TopK", "Transpose", "Trilu", "Unsqueeze", "Where", "Xor",
})  # fmt: skip


def find_folded(source: onnx.GraphProto) -> tuple[str, ...]:
    """Returns the operators that compute constants with float kernels whose last bits differ between CPUs, sorted."""
    constants: set[str] = set()
    found: set[str] = set()
    for graph in iterate_graphs(source):
        constants |= {tensor.name for tensor in graph.initializer}
        for node in graph.node:
            if all(name in constants for name in node.input if name) and not node.domain:
                # Whatever follows from constants alone is folded when the file is written, with this CPU's kernels.
                constants |= set(node.output)
                if node.op_type not in _EXACT_OPS and any(node.input):
                    found.add(node.op_type)
    return tuple(sorted(found))


def describe_traits(source: onnx.GraphProto, nodes: Sequence[OrtNode]) -> tuple[str, ...]:
    """Returns a sentence for each reason why another kind of CPU could give other bytes; none if it would not.

    `source` is the model before its constants were folded, `nodes` are those of the converted file.
    """
    ops = {node.op for node in nodes}
    traits: list[str] = []
    if folded := find_folded(source):
        traits.append(f"constants were computed by this CPU's float kernels: {', '.join(folded)}")
    if _has_half(source):
        traits.append("fp16 nodes: which casts are baked in depends on the fp16 kernels of this ONNX Runtime build")
    if any(op.startswith("com.microsoft.nchwc.") for op in ops):
        traits.append("blocked layouts (NCHWc) exist on x64 only")
    if "com.microsoft.NhwcFusedConv" in ops:
        traits.append("NhwcFusedConv is made, and loads, on an Arm CPU with SME only")
    return tuple(traits)


def _has_half(source: onnx.GraphProto) -> bool:
    half = onnx.TensorProto.FLOAT16
    return any(
        any(tensor.data_type == half for tensor in graph.initializer)
        or any(value.type.tensor_type.elem_type == half for value in (*graph.input, *graph.value_info, *graph.output))
        or any(node.op_type == "Cast" and any(item.i == half for item in node.attribute) for node in graph.node)
        for graph in iterate_graphs(source)
    )
