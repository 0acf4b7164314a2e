"""Cross-layer equalization: channels of unequal size are scaled between layers."""
