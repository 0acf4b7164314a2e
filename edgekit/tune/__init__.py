"""What a session is told, searched for a goal: races of settings in interleaved rounds, and what they prove."""
