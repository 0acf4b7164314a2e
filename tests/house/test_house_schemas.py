"""The JSON Schema in the package is that of the code."""

from edgekit.bundle.manifest import SCHEMA_FILE, render_schema


def test_the_published_schema_is_current() -> None:
    assert SCHEMA_FILE.read_bytes() == render_schema(), (
        "run .venv/bin/python tools/write_schemas.py, and say in CHANGELOG.md what is new"
    )
