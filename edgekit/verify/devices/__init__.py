"""Layers on a device: cuts, probes, bisection, placement."""
