"""How long a model will take on which phone, from what other networks took there."""
