"""Layers by their names in the ML Program of Core ML's provider, as Xcode's performance report shows them."""

import msgspec
import numpy as np

from edgekit.devices.device import Device, Job
from edgekit.devices.ios.ios import NAME
from edgekit.devices.ios.mil.program import Operation
from edgekit.devices.labelled import kind_of
from edgekit.devices.packages import match_operations
from edgekit.errors import EdgekitError
from edgekit.verify.facts import Located


def name_operations(device: Device, job: Job, found: Located) -> Located:
    """Returns what was found of a job's layers with their operations in the ML Program, where the device writes one."""
    if kind_of(device) != NAME:
        return found
    try:
        matched = match_operations(job)
    except (EdgekitError, ValueError) as error:
        note = f"the layers were not matched to Core ML's program: {error}"
        return msgspec.structs.replace(found, notes=(*found.notes, note))
    return msgspec.structs.replace(
        found, operations={name: tuple(map(_describe, operations)) for name, operations in matched.items()}
    )


def _describe(operation: Operation) -> str:
    is_half = any(result.dtype is np.float16 for result in operation.results)
    return f"{operation.kind} '{operation.name}' ({'half' if is_half else 'float'})"
