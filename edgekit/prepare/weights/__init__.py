"""Weights kept out of the way of graph optimization: external, hollowed, standing in."""
