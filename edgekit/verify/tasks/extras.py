"""Packages that only some metrics need: they are imported when such a metric is used."""

import importlib
from typing import Any

from edgekit.errors import MissingExtraError

# Packages that are called otherwise than their module.
_PACKAGES = {"sklearn": "scikit-learn"}


def import_extra(module: str, metric: str) -> Any:
    """Returns a module of the extra `metrics`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        wanted = _PACKAGES.get(package, package)
        raise MissingExtraError(f"metric {metric} needs {package}", hint=f"pip install {wanted}") from error
