"""Groups of models: which output feeds which input, the folder of a group, and weights that are stored once."""
