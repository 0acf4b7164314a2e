"""Makes the job that runs a bundle on a device, with the form, samples and options that an app would use.

If the bundle was tuned for the device's kind of machine, the tuned session settings are added to the target's.
"""

import platform
from collections.abc import Mapping

import msgspec
from onnx import TensorProto

from edgekit.bundle.folder import Bundle, read_check, read_target
from edgekit.bundle.manifest import CallSettings, MachineClass, Manifest, SessionSetting
from edgekit.data.samples import Samples
from edgekit.devices.device import LEAST_SAMPLES, Device, Job
from edgekit.devices.find import address_of, is_remote, kind_of
from edgekit.machine import count_cores, may_saturate
from edgekit.model.external import skim_model
from edgekit.target import Form, Verification

# Operators whose output shape depends on values: a quantized model may give another shape than the float model.
_SHAPED_BY_DATA = frozenset({"Compress", "NonMaxSuppression", "NonZero", "Unique"})

# Time limits: of a run of LEAST_SAMPLES samples, and of any run.
_TIMEOUT_S, _MAX_TIMEOUT_S = 300.0, 3600.0

OF_THIS_MACHINE = frozenset({"host", "host:native"})
"""Devices that are this machine itself, not an emulation of another one."""
_X64_HERE = OF_THIS_MACHINE | {"android:x86_64"}


def plan_run(bundle: Bundle, device: Device, samples: int) -> Verification:
    """Returns the target's verification plan for this device or its kind, else a plan with the form that an app loads.

    Emulated arithmetic inserts rounding into the graph, so it needs the ONNX file, whichever form an app loads. So does
    a CPU here that computes products of u8 and s8 exactly for ONNX files only (`EXACT_SUMS`).
    """
    manifest = bundle.manifest
    planned = {verification.device: verification for verification in manifest.verification}
    plan = planned.get(address_of(device)) or planned.get(kind_of(device))
    form: Form = "onnx" if kind_of(device) == "emulated" and "onnx" in manifest.forms else manifest.form
    plan = plan or Verification(device=device.name, form=form, samples=samples)
    if may_saturate() and address_of(device) in _X64_HERE and "onnx" in manifest.forms:
        graph = skim_model(bundle.find_model("onnx")).graph
        stored = {tensor.data_type for tensor in graph.initializer}
        has_u8 = TensorProto.UINT8 in stored or any(node.op_type.startswith("DynamicQuantize") for node in graph.node)
        if has_u8 and TensorProto.INT8 in stored:
            plan = msgspec.structs.replace(plan, form="onnx")
    return msgspec.structs.replace(plan, samples=min(plan.samples, samples))


def make_job(bundle: Bundle, plan: Verification, samples: Samples) -> Job:
    """Returns the job that runs samples on the form that a plan names.

    `bundle` must be a snapshot: its files are what the manifest's digests say.

    Raises:
        BundleError: the bundle lacks that form.
    """
    check = read_check(bundle)
    is_free = any(node.op in _SHAPED_BY_DATA for node in check.node_list)
    # A model that runs step by step is judged on whole sequences: all their steps must run, and the time limit grows
    # with their number.
    min_samples = max(LEAST_SAMPLES, bundle.manifest.steps)
    return Job(
        model=bundle.find_model(plan.form),
        target=read_target(bundle),
        precision=bundle.manifest.precision,
        outputs=tuple(
            msgspec.structs.replace(spec, shape=spec.shape and (None,) * len(spec.shape)) if is_free else spec
            for spec in bundle.golden.outputs
        ),
        check=check,
        samples=samples,
        least_samples=min_samples,
        timeout_s=min(_MAX_TIMEOUT_S, _TIMEOUT_S * min_samples / LEAST_SAMPLES),
        digests_hold=True,
    )


def find_class(device: Device) -> MachineClass | None:
    """Returns the kind of machine of a device that is this machine, None for every other device."""
    if address_of(device) not in OF_THIS_MACHINE:
        return None
    return MachineClass(system=platform.system().lower(), machine=platform.machine().lower(), cores=count_cores())


def read_class(versions: Mapping[str, str]) -> MachineClass | None:
    """Returns the kind of a machine from what its runner reported, such as the system `Linux 6.1.0 aarch64`."""
    words, cores = versions.get("system", "").lower().split(), versions.get("cores", "")
    if len(words) < 2:
        return None
    return MachineClass(system=words[0], machine=words[-1], cores=int(cores) if cores.isdecimal() else 0)


def count_device_cores(device: Device, versions: Mapping[str, str]) -> int:
    """Returns how many cores a device has; for a remote one, the number that it reported, or 0."""
    if not is_remote(device):
        return count_cores()
    kind = read_class(versions)
    return 0 if kind is None else kind.cores


def find_tuned(manifest: Manifest, device: Device) -> SessionSetting | None:
    """Returns the tuned setting of a bundle for a device's kind of machine, None if there is none.

    If the kind is not known, it is the setting that was found on that very device.
    """
    kind, address = find_class(device), address_of(device)
    for tuned in manifest.tuned or ():
        if tuned.machine.holds(kind) if kind else tuned.evidence.device == address:
            return tuned.setting
    return None


def set_job(job: Job, setting: SessionSetting) -> Job:
    """Returns a job whose session has a tuned setting in addition to what its target asks for."""
    target_session = job.target.session
    session = msgspec.structs.replace(
        target_session,
        config={**target_session.config, **setting.config},
        provider_options={**target_session.provider_options, **setting.provider_options},
        # Devices of these systems pass the system's own options, so the tuned ones must be added there too.
        platforms={
            name: msgspec.structs.replace(
                platform, provider_options={**platform.provider_options, **setting.provider_options}
            )
            for name, platform in target_session.platforms.items()
        },
    )
    return msgspec.structs.replace(
        job,
        target=msgspec.structs.replace(job.target, session=session),
        chosen=frozenset(setting.provider_options),
        **{name: getattr(setting, name) for name in CallSettings.__struct_fields__},
    )
