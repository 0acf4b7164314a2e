"""How far two tensors are apart: each metric with its formula and interval."""
