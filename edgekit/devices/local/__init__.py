"""Devices on this machine: ONNX Runtime in a child process, our C++ runner, emulated arithmetic."""
