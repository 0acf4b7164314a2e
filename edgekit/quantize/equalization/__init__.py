"""Cross-layer equalization: unequal channels scaled between layers."""
