"""Devices behind adb or ssh, and what is stored on them."""
