"""Chooses which tensors leave 8 bits, the range method and the rounding."""
