"""Writes the JSON Schemas of the package anew; a test says when that is due."""

from edgekit._files import write_file
from edgekit.bundle.manifest import render_schemas, schema_folder

for name, text in render_schemas().items():
    write_file(schema_folder() / name, text)
    print(f"wrote {name}")
