"""Running a model with its inner tensors as outputs, one sample at a time."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx

from edgekit._ort import CpuSession, Level, SessionSettings, external_config
from edgekit.errors import UsageError
from edgekit.model.model import Model, read_outside
from edgekit.model.tensors import DTYPES, Array, Tensors
from edgekit.verify.matching.match import QUANTIZE, MatchedTensor

ISOLATED_PREFIX = "edgekit.isolated:"

# Several sessions take turns: the threads of those that wait must not keep the cores busy.
_QUIET = {"session.intra_op.allow_spinning": "0"}


def open_traced(model: Model, names: Sequence[str]) -> CpuSession:
    """Returns a session, with every optimisation off, that gives the tensors `names` as outputs."""
    proto = read_outside(model)
    _add_outputs(proto, names)
    return open_proto(proto, model)


def open_isolated(model: Model, matched: Sequence[MatchedTensor], dtypes: Mapping[str, np.dtype[Any]]) -> CpuSession:
    """Returns a session that runs each layer in isolation, on values that are given, not on those of the layer before.

    Each matched tensor becomes an input `ISOLATED_PREFIX` + name, of the type in `dtypes`, which the nodes after it
    read; the Q and DQ nodes that round the tensor itself still belong to the layer that computes it. The outputs are
    the matched tensors as each layer computes them, with all their copies.
    """
    proto = read_outside(model)
    given = {copy: tensor.tensor for tensor in matched for copy in tensor.copies_in_b if tensor.tensor in dtypes}
    rounding = {tensor.raw_b for tensor in matched if tensor.in_b != tensor.raw_b}
    for node in proto.graph.node:
        for place, name in enumerate(node.input):
            if name in given and not (node.op_type == QUANTIZE and name in rounding):
                node.input[place] = ISOLATED_PREFIX + given[name]
    for name in sorted(set(given.values())):
        proto.graph.input.append(
            onnx.helper.make_tensor_value_info(
                ISOLATED_PREFIX + name, onnx.helper.np_dtype_to_tensor_dtype(dtypes[name]), None
            )
        )
    _add_outputs(proto, [copy for tensor in matched for copy in sorted(tensor.copies_in_b)])
    return open_proto(proto, model)


def adapt_sample(sample: Tensors, model: Model) -> dict[str, Array]:
    """Returns the inputs of a model from a sample, with floats cast to the float type that it wants.

    Raises:
        UsageError: the sample lacks an input, or has it in another kind of type.
    """
    adapted: dict[str, Array] = {}
    for spec in model.inputs:
        value = sample.get(spec.name)
        if value is None or (value.dtype.name != spec.dtype and not _both_float(value, spec.dtype)):
            has = ", ".join(f"{name} ({item.dtype})" for name, item in sample.items())
            raise UsageError(f"'{model.path}' wants the input {spec}", hint=f"the samples have: {has}")
        adapted[spec.name] = value if spec.dtype == "string" else value.astype(DTYPES[spec.dtype], copy=False)
    return adapted


def open_proto(proto: onnx.ModelProto, model: Model) -> CpuSession:
    """Returns a session, with every optimisation off, of a graph that was made from a model and shares its weights."""
    config = {**_QUIET, **external_config(model.path.parent)}
    settings = SessionSettings(level=Level.DISABLED, config=config, arena=False, libraries=model.custom_ops)
    return CpuSession(proto.SerializeToString(), settings, subject=str(model.path))


def _both_float(value: Array, dtype: str) -> bool:
    return (value.dtype.kind == "f" and dtype.startswith("float")) or (value.dtype.kind in "UO" and dtype == "string")


def _add_outputs(proto: onnx.ModelProto, names: Sequence[str]) -> None:
    given = {value.name for value in proto.graph.output}
    for name in dict.fromkeys(names):
        if name not in given:
            proto.graph.output.append(onnx.ValueInfoProto(name=name))
