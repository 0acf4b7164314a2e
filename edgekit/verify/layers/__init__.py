"""Layers of two models compared, and the first bad one named."""
