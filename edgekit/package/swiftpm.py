"""A Swift package: the bundles as resources, and a loader in Swift."""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from edgekit.bundle.archive import list_files
from edgekit.bundle.manifest.coordinates import SWIFT_PACKAGE
from edgekit.package.tables import render_table
from edgekit.package.variant import Identity, Part, Workplace, list_entries
from edgekit.target import read_version

_SWIFT = Path(__file__).parent / "far" / "swift"
# iOS 15 has Core ML 5; newer ones are asked for by the target's settings.
_OLDEST_IOS = "15"


def collect_swiftpm(parts: Sequence[Part], identity: Identity, _work: Workplace) -> Mapping[str, Path | bytes]:
    """Returns the files of a Swift package: `Package.swift`, sources, and the bundles under `Resources/`."""
    module = "".join(word[:1].upper() + word[1:] for word in re.split(r"[^A-Za-z0-9]+", identity.name))
    variants = [part.variant for part in parts]
    versions = [part.bundle.manifest.settings.get("ios", _OLDEST_IOS) for part in parts]
    values = {
        "identity": identity,
        "module": module,
        # One package has one deployment target: the highest that a bundle in it asks for.
        "minimum_ios": max(versions, key=lambda text: int(text) if text.isdigit() else 0) + ".0",
        "minimum_ort": max((variant.minimum_ort for variant in variants), key=read_version),
        "swift_package": SWIFT_PACKAGE,
    }
    sources = f"Sources/{module}"
    entries: dict[str, Path | bytes] = {f"{sources}/{name}": path for name, path in list_files(_SWIFT).items()}
    entries[f"{sources}/Bundles.swift"] = render_table("Bundles.swift.j2", variants, **values)
    entries["Package.swift"] = render_table("Package.swift.j2", variants, **values)
    entries["README.md"] = render_table("swift.md.j2", variants, **values)
    for part in parts:
        entries.update(list_entries(part, f"{sources}/Resources"))
    return entries
