"""Writes networks of the table as ONNX files: run by the Python of the corpus, which has PyTorch.

    export_nets.py NETS.toml FOLDER NAME...

Weights are random, and the resolution is that with which the table was measured. Networks that no package has are in
built_nets.py. Weights are random because a compiler would merge equal ones.
"""

import json
import os
import sys
import tomllib
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers
import ultralytics
from built_nets import BUILT
from torch import nn


class Plain(nn.Module):  # type: ignore[misc] # PyTorch lives elsewhere
    """A network that is called with one tensor for each name, and returns only tensors."""

    def __init__(self, net: nn.Module, words: Sequence[str], more: Mapping[str, Any], fields: Sequence[str]) -> None:
        super().__init__()
        self.net, self.words, self.more, self.fields = net, words, more, fields

    def forward(self, *xs: torch.Tensor) -> Any:
        """Returns the tensors of the named fields, or all of them."""
        made = self.net(**dict(zip(self.words, xs, strict=True)), **self.more) if self.words else self.net(*xs)
        return tuple(made[field] for field in self.fields) if self.fields else tuple(list_tensors(made))


def list_tensors(made: Any) -> list[torch.Tensor]:
    """Returns the tensors in a network's result."""
    if isinstance(made, torch.Tensor):
        return [made]
    parts = made.values() if isinstance(made, Mapping) else made if isinstance(made, (list, tuple)) else ()
    return [tensor for part in parts for tensor in list_tensors(part)]


def make_torchvision(spec: Mapping[str, Any]) -> nn.Module:
    """Returns an architecture of torchvision."""
    return torchvision.models.get_model(spec["model"], weights=None, **spec.get("options", {}))


def make_timm(spec: Mapping[str, Any]) -> nn.Module:
    """Returns an architecture of timm."""
    return timm.create_model(spec["model"], exportable=True, **spec.get("options", {}))


def make_transformers(spec: Mapping[str, Any]) -> nn.Module:
    """Returns a model of transformers, or the part of it that `part` names."""
    kind = getattr(transformers, spec["model"])
    config = kind.config_class(**spec.get("options", {}))
    net = kind._from_config(config, attn_implementation="eager")  # noqa: SLF001 - its only way without weights
    for name in filter(None, spec.get("part", "").split(".")):
        net = getattr(net, name)
    return net


def make_ultralytics(spec: Mapping[str, Any]) -> nn.Module:
    """Returns a detector of ultralytics in the form in which it is exported."""
    net = ultralytics.YOLO(spec["model"], verbose=False, **spec.get("options", {})).model
    for module in net.modules():
        if hasattr(module, "export"):
            module.export, module.format, module.dynamic = True, "onnx", False
    return net


def make_built(spec: Mapping[str, Any]) -> nn.Module:
    """Returns an architecture of this file."""
    return BUILT[spec["model"]](**spec.get("options", {}))


MAKERS: Mapping[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "built": make_built,
    "torchvision": make_torchvision,
    "timm": make_timm,
    "transformers": make_transformers,
    "ultralytics": make_ultralytics,
}


def export(spec: Mapping[str, Any], out: Path) -> int:
    """Writes one network, and returns its number of parameters."""
    torch.manual_seed(0)
    net = MAKERS[spec["library"]](spec).eval()
    inputs = []
    for shape in spec["shapes"]:
        sizes = [size for size in shape if size != "int"]
        inputs.append(torch.ones(sizes, dtype=torch.int64) if shape[-1] == "int" else torch.rand(sizes))
    plain = Plain(net, spec.get("words", ()), spec.get("more", {}), spec.get("fields", ())).eval()
    half = out.with_suffix(".part")
    with torch.no_grad():
        if spec.get("dynamo"):
            torch.onnx.export(plain, tuple(inputs), str(half), dynamo=True, external_data=False, verbose=False)
        else:
            torch.onnx.export(plain, tuple(inputs), str(half), dynamo=False, opset_version=17)
    half.rename(out)
    return sum(weight.numel() for weight in net.parameters())


def main() -> None:
    """Writes the named networks, and prints each one's number of parameters or why it failed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # Its single operator for a whole layer of attention does not exist in ONNX.
    torch.backends.mha.set_fastpath_enabled(False)
    table, folder, said = tomllib.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries talk
    for name in sys.argv[3:]:
        row: dict[str, Any] = {"name": name}
        try:
            row["parameters"] = export(table[name], folder / f"{name.replace('/', '+')}.onnx")
        except Exception as error:  # noqa: BLE001 - one that cannot be exported does not stop the others
            row["failure"] = f"{type(error).__name__}: {error}"[:300]
        print(json.dumps(row), file=said, flush=True)


if __name__ == "__main__":
    main()
