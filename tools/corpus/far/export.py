"""Writes architectures as ONNX files: run by the Python of the corpus, which has PyTorch.

    export.py FOLDER < specs.json

`specs.json` lists networks in the form of `Spec` in table.py. Each is written to FOLDER/NAME/model.onnx; a failure is a
line on standard output, {"name": ..., "failure": ...}, and does not stop the others. Random weights are scaled so that
the magnitude of activations stays the same from layer to layer, normalization gets its statistics from samples, and the
last layer is centred, so that answers differ from sample to sample as those of a trained network do.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
import transformers
import ultralytics
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from inputs import draw_samples

LAYERS = nn.Linear | nn.Conv1d | nn.Conv2d | nn.ConvTranspose2d
BATCH_NORMS = nn.BatchNorm1d | nn.BatchNorm2d
# The spread of the last layer's outputs, like that of a trained classifier.
_SPREAD = 3.0
_SAMPLES, _BATCH = 32, 16


class Plain(nn.Module):  # type: ignore[misc] # PyTorch lives elsewhere
    """A network with one input and one output tensor."""

    def __init__(self, net: nn.Module, word: str, field: str) -> None:
        super().__init__()
        self.net, self.word, self.field = net, word, field

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the one output."""
        # Without a mask the causal models would look for packed texts.
        mask = {"attention_mask": torch.ones_like(x)} if self.word == "input_ids" else {}
        made = self.net(**{self.word: x}, **mask) if self.word else self.net(x)
        while not isinstance(made, torch.Tensor):
            made = made[self.field] if self.field else made[0]
        return made


def make_torchvision(spec: Mapping[str, Any]) -> nn.Module:
    """Returns an architecture of torchvision; `none` in the table is None."""
    options = {key: None if value == "none" else value for key, value in spec["options"].items()}
    net = torchvision.models.get_model(spec["model"], weights=None, num_classes=10, **options)
    return Plain(net, "", spec["field"])


def make_timm(spec: Mapping[str, Any]) -> nn.Module:
    """Returns an architecture of timm."""
    return Plain(timm.create_model(spec["model"], num_classes=10, exportable=True, **spec["options"]), "", "")


def make_transformers(spec: Mapping[str, Any]) -> nn.Module:
    """Returns a model of transformers with a small configuration."""
    kind = getattr(transformers, spec["model"])
    config = kind.config_class(**spec["options"], attn_implementation="eager")
    word = {"tokens": "input_ids", "sound": "input_values", "spectrum": "input_values", "image": "pixel_values"}
    return Plain(kind(config), word[spec["input"]], spec["field"])


def make_ultralytics(spec: Mapping[str, Any]) -> nn.Module:
    """Returns a detector of ultralytics in the form in which it is exported."""
    net = ultralytics.YOLO(spec["model"], verbose=False).model
    for module in net.modules():
        if hasattr(module, "export"):
            module.export, module.format, module.dynamic = True, "onnx", False
    return Plain(net, "", "")


MAKERS: Mapping[str, Callable[[Mapping[str, Any]], nn.Module]] = {
    "torchvision": make_torchvision,
    "timm": make_timm,
    "transformers": make_transformers,
    "ultralytics": make_ultralytics,
}


def draw_weights(net: nn.Module) -> None:
    """Draws weights that keep the magnitude of values; constants that are not weights (of DFL, of positions) stay."""
    layers = {id(module.weight) for module in net.modules() if isinstance(module, LAYERS)}
    for name, weight in net.named_parameters():
        if not weight.requires_grad:
            continue
        if id(weight) in layers:
            gain = 2.0 if weight.ndim > 2 else 1.0
            nn.init.normal_(weight, 0, (gain / (weight.numel() / weight.shape[0])) ** 0.5)
        elif weight.numel() == max([*weight.shape, 1]):
            if float(weight.min()) == float(weight.max()) and weight.numel() > 1:
                nn.init.normal_(weight, 0, 0.1) if "bias" in name else nn.init.uniform_(weight, 0.6, 1.4)
        elif float(weight.std()) < 0.1:
            nn.init.normal_(weight, 0, 0.3)


def learn_statistics(net: nn.Module, samples: torch.Tensor) -> None:
    """Runs samples with normalization in training mode, so that it stores their mean and variance."""
    norms = [module for module in net.modules() if isinstance(module, BATCH_NORMS)]
    for norm in norms:
        norm.reset_running_stats()
        norm.momentum = None
        norm.train()
    if norms:
        run_batches(net, samples)
    net.eval()


def run_batches(net: nn.Module, samples: torch.Tensor) -> torch.Tensor:
    """Returns the outputs of all samples."""
    with torch.no_grad():
        return torch.cat([net(batch) for batch in samples.split(_BATCH)])


def centre_answers(net: nn.Module, samples: torch.Tensor, axis: int) -> None:
    """Gives the last layer before the classes of `axis` a bias that removes their mean, and scales its weights."""
    ends = list[nn.Module]()
    hooks = [
        module.register_forward_hook(lambda module, *_: ends.append(module))
        for module in net.modules()
        if getattr(module, "weight", None) is not None
    ]
    answers = run_batches(net, samples[:_BATCH]).movedim(axis, -1)
    for hook in hooks:
        hook.remove()
    end = ends[-1]
    answers = answers.reshape(-1, answers.shape[-1])
    if getattr(end, "bias", None) is None or end.bias.shape != answers.shape[1:]:
        return
    scale = _SPREAD / float(answers.std(0).mean() + 1e-9)
    with torch.no_grad():
        end.bias.copy_((end.bias - answers.mean(0)) * scale)
        end.weight.mul_(scale)


def write_onnx(net: nn.Module, sample: torch.Tensor, exporter: str, out: Path) -> None:
    """Writes a network with an exporter; with TorchScript's the batch stays open, as in most published models."""
    words: dict[str, Any] = {"input_names": ["input"], "output_names": ["output"]}
    if exporter == "dynamo":
        torch.onnx.export(net, (sample,), str(out), dynamo=True, external_data=False, verbose=False, **words)
    else:
        axes = {"input": {0: "batch"}, "output": {0: "batch"}}
        torch.onnx.export(net, (sample,), str(out), dynamo=False, opset_version=17, dynamic_axes=axes, **words)


def export(spec: Mapping[str, Any], folder: Path) -> None:
    """Writes one network with each exporter whose file is missing."""
    torch.manual_seed(sum(map(ord, spec["model"])))
    drawn = draw_samples(spec["input"], tuple(spec["shape"]), _SAMPLES, 7, folder.parent / "photos")
    samples = torch.from_numpy(drawn.reshape(-1, *drawn.shape[2:]))
    net = MAKERS[spec["library"]](spec).eval()
    draw_weights(net)
    learn_statistics(net, samples)
    if spec["answers"] in {"classes", "map", "sequence"}:
        centre_answers(net, samples, -1 if spec["answers"] == "sequence" else 1)
    for exporter in spec["exporters"]:
        out = folder / f"{spec['name']}-{exporter}" / "model.onnx"
        if not out.exists():
            out.parent.mkdir(parents=True, exist_ok=True)
            write_onnx(net, samples[:1], exporter, out.with_name("half-written"))
            out.with_name("half-written").rename(out)


def main() -> None:
    """Writes the networks that standard input lists."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    folder, said = Path(sys.argv[1]), os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # the libraries talk
    for spec in json.load(sys.stdin):
        try:
            export(spec, folder)
            line = {"name": spec["name"]}
        except Exception as error:  # noqa: BLE001 - one that cannot be exported does not stop the others
            line = {"name": spec["name"], "failure": f"{type(error).__name__}: {error}"[:300]}
        print(json.dumps(line), file=said, flush=True)


if __name__ == "__main__":
    main()
