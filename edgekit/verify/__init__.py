"""Verify: does a bundle give on its devices what the float model gives?"""
