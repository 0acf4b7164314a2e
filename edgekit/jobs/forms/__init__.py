"""A model in the forms that a target loads: halved, converted, and for each of several sizes."""
