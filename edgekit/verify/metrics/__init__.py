"""Metrics of the difference between the outputs of two runs, each with its formula and interval."""
