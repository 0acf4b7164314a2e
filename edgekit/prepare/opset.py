"""Conversion between opsets.

onnx's converter can lower few operators. Here the opset is also lowered if all operators of the model are the same in
both versions.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import msgspec
import numpy as np
import onnx
from onnx import defs, helper, numpy_helper, shape_inference, version_converter

from edgekit._ort import VERSION
from edgekit.errors import ModelError, UsageError, quote_error
from edgekit.graph.constants import LAYER_NORM_SINCE, ORT_DOMAIN, is_own, list_constants
from edgekit.graph.inference import copy_light, infer_model
from edgekit.model import model as models
from edgekit.model.external import LEAST_BYTES
from edgekit.prepare.external import put_weights


class _Value(NamedTuple):
    kind: str  # as a schema names it, "tensor(float)"
    rank: int | None


def _means_the_same(node: onnx.NodeProto, own: int, opset: int, values: Mapping[str, _Value]) -> bool:
    """Returns True if an operator has the same inputs, outputs and defaults in both opsets, as far as the node uses it.

    An attribute or trailing input that the node does not use makes no difference. The older opset must have the element
    types of the known values.
    """
    if not defs.has(node.op_type, opset):
        return False
    new: Any = defs.get_schema(node.op_type, own)
    old: Any = defs.get_schema(node.op_type, opset)
    if new.since_version == old.since_version:
        return True
    if opset < _CHANGED_SINCE.get(node.op_type, 0) <= own:
        # Before opset 13 the axis of a softmax and all axes behind it were one row: the same if it is the last.
        axis = next((attribute.i for attribute in node.attribute if attribute.name == "axis"), None)
        ranks = {values[name].rank for name in node.input if name in values}
        if axis is None or (axis != -1 and axis + 1 not in ranks):
            return False
    # Most new versions only add element types: so the signatures are compared.
    last = len(old.inputs) - 1
    pairs = [(old.inputs[min(at, last)], name) for at, name in enumerate(node.input) if last >= 0]
    if any(values[name].kind not in formal.types for formal, name in pairs if name in values):
        return False
    if any(formal.option != defs.OpSchema.FormalParameterOption.Optional for formal, name in pairs if not name):
        return False
    names = [formal.name for formal in old.inputs][: len(node.input)]
    if names != [formal.name for formal in new.inputs][: len(node.input)]:
        return False
    before, after = old.attributes, new.attributes
    unused = before.keys() - {attribute.name for attribute in node.attribute}
    same = all(name in after and after[name].default_value == before[name].default_value for name in unused)
    return same and _fits(node, old)


def _fits(node: onnx.NodeProto, schema: Any) -> bool:
    """Returns True if an operator has the attributes of a node, and may have as many inputs and outputs."""
    has_each = all(attribute.name in schema.attributes for attribute in node.attribute)
    return has_each and schema.min_input <= len(node.input) and len(node.output) <= schema.max_output


def _read_values(proto: onnx.ModelProto) -> dict[str, _Value]:
    """Returns the element type and the number of axes of each tensor for which they are known."""
    found = dict[str, tuple[int, int | None]]()
    for graph in models.iterate_graphs(infer_model(proto).graph):
        found |= {tensor.name: (tensor.data_type, len(tensor.dims)) for tensor in graph.initializer}
        for value in (*graph.input, *graph.value_info, *graph.output):
            held = value.type.tensor_type
            if held.elem_type:
                found[value.name] = held.elem_type, len(held.shape.dim) if held.HasField("shape") else None
    spell = onnx.TensorProto.DataType.Name
    return {name: _Value(f"tensor({spell(kind).lower()})", rank) for name, (kind, rank) in found.items()}


MAX_OPSET = models.formats_of(VERSION).opset
"""The newest opset of ai.onnx that this ONNX Runtime supports officially (its own error message says so)."""
MAX_IR_VERSION = models.formats_of(VERSION).ir_version
"""The newest IR version that this ONNX Runtime loads (its own error message says so)."""
OLDEST_OPSET = 13
"""Q and DQ nodes have scales per channel from opset 13 on."""
DEFAULT_OPSET = 17
"""The opset that an older model is raised to: the newest that ONNX Runtime 1.16 and QNN both support fully."""

_FUSED_NORMS = frozenset({"EmbedLayerNormalization", "LayerNormalization", "SkipLayerNormalization"})
# The operators of a LayerNormalization in parts: a division by the root of a variance; tf2onnx gives the variance of
# Keras's layer to a BatchNormalization.
_PARTED_NORMS = (
    [{"Div", "Reciprocal"}, {"Sqrt"}, {"ReduceMean", "ReduceSum"}], [{"BatchNormalization"}, {"ReduceSumSquare"}],
)  # fmt: skip
_ASIDE = "edgekit.aside"
_PORTABLE_IR_VERSION = 9
# The newest element type of that version (onnx.proto's history of IR_VERSION).
_NEWEST_PORTABLE_TYPE = onnx.TensorProto.FLOAT8E5M2FNUZ
_SCAN_SINCE = 9
# Since these opsets a Resize says how positions are mapped, and a Hardmax compares along its axis alone.
_RESIZE_SINCE, _HARDMAX_SINCE = 11, 13
# Since these opsets the same node means something else, and onnx's converter lowers it or its attributes as they are.
_CHANGED_SINCE = {
    **dict.fromkeys(("Hardmax", "LogSoftmax", "Softmax"), _HARDMAX_SINCE),
    "RoiAlign": 16,  # without a mode, positions are shifted by half a pixel
    "GridSample": 20,  # "bilinear" and "bicubic" are "linear" and "cubic"
    "GroupNormalization": 21,  # scale and bias are per channel, before per group
}
_FAILURES = (version_converter.ConvertError, shape_inference.InferenceError, RuntimeError, ValueError)


def read_opset(proto: onnx.ModelProto) -> int:
    """Returns the version of ONNX's own operator set, 1 if the model imports none; `merge_domains` must come before."""
    return max((entry.version for entry in proto.opset_import if not entry.domain), default=1)


def choose_opset(proto: onnx.ModelProto, wanted: int | None) -> int:
    """Returns the opset to convert to: the wanted one, else the model's own or the nearest that edgekit supports.

    An opset below 13 is raised to 17, and so is one below 17 of a model that has the operators of a LayerNormalization
    in parts, or one that ONNX Runtime's optimizers wrote into an older model. One that ONNX Runtime does not have is
    lowered.

    Raises:
        UsageError: ONNX Runtime does not have the wanted opset.
    """
    if wanted is not None and not 1 <= wanted <= MAX_OPSET:
        raise UsageError(f"there is no opset '{wanted}'", hint=f"a whole number from 1 to {MAX_OPSET}")
    own = read_opset(proto)
    if wanted is not None:
        return wanted
    lifted = own < OLDEST_OPSET and any(not node.domain for node in models.iterate_nodes(proto.graph))
    # From opset 17 on, ONNX Runtime fuses the parts, and its optimizers' own operators can be split into ONNX's norm.
    ops = {node.op_type for node in proto.graph.node if node.domain in {"", ORT_DOMAIN}}
    normed = own < LAYER_NORM_SINCE and any(
        all(not each.isdisjoint(ops) for each in parts) for parts in ([_FUSED_NORMS], *_PARTED_NORMS)
    )
    return DEFAULT_OPSET if lifted or normed else min(own, MAX_OPSET)


def convert_opset(proto: onnx.ModelProto, opset: int) -> onnx.ModelProto:
    """Returns the model in another opset; large weights never pass through the converter.

    Raises:
        ModelError: onnx cannot convert an operator of the model, in either direction.
    """
    own = read_opset(proto)
    if own == opset:
        return proto
    # The converter would keep the node, though the meaning of its inputs changed.
    if own < _SCAN_SINCE <= opset and any(node.op_type == "Scan" for node in proto.graph.node):
        words = f"cannot convert opset {own} to {opset}: Scan had a batch axis before opset {_SCAN_SINCE}"
        raise ModelError(words, hint=f"export the model with opset {opset}")
    lowers, wide = opset < own, {onnx.TensorProto.FLOAT16, onnx.TensorProto.DOUBLE}
    if not lowers and models.list_element_types(proto.graph).isdisjoint(wide):
        for part in models.iterate_graphs(proto.graph):
            models.refill(part.node, [new for node in part.node for new in _write_preview(node) or (node,)])
    nodes = [node for node in models.iterate_nodes(proto.graph) if not node.domain]
    read = helper.get_attribute_value
    for node in nodes if lowers else ():
        if defs.has(node.op_type, opset):
            # Attributes that the older opset lacks are dropped where they state the default.
            new: Any = defs.get_schema(node.op_type, own).attributes
            lacking = new.keys() - cast("Any", defs.get_schema(node.op_type, opset)).attributes.keys()
            pairs = [(each, each.name in lacking and new[each.name].default_value) for each in node.attribute]
            kept = [each for each, default in pairs if not default or read(each) != read(default)]
            models.refill(node.attribute, kept)
    # ONNX Runtime's own normalizations in ONNX's domain get another domain, so that the converter leaves them alone.
    # The operators that differ in the older opset or do not exist there, or that onnx does not know at all.
    known = (node for node in nodes if not is_own(node, own))
    values = _read_values(proto) if lowers else {}
    newer = sorted({node.op_type for node in known if not _means_the_same(node, own, min(own, opset), values)})
    if lowers and not newer:
        # No node changes, only the import.
        for entry in proto.opset_import:
            if not entry.domain:
                entry.version = opset
        return proto
    if lowers and not _CHANGED_SINCE.keys().isdisjoint(newer):
        raise _refusal(own, opset, newer)
    light, weights = copy_light(proto, LEAST_BYTES)
    aside = [node for node in models.iterate_nodes(light.graph) if not node.domain and is_own(node, own)]
    for node in aside:
        node.domain = _ASIDE
    light.opset_import.add(domain=_ASIDE, version=1)
    # The converter handles the changed meaning of `axis` for Softmax, but not for Hardmax.
    is_hard = own < _HARDMAX_SINCE <= opset
    hard = {node.name for node in models.iterate_nodes(light.graph) if is_hard and node.op_type == "Hardmax"}
    for node in models.iterate_nodes(light.graph):
        node.op_type = "Softmax" if node.name in hard else node.op_type
    try:
        converted = version_converter.convert_version(light, opset)
    except _FAILURES as error:
        raise _refusal(own, opset, newer, quote_error(error)) from error
    # The converter keeps attributes that the older opset lacks, and a Gemm without its third input.
    lowered = [node for node in models.iterate_nodes(converted.graph) if lowers and not node.domain]
    if not all(_fits(node, defs.get_schema(node.op_type, opset)) for node in lowered):
        raise _refusal(own, opset, newer)
    put_weights(converted.graph, weights)
    models.refill(converted.opset_import, [entry for entry in converted.opset_import if entry.domain != _ASIDE])
    for node in models.iterate_nodes(converted.graph):
        node.domain = "" if node.domain == _ASIDE else node.domain
        node.op_type = "Hardmax" if node.name in hard else node.op_type
    if own < _RESIZE_SINCE <= opset:
        _map_positions(converted.graph)
    return converted


def _refusal(own: int, opset: int, newer: Sequence[str], reason: str = "") -> ModelError:
    reason = f"it uses {', '.join(newer)}" if newer else reason
    strange = ", ".join(name for name in newer if not defs.has(name))
    hint = f"with operators of ONNX, which has no {strange}" if strange else f"with opset {opset}"
    return ModelError(f"cannot convert opset {own} to {opset}: {reason}", hint=f"export the model {hint}")


# ONNX had these as a preview, OnnxMLTools wrote them for Core ML's layers, and only ONNX Runtime's CPU has them still.
_PREVIEW = frozenset({"Affine", "Crop", "ImageScaler"})
_NUMBERS = frozenset({onnx.AttributeProto.FLOAT, onnx.AttributeProto.FLOATS, onnx.AttributeProto.INTS})
_TO_THE_END = np.iinfo(np.int64).max


def _write_preview(node: onnx.NodeProto) -> Sequence[onnx.NodeProto]:
    """Returns the Mul and Add or the Slice for a node of `_PREVIEW`; none for another, or for malformed attributes."""
    is_known = node.op_type in _PREVIEW and not node.domain and len(node.input) == len(node.output) == 1
    if not is_known or any(each.type not in _NUMBERS for each in node.attribute):
        return ()
    given: dict[str, Any] = {each.name: helper.get_attribute_value(each) for each in node.attribute}
    (x,), (y,) = node.input, node.output
    if node.op_type == "Crop":
        # The borders are left, top, right, bottom; the scale is the height and width of what is kept.
        border, size = list(given.get("border", ())), list(given.get("scale", ()))
        if len(border) != 4 or len(size) not in {0, 2} or min(border) < 0:
            return ()
        left, top, right, bottom = border
        ends = [top + size[0], left + size[1]] if size else [-each or _TO_THE_END for each in (bottom, right)]
        return (helper.make_node("Slice", [x], [y], node.name, starts=[top, left], ends=ends, axes=[2, 3]),)
    names = ("alpha", "beta") if node.op_type == "Affine" else ("scale", "bias")
    defaults = zip(names, (1, 0), strict=True)
    factor, shift = (np.asarray(given.get(name, default), np.float32) for name, default in defaults)
    shift = shift.reshape(-1, 1, 1) if shift.ndim else shift
    constants = [
        helper.make_node("Constant", [], [f"{y}/{name}"], value=numpy_helper.from_array(value))
        for name, value in zip(names, (factor, shift), strict=True)
    ]
    scaled = helper.make_node("Mul", [x, f"{y}/{names[0]}"], [f"{y}/scaled"])
    return (*constants, scaled, helper.make_node("Add", [f"{y}/scaled", f"{y}/{names[1]}"], [y], node.name))


def _map_positions(graph: onnx.GraphProto) -> None:
    """Adds the attributes for how positions were mapped before opset 11 to each Resize; the converter does not.

    Positions were divided by the scale, and the nearest was rounded up if all sizes shrink, else down
    (`GetNearestPixel` of ONNX Runtime's `upsamplebase.h`).
    """
    constants = {name: tensor for part in models.iterate_graphs(graph) for name, tensor in list_constants(part).items()}
    for node in (node for node in models.iterate_nodes(graph) if node.op_type == "Resize" and not node.domain):
        scales = constants.get(node.input[2])
        shrinks = scales is not None and bool((numpy_helper.to_array(scales) <= 1).all())
        node.attribute.append(helper.make_attribute("coordinate_transformation_mode", "asymmetric"))
        node.attribute.append(helper.make_attribute("nearest_mode", "ceil" if shrinks else "floor"))


def lower_model(model: models.Model, folder: Path, runtime: str = VERSION) -> models.Model:
    """Returns a model that a version of ONNX Runtime reads: itself, or one of lower IR version and opset in `folder`.

    Raises:
        ModelError: an operator cannot be converted to an opset that this ONNX Runtime reads.
        OutputError: `folder` cannot be written.
    """
    opset, reads = model.opsets.get("ai.onnx", 1), models.formats_of(runtime)
    if model.ir_version <= reads.ir_version and opset <= reads.opset:
        return model
    proto = models.read_proto(model)
    try:
        proto = convert_opset(proto, min(opset, reads.opset))
    except ModelError as error:
        newer = models.find_reader(model.ir_version, opset)
        reader = f"ONNX Runtime {newer} reads it as it is" if newer else "no ONNX Runtime that was tried reads it"
        words = f"'{model.path}' has opset {opset}, and ONNX Runtime {runtime} reads up to {reads.opset}"
        raise ModelError(f"{words}: {error.message}", hint=f"{error.hint}; {reader}") from error
    lower_ir_version(proto, min(opset, reads.opset), reads.ir_version)
    lowered = models.save_proto(proto, folder / model.path.name)
    return msgspec.structs.replace(lowered, name=model.name, custom_ops=model.custom_ops)


def lower_ir_version(proto: onnx.ModelProto, opset: int, newest: int = MAX_IR_VERSION) -> None:
    """Lowers the IR version to 9 if the opset (up to 20) and the element types allow it, in place, for old runtimes.

    It is at most `newest`, which ONNX Runtime reads, and at least 8: version 3 requires initializers among the inputs.
    """
    is_portable = opset <= 20 and max(models.list_element_types(proto.graph), default=0) <= _NEWEST_PORTABLE_TYPE
    if proto.ir_version > _PORTABLE_IR_VERSION and is_portable:
        proto.ir_version = _PORTABLE_IR_VERSION
    proto.ir_version = min(max(proto.ir_version, 8), newest)
