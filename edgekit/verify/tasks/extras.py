"""Packages that only some metrics need: they are imported when such a metric is used."""

import importlib
from typing import Any

from edgekit.errors import MissingExtraError


def import_extra(module: str, metric: str) -> Any:
    """Returns a module of the extra `metrics`.

    Raises:
        MissingExtraError: it is not installed.
    """
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise MissingExtraError(f"metric {metric} needs {package}", hint="pip install 'edgekit[metrics]'") from error
