"""What outputs mean, and what quantizing is expected to cost."""
