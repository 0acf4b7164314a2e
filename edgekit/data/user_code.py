"""Functions of the user's own, named `module:function` on the command line or in a recipe, never by a bundle."""

import importlib
import sys
from collections.abc import Callable
from typing import Any

from edgekit.errors import UsageError, quote_error


def load_function(source: str, what: str) -> Callable[..., Any]:
    """Returns the function that `module:function` names; modules of the working folder are found, after installed ones.

    Raises:
        UsageError: the module cannot be imported, or has no such function; `what` says what it was wanted for.
    """
    module, _, name = source.partition(":")
    if "" not in sys.path:
        sys.path.append("")  # last, so that no file of the working folder stands in for an installed module
    try:
        found: Callable[..., Any] = getattr(importlib.import_module(module), name)
    except Exception as error:  # importing runs the user's own code
        message = f"cannot load {what} '{source}': {quote_error(error)}"
        raise UsageError(message, hint="module:function, importable from here") from error
    return found
