"""The table of the corpus, nets.toml, as values, and the folders of the networks."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import msgspec
import numpy as np

from edgekit.machine import cache_folder
from edgekit.model.tensors import Array

Answers = Literal["classes", "values", "vector", "map", "sequence", "boxes"]
Exporter = Literal["dynamo", "torchscript"]
CORPUS = cache_folder() / "corpus"
NETS = CORPUS / "nets"
PHOTOS = CORPUS / "photos"


class Spec(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An architecture, its maker, and the purpose of its one output; `options` go to its maker.

    `field` is the output to use if there are several. `side` is that of an image in pixels.
    """

    model: str
    library: str = ""
    input: str = "image"
    answers: Answers = "classes"
    field: str = ""
    side: int = 64
    options: Mapping[str, Any] = {}
    exporters: Sequence[Exporter] = ("dynamo", "torchscript")
    held_out: bool = False

    @property
    def name(self) -> str:
        """The name of its folder, without the exporter's."""
        return f"{self.library}-{self.model.removesuffix('.yaml')}".lower()

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one sample."""
        return {
            "image": (1, 3, self.side, self.side), "tokens": (1, 32), "sound": (1, 4000), "spectrum": (1, 64, 64)
        }[self.input]  # fmt: skip


class Packaged(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A trained network inside a package of PyPI, or of npm (`npm:NAME==VERSION`), whose file is `member`.

    Samples of `kind` and `shape` go to `input`: `scale` times the values from DRAWS, plus `shift`. The `others`, such
    as a state, are zero; frozen inputs are constants of the build.
    """

    name: str
    package: str
    member: str
    answers: Answers
    input: str
    kind: str
    shape: tuple[int, ...]
    scale: float = 1.0
    shift: float = 0.0
    channels_last: bool = False
    dims: Mapping[str, int] = {}
    freeze: Mapping[str, float] = {}
    others: Mapping[str, tuple[int, ...]] = {}
    held_out: bool = False

    def fit(self, values: Array) -> Array:
        """Returns random values, scaled as this network needs them."""
        if values.dtype == np.float32:
            values = np.asarray(values * self.scale + self.shift, np.float32)
        return np.moveaxis(values, -3, -1) if self.channels_last else values


class Net(msgspec.Struct, frozen=True, kw_only=True):
    """A network of the corpus: its folder holds model.onnx, calib.npz, eval.npz and held.npz."""

    name: str
    folder: Path
    answers: Answers
    held_out: bool = False
    dims: Mapping[str, int] = {}
    freeze: Mapping[str, float] = {}


def read_specs() -> tuple[list[Spec], list[Packaged]]:
    """Returns the architectures and the trained networks of nets.toml."""
    table = tomllib.loads(Path(__file__).with_name("nets.toml").read_text())
    packaged = msgspec.convert(table.pop("packages", []), list[Packaged])
    return [
        msgspec.convert({**row, "library": library}, Spec)
        for library, groups in table.items()
        for group in groups
        for row in group["models"]
    ], packaged


def list_nets() -> list[Net]:
    """Returns each network of the table; an architecture is one network for each exporter."""
    specs, packaged = read_specs()
    nets = [
        Net(
            name=each.name,
            folder=NETS / each.name,
            answers=each.answers,
            held_out=each.held_out,
            dims=each.dims,
            freeze=each.freeze,
        )
        for each in packaged
    ]
    for spec in specs:
        for exporter in spec.exporters:
            dims = {"dynamo": {}, "torchscript": {"batch": 1}}[exporter]
            name = f"{spec.name}-{exporter}"
            net = Net(name=name, folder=NETS / name, answers=spec.answers, held_out=spec.held_out, dims=dims)
            nets.append(net)
    return nets
