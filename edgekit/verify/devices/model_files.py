"""Every model file of a bundle, opened as an app opens it: by the manifest's provider, options and session keys.

An app may open any file that a bundle ships, not only the one that the manifest names first. Where the device is the
runtime that an app links, a file that it does not open there is not evidence of anything, and should not be shipped.
"""

from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekit.bundle.folder import Bundle
from edgekit.bundle.golden import Golden, read_inputs, read_outputs
from edgekit.data.samples import select_samples, spread_indices
from edgekit.devices.bundled import make_job
from edgekit.devices.device import LEAST_SAMPLES, Device
from edgekit.devices.named import kind_of
from edgekit.devices.placed import count_nodes
from edgekit.devices.recorded import is_recorded
from edgekit.errors import EdgekitError
from edgekit.target import Form, Verification
from edgekit.verify.devices.placement import find_placed
from edgekit.verify.facts import FileReport
from edgekit.verify.metrics.listed import compare_bundled

LINKED_RUNTIMES = frozenset({"android", "ios-sim"})
"""Kinds of devices that are the runtime which an app links."""


def list_other_forms(bundle: Bundle, device: Device, plan: Verification) -> tuple[Form, ...]:
    """Returns the forms that a bundle ships beside that of the plan, where the device can say what becomes of them."""
    is_asked = kind_of(device) in LINKED_RUNTIMES and not is_recorded(device)
    forms = bundle.manifest.forms if is_asked else {}
    return tuple(form for form in forms if form not in {plan.form, "context"})


def try_model_files(
    bundle: Bundle, device: Device, plan: Verification, golden: Golden, work: Path
) -> Iterator[FileReport]:
    """Yields what becomes of each other model file on a device, with the fewest samples that it runs."""
    rows = spread_indices(golden.samples, min(LEAST_SAMPLES, plan.samples))
    samples = select_samples(read_inputs(golden), rows)
    reference = select_samples(read_outputs(golden), rows)
    for form in list_other_forms(bundle, device, plan):
        folder = work / form
        folder.mkdir(parents=True)
        job = make_job(bundle, msgspec.structs.replace(plan, form=form), samples)
        try:
            run = device.run_job(job, folder)
        except EdgekitError as error:
            yield FileReport(file=job.model.name, form=form, failure=error.message)
            continue
        yield FileReport(
            file=job.model.name,
            form=form,
            provider_nodes=count_nodes(run, job),
            placed=find_placed(run, job),
            load_ms=run.load_ms,
            outputs=() if run.failure else compare_bundled(bundle, reference, run.outputs),
            failure=run.failure,
            crashed=run.crashed,
        )
