"""How far two tensors lie apart, each metric with its formula and interval."""
