"""Rewrites of a graph, by what they are about."""
