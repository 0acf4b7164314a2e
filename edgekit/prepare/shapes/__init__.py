"""Dimensions fixed, derived and inferred."""
