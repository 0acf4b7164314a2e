"""Writes the JSON Schema of the package; a test fails if it is out of date."""

from edgekit._files import write_file
from edgekit.bundle.manifest import SCHEMA_FILE, render_schema

write_file(SCHEMA_FILE, render_schema())
print(f"wrote {SCHEMA_FILE.name}")
