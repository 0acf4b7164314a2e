"""`edgekit doctor`."""

from typing import Annotated

from edgekit.cli import options
from edgekit.cli.declare import Option, as_command
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import show_json, show_line
from edgekit.cli.terminal import show_devices
from edgekit.devices.find import list_devices
from edgekit.devices.local.provider import list_offered
from edgekit.devices.remote.examine import PhoneReport, examine_phone
from edgekit.devices.remote.remote import AdbDevice, check_address
from edgekit.errors import UsageError
from edgekit.jobs.prepare import list_versions


@as_command
def command(
    device: Annotated[str | None, Option("Examine a phone: what would refuse a session there.", "adb:SERIAL", "--on")],
    as_json: options.Json,
) -> int:
    """Say what this machine, or a phone behind adb, has, what it lacks, and how to get it.

    \b
    Example:
      edgekit doctor
      edgekit doctor --on adb:R5CT1234

    Exit code 0: told, and nothing is known that refuses a session of QNN on the phone. 1: something does. 2: the phone
    does not answer.
    """
    if device is not None:
        kind, _, serial = device.partition(":")
        if kind != "adb":
            raise UsageError(f"'{device}' is no phone behind adb", hint="give adb:SERIAL; adb devices -l lists them")
        report = examine_phone(AdbDevice(serial=serial and check_address("adb", serial)))
        show_json(report) if as_json else _show_phone(report)
        return NO if any(finding.level == "fault" for finding in report.findings) else YES
    versions, devices, offered = list_versions(), list_devices(), list_offered()
    if as_json:
        show_json({"versions": versions, "devices": devices, "providers": offered})
    else:
        show_line(", ".join(f"{name} {version}" for name, version in versions.items()))
        show_devices(devices, offered)
    return YES


def _show_phone(report: PhoneReport) -> None:
    """Prints what a phone is, then each thing that would go wrong there, with its cause and what to do."""
    facts = report.facts
    told = ((name.replace("_", " "), getattr(facts, name)) for name in facts.__struct_fields__ if name != "lists")
    show_line(f"{report.device}: " + ", ".join(f"{name} {value}" for name, value in told if value))
    for finding in report.findings:
        show_line(f"- {finding.level}: {finding.symptom}: {finding.cause}. What to do: {finding.fix}")
    if not report.findings:
        show_line("- nothing is known that would refuse a session there")
