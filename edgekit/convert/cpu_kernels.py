"""Which nodes of a quantized model ONNX Runtime's CPU provider runs in integers: asked, not predicted."""

import re

import onnx

from edgekit._files import work_folder
from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.model.model import Model

_INTEGER = re.compile(r"QLinear|QGemm|MatMulInteger|ConvInteger|DynamicQuantize")
_QUANTIZERS = ("QuantizeLinear", "DequantizeLinear")


def find_integer_nodes(model: Model, *, signed: bool) -> dict[str, bool]:
    """Returns for each node that a session still has, but Q and DQ, whether it computes on integers.

    `signed` asks for the kernels of Arm, which take signed activations, instead of those of x64; the same graph is made
    on either. Nodes that only move values are among the first if no DQ makes what they read.

    Raises:
        RuntimeRefusal: ONNX Runtime makes no session of the model.
    """
    settings = SessionSettings(
        level=Level.EXTENDED, config={"session.qdqisint8allowed": "1" if signed else "0"}, threads=1,
        libraries=model.custom_ops,
    )  # fmt: skip
    with work_folder() as work:
        optimize_graph(model.path, work / "optimized.onnx", settings)
        graph = onnx.load(str(work / "optimized.onnx"), load_external_data=False).graph
    makers = {name: node.op_type for node in graph.node for name in node.output}
    return {
        node.name: bool(_INTEGER.match(node.op_type)) or not any(_is_float(name, makers) for name in node.input)
        for node in graph.node
        if node.op_type not in _QUANTIZERS
    }


def _is_float(name: str, makers: dict[str, str]) -> bool:
    return makers.get(name) == "DequantizeLinear"
