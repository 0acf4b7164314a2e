"""Devices that are reached by adb or ssh, and the files stored on them."""
