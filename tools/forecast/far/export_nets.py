"""Writes networks of the table as ONNX files: run by the Python of the corpus, which has PyTorch.

    export_nets.py NETS.toml FOLDER NAME...

Weights are random, at the resolution that the table was measured with. What packages do not have and what is short is
built here, after the papers. Constant weights would be merged by a compiler, so they are drawn.
"""
# ruff: noqa: D102 - what a class says is what its forward does

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
from torch import nn


class Plain(nn.Module):  # type: ignore[misc] # PyTorch lives elsewhere
    """A network called with one tensor for each word, that returns tensors alone."""

    def __init__(self, net: nn.Module, words: Sequence[str], more: Mapping[str, Any], fields: Sequence[str]) -> None:
        super().__init__()
        self.net, self.words, self.more, self.fields = net, words, more, fields

    def forward(self, *xs: torch.Tensor) -> Any:
        """Returns the tensors of the fields that are named, or all of them."""
        made = self.net(**dict(zip(self.words, xs, strict=True)), **self.more) if self.words else self.net(*xs)
        return tuple(made[field] for field in self.fields) if self.fields else tuple(list_tensors(made))


def list_tensors(made: Any) -> list[torch.Tensor]:
    """Returns the tensors in what a network returned."""
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
    """Returns a detector of ultralytics as it exports it."""
    net = ultralytics.YOLO(spec["model"], verbose=False, **spec.get("options", {})).model
    for module in net.modules():
        if hasattr(module, "export"):
            module.export, module.format, module.dynamic = True, "onnx", False
    return net


def conv(inside: int, outside: int, size: int = 3, **more: Any) -> nn.Conv2d:
    """Returns a convolution that keeps the size of the picture."""
    return nn.Conv2d(inside, outside, size, padding=size // 2, **more)


class DnCnn(nn.Module):  # type: ignore[misc]
    """Zhang et al. 2017, 17 layers of 64 channels; the noise is subtracted."""

    def __init__(self, layers: int, channels: int) -> None:
        super().__init__()
        inner = [each for _ in range(layers - 2) for each in (conv(channels, channels), nn.ReLU())]
        self.net = nn.Sequential(conv(1, channels), nn.ReLU(), *inner, conv(channels, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x - self.net(x)


class QuickSr(nn.Module):  # type: ignore[misc]
    """Berger et al. 2023: convolutions with Hardtanh, and pixel shuffle."""

    def __init__(self, channels: int, layers: int, scale: int) -> None:
        super().__init__()
        inner = [each for _ in range(layers) for each in (conv(channels, channels), nn.Hardtanh(0, 1))]
        last = [conv(channels, 3 * scale**2), nn.PixelShuffle(scale), nn.Hardtanh(0, 1)]
        self.net = nn.Sequential(conv(3, channels), nn.Hardtanh(0, 1), *inner, *last)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x)


class Dense(nn.Module):  # type: ignore[misc]
    """The residual dense block of ESRGAN (Wang et al. 2018)."""

    def __init__(self, channels: int, growth: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(conv(channels + i * growth, growth if i < 4 else channels) for i in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        known = [x]
        for each in self.convs[:4]:
            known.append(nn.functional.leaky_relu(each(torch.cat(known, 1)), 0.2))
        return self.convs[4](torch.cat(known, 1)) * 0.2 + x


class Rrdb(nn.Module):  # type: ignore[misc]
    """ESRGAN's generator: 23 residual-in-residual dense blocks, four times as large."""

    def __init__(self, channels: int = 64, growth: int = 32, blocks: int = 23) -> None:
        super().__init__()
        self.first, self.body = conv(3, channels), conv(channels, channels)
        self.blocks = nn.ModuleList(nn.Sequential(*(Dense(channels, growth) for _ in range(3))) for _ in range(blocks))
        self.ups, self.last = nn.ModuleList(conv(channels, channels) for _ in range(3)), conv(channels, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made = x
        for block in self.blocks:
            made = block(made) * 0.2 + made
        x = x + self.body(made)
        for up in self.ups[:2]:
            x = nn.functional.leaky_relu(up(nn.functional.interpolate(x, scale_factor=2.0, mode="nearest")), 0.2)
        return self.last(nn.functional.leaky_relu(self.ups[2](x), 0.2))


class Compact(nn.Module):  # type: ignore[misc]
    """Real-ESRGAN's small network: convolutions with PReLU, pixel shuffle, and the picture added."""

    def __init__(self, channels: int = 64, layers: int = 32, scale: int = 4) -> None:
        super().__init__()
        inner = [each for _ in range(layers) for each in (conv(channels, channels), nn.PReLU(channels))]
        self.scale = scale
        self.net = nn.Sequential(conv(3, channels), nn.PReLU(channels), *inner, conv(channels, 3 * scale**2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = nn.functional.pixel_shuffle(self.net(x), self.scale)
        return made + nn.functional.interpolate(x, scale_factor=float(self.scale), mode="nearest")


class SrGan(nn.Module):  # type: ignore[misc]
    """SRGAN's generator (Ledig et al. 2017): 16 residual blocks, two pixel shuffles."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(conv(3, 64, 9), nn.PReLU())
        self.blocks = nn.ModuleList(
            nn.Sequential(conv(64, 64), nn.BatchNorm2d(64), nn.PReLU(), conv(64, 64), nn.BatchNorm2d(64))
            for _ in range(16)
        )
        self.body = nn.Sequential(conv(64, 64), nn.BatchNorm2d(64))
        ups = [each for _ in range(2) for each in (conv(64, 256), nn.PixelShuffle(2), nn.PReLU())]
        self.last = nn.Sequential(*ups, conv(64, 3, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        made = x
        for block in self.blocks:
            made = made + block(made)
        return self.last(x + self.body(made)).clamp(0, 1)


class Norm(nn.Module):  # type: ignore[misc]
    """LayerNorm over the channels of a picture."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1, channels, 1, 1) + 0.5)
        self.bias = nn.Parameter(torch.rand(1, channels, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centred = x - x.mean(1, keepdim=True)
        return centred / (centred.pow(2).mean(1, keepdim=True) + 1e-6).sqrt() * self.weight + self.bias


class NafBlock(nn.Module):  # type: ignore[misc]
    """A block of NAFNet (Chen et al. 2022): gates are products of halves."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.wide, self.depth = conv(c, 2 * c, 1), conv(2 * c, 2 * c, 3, groups=2 * c)
        self.attend, self.narrow = conv(c, c, 1), conv(c, c, 1)
        self.one, self.two, self.up, self.down = Norm(c), Norm(c), conv(c, 2 * c, 1), conv(c, c, 1)
        self.beta, self.gamma = (nn.Parameter(torch.rand(1, c, 1, 1)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = self.depth(self.wide(self.one(x))).chunk(2, 1)
        gated = a * b
        x = x + self.narrow(gated * self.attend(gated.mean((2, 3), keepdim=True))) * self.beta
        a, b = self.up(self.two(x)).chunk(2, 1)
        return x + self.down(a * b) * self.gamma


class NafNet(nn.Module):  # type: ignore[misc]
    """NAFNet: an encoder and a decoder of such blocks, halved by convolutions, enlarged by pixel shuffle."""

    def __init__(self, width: int, encoder: Sequence[int], middle: int, decoder: Sequence[int]) -> None:
        super().__init__()
        self.first, self.last = conv(3, width), conv(width, 3)
        self.encoders, self.downs, self.ups, self.decoders = (nn.ModuleList() for _ in range(4))
        c = width
        for count in encoder:
            self.encoders.append(nn.Sequential(*(NafBlock(c) for _ in range(count))))
            self.downs.append(nn.Conv2d(c, 2 * c, 2, 2))
            c *= 2
        self.middle = nn.Sequential(*(NafBlock(c) for _ in range(middle)))
        for count in decoder:
            self.ups.append(nn.Sequential(conv(c, 2 * c, 1, bias=False), nn.PixelShuffle(2)))
            c //= 2
            self.decoders.append(nn.Sequential(*(NafBlock(c) for _ in range(count))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, kept = self.first(x), []
        for encode, down in zip(self.encoders, self.downs, strict=True):
            made = encode(made)
            kept.append(made)
            made = down(made)
        made = self.middle(made)
        for up, decode, skip in zip(self.ups, self.decoders, reversed(kept), strict=True):
            made = decode(up(made) + skip)
        return self.last(made) + x


class HrPose(nn.Module):  # type: ignore[misc]
    """HRNet for poses: the finest map alone; with `joined`, all four maps enlarged and put together."""

    def __init__(self, name: str, points: int, *, joined: bool) -> None:
        super().__init__()
        self.body = timm.create_model(name, features_only=True, feature_location="", out_indices=(1, 2, 3, 4))
        wide = sum(self.body.feature_info.channels())
        self.joined = joined
        if joined:
            self.head = nn.Sequential(conv(wide, wide, 1), nn.BatchNorm2d(wide), nn.ReLU(), conv(wide, points, 1))
        else:
            self.head = conv(self.body.feature_info.channels()[0], points, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = self.body(x)
        if not self.joined:
            return self.head(maps[0])
        size = maps[0].shape[2:]
        rest = [nn.functional.interpolate(each, size=size, mode="bilinear") for each in maps[1:]]
        return self.head(torch.cat([maps[0], *rest], 1))


class IrSe(nn.Module):  # type: ignore[misc]
    """A block of ArcFace's IR-SE networks (Deng et al. 2019)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.short: nn.Module = nn.MaxPool2d(1, stride)
        if inside != outside:
            self.short = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))
        self.body = nn.Sequential(
            nn.BatchNorm2d(inside), conv(inside, outside, bias=False), nn.PReLU(outside),
            conv(outside, outside, stride=stride, bias=False), nn.BatchNorm2d(outside),
        )  # fmt: skip
        squeeze = conv(outside, outside // 16, 1, bias=False), conv(outside // 16, outside, 1, bias=False)
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), squeeze[0], nn.ReLU(), squeeze[1], nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.body(x)
        return made * self.gate(made) + self.short(x)


def make_irse(counts: Sequence[int]) -> nn.Module:
    """Returns IR-SE of as many blocks in each of its four stages."""
    blocks, inside = list[nn.Module](), 64
    for outside, count in zip((64, 128, 256, 512), counts, strict=True):
        blocks += [IrSe(inside if i == 0 else outside, outside, 2 if i == 0 else 1) for i in range(count)]
        inside = outside
    stem = [conv(3, 64, bias=False), nn.BatchNorm2d(64), nn.PReLU(64)]
    end = [nn.BatchNorm2d(512), nn.Dropout(), nn.Flatten(), nn.Linear(512 * 49, 512), nn.BatchNorm1d(512)]
    return nn.Sequential(*stem, *blocks, *end)


def make_mobilenet_v1(inside: int, classes: int, stride: int) -> nn.Module:
    """Returns MobileNet v1 (Howard et al. 2017) whose maps shrink to a `stride`-th and no further."""
    rows = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2), *[(512, 1)] * 5, (1024, 2), (1024, 1)]
    layers = [conv(inside, 32, stride=2, bias=False), nn.BatchNorm2d(32), nn.ReLU6()]
    c, shrunk = 32, 2
    for out, step in rows:
        step = step if shrunk * step <= stride else 1  # noqa: PLW2901 - as the published network for poses has it
        shrunk *= step
        layers += [conv(c, c, stride=step, groups=c, bias=False), nn.BatchNorm2d(c), nn.ReLU6()]
        layers += [conv(c, out, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU6()]
        c = out
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, classes)] if stride == 32 else [conv(c, classes, 1)]
    return nn.Sequential(*layers, *head)


class PspNet(nn.Module):  # type: ignore[misc]
    """PSPNet (Zhao et al. 2017) on a ResNet whose last two stages are dilated."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        net = torchvision.models.resnet101(weights=None, replace_stride_with_dilation=[False, True, True])
        net.conv1 = nn.Sequential(
            nn.Conv2d(3, 64, 3, 2, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU(), conv(64, 64, bias=False),
            nn.BatchNorm2d(64), nn.ReLU(), conv(64, 128, bias=False),
        )  # fmt: skip
        net.bn1 = nn.BatchNorm2d(128)
        net.layer1[0].conv1 = nn.Conv2d(128, 64, 1, bias=False)
        net.layer1[0].downsample[0] = nn.Conv2d(128, 256, 1, bias=False)
        self.body = nn.Sequential(*list(net.children())[:-2])
        self.bins = nn.ModuleList(
            nn.Sequential(nn.AvgPool2d(60 // n, 60 // n), conv(2048, 512, 1, bias=False), nn.BatchNorm2d(512),
                          nn.ReLU())
            for n in (1, 2, 3, 6)
        )  # fmt: skip
        self.head = nn.Sequential(conv(4096, 512, bias=False), nn.BatchNorm2d(512), nn.ReLU(), conv(512, classes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.body(x)
        size = made.shape[2:]
        bins = [nn.functional.interpolate(each(made), size=size, mode="bilinear") for each in self.bins]
        return nn.functional.interpolate(self.head(torch.cat([made, *bins], 1)), size=x.shape[2:], mode="bilinear")


BUILT: Mapping[str, Callable[..., nn.Module]] = {
    "compact": Compact, "dncnn": DnCnn, "hrnet": HrPose, "irse": make_irse, "mobilenet_v1": make_mobilenet_v1,
    "nafnet": NafNet, "pspnet": PspNet, "quicksr": QuickSr, "rrdb": Rrdb, "srgan": SrGan,
}  # fmt: skip


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
    """Writes one network, and returns how many parameters it has."""
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
    """Writes the networks that are named, and says of each its parameters or why it failed."""
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    # Its one operator for a whole layer of attention has no form in ONNX.
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
