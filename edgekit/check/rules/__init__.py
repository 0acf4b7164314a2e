"""The kinds of limit that a target's rules.toml may name, one class a kind."""
