"""Opens a provider of this machine: a plug-in library, or a built-in one that needs other libraries.

`ort_runner.py`, in the same folder, uses it for a job's provider. As a program it prints, as a line of JSON, the
hardware that a provider finds: `python ort_provider.py '{"provider": ..., "library": ..., "cpu_vendor": ..., "parts":
[...]}'`.
"""

import ctypes
import json
import sys
from pathlib import Path
from typing import Any

import onnxruntime

ort: Any = onnxruntime
Json = dict[str, Any]


def main() -> int:
    """Prints the hardware that a provider finds, and why the provider cannot be used, if so."""
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
    except Exception as error:  # noqa: BLE001 - ONNX Runtime's exceptions share no base class; each tells a reason
        found["failure"] = (str(error).strip().splitlines() or [type(error).__name__])[0][:400]
    print(json.dumps(found))  # noqa: T201 - the answer
    return 0


def prepare_provider(options: Any, job: Json, providers: list[Any]) -> list[Any] | None:
    """Registers a job's provider with ONNX Runtime, and returns the providers to pass to the session by name.

    Returns None for a plug-in provider, which is added to the session's options instead.

    Raises:
        RuntimeError: the provider finds no hardware of the kind that the job asks for.
    """
    if not job["library"]:
        _preload()
        return providers
    devices, _ = find_devices(job)
    if not (wanted := [device for device in devices if job["hardware"] in {"", _kind(device)}]):
        found = ", ".join(_kind(device) for device in devices) or "none"
        raise RuntimeError(f"{job['provider']} finds no {job['hardware'] or 'device'} here, but {found}")
    options.add_provider_for_devices(wanted[:1], job["provider_options"])
    return None


def find_devices(job: Json) -> tuple[list[Any], bool]:
    """Returns the devices that a plug-in provider finds here, and whether a CPU was presented as another vendor's.

    While the plug-in enumerates devices, every CPU is presented as one of the job's vendor; 0 changes nothing.
    OpenVINO's plug-in does not list CPUs of other vendors than Intel, although it can compute on them
    (microsoft/onnxruntime#31981). ONNX Runtime exposes its own record of each CPU: {kind, vendor, device}, 4 bytes
    each. The vendor is overwritten only if the memory holds exactly these values.
    """
    vendor, changed = job["cpu_vendor"], list[tuple[Any, int]]()
    for cpu in [device.device for device in ort.get_ep_devices() if vendor and _kind(device) == "cpu"]:
        # pybind11 stores the address of the C++ record after the header of the Python object.
        address = ctypes.c_void_p.from_address(id(cpu) + 16).value
        if cpu.vendor_id == vendor or not address:
            continue
        record = (ctypes.c_uint32 * 3).from_address(address)
        if list(record) == [int(cpu.type), cpu.vendor_id, cpu.device_id]:
            changed.append((record, cpu.vendor_id))
            record[1] = vendor
    try:
        ort.register_execution_provider_library(job["provider"], job["library"])
    finally:
        for record, old in changed:
            record[1] = old
    return [device for device in ort.get_ep_devices() if device.ep_name == job["provider"]], bool(changed)


def _preload() -> None:
    """Loads CUDA and cuDNN libraries from wheels, which the system's loader would not find."""
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
