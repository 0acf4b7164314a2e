"""The files that devices need: the user's cache, the sources that ship with edgekit, and the files of a model."""

import functools
import os
from collections.abc import Mapping
from pathlib import Path

from edgekit._files import digest_bytes, digest_file
from edgekit.model.model import list_external


def cache_folder() -> Path:
    """Returns `$EDGEKIT_CACHE`, or `edgekit` below `$XDG_CACHE_HOME` or `~/.cache`."""
    if folder := os.environ.get("EDGEKIT_CACHE", ""):
        return Path(folder).absolute()
    return Path(os.environ.get("XDG_CACHE_HOME", "") or Path.home() / ".cache").absolute() / "edgekit"


def find_sources(name: str) -> Path:
    """Returns the folder of C and C++ sources that ship with edgekit; in a checkout that is `tools/NAME`."""
    shipped = Path(__file__).parents[2] / f"_{name}"
    return shipped if shipped.is_dir() else Path(__file__).parents[3] / "tools" / name


def digest_sources(name: str) -> str:
    """Returns the digest of a program's sources: those in its own folder, and those of the runner linked with them."""
    runner = find_sources("runner")
    files = [*runner.rglob("*.cpp"), *runner.rglob("*.h"), *find_sources(name).iterdir()]
    return digest_bytes("\n".join(sorted(f"{path.name} {digest_file(path)}" for path in files)).encode())


def list_model_files(model: Path) -> dict[str, Path]:
    """Returns the model file and its external data files, by their names relative to the model's folder.

    Raises:
        ModelError: the file is no model, or names a file that is missing or outside its folder.
    """
    external = list_external(model) if model.suffix == ".onnx" else ()
    return {name: model.parent / name for name in (model.name, *external)}


def digest_files(files: Mapping[str, Path]) -> str:
    """Returns the sha256 of a set of files: of their names, contents and executable bits."""
    lines = [f"{digest_unchanged(path)} {int(os.access(path, os.X_OK))} {name}" for name, path in sorted(files.items())]
    return digest_bytes("\n".join(lines).encode())


def digest_unchanged(path: Path) -> str:
    """Returns the sha256 of a file; it is read again only if its size or one of its times has changed."""
    facts = path.stat()
    # The ctime also reveals a change after which a program reset the modification time.
    return _digest_known(path, (facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns))


@functools.lru_cache(maxsize=64)
def _digest_known(path: Path, facts: tuple[int, ...]) -> str:  # noqa: ARG001 - part of the key
    return digest_file(path)
