"""Weights alone made smaller: fp16, 8 and 4 bits in blocks."""
