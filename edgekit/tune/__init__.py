"""Searches session settings for a goal: settings race in interleaved rounds, and must prove their gain."""
