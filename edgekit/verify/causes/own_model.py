"""What the bundle's own model gives on this machine: a device that gives the same is not to blame for it.

A model that clips what lies beyond its calibrated range, or rounds to a coarse grid, may give the same for all samples,
or follow none of them. Held against the float model, an honest device that runs it looks like one that lies.
"""

from collections.abc import Iterator, Sequence

import msgspec

from edgekit._ort import CpuSession
from edgekit.bundle.folder import Bundle
from edgekit.data.samples import Samples
from edgekit.errors import EdgekitError
from edgekit.model.tensors import Tensors
from edgekit.target import Form
from edgekit.verify.causes.forms import TESTED_FORMS, choose_settings
from edgekit.verify.causes.honesty import find_half_values
from edgekit.verify.metrics.dependence import compare_device_outputs
from edgekit.verify.metrics.outputs import OutputReport


def run_own_model(bundle: Bundle, samples: Samples) -> Samples | None:
    """Returns what a bundle's model gives for samples on this machine's CPU, None where no file of it runs here."""
    forms: list[Form] = [form for form in TESTED_FORMS if bundle.manifest.forms.get(form)]
    for form in forms:
        path = bundle.find_model(form)
        try:
            session = CpuSession(path, choose_settings(bundle, form, path))
            return _hold([session.run(sample) for sample in samples])
        except EdgekitError:
            continue
    return None


def _hold(rows: Sequence[Tensors]) -> Samples:
    return Samples(source="the bundle's own model", count=len(rows), read=lambda: iter(rows))


def excuse_outputs(
    outputs: Sequence[OutputReport], got: Samples, bundle: Bundle, samples: Samples
) -> tuple[OutputReport, ...]:
    """Returns reports of what came back for samples without what the bundle's own model explains of it.

    Held against the own model, a device that lies is accused again, and one that runs the model is not. Nothing runs
    where nobody is accused.
    """
    if not any(output.mismatch for output in outputs):
        return tuple(outputs)
    own = run_own_model(bundle, samples)
    if own is None:
        return tuple(outputs)
    again = {output.name for output in compare_device_outputs(own, got) if output.mismatch}
    return tuple(
        output if output.name in again else msgspec.structs.replace(output, mismatch=None) for output in outputs
    )


def describe_excused(before: Sequence[OutputReport], after: Sequence[OutputReport]) -> Iterator[str]:
    """Yields a note for each output that `excuse_outputs` holds the model to account for, not the device."""
    for plain, excused in zip(before, after, strict=True):
        if plain.mismatch and not excused.mismatch:
            yield (
                f"output '{plain.name}' {plain.mismatch}; so it is from the bundle's own model on this machine: what"
                " quantizing clips or rounds away, not the device"
            )


def find_own_half_values(reference: Samples, got: Samples, bundle: Bundle, samples: Samples) -> tuple[str, ...]:
    """Returns the notes of `find_half_values` for outputs that are not of half precision on this machine too."""
    notes = find_half_values(reference, got)
    own = run_own_model(bundle, samples) if notes else None
    excused = () if own is None else find_half_values(reference, own)
    return tuple(note for note in notes if note not in excused)
