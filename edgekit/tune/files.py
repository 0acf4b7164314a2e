"""Opens the model files that are compared, and writes the resulting setting into a bundle."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from edgekit._files import write_file
from edgekit._ort import CPU_PROVIDER
from edgekit.bench.subject import Opening, Subject, open_subject
from edgekit.bundle.checks import check_requests
from edgekit.bundle.folder import MANIFEST, open_bundle
from edgekit.bundle.manifest import TunedSession, encode_json
from edgekit.bundle.multi import INDEX
from edgekit.bundle.sign import SIGNATURE
from edgekit.convert.convert import Source, convert_forms
from edgekit.convert.ort_form import OrtOptions
from edgekit.devices.device import Device, Job, require_device
from edgekit.devices.find import DeviceChoice, choose_devices
from edgekit.devices.local.runner import host_abi
from edgekit.errors import BundleError, EdgekitError, UsageError
from edgekit.model.model import load_model, read_proto

# Models below this size are converted to ORT format in a few seconds; larger ones take long, and hardly load faster.
_MAX_CONVERTED_BYTES = 200_000_000
ORT_FORM = "ORT format"

Opened = Mapping[str, Subject]
"""The opened model files by name; the default one has the name ""."""


def open_files(
    path: Path, work: Path, opening: Opening, candidates: Sequence[Path], choice: DeviceChoice
) -> tuple[Opened, Device, tuple[str, ...]]:
    """Returns all files to compare, the device to run them on, and notes on files that could not be included.

    These are `path` itself, each further form of a bundle, the ORT format of a small model on this CPU, and the
    candidates.

    Raises:
        EdgekitError: the subject, a candidate, the data or the device is wrong.
    """
    first = open_subject(path, work / "default", opening)
    devices = choose_devices(choice, first.target_for, default=(first.default_device,))
    if len(devices) != 1:
        raise UsageError("tune races on one device at a time", hint="give one --on; each device has its own best")
    device = devices[0]
    require_device(device.name, device.find_missing())
    found: dict[str, Subject] = {"": first}
    notes: list[str] = []
    is_host_cpu = first.job_for(device).target.provider == CPU_PROVIDER and device.name.startswith("host")
    if path.is_dir():
        manifest = open_bundle(path).manifest
        for form in manifest.forms:
            # The default is the form of the job: verification may use another form than an app loads.
            if manifest.forms[form][0] != first.job_for(device).model.name:
                found[form] = open_subject(path, work / form, msgspec.structs.replace(opening, form=form))
    elif path.suffix == ".onnx" and is_host_cpu and path.stat().st_size < _MAX_CONVERTED_BYTES:
        try:
            folder = work / "ort"
            # The file is used on this machine only, so it may have the memory layouts of its CPU.
            options = OrtOptions(style="full", cpu="arm" if host_abi() == "linux-arm64" else "x64")
            model = load_model(path)
            source = Source(model=model, origin=model, checked=False)
            converted = convert_forms(model, source, ("full",), {"full": options}, folder)
            found[ORT_FORM] = open_subject(folder / converted.files["full"][0], work / "ort", opening)
        except EdgekitError as error:
            notes.append(f"no {ORT_FORM} in the race: {error.message}")
    for candidate in candidates:
        if candidate.name in found:
            raise UsageError(f"'{candidate.name}' is given twice", hint="name each candidate once")
        found[candidate.name] = open_subject(candidate, work / f"candidate{len(found)}", opening)
    return found, device, tuple(notes)


def has_branches(job: Job) -> bool:
    """Returns True if two nodes of a model could run concurrently, or if that is not known (ORT format)."""
    if job.model.suffix != ".onnx":
        return True
    graph = read_proto(load_model(job.model), weights=False).graph
    depths = {value.name: 0 for value in graph.input}
    constants = {tensor.name for tensor in graph.initializer}
    seen: set[int] = set()
    for node in graph.node:
        reads = [depths[name] for name in node.input if name in depths and name not in constants]
        # Nodes that read only constants are folded when the session is made.
        if not reads:
            continue
        if (depth := max(reads) + 1) in seen:
            return True
        seen.add(depth)
        depths |= dict.fromkeys(node.output, depth)
    return False


def require_bundle(path: Path) -> None:
    """Checks, before anything is measured, that a setting can be written into `path`.

    Raises:
        BundleError: it is no folder with a manifest, or a part of a folder of several targets.
    """
    if not path.is_dir():
        raise BundleError(f"--apply writes into a bundle, and '{path}' is none", hint="build one, or leave --apply out")
    # The index holds the digest of each manifest: changing one would break the whole folder.
    index = next((parent / INDEX for parent in path.resolve().parents[:2] if (parent / INDEX).is_file()), None)
    if index is not None:
        words = f"'{path}' belongs to '{index}'"
        raise BundleError(words, hint="tune the bundle before you join it: edgekit join comes after")


def apply_setting(path: Path, tuned: TunedSession) -> str:
    """Writes a setting into a bundle's manifest, in place of one for the same kind of machine; says what was written.

    Raises:
        BundleError: the bundle is incomplete, or has a setting that a bundle may not request.
        OutputError: the folder cannot be written.
    """
    bundle = open_bundle(path)
    others = [one for one in bundle.manifest.tuned or () if one.machine != tuned.machine]
    # More specific classes first, because the first one that matches is used.
    ordered = sorted((*others, tuned), key=lambda one: (one.machine.system, one.machine.machine, -one.machine.cores))
    manifest, source = msgspec.structs.replace(bundle.manifest, tuned=tuple(ordered)), path / MANIFEST
    check_requests(manifest, str(source))
    signed = (path / SIGNATURE).exists()
    # The signature is removed first: if edgekit is interrupted here, the bundle is unsigned but intact, and never
    # carries a signature of other content.
    (path / SIGNATURE).unlink(missing_ok=True)
    write_file(source, encode_json(manifest))
    unsigned = "; its signature was of the bundle before and is gone: edgekit sign signs it again"
    return f"'{source}'" + (unsigned if signed else "")
