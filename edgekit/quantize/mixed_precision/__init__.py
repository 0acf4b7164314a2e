"""Which tensors leave 8 bits, and which range method and rounding are taken."""
