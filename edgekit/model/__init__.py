"""A model file, the facts read from it, and tensors."""
