"""Which tensor of one model is which of the other."""
