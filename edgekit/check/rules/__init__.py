"""The kinds of limit a target's rules.toml may name, one function a kind."""
