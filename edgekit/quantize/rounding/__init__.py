"""Weights rounded: bias correction, least squares, GPTQ."""
