"""The JSON Schemas that are published with edgekit, made from the values that the code itself reads."""

from collections.abc import Mapping
from pathlib import Path

import msgspec

from edgekit.bundle.manifest.manifest import Manifest, encode_json

_TITLES: Mapping[str, tuple[type, str]] = {
    "manifest.schema.json": (Manifest, "edgekit bundle manifest, schema version 2"),
}
_DIALECT = "https://json-schema.org/draft/2020-12/schema"


def render_schemas() -> dict[str, bytes]:
    """Returns the text of each schema by the name of its file beside this module."""
    return {
        name: encode_json({"$schema": _DIALECT, "title": title, **msgspec.json.schema(kind)})
        for name, (kind, title) in _TITLES.items()
    }


def schema_folder() -> Path:
    """Returns the folder that the schemas are published in."""
    return Path(__file__).parent
