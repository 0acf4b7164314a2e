"""The JSON Schemas in the package are those of the code."""

from edgekit.bundle.manifest import render_schemas, schema_folder


def test_the_published_schemas_are_current() -> None:
    published = {path.name: path.read_bytes() for path in schema_folder().glob("*.schema.json")}
    assert published == render_schemas(), (
        "run .venv/bin/python tools/write_schemas.py, and say in CHANGELOG.md what is new"
    )
