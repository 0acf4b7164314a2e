"""`edgekit runner`."""

from pathlib import Path
from typing import Annotated

import click

from edgekit.cli import options
from edgekit.cli.declare import Option, subcommand
from edgekit.cli.main import YES
from edgekit.cli.screen import show_json, show_line, showing_progress
from edgekit.devices.local.runner import ABIS, build_runner, copy_runner, host_abi


@click.group
def command() -> None:
    """Build the program that runs a model on a phone or a board.

    \b
    Example:
      edgekit runner build --abi linux-arm64
    """


@subcommand(command, "build")
def build_command(
    abi: Annotated[str | None, Option(f"{', '.join(ABIS)}; this machine's where it is not given.", "ABI")],
    ndk: Annotated[Path | None, Option("The Android NDK, for Android.", "PATH")],
    library: Annotated[Path | None, Option("ONNX Runtime for Android: its .aar or .so.", "FILE")],
    out: Annotated[Path | None, Option("Copy the runner and its library there.", "DIR")],
    as_json: options.Json,
    volume: options.Volume,
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
