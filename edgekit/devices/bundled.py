"""The job that runs a bundle on a device: the form, the samples and the options that an app would use."""

import msgspec

from edgekit.bundle.folder import Bundle, read_check, read_target
from edgekit.devices.device import Device, Job
from edgekit.devices.labelled import address_of, kind_of
from edgekit.samples import Samples
from edgekit.target import Verification


def plan_run(bundle: Bundle, device: Device, samples: int) -> Verification:
    """Returns what the target's plan says for this device or its kind, else everything an app would load."""
    manifest = bundle.manifest
    planned = {verification.device: verification for verification in manifest.verification}
    plan = planned.get(address_of(device)) or planned.get(kind_of(device))
    plan = plan or Verification(device=device.name, form=manifest.form, samples=samples)
    return msgspec.structs.replace(plan, samples=min(plan.samples, samples))


def make_job(bundle: Bundle, plan: Verification, samples: Samples) -> Job:
    """Returns the job that runs samples on the form that a plan names.

    `bundle` must be a snapshot: its files are what the manifest's digests say.

    Raises:
        BundleError: the bundle lacks that form.
    """
    return Job(
        model=bundle.find_model(plan.form),
        target=read_target(bundle),
        precision=bundle.manifest.precision,
        outputs=bundle.golden.outputs,
        check=read_check(bundle),
        samples=samples,
        digests_hold=True,
    )
