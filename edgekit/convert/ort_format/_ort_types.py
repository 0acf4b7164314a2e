"""The adapter to onnxruntime's tool that finds the types which each kernel needs; nothing else imports it."""

import importlib
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from edgekit.errors import ModelError

_FAILURES = (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError)


def list_type_entries(models: Sequence[Path]) -> dict[tuple[str, str], str]:
    """Returns what a build's config says of an operator's types, as JSON, by domain and operator.

    An operator whose kernel has no code of its own for each type has no entry, and so has one that no node of the files
    is of: what saved optimisations produce is built with all its types.

    Raises:
        ModelError: the tool cannot read a file.
    """
    tool: Any = importlib.import_module("onnxruntime.tools.ort_format_model")
    manager, operators = tool.OperatorTypeUsageManager(), dict[str, dict[int, set[str]]]()
    for model in models:
        try:
            with warnings.catch_warnings():
                # It leaves closing the file to the garbage collector.
                warnings.simplefilter("ignore", ResourceWarning)
                tool.OrtFormatModelProcessor(str(model), operators, manager).process()
        except _FAILURES as error:
            raise ModelError(
                f"ONNX Runtime's tool finds no types in '{model}': {error}", hint="leave --types out"
            ) from error
    found = {(domain, op) for domain, opsets in operators.items() for ops in opsets.values() for op in ops}
    entries = {(domain, op): manager.get_config_entry(domain, op) for domain, op in sorted(found)}
    return {key: entry for key, entry in entries.items() if entry}
