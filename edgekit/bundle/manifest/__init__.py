"""The manifest: its schema, its versions, and the checks on what it names."""
