"""Reads and computes ML Programs, the models that ONNX Runtime's Core ML provider writes."""
