"""An app's `edgekit.toml`: builds, verifies and packs its models for its targets, where something changed."""
