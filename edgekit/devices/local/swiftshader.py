"""SwiftShader, a Vulkan driver that computes on the CPU: it stands in for the GPU that a machine has not."""

import functools
import sys
from collections.abc import Mapping
from pathlib import Path

# Where Debian's and Ubuntu's Chromium put it, with a Vulkan loader of its own.
_FOLDERS = (Path("/usr/lib/chromium"), Path("/usr/lib/chromium-browser"))
_DRIVER = "vk_swiftshader_icd.json"
_LOADER = "libvulkan.so.1"
_SYSTEMS = tuple(f"{place}/{_LOADER}" for place in ("lib", "lib/*-linux-gnu", "lib64", "local/lib"))


@functools.cache
def find_swiftshader() -> Mapping[str, str]:
    """Returns the environment of WebGPU's provider on SwiftShader; it is empty where there is a GPU, or no driver."""
    if sys.platform != "linux" or any(Path("/dev/dri").glob("renderD*")) or Path("/dev/nvidia0").exists():
        return {}
    folder = next((one for one in _FOLDERS if (one / _DRIVER).is_file()), None)
    if folder is None:
        return {}
    found = {"VK_ICD_FILENAMES": str(folder / _DRIVER), "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1"}
    # Dawn opens the loader by its name alone. Not ctypes.util.find_library: it starts ldconfig, and then a compiler.
    if not any(any(Path("/usr").glob(place)) for place in _SYSTEMS) and (folder / _LOADER).is_file():
        found["LD_LIBRARY_PATH"] = str(folder)
    return found
