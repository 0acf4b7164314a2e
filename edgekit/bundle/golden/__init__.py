"""Golden vectors: inputs, the float model's outputs, and the outputs recorded on a device."""
