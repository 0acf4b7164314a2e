"""Models for measuring placement: onnx's node tests and light models, the zoo, and the zoo quantized."""

import contextlib
import logging
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
from onnx import numpy_helper, version_converter
from onnx.backend.test import loader
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize, quantize_static
from onnxruntime.quantization.execution_providers.qnn import get_qnn_qdq_config
from placement_generated import generate_models

ZOO = Path(__file__).parents[2] / "shared/zoo/models"
ort: Any = onnxruntime
MAX_OPSET = 26
SEEDS = range(60)
"""The seeds of the generated models with which the rules were corrected; others are held out."""
QUANTIZED = (
    "mobilenetv2_1.0_224_fp32", "squeezenet1.1_fp32", "vww_96_float", "kws_dscnn_float", "superres_core_224",
    "ultraface_rfb320", "ppocr_cls_mbv3", "fastestdet", "mnist_cnn_pytorch", "light_resnet50", "light_shufflenet",
)  # fmt: skip
SCHEMES = {
    "u8s8": (QuantType.QUInt8, QuantType.QInt8),
    "s8s8": (QuantType.QInt8, QuantType.QInt8),
    "u8u8": (QuantType.QUInt8, QuantType.QUInt8),
}
QNN_SCHEMES = {"qnn8": (QuantType.QUInt8, QuantType.QUInt8), "qnn16": (QuantType.QUInt16, QuantType.QUInt8)}
HEAVY = ("light_vgg19", "light_bvlc_alexnet", "light_zfnet512")


def write_models(sources: list[str], folder: Path, seeds: range = SEEDS) -> Iterator[Path]:
    """Yields the prepared files of each source, without those that ONNX Runtime refuses.

    `seeds` are those of the random models of the source "generated".
    """
    ort.set_default_logger_severity(4)
    logging.disable(logging.WARNING)
    warnings.simplefilter("ignore", RuntimeWarning)
    for source in sources:
        (folder / source).mkdir(parents=True, exist_ok=True)
        for name, proto in _generated_models(folder, seeds) if source == "generated" else _SOURCES[source](folder):
            path = folder / source / f"{name}.onnx"
            if not path.exists():
                with contextlib.suppress(*_REFUSALS):
                    prepare_proto(proto, path)
            if path.exists():
                yield path


def prepare_proto(proto: onnx.ModelProto, path: Path) -> None:
    """Writes the graph that a provider sees: dimensions fixed to 1, basic optimization, a unique name for each node.

    The nodes that a function is expanded to are folded only by a second optimization, as in a session that loads the
    file.
    """
    _fix_inputs(proto)
    for _ in range(2):
        options = ort.SessionOptions()
        options.log_severity_level = 4
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_BASIC
        options.optimized_model_filepath = str(path)
        ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
        proto = onnx.load(str(path))
        _name_nodes(proto)
    onnx.save(proto, str(path))


def _fix_inputs(proto: onnx.ModelProto) -> None:
    constants = {tensor.name for tensor in proto.graph.initializer}
    for value in list(proto.graph.input):
        if value.name in constants:
            proto.graph.input.remove(value)
        for dim in value.type.tensor_type.shape.dim:
            if dim.dim_value <= 0:
                dim.dim_value = 1
    proto.ir_version = min(max(proto.ir_version, 4), 13)
    for entry in proto.opset_import:
        if not entry.domain:
            entry.version = min(entry.version, MAX_OPSET)
    _name_nodes(proto)


def _name_nodes(proto: onnx.ModelProto) -> None:
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"{node.op_type}_{index}"


def _node_tests(folder: Path) -> Iterator[tuple[str, onnx.ModelProto]]:
    """Yields each node test, also with all inputs but the first as constants, and quantized."""
    source = folder / "node" / "_float"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        cases = loader.load_node_model_tests()
    for case in cases:
        if case.model is None or "expanded" in case.name:
            continue
        text = case.model.SerializeToString()
        yield case.name, onnx.ModelProto.FromString(text)
        frozen = onnx.ModelProto.FromString(text)
        if case.data_sets and _freeze_inputs(frozen, case.data_sets[0][0]):
            yield f"{case.name}__const", frozen
        else:
            frozen = onnx.ModelProto.FromString(text)
        with contextlib.suppress(*_REFUSALS):
            prepare_proto(frozen, source)
            for scheme in ("u8s8", "s8s8"):
                with contextlib.suppress(*_REFUSALS):
                    quantized = _quantize(source, scheme, f"{case.name}__{scheme}")
                    # A model without Q is the float model, which was yielded already; an empty one is written already.
                    if not quantized.graph.node or any(
                        node.op_type == "QuantizeLinear" for node in quantized.graph.node
                    ):
                        yield f"{case.name}__{scheme}", quantized
    source.unlink(missing_ok=True)


def _freeze_inputs(proto: onnx.ModelProto, samples: Any) -> bool:
    """Replaces inputs after the first by constants with the test's own values; returns False if none can be."""
    before = len(proto.graph.input)
    for at in range(before - 1, 0, -1):
        sample = samples[at] if at < len(samples) else None
        if isinstance(sample, (list, dict)):
            continue  # a sequence or an optional value cannot be an initializer
        array = numpy_helper.to_array(sample) if isinstance(sample, onnx.TensorProto) else np.asarray(sample)
        value = proto.graph.input[at]
        if array.dtype.kind not in "fiub":
            continue
        tensor = numpy_helper.from_array(array, value.name)
        if tensor.data_type == value.type.tensor_type.elem_type:
            proto.graph.initializer.append(tensor)
            del proto.graph.input[at]
    return len(proto.graph.input) < before


def _real_models(_folder: Path) -> Iterator[tuple[str, onnx.ModelProto]]:
    data = Path(loader.DATA_DIR)
    paths = {path.stem: path for path in (*ZOO.glob("*.onnx"), *data.glob("light/*.onnx")) if path.stem not in HEAVY}
    for kind in ("pytorch-converted", "pytorch-operator", "simple"):
        paths.update({path.parent.name: path for path in (data / kind).glob("*/model.onnx")})
    for name, path in sorted(paths.items()):
        yield name, onnx.load(str(path))


def _quantized_models(folder: Path) -> Iterator[tuple[str, onnx.ModelProto]]:
    real = dict(_real_models(folder))
    for name in QUANTIZED:
        source = folder / "quantized" / f"_{name}"
        if name not in real:
            continue
        with contextlib.suppress(*_REFUSALS):
            prepare_proto(real[name], source)
            opset = next(entry.version for entry in onnx.load(str(source)).opset_import if not entry.domain)
            if opset < 13:
                onnx.save(version_converter.convert_version(onnx.load(str(source)), 17), str(source))
            for scheme in (*SCHEMES, *QNN_SCHEMES):
                with contextlib.suppress(*_REFUSALS):
                    yield f"{name}__{scheme}", _quantize(source, scheme, f"{name}__{scheme}")
        source.unlink(missing_ok=True)


def _quantize(source: Path, scheme: str, name: str) -> onnx.ModelProto:
    """Returns a quantized model, or an empty one if an earlier run wrote it."""
    if source.with_name(f"{name}.onnx").exists():
        return onnx.ModelProto()
    out = source.with_suffix(".q")
    reader = _Noise(onnx.load(str(source), load_external_data=False))
    if scheme in SCHEMES:
        activation, weight = SCHEMES[scheme]
        options: Any = {"activation_type": activation, "weight_type": weight, "quant_format": QuantFormat.QDQ}
        quantize_static(str(source), str(out), reader, per_channel=weight == QuantType.QInt8, **options)
    else:
        activation, weight = QNN_SCHEMES[scheme]
        quantize(
            str(source),
            str(out),
            get_qnn_qdq_config(str(source), reader, activation_type=activation, weight_type=weight),
        )
    proto = onnx.load(str(out))
    out.unlink()
    return proto


class _Noise(CalibrationDataReader):  # type: ignore[misc]  # onnxruntime has no types
    """One random sample: placement does not depend on ranges."""

    def __init__(self, proto: onnx.ModelProto) -> None:
        rng = np.random.default_rng(0)
        constants = {tensor.name for tensor in proto.graph.initializer}
        self._sample: dict[str, Any] | None = {
            value.name: rng.random([dim.dim_value for dim in value.type.tensor_type.shape.dim]).astype(
                onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
            )
            for value in proto.graph.input
            if value.name not in constants
        }

    def get_next(self) -> dict[str, Any] | None:
        """Returns the sample, then None."""
        sample, self._sample = self._sample, None
        return sample


def _generated_models(folder: Path, seeds: range) -> Iterator[tuple[str, onnx.ModelProto]]:
    source = folder / "generated" / "_float"
    for net in generate_models(seeds):
        yield net.name, net.proto
        with contextlib.suppress(*_REFUSALS):
            prepare_proto(net.proto, source)
            for scheme in ("u8s8", "s8s8", "qnn8"):
                with contextlib.suppress(*_REFUSALS):
                    yield f"{net.name}__{scheme}", _quantize(source, scheme, f"{net.name}__{scheme}")
    source.unlink(missing_ok=True)


_SOURCES = {"node": _node_tests, "real": _real_models, "quantized": _quantized_models}
_STATE: Any = ort.capi.onnxruntime_pybind11_state
_REFUSALS = (
    *(cast("type[Exception]", getattr(_STATE, name)) for name in (
        "Fail", "InvalidArgument", "InvalidGraph", "InvalidProtobuf", "NotImplemented", "RuntimeException", "NoModel")),
    AssertionError, ValueError, RuntimeError, TypeError, LookupError, onnx.checker.ValidationError,
)  # fmt: skip
