"""Devices on this machine: ONNX Runtime in a child process, edgekit's C++ runner, emulated CPUs and arithmetic."""
