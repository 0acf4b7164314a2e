"""Static quantization with numpy and ONNX Runtime only: calibrate once, plan for each target, apply the plan."""

from edgekit.quantize.apply import QuantizedModel, quantize_model
from edgekit.quantize.calibration.calibrate import Calibration, calibrate_model
from edgekit.quantize.mixed_precision.auto import plan_quantization
from edgekit.quantize.plan import Candidate, FloatNode, QuantPlan

__all__ = [
    "Calibration",
    "Candidate",
    "FloatNode",
    "QuantPlan",
    "QuantizedModel",
    "calibrate_model",
    "plan_quantization",
    "quantize_model",
]
