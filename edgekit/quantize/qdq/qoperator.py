"""The QOperator form of a QDQ model: QLinearConv and its like in place of float nodes between DQ and Q."""

from pathlib import Path

import msgspec
import onnx

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.errors import ModelError
from edgekit.model.model import Model, load_model, read_proto
from edgekit.prepare.tidy import name_nodes, restore_stamps, sort_values

_OTHER_FUSIONS = (
    "AttentionFusion", "BiasDropoutFusion", "BiasGeluFusion", "BiasSoftmaxFusion", "ConvActivationFusion",
    "DynamicQuantizeMatMulFusion", "EmbedLayerNormFusion", "FastGeluFusion", "GatherSliceToSplitFusion",
    "GatherToSliceFusion", "GemmActivationFusion", "GeluApproximation", "GeluFusionL2", "LayerNormFusionL2",
    "MatMulActivationFusion", "MatMulIntegerToFloatFusion", "MatMulScaleFusion", "MatmulTransposeFusion",
    "QuickGeluFusion", "SimplifiedLayerNormFusion", "SkipLayerNormFusion",
)  # fmt: skip
"""What else ONNX Runtime does at its extended level (`graph_transformer_utils.cc`); float nodes are to stay."""


class QOperatorModel(msgspec.Struct, frozen=True, kw_only=True):
    """A model in QOperator form, and how many integer operators it has of each kind."""

    model: Model
    operators: dict[str, int]


def write_qoperator(model: Model, out: Path, cpu: str) -> QOperatorModel:
    """Writes the QOperator form of a prepared QDQ model to `out`, with its scales, zero points and weights unchanged.

    Raises:
        ModelError: no node of the model stands between DQ and Q nodes that ONNX Runtime has an integer operator for.
        RuntimeRefusal: ONNX Runtime cannot load the model.
    """
    settings = SessionSettings(
        level=Level.EXTENDED,
        config={"session.disable_prepacking": "1", "session.qdqisint8allowed": "1" if cpu == "arm" else "0"},
        disabled_optimizers=_OTHER_FUSIONS,
        threads=1,
        libraries=model.custom_ops,
    )
    out.parent.mkdir(parents=True, exist_ok=True)
    optimize_graph(model.path, out, settings)
    proto = onnx.load(str(out))
    name_nodes(proto.graph)
    restore_stamps(proto, read_proto(model, weights=False))
    sort_values(proto.graph)
    counts = dict[str, int]()
    for node in proto.graph.node:
        if node.op_type.startswith("QLinear") or node.op_type in {"QGemm", "MatMulIntegerToFloat"}:
            counts[node.op_type] = counts.get(node.op_type, 0) + 1
    if not counts:
        raise ModelError(
            f"no node of '{model.name}' became an integer operator on {cpu}", hint="give a QDQ model: edgekit quantize"
        )
    out.write_bytes(proto.SerializeToString(deterministic=True))
    written = load_model(out, custom_ops=model.custom_ops)
    return QOperatorModel(model=written, operators=dict(sorted(counts.items())))
