"""Examines a phone over adb: its chip, libraries and drivers, and what would prevent a session in an app.

`findings.toml` lists the faults with their symptoms, causes and fixes, `_TOLD_BY` how each is recognised.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec

from edgekit.devices.device import require_device
from edgekit.devices.process.run import last_line
from edgekit.devices.remote.remote import AdbDevice
from edgekit.devices.remote.store import ask
from edgekit.errors import DeviceError
from edgekit.serialize import read_own_toml
from edgekit.target import load_target

Level = Literal["fault", "warning"]

_PROPERTIES = {
    "abi": "ro.product.cpu.abi", "model": "ro.product.model", "android": "ro.build.version.release",
    "api_level": "ro.build.version.sdk", "soc": "ro.soc.model", "maker": "ro.soc.manufacturer",
    "platform": "ro.board.platform",
}  # fmt: skip
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


_TOLD_BY: Mapping[str, Callable[[PhoneFacts], bool]] = {
    "abi": lambda f: f.abi != "arm64-v8a",
    "pages": lambda f: _number(f.page_size) > 4096,
    "chip": lambda f: not _is_qualcomm(f),
    "rpc": lambda f: _is_qualcomm(f) and not f.rpc,
    "rpc-public": lambda f: bool(f.rpc and f.lists) and not f.public,
    "rpc-manifest": lambda f: bool(f.public) and _number(f.api_level) >= 31,
    "rpc-device": lambda f: bool(f.rpc) and not f.rpc_device,
    "old-npu": lambda f: 0 < _number(f.htp) < 68,
    "skel": lambda f: bool(f.htp) and f"V{f.htp}Skel" not in f.skels,
    "nnapi": lambda f: _number(f.api_level) < 27 or not f.nnapi,
    "nnapi-driver": lambda f: bool(f.nnapi) and not f.nnapi_drivers,
}
_FINDINGS = read_own_toml(Path(__file__).parent / "findings.toml", dict[str, tuple[Finding, ...]])["findings"]


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
    found = sorted((each for each in _FINDINGS if _TOLD_BY[each.id](facts)), key=lambda each: each.level != "fault")
    texts = [(each, each.cause.format_map(values), each.fix.format_map(values)) for each in found]
    return tuple(msgspec.structs.replace(each, cause=cause, fix=fix) for each, cause, fix in texts)
