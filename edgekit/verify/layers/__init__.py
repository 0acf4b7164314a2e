"""Compares the layers of two models, and finds the first that is wrong by itself."""
