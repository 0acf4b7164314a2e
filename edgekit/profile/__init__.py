"""Where the time of a run goes: reads ONNX Runtime's profile, and compares it with the machine's peak rates."""
