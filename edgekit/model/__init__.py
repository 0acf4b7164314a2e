"""Model files, the facts read from them, and tensors."""
