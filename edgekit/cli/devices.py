"""`edgekit devices`."""

import click

from edgekit.cli import options
from edgekit.cli.main import NO, YES
from edgekit.cli.terminal import show_devices, show_json, show_line, showing_progress
from edgekit.devices.find import install_device, list_devices
from edgekit.target import load_target


@click.group(
    name="devices", short_help="List, install or test what can run a bundle here.", invoke_without_command=True
)
@click.pass_context
def command(ctx: click.Context) -> int:
    """List, install or test what can run a bundle here.

    \b
    Example:
      edgekit devices install xnnpack-wasm
    """
    if ctx.invoked_subcommand is None:
        show_devices(list_devices())
    return YES


@command.command(name="list")
@click.option("--target", metavar="NAME", help="Only those that can run this target.")
@options.JSON
def list_command(target: str | None, as_json: bool) -> int:
    """List the devices, what they prove, and what they lack here."""
    statuses = list_devices(load_target(target) if target else None)
    show_json({"devices": statuses}) if as_json else show_devices(statuses)
    return YES


@command.command(name="install")
@click.argument("name")
@options.verbosity
def install_command(name: str, volume: int) -> int:
    """Install what the device NAME needs into your cache."""
    with showing_progress(volume) as progress:
        install_device(name, progress)
    show_line(f"'{name}' can run")
    return YES


@command.command(name="test")
@click.argument("name")
@options.JSON
def test_command(name: str, as_json: bool) -> int:
    """Say whether the device NAME can run here; exit code 1 if not."""
    statuses = [status for status in list_devices() if status.name == name.partition(":")[0]]
    show_json({"devices": statuses}) if as_json else show_devices(statuses)
    return YES if statuses and all(status.available for status in statuses) else NO
