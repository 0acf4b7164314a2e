"""Examines a phone over adb: its chip, libraries and drivers, and what would prevent a session in an app.

The table `_SIGNS` lists for each fault how it is recognised, its symptom, its cause and its fix.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Literal

import msgspec

from edgekit.devices.device import require_device
from edgekit.devices.process.run import last_line
from edgekit.devices.remote.remote import AdbDevice
from edgekit.devices.remote.store import ask
from edgekit.errors import DeviceError
from edgekit.target import load_target

Level = Literal["fault", "warning"]

_PROPERTIES = {
    "abi": "ro.product.cpu.abi", "model": "ro.product.model", "android": "ro.build.version.release",
    "api_level": "ro.build.version.sdk", "soc": "ro.soc.model", "maker": "ro.soc.manufacturer",
    "platform": "ro.board.platform",
}  # fmt: skip
# Qualcomm's library that reaches the NPU, and Android's list of the vendor libraries that apps may load.
_RPC = "libcdsprpc.so"
_PUBLIC = "/vendor/etc/public.libraries.txt"
_PROBES = Path(__file__).parent / "probes.sh"


class PhoneFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What a phone reports about itself; "" for what it does not report.

    `htp` is the architecture of its NPU, and `soc_model` QNN's number of its chip, if edgekit knows them. `rpc` is the
    path of the library that reaches the NPU, `public` says whether apps may load it, and `rpc_device` is the device
    file that it opens. `skels` are the QNN libraries for the NPU side that are installed, `nnapi_drivers` the vendors'
    NNAPI drivers.
    """

    abi: str = ""
    model: str = ""
    android: str = ""
    api_level: str = ""
    soc: str = ""
    maker: str = ""
    platform: str = ""
    page_size: str = ""
    soc_id: str = ""
    rpc: str = ""
    lists: str = ""
    public: str = ""
    rpc_device: str = ""
    skels: str = ""
    nnapi: str = ""
    nnapi_drivers: str = ""
    soc_model: str = ""
    htp: str = ""


class Finding(msgspec.Struct, frozen=True):
    """A problem that an app would have on the phone: its symptom, cause and fix."""

    id: str
    level: Level
    symptom: str
    cause: str
    fix: str


class PhoneReport(msgspec.Struct, frozen=True, kw_only=True):
    """The result of examining a phone: its facts, and what would prevent a session there."""

    device: str
    facts: PhoneFacts
    findings: tuple[Finding, ...]


def _is_qualcomm(facts: PhoneFacts) -> bool:
    # Old phones do not report the chip's maker; on Qualcomm's, the kernel reports a chip number.
    return facts.maker.upper() in {"QTI", "QUALCOMM"} or (not facts.maker and bool(facts.soc_id))


def _number(text: str) -> int:
    return int(text) if text.isascii() and text.isdigit() and len(text) < 10 else 0


_MANIFEST = f'<uses-native-library android:name="{_RPC}" android:required="false"/>'
_SIGNS: tuple[tuple[Callable[[PhoneFacts], bool], Finding], ...] = (
    (lambda f: f.abi != "arm64-v8a", Finding(
        "abi", "fault", "the app's libraries are not found",
        "its ABI is '{abi}', and the libraries of QNN are for arm64-v8a alone", "build for cpu or xnnpack there",
    )),
    (lambda f: _number(f.page_size) > 4096, Finding(
        "pages", "warning", "a library is refused as it is loaded (dlopen)",
        "its pages have {page_size} bytes, and a library aligned to 4,096 does not fit them",
        "link every library with -Wl,-z,max-page-size=16384, as NDK r28 does by itself",
    )),
    (lambda f: not _is_qualcomm(f), Finding(
        "chip", "fault", "QNN creates no device",
        "its chip is '{soc}' of '{maker}', not Qualcomm's", "use a bundle for nnapi, xnnpack or cpu there",
    )),
    (lambda f: _is_qualcomm(f) and not f.rpc, Finding(
        "rpc", "fault", "QNN creates no device",
        f"{_RPC}, which reaches the NPU, is not there", "the system image lacks it: use xnnpack or cpu there",
    )),
    (lambda f: bool(f.rpc and f.lists) and not f.public, Finding(
        "rpc-public", "fault", "QNN creates no device in an app",
        f"{_PUBLIC} does not list {_RPC}, so that an app may not load it", "use xnnpack or cpu there",
    )),
    (lambda f: bool(f.public) and _number(f.api_level) >= 31, Finding(
        "rpc-manifest", "warning",
        "QNN creates no device in an app, though a program of adb's user reaches the NPU",
        "since Android 12 an app loads a vendor's library only if its manifest asks for it",
        f"in AndroidManifest.xml: {_MANIFEST}",
    )),
    (lambda f: bool(f.rpc) and not f.rpc_device, Finding(
        "rpc-device", "fault", "QNN creates no device",
        "the kernel offers no way to the NPU (/dev/fastrpc-cdsp)", "use xnnpack or cpu there",
    )),
    (lambda f: 0 < _number(f.htp) < 68, Finding(
        "old-npu", "fault", "everything runs on the CPU, and nothing says so",
        "its NPU is v{htp}, and QNN's HTP backend begins with v68", "use xnnpack or cpu there",
    )),
    (lambda f: bool(f.htp) and f"V{f.htp}Skel" not in f.skels, Finding(
        "skel", "warning",
        "QNN creates no device: the skel is not found",
        "libQnnHtpV{htp}Skel.so lies in no folder of the system: an app must bring it",
        "put libQnnHtpV{htp}Skel.so and libQnnHtpV{htp}Stub.so into jniLibs/arm64-v8a, and ADSP_LIBRARY_PATH on it",
    )),
    (lambda f: _number(f.api_level) < 27 or not f.nnapi, Finding(
        "nnapi", "warning", "NNAPI cannot be loaded",
        "Android API {api_level} has no libneuralnetworks.so where apps look", "build for xnnpack or cpu there",
    )),
    (lambda f: bool(f.nnapi) and not f.nnapi_drivers, Finding(
        "nnapi-driver", "warning",
        "NNAPI runs everything on the CPU, and nothing says so",
        "no vendor's driver is registered: nnapi-reference alone is left",
        "use xnnpack there, or refuse the CPU: NNAPI_FLAG_CPU_DISABLED",
    )),
)  # fmt: skip


def examine_phone(phone: AdbDevice) -> PhoneReport:
    """Returns the facts of a phone, and what would prevent a session of an app there.

    Raises:
        DeviceError: adb does not reach it, or it does not answer.
    """
    require_device(phone.name, phone.find_link_fault())
    script = "\n".join(f'echo "{key}=$(getprop {name})"' for key, name in _PROPERTIES.items())
    # The exit code of the last test must not become that of the script.
    facts = read_facts(ask(phone, f"{script}\n{_PROBES.read_text()}\ntrue", step="examining it"))
    if not facts.abi:
        raise DeviceError(f"'{phone.name}' does not tell its ABI", hint="is it an Android? getprop must work there")
    return PhoneReport(device=phone.name, facts=facts, findings=judge_facts(facts))


def read_facts(output: str) -> PhoneFacts:
    """Returns the facts in the script's output, lines of NAME=VALUE; other lines are ignored."""
    known = set(PhoneFacts.__struct_fields__) - {"soc_model", "htp"}
    pairs = (line.partition("=") for line in output.splitlines())
    facts = {name: last_line(value)[:200] for name, _, value in pairs if name in known}
    target = load_target("qnn")
    numbers = {name.casefold(): number for number, name in target.socs.items()}
    soc_model = numbers.get(facts.get("soc", "").casefold(), "")
    htp = target.parameters["soc_model"].implies.get(soc_model, {}).get("htp_arch", "")
    return PhoneFacts(**facts, soc_model=soc_model, htp=htp)


def judge_facts(facts: PhoneFacts) -> tuple[Finding, ...]:
    """Returns the problems of a phone, faults first."""
    values = {name: getattr(facts, name) or "unknown" for name in facts.__struct_fields__}
    found = sorted((sign for matches, sign in _SIGNS if matches(facts)), key=lambda sign: sign.level != "fault")
    texts = [(sign, sign.cause.format_map(values), sign.fix.format_map(values)) for sign in found]
    return tuple(msgspec.structs.replace(sign, cause=cause, fix=fix) for sign, cause, fix in texts)
