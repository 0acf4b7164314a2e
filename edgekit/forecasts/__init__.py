"""How long a model will take on which phone, estimated from the times of other networks there."""
