"""The QOperator form of a QDQ model: QLinearConv and its like in place of float nodes between DQ and Q."""

from collections import Counter
from pathlib import Path

import msgspec
import onnx

from edgekit._ort import Level, SessionSettings, optimize_graph
from edgekit.errors import ModelError
from edgekit.model.model import Model, load_model, read_proto
from edgekit.prepare.tidy import name_nodes, restore_stamps, sort_values

# What else ONNX Runtime does at its extended level (onnxruntime/core/optimizer/graph_transformer_utils.cc).
_OTHER_FUSIONS = (
    "AttentionFusion", "BiasDropoutFusion", "BiasGeluFusion", "BiasSoftmaxFusion", "ConvActivationFusion",
    "DynamicQuantizeMatMulFusion", "EmbedLayerNormFusion", "FastGeluFusion", "GatherSliceToSplitFusion",
    "GatherToSliceFusion", "GemmActivationFusion", "GeluApproximation", "GeluFusionL2", "LayerNormFusionL2",
    "MatMulActivationFusion", "MatMulIntegerToFloatFusion", "MatMulScaleFusion", "MatmulTransposeFusion",
    "QuickGeluFusion", "SimplifiedLayerNormFusion", "SkipLayerNormFusion",
)  # fmt: skip


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
    # Prepacked weights are laid out for this machine's kernels. Where int8 is not allowed, ONNX Runtime makes uint8 of
    # activations (QDQS8ToU8Transformer): an x64's products are of u8 and s8, an Arm's of s8 and s8.
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
    ops = [node.op_type for node in proto.graph.node]
    counts = Counter(op for op in ops if op.startswith("QLinear") or op in {"QGemm", "MatMulIntegerToFloat"})
    if not counts:
        raise ModelError(
            f"no node of '{model.name}' became an integer operator on {cpu}", hint="give a QDQ model: edgekit quantize"
        )
    out.write_bytes(proto.SerializeToString(deterministic=True))
    written = load_model(out, custom_ops=model.custom_ops)
    return QOperatorModel(model=written, operators=dict(sorted(counts.items())))
