"""The paths of the demo's model and data."""

from pathlib import Path

import edgekit

DEMO = Path(edgekit.__file__).parent / "demo"
MODEL = DEMO / "digits_mobilenet.onnx"
CALIBRATION = DEMO / "calibration.npz"
EVALUATION = DEMO / "evaluation.npz"
LABELS = DEMO / "evaluation_labels.npy"
