"""ONNX Runtime's release binaries for other systems: fetched, and a program of this machine built around each."""
