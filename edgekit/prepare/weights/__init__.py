"""Weights kept out of the way of graph optimization: external, stripped, standing in."""
