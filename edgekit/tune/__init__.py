"""Searches session settings for a goal: settings are timed in interleaved rounds, and a gain must be significant."""
