"""Rewrites of a graph, one file a rewrite."""
