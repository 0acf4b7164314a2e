"""`edgekit doctor`."""

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.screen import show_json, show_line
from edgekit.cli.terminal import show_devices
from edgekit.devices.find import list_devices
from edgekit.devices.local.provider import list_offered
from edgekit.jobs.prepare import list_versions


@click.command(short_help="Say what this machine has, what it lacks, and how to get it.")
@options.JSON
def command(as_json: bool) -> int:
    """Say what this machine has, what it lacks, and how to get it.

    \b
    Example:
      edgekit doctor
    """
    versions, devices, offered = list_versions(), list_devices(), list_offered()
    if as_json:
        show_json({"versions": versions, "devices": devices, "providers": offered})
    else:
        show_line(", ".join(f"{name} {version}" for name, version in versions.items()))
        show_devices(devices, offered)
    return YES
