"""Check: predict node by node what a target takes, why it refuses the rest, and what to change."""
