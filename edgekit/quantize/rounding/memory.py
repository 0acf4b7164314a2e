"""What rounding found, kept beside the statistics that it was found from: a layer is rounded once for all targets."""

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from edgekit._files import replacing_file
from edgekit.data.npz import MALFORMED
from edgekit.model.tensors import HEADERS, Array


def recall(statistics: Path, key: str) -> dict[str, Array] | None:
    """Returns the arrays that were kept under a key, None where there are none, or where their file is damaged."""
    path = _locate(statistics, key)
    if not path.is_file():
        return None
    try:
        with HEADERS, path.open("rb") as file, np.load(file, allow_pickle=False) as fields:
            return {name: fields[name] for name in fields.files}
    except MALFORMED:
        # It is rounded again, and the file replaced.
        return None


def remember(statistics: Path, key: str, arrays: Mapping[str, Array]) -> None:
    """Keeps arrays under a key, the digest of all that they depend on beside the statistics.

    Raises:
        OutputError: the folder of statistics cannot be written.
    """
    with replacing_file(_locate(statistics, key)) as temporary, temporary.open("wb") as file:
        # numpy names each array by its keyword.
        np.savez(file, allow_pickle=False, **arrays)


def _locate(statistics: Path, key: str) -> Path:
    return statistics / "rounded" / f"{key}.npz"
