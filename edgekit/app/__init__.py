"""An app's `edgekit.toml`: its models on its targets, built where something changed, verified and packed."""
