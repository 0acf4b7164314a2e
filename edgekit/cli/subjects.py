"""Options of bench, profile, tune and verify: the devices, and how a bundle or a model is opened there."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit.bench.subject import Opening
from edgekit.cli.declare import From, Option, number
from edgekit.cli.options import Dims, Freeze, name_values
from edgekit.devices.register import DeviceChoice

SessionTarget = Annotated[
    str | None, Option("Open a model with the session options of this target, or of this machine's (auto).", "NAME")
]
Threads = Annotated[int, number("Threads; 0: ONNX Runtime chooses.", 0, 256, metavar="N", default=0)]
FirstSample = Annotated[str | None, Option("Run the first sample of DATA. Default: a golden or a random one.", "DATA")]


def choose_devices(
    names: Annotated[tuple[str, ...], Option("A device; may be given several times.", "DEVICE", "--on")],
    on_file: Annotated[Path | None, Option("The devices that a devices.toml lists.", "FILE")],
    settings: Annotated[
        dict[str, str], name_values("A setting of the device android, as phone=pixel-6.", "NAME=VALUE", "--set")
    ],
) -> DeviceChoice:
    """Returns the devices that --on, --on-file and --set name."""
    return DeviceChoice(names=names, file=on_file, settings=settings)


Devices = Annotated[DeviceChoice, From(choose_devices)]
Required = Annotated[tuple[str, ...], Option("Like --on, but it is a failure if it cannot run.", "DEVICE", "--require")]


def add_required(choice: DeviceChoice, required: Sequence[str]) -> DeviceChoice:
    """Returns a choice of devices that also names the required ones."""
    return msgspec.structs.replace(choice, names=tuple(dict.fromkeys((*choice.names, *required))))


def choose_opening(target: SessionTarget, dims: Dims, freeze: Freeze, data: FirstSample) -> Opening:
    """Returns how a bundle or a model is opened."""
    return Opening(target=target, data=data, dims=dims, freeze=freeze)


ModelOpening = Annotated[Opening, From(choose_opening)]
