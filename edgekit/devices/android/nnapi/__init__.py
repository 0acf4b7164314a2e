"""NNAPI: the networks that ONNX Runtime's provider builds, and what computes them."""
