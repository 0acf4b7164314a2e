"""Starts a device's process, sends it jobs and tensors, and receives tensors and a report."""
