"""What a model or a bundle holds: its facts, its sizes, and what changed between two of them."""
