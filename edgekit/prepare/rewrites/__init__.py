"""The rewrites of a graph, in a module for each group of operators."""
