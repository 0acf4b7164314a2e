"""Where the time of a run goes: reads ONNX Runtime's profiler, and compares with what the machine reaches."""
