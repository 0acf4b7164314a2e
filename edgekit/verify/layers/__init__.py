"""Compares the layers of two models, and names the first bad one."""
