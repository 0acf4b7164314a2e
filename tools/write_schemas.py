"""Writes the JSON Schema of the package anew; a test says when that is due."""

from edgekit._files import write_file
from edgekit.bundle.manifest import SCHEMA_FILE, render_schema

write_file(SCHEMA_FILE, render_schema())
print(f"wrote {SCHEMA_FILE.name}")
