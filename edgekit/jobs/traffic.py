"""What QNN's compiler plans for a float model: the bytes that it moves. Nothing runs on a device."""

import time
from collections.abc import Mapping

from edgekit._files import work_folder
from edgekit.convert.context import require_compiler
from edgekit.errors import DeviceError, RuntimeRefusal, UsageError
from edgekit.forecasts.traffic import SOC, Traffic, compile_traffic
from edgekit.graph.graph import Graph
from edgekit.model.model import Model
from edgekit.prepare.clean import prepare_model
from edgekit.report.tables import format_bytes

COMPILE_SECONDS = 180.0
"""How long QNN's compiler may take for a forecast."""
_QUANTIZED = frozenset({"QuantizeLinear", "DequantizeLinear", "QLinearConv", "QLinearMatMul"})


def compile_model(source: Model, graph: Graph, dims: Mapping[str, int]) -> tuple[Traffic | None, str]:
    """Returns what the compiler plans, None where it fails, and a remark on it; `graph` is that of the model.

    Raises:
        UsageError: the model is quantized, of which no plans were learned from.
        MissingExtraError: onnxruntime-qnn is not installed.
    """
    if any(node.op_type in _QUANTIZED for node in graph.nodes):
        raise UsageError(
            f"'{source.name}' is quantized, and --compile was fitted to plans of float models",
            hint="give the float model, or leave --compile out",
        )
    require_compiler()
    began = time.monotonic()
    try:
        with work_folder() as work:
            prepared = prepare_model(source, work / "prepared.onnx", dims)
            found = compile_traffic(prepared.path.name, work, timeout_s=COMPILE_SECONDS)
    except (DeviceError, RuntimeRefusal) as error:
        return None, f"forecast from the graph alone, without a plan: {error}"
    return found, (
        f"QNN's compiler plans {found.operations:,} operations in float for SoC {SOC}, and moves"
        f" {format_bytes(found.dram)} from and to DRAM (compiled in {time.monotonic() - began:.0f} s)"
    )
