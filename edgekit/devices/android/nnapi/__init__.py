"""NNAPI: the networks that ONNX Runtime's builder makes, and what computes them."""
