"""Cross-layer equalization: channels of unequal size evened out between layers."""
