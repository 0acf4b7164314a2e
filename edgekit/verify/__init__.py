"""Verification: compares a bundle's outputs on devices with those of the float model, and judges the difference."""
