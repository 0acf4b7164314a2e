"""`edgekit runner`."""

from pathlib import Path

import click

from edgekit.cli import options
from edgekit.cli.main import YES
from edgekit.cli.screen import show_json, show_line, showing_progress
from edgekit.devices.local.runner import ABIS, build_runner, copy_runner, host_abi


@click.group(name="runner", short_help="Build the program that runs a model on a phone or a board.")
def command() -> None:
    """Build the program that runs a model on a phone or a board.

    \b
    Example:
      edgekit runner build --abi linux-arm64
    """


@command.command(name="build")
@click.option("--abi", metavar="ABI", help=f"{', '.join(ABIS)}; this machine's where it is not given.")
@click.option("--ndk", type=click.Path(path_type=Path), metavar="PATH", help="The Android NDK, for Android.")
@click.option(
    "--library", type=click.Path(path_type=Path), metavar="FILE", help="ONNX Runtime for Android: its .aar or .so."
)
@click.option("--out", type=click.Path(path_type=Path), metavar="DIR", help="Copy the runner and its library there.")
@options.JSON
@options.verbosity
def build_command(
    abi: str | None, ndk: Path | None, library: Path | None, out: Path | None, as_json: bool, volume: int
) -> int:
    """Build the runner for a kind of machine, once; devices find it in your cache.

    \b
    Examples:
      edgekit runner build
      edgekit runner build --abi arm64-v8a --ndk ~/ndk --library onnxruntime-android.aar --out runner
    """
    with showing_progress(volume) as progress:
        built = build_runner(abi or host_abi(), progress, ndk=ndk, library=library)
    if out is not None:
        built = copy_runner(built, out)
    size_bytes = built.program.stat().st_size
    if as_json:
        show_json({"abi": built.abi, "files": built.files, "size_bytes": size_bytes})
    else:
        show_line(f"{built.program}: {size_bytes} bytes, for {built.abi}, with {built.library.name}")
    return YES
