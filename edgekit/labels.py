"""Labels: the class of each sample."""

from pathlib import Path

import numpy as np

from edgekit.errors import DataError
from edgekit.samples import Samples


def read_labels(path: Path, samples: Samples) -> tuple[int, ...]:
    """Returns the class of each sample, from a `.npy` or from a text file with one class a line.

    Raises:
        DataError: the file cannot be read, holds no whole numbers, or has another number of classes than samples.
    """
    try:
        values = np.load(path, allow_pickle=False) if path.suffix == ".npy" else np.loadtxt(path, np.int64, ndmin=1)
    except OSError as error:
        raise DataError(f"cannot read labels '{path}'", hint="give a .npy or one class a line") from error
    except (ValueError, EOFError) as error:
        raise DataError(f"'{path}' holds no labels", hint="give whole numbers, one class a line") from error
    if values.ndim != 1 or values.dtype.kind not in "iu" or len(values) != samples.count:
        raise DataError(
            f"'{path}' has {values.dtype} of shape {list(values.shape)} as labels",
            hint=f"give {samples.count} whole numbers, one a sample of '{samples.source}'",
        )
    return tuple(int(value) for value in values)
