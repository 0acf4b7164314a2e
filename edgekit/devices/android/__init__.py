"""Runs ONNX Runtime's own binary for Android on this machine: the file that an app ships, with all its providers."""
