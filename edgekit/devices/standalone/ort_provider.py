"""Opens a provider of this machine: one that a library adds to ONNX Runtime, or one that is built in and needs others.

It stands beside `ort_runner.py`, which asks it for a job's provider, and alone it says what a provider finds here:
`python ort_provider.py '{"provider": ..., "library": ..., "cpu_vendor": ..., "parts": [...]}'` prints a line of JSON.
"""

import ctypes
import json
import sys
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import onnxruntime

ort: Any = onnxruntime
Json = dict[str, Any]


def main() -> int:
    """Prints the hardware that a provider finds, and why it cannot be used where it cannot."""
    asked = json.loads(sys.argv[1])
    found: Json = {"devices": [], "failure": "", "vendor_claimed": False}
    try:
        if asked["library"]:
            devices, found["vendor_claimed"] = find_devices(asked)
            found["devices"] = [_describe(device) for device in devices]
        else:
            _preload()
            for part in asked["parts"]:
                ctypes.CDLL(str(Path(ort.__file__).parent / "capi" / part))
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base, and each says why
        found["failure"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:400]
    print(json.dumps(found))  # noqa: T201 - the answer
    return 0


def prepare_provider(options: Any, job: Json, providers: list[Any]) -> list[Any] | None:
    """Makes a job's provider known to ONNX Runtime, and returns those that a session is to be given by name.

    They are None where a library brings the provider, which is then in the session's options.

    Raises:
        RuntimeError: the provider finds no hardware of the kind that the job asks for.
    """
    if not job["library"]:
        _preload()
        return providers
    devices, _ = find_devices(job)
    wanted = [device for device in devices if job["hardware"] in {"", _kind(device)}]
    if not wanted:
        found = ", ".join(_kind(device) for device in devices) or "none"
        raise RuntimeError(f"{job['provider']} finds no {job['hardware'] or 'device'} here, but {found}")
    options.add_provider_for_devices(wanted[:1], job["provider_options"])
    return None


def find_devices(job: Json) -> tuple[list[Any], bool]:
    """Returns the devices that a plug-in provider has here, and whether a CPU was claimed to be another vendor's."""
    with _claiming_vendor(job["cpu_vendor"]) as claimed:
        ort.register_execution_provider_library(job["provider"], job["library"])
    return [device for device in ort.get_ep_devices() if device.ep_name == job["provider"]], claimed


@contextmanager
def _claiming_vendor(vendor: int) -> Generator[bool]:
    """Claims that every CPU is of a vendor while a library is asked what it can use; 0 claims nothing.

    OpenVINO's plug-in leaves out CPUs that are not Intel's, though it computes on them (microsoft/onnxruntime#31981).
    ONNX Runtime hands out its own record of each CPU: {kind, vendor, device} in 4 bytes each. Nothing is written
    unless these stand there.
    """
    changed: list[tuple[Any, int]] = []
    cpus = [device.device for device in ort.get_ep_devices() if vendor and _kind(device) == "cpu"]
    for cpu in cpus:
        # What pybind11 keeps behind the head of a Python object: the address of the record.
        address = ctypes.c_void_p.from_address(id(cpu) + 16).value
        if cpu.vendor_id == vendor or not address:
            continue
        record = (ctypes.c_uint32 * 3).from_address(address)
        if list(record) == [int(cpu.type), cpu.vendor_id, cpu.device_id]:
            changed.append((record, cpu.vendor_id))
            record[1] = vendor
    try:
        yield bool(changed)
    finally:
        for record, old in changed:
            record[1] = old


def _preload() -> None:
    """Loads the libraries of CUDA and cuDNN that wheels brought, which the system's loader does not find."""
    if hasattr(ort, "preload_dlls"):
        ort.preload_dlls()


def _kind(device: Any) -> str:
    return str(device.device.type.name).lower()


def _describe(device: Any) -> Json:
    metadata, hardware = dict(device.ep_metadata), device.device
    name = metadata.get("FULL_DEVICE_NAME") or dict(hardware.metadata).get("Description") or hardware.vendor
    return {"kind": _kind(device), "name": str(name), "version": str(metadata.get("version", ""))}


if __name__ == "__main__":
    sys.exit(main())
