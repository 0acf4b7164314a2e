"""Runs ONNX Runtime's own library for the iOS simulator on this machine, with its Core ML provider."""
