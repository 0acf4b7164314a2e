"""What a package weighs, file by file."""

import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from edgekit.package.variant import Part


def measure_entries(entries: Mapping[str, Path | bytes]) -> dict[str, int]:
    """Returns the bytes of every file, and of what is in an AAR, below `aar/`: an app gets that file by file."""
    sizes: dict[str, int] = {}
    for name, source in sorted(entries.items()):
        if isinstance(source, Path) and name.endswith(".aar"):
            with zipfile.ZipFile(source) as archive:
                sizes |= {f"aar/{entry.filename}": entry.file_size for entry in archive.infolist()}
        else:
            sizes[name] = len(source) if isinstance(source, bytes) else source.stat().st_size
    return sizes


def measure_models(parts: Sequence[Part]) -> int:
    """Returns the bytes of the model files of a package, each content once."""
    return sum({digest: size for part in parts for digest, size in _list_models(part)}.values())


def _list_models(part: Part) -> Iterator[tuple[str, int]]:
    """Yields digest and size of each model file that goes along."""
    files = part.variant.files
    names = {name for names in part.bundle.manifest.forms.values() for name in names}
    yield from ((files[name].sha256, files[name].size_bytes) for name in sorted(names & files.keys()))
