"""`edgekit devices`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit.cli import options
from edgekit.cli.declare import Argument, Option, subcommand
from edgekit.cli.main import NO, YES
from edgekit.cli.screen import show_json, show_line, showing_progress
from edgekit.cli.terminal import show_devices, show_self_test
from edgekit.devices.find import default_target, find_device, install_device, list_devices, serve_device
from edgekit.devices.local.provider import list_offered
from edgekit.devices.self_test import try_device
from edgekit.target import load_target


@click.group(invoke_without_command=True)
@click.pass_context
def command(ctx: click.Context) -> int:
    """List, install or test what can run a bundle here.

    \b
    Example:
      edgekit devices install android
    """
    if ctx.invoked_subcommand is None:
        show_devices(list_devices(), list_offered())
    return YES


@subcommand(command, "list")
def list_command(
    target: Annotated[str | None, Option("Only those that can run this target.", "NAME")],
    as_json: options.Json,
) -> int:
    """List the devices, what they prove, and what they lack here."""
    statuses, offered = list_devices(load_target(target) if target else None), () if target else list_offered()
    show_json({"devices": statuses, "providers": offered}) if as_json else show_devices(statuses, offered)
    return YES


@subcommand(command, "install")
def install_command(
    name: Annotated[str, Argument()],
    library: Annotated[Path | None, Option("ONNX Runtime for android: an .aar.", "FILE")],
    framework: Annotated[Path | None, Option("ONNX Runtime for ios-sim: an .xcframework.", "FOLDER")],
    volume: options.Volume,
) -> int:
    """Install what the device NAME needs into your cache."""
    with showing_progress(volume) as progress:
        install_device(name, progress, library=library, framework=framework)
    missing = find_device(name, default_target(name)).find_missing()
    show_line(f"'{name}' can run" if missing is None else f"'{name}' is installed, but {missing.reason}")
    return YES


@subcommand(command, "test")
def test_command(
    name: Annotated[str, Argument()],
    as_json: options.Json,
    volume: options.Volume,
) -> int:
    """Try each provider of the device NAME with a model whose outputs are known, and with two on which it must say no.

    Exit code 0: everything went as it must. 1: not so, or the device is not here. 2: there is no such device.
    """
    with showing_progress(volume) as progress:
        test = try_device(serve_device(name), progress)
    show_json(test) if as_json else show_self_test(test)
    return YES if test.passed else NO
