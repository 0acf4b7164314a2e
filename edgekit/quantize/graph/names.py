"""Name collisions: names that a model gives to its tensors and that quantizing or measuring it would give to others."""

import re

import onnx

from edgekit.errors import ModelError
from edgekit.model.model import list_names, rename_tensors

# What ONNX Runtime's quantizer puts behind the name of a tensor (onnxruntime/quantization/quant_utils.py). Where a name
# is taken it adds nothing (ONNXModel.add_initializer): a model's own `x_scale` would be read as the scale of `x`.
_ORT_SUFFIX = re.compile(r"_(scale|zero_point|quantized|convert|QuantizeLinear|DequantizeLinear)(_|$)")
_OURS = "edgekit."  # what calibration's own tensors begin with


def avoid_name_collisions(proto: onnx.ModelProto, subject: str) -> None:
    """Renames inner tensors whose names would be given to others, in place: `x_scale` where there is an `x`.

    Inputs and outputs keep their names; then the other of the two tensors gets a new one.

    Raises:
        ModelError: both are inputs or outputs.
    """
    names = list_names(proto.graph)
    kept = {value.name for value in (*proto.graph.input, *proto.graph.output)}
    renamed: dict[str, str] = {}
    for name in sorted(names):
        stem = next(
            (name[: match.start()] for match in _ORT_SUFFIX.finditer(name) if name[: match.start()] in names), None
        )
        if stem is None and not name.startswith(_OURS):
            continue
        other = next((each for each in (name, stem) if each is not None and each not in kept), None)
        if other is None:
            raise ModelError(
                f"quantizing '{subject}' would give the name of '{name}' to what it makes of '{stem or name}'",
                hint=f"rename it: edgekit prepare MODEL --rename {name}=NEW --out FILE",
            )
        renamed.setdefault(other, _free_name(other, names))
    if renamed:
        rename_tensors(proto.graph, renamed)


def _free_name(name: str, names: set[str]) -> str:
    new = f"own.{name}" if name.startswith(_OURS) else f"{name}.own"
    while new in names:
        new += ".own"
    return new
