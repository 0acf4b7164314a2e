"""Metrics of a task: accuracy, detection, text, sound."""
