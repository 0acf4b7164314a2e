"""Packages for Linux boards: the bundles, and loaders in C++ and Python that open and test them."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit.bundle.archive import list_files
from edgekit.bundle.manifest.manifest import encode_json
from edgekit.package.tables import render_table
from edgekit.package.variant import Identity, Part, Workplace, list_entries

BUNDLES = "bundles"
_FAR = Path(__file__).parent / "far"
GROUP_PROGRAMS = (_FAR / "group" / "edgekit_group.py", _FAR / "python" / "edgekit_loader.py")
"""What runs a group of models in Python: the first as a program, beside the second."""


def collect_board(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a package for a board by name: `bundles/`, `cpp/`, `python/` and a README."""
    entries: dict[str, Path | bytes] = {}
    variants = [part.variant for part in parts]
    for part in parts:
        entries.update(list_entries(part, BUNDLES))
    for language in ("cpp", "python"):
        sources = list_files(_FAR / language)
        entries.update({f"{language}/{name}": path for name, path in sources.items() if "__pycache__" not in name})
    entries["cpp/edgekit_bundles.h"] = render_table("edgekit_bundles.h.j2", variants)
    entries["python/edgekit_bundles.json"] = encode_json([msgspec.to_builtins(variant) for variant in variants])
    entries["README.md"] = render_table("board.md.j2", variants, identity=identity)
    return entries
