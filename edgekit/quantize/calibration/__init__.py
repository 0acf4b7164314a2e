"""Calibration: passes over samples, statistics, and their cache."""
