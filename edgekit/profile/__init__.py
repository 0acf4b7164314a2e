"""Where the time of a run goes: ONNX Runtime's profiler read, and held against what the machine reaches."""
