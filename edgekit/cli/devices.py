"""Commands about this machine and its devices: targets, devices, runner and doctor."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import click
import msgspec
from rich.text import Text

from edgekit.cli import options
from edgekit.cli.declare import Answer, Argument, Option, as_command, subcommand
from edgekit.cli.screen import print_table, show_line
from edgekit.devices.device import DeviceStatus
from edgekit.devices.find import default_target, find_device, install_device, list_devices, serve_device
from edgekit.devices.local.provider import OfferedProvider, list_offered
from edgekit.devices.local.runner import ABIS, build_runner, copy_runner, host_abi
from edgekit.devices.remote.examine import examine_phone
from edgekit.devices.remote.remote import AdbDevice, check_address
from edgekit.devices.self_test import try_device
from edgekit.errors import UsageError
from edgekit.jobs.check import list_versions
from edgekit.phones import read_phones
from edgekit.progress import Progress
from edgekit.report.tables import make_table
from edgekit.report.text import color_verdict
from edgekit.target import load_target, target_names


@click.group(invoke_without_command=True)
@click.pass_context
def devices_command(ctx: click.Context) -> None:
    """List, install or test what can run a bundle here.

    \b
    Example:
      edgekit devices install android
    """
    if ctx.invoked_subcommand is None:
        show_devices(list_devices(), list_offered())


@subcommand(devices_command, "list")
def list_command(target: Annotated[str | None, Option("Only those that can run this target.", "NAME")]) -> Answer:
    """List the devices, what they prove, and what they lack here."""
    statuses, offered = list_devices(load_target(target) if target else None), () if target else list_offered()
    return Answer({"devices": statuses, "providers": offered}, lambda: show_devices(statuses, offered))


@subcommand(devices_command, "install")
def install_command(
    name: Annotated[str, Argument()],
    library: Annotated[Path | None, Option("ONNX Runtime for android: an .aar.", "FILE")],
    framework: Annotated[Path | None, Option("ONNX Runtime for ios-sim: an .xcframework.", "FOLDER")],
    progress: Progress,
) -> None:
    """Install what the device NAME needs into your cache."""
    install_device(name, progress, library=library, framework=framework)
    missing = find_device(name, default_target(name)).find_missing()
    show_line(f"'{name}' can run" if missing is None else f"'{name}' is installed, but {missing.reason}")
    # One device serves several targets, of which some need a package more.
    for device, served in serve_device(name) if missing is None else ():
        if other := device.find_missing():
            show_line(f"- not for {served.name}: {other.reason}" + (f"; {other.command}" if other.command else ""))


@subcommand(devices_command, "test")
def test_command(name: Annotated[str, Argument()], progress: Progress) -> Answer:
    """Test each provider of the device NAME: a model with known outputs must pass, and two faulty cases must fail.

    Exit code 0: every check passed. 1: one did not, or the device is not here. 2: there is no such device.
    """
    test = try_device(serve_device(name), progress)

    def show() -> None:
        rows = [(each.name, color_verdict("pass" if each.passed else "fail"), each.detail) for each in test.checks]
        if rows:
            print_table(make_table("check", "result", "what was seen", rows=rows))
        if test.skipped is not None:
            show_line(f"- not tried: {test.skipped}" + (f"; to run it: {test.command}" if test.command else ""))
        show_line(f"{test.device}: {'pass' if test.passed else 'fail'}")

    return Answer(test, show, test.passed)


@as_command
def targets_command(name: Annotated[str | None, Argument()], settings: options.Settings) -> Answer:
    """List the targets, or show the one called NAME with its parameters.

    \b
    Example:
      edgekit targets qnn
    """
    if name is None:
        targets = [load_target(known) for known in target_names()]
        verified = [", ".join(each.device for each in one.verification) for one in targets]
        rows = [(one.name, one.title, one.precision, by) for one, by in zip(targets, verified, strict=True)]
        table = make_table("target", "what it is", "precision", "verified here by", rows=rows)
        return Answer({"targets": targets}, lambda: print_table(table))
    target = load_target(name, settings)

    def show() -> None:
        show_line(f"{target.name}: {target.title}\n{target.precision}: {target.precision_reason}")
        table = make_table("--set", "value", "allowed", "what it is")
        for parameter_name, parameter in target.parameters.items():
            allowed = ", ".join(parameter.choices) or f"{parameter.minimum} to {parameter.maximum}"
            if parameter.names:
                allowed = ", ".join(phone.name for phone in read_phones(target.folder / parameter.names))
            table.add_row(parameter_name, target.settings.get(parameter_name, ""), allowed, parameter.description)
        print_table(table)

    return Answer(target, show)


@click.group
def runner_command() -> None:
    """Build the program that runs a model on a phone or a board.

    \b
    Example:
      edgekit runner build --abi linux-arm64
    """


@subcommand(runner_command, "build")
def build_command(
    abi: Annotated[str | None, Option(f"{', '.join(ABIS)}. Default: this machine's.", "ABI")],
    ndk: Annotated[Path | None, Option("The Android NDK, for Android.", "PATH")],
    library: Annotated[Path | None, Option("ONNX Runtime for Android: its .aar or .so.", "FILE")],
    out: Annotated[Path | None, Option("Copy the runner and its library there.", "DIR")],
    progress: Progress,
) -> Answer:
    """Build the runner for a kind of machine, once; devices find it in your cache.

    \b
    Examples:
      edgekit runner build
      edgekit runner build --abi arm64-v8a --ndk ~/ndk --library onnxruntime-android.aar --out runner
    """
    built = build_runner(abi or host_abi(), progress, ndk=ndk, library=library)
    if out is not None:
        built = copy_runner(built, out)
    size_bytes = built.program.stat().st_size
    line = f"{built.program}: {size_bytes} bytes, for {built.abi}, with {built.library.name}"
    return Answer({"abi": built.abi, "files": built.files, "size_bytes": size_bytes}, lambda: show_line(line))


@as_command
def doctor_command(
    device: Annotated[str | None, Option("Examine a phone: why a session would fail there.", "adb:SERIAL", "--on")],
) -> Answer:
    """Say what this machine, or a phone behind adb, has, what it lacks, and how to get it.

    \b
    Example:
      edgekit doctor
      edgekit doctor --on adb:R5CT1234

    Exit code 0: nothing is known that would refuse a QNN session on the phone. 1: something is. 2: the phone does not
    answer.
    """
    if device is not None:
        kind, _, serial = device.partition(":")
        if kind != "adb":
            raise UsageError(f"'{device}' is no phone behind adb", hint="give adb:SERIAL; adb devices -l lists them")
        report = examine_phone(AdbDevice(serial=serial and check_address("adb", serial)))

        def show_phone() -> None:
            """Prints the facts of the phone, then each finding with its cause and its remedy."""
            facts = msgspec.structs.asdict(report.facts)
            known = (f"{name.replace('_', ' ')} {value}" for name, value in facts.items() if name != "lists" and value)
            show_line(f"{report.device}: {', '.join(known)}")
            for finding in report.findings:
                show_line(f"- {finding.level}: {finding.symptom}: {finding.cause}. What to do: {finding.fix}")
            if not report.findings:
                show_line("- nothing is known that would refuse a session there")

        return Answer(report, show_phone, not any(finding.level == "fault" for finding in report.findings))
    versions, devices, offered = list_versions(), list_devices(), list_offered()

    def show() -> None:
        show_line(", ".join(f"{name} {version}" for name, version in versions.items()))
        show_devices(devices, offered)

    return Answer({"versions": versions, "devices": devices, "providers": offered}, show)


def show_devices(statuses: Sequence[DeviceStatus], offered: Sequence[OfferedProvider]) -> None:
    """Prints devices as a table, and another of the providers that are installed."""
    table = make_table("device", "evidence", "here", "ONNX Runtime", "what it is, or what to do")
    for status in statuses:
        here = Text("ready", "green") if status.available else Text("missing", "yellow")
        versions = [f"{name} {version}" for name, version in status.versions.items() if name != "onnxruntime"]
        about = "; ".join(filter(None, (status.reason, status.command, ", ".join(versions))))
        table.add_row(status.name, status.evidence.value, here, status.versions.get("onnxruntime", "-"), about)
    print_table(table)
    if offered:
        rows = [(it.provider, it.source, it.device or "-", it.failure or ", ".join(it.hardware)) for it in offered]
        print_table(make_table("provider", "from", "--on", "what it finds here, or what it lacks", rows=rows))
