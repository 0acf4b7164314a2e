"""Check: predicts which nodes a target's provider takes, why it refuses the others, and what to change."""
