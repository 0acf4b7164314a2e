"""Networks of the table that no package has, or that are short, built from the papers and their published code.

Weights are PyTorch's random initial weights. The numbers of parameters are those of the table, except for parameters
that are folded away.
"""
# ruff: noqa: D102 - what a class says is what its forward does

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import timm
import torch
import torchvision
from torch import nn
from torch.nn import functional


def conv(inside: int, outside: int, size: int = 3, **more: Any) -> nn.Conv2d:
    """Returns a convolution that keeps the size of the image."""
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
            known.append(functional.leaky_relu(each(torch.cat(known, 1)), 0.2))
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
            x = functional.leaky_relu(up(functional.interpolate(x, scale_factor=2.0, mode="nearest")), 0.2)
        return self.last(functional.leaky_relu(self.ups[2](x), 0.2))


class Compact(nn.Module):  # type: ignore[misc]
    """Real-ESRGAN's small network: convolutions with PReLU, pixel shuffle, and the input image added."""

    def __init__(self, channels: int = 64, layers: int = 32, scale: int = 4) -> None:
        super().__init__()
        inner = [each for _ in range(layers) for each in (conv(channels, channels), nn.PReLU(channels))]
        self.scale = scale
        self.net = nn.Sequential(conv(3, channels), nn.PReLU(channels), *inner, conv(channels, 3 * scale**2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = functional.pixel_shuffle(self.net(x), self.scale)
        return made + functional.interpolate(x, scale_factor=float(self.scale), mode="nearest")


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
    """LayerNorm over the channels of an image."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(channels, eps=1e-6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class NafBlock(nn.Module):  # type: ignore[misc]
    """A block of NAFNet (Chen et al. 2022); its gates are products of two halves of the channels."""

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
    """HRNet for poses: only the finest map; with `joined`, all four maps enlarged and concatenated."""

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
        rest = [functional.interpolate(each, size=size, mode="bilinear") for each in maps[1:]]
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
    """Returns IR-SE with the given numbers of blocks in its four stages."""
    blocks, inside = list[nn.Module](), 64
    for outside, count in zip((64, 128, 256, 512), counts, strict=True):
        blocks += [IrSe(inside if i == 0 else outside, outside, 2 if i == 0 else 1) for i in range(count)]
        inside = outside
    stem = [conv(3, 64, bias=False), nn.BatchNorm2d(64), nn.PReLU(64)]
    end = [nn.BatchNorm2d(512), nn.Dropout(), nn.Flatten(), nn.Linear(512 * 49, 512), nn.BatchNorm1d(512)]
    return nn.Sequential(*stem, *blocks, *end)


def make_mobilenet_v1(inside: int, classes: int, stride: int) -> nn.Module:
    """Returns MobileNet v1 (Howard et al. 2017) whose maps shrink to one `stride`-th and no further."""
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
        bins = [functional.interpolate(each(made), size=size, mode="bilinear") for each in self.bins]
        return functional.interpolate(self.head(torch.cat([made, *bins], 1)), size=x.shape[2:], mode="bilinear")


def unit(
    inside: int, outside: int, size: int = 3, act: Callable[[], nn.Module] = nn.ReLU, **more: Any
) -> nn.Sequential:
    """Returns a convolution with batch normalization and an activation."""
    more = {"padding": size // 2 * more.get("dilation", 1), **more}
    return nn.Sequential(nn.Conv2d(inside, outside, size, bias=False, **more), nn.BatchNorm2d(outside), act())


def leaky() -> nn.Module:
    """Returns the activation of Darknet."""
    return nn.LeakyReLU(0.1)


def enlarge(x: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """Returns maps resized to the size of others."""
    return functional.interpolate(x, size=like.shape[2:], mode="bilinear", align_corners=False)


class DeepLab(nn.Module):  # type: ignore[misc]
    """DeepLabV3+ (Chen et al. 2018) on MobileNetV2 whose maps shrink to a sixteenth."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        net = torchvision.models.mobilenet_v2(weights=None).features[:-1]
        for layer in net[14:].modules():
            if isinstance(layer, nn.Conv2d) and layer.kernel_size == (3, 3):
                layer.stride, layer.dilation, layer.padding = (1, 1), (2, 2), (2, 2)
        net[14].conv[1][0].dilation = net[14].conv[1][0].padding = (1, 1)
        self.low, self.high = net[:4], net[4:]
        rates = [unit(320, 256, dilation=rate) for rate in (6, 12, 18)]
        self.bins = nn.ModuleList([unit(320, 256, 1), *rates])
        self.pool, self.join, self.short = unit(320, 256, 1), unit(1280, 256, 1), unit(24, 48, 1)
        self.head = nn.Sequential(unit(304, 256), unit(256, 256), conv(256, classes, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.low(x)
        high = self.high(low)
        pooled = enlarge(self.pool(high.mean((2, 3), keepdim=True)), high)
        joined = self.join(torch.cat([*(each(high) for each in self.bins), pooled], 1))
        return enlarge(self.head(torch.cat([enlarge(joined, low), self.short(low)], 1)), x)


class Gated(nn.Module):  # type: ignore[misc]
    """A block of OSNet (Zhou et al. 2019): four depths of light convolutions, one gate for all of them."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        c = outside // 4
        self.first, self.last = unit(inside, c, 1), unit(c, outside, 1, nn.Identity)
        self.streams = nn.ModuleList(
            nn.Sequential(*(nn.Sequential(conv(c, c, 1, bias=False), unit(c, c, groups=c)) for _ in range(depth)))
            for depth in (1, 2, 3, 4)
        )
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), conv(c, c // 16, 1), nn.ReLU(), conv(c // 16, c, 1))
        self.short = nn.Identity() if inside == outside else unit(inside, outside, 1, nn.Identity)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = self.first(x)
        streams = [stream(made) for stream in self.streams]
        gated = sum(stream * torch.sigmoid(self.gate(stream)) for stream in streams)
        return torch.relu(self.last(gated) + self.short(x))


def make_osnet() -> nn.Module:
    """Returns OSNet at full width, without its classes."""
    layers: list[nn.Module] = [unit(3, 64, 7, stride=2), nn.MaxPool2d(3, 2, 1)]
    for inside, outside in ((64, 256), (256, 384), (384, 512)):
        layers += [Gated(inside, outside), Gated(outside, outside)]
        layers += [unit(outside, outside, 1), nn.AvgPool2d(2)] if outside < 512 else [unit(512, 512, 1)]
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 512), nn.BatchNorm1d(512), nn.ReLU()]
    return nn.Sequential(*layers, *end)


class Rsu(nn.Module):  # type: ignore[misc]
    """A block of U2-Net (Qin et al. 2020): a small U-Net, with `flat` with dilations in place of pooling."""

    def __init__(self, depth: int, inside: int, c: int, outside: int, *, flat: bool = False) -> None:
        super().__init__()
        self.flat, self.first = flat, unit(inside, outside)
        rates = [2**at if flat else 1 for at in range(depth - 1)]
        self.downs = nn.ModuleList(unit(outside if at == 0 else c, c, dilation=r) for at, r in enumerate(rates))
        self.middle = unit(c, c, dilation=2 ** (depth - 1) if flat else 2)
        ups = list(enumerate(rates))[::-1]
        self.ups = nn.ModuleList(unit(2 * c, outside if at == 0 else c, dilation=rate) for at, rate in ups)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        start = made = self.first(x)
        kept = list[torch.Tensor]()
        for at, down in enumerate(self.downs):
            pooled = made if self.flat or at == 0 else functional.max_pool2d(made, 2, 2, ceil_mode=True)
            made = down(pooled)
            kept.append(made)
        made = self.middle(made)
        for up, skip in zip(self.ups, reversed(kept), strict=True):
            made = up(torch.cat([made if made.shape == skip.shape else enlarge(made, skip), skip], 1))
        return made + start


class U2Net(nn.Module):  # type: ignore[misc]
    """U2-Net: six such blocks down, five up, and an output map from each."""

    def __init__(self) -> None:
        super().__init__()
        downs = [(7, 3, 32, 64), (6, 64, 32, 128), (5, 128, 64, 256), (4, 256, 128, 512)]
        flat = [Rsu(4, 512, 256, 512, flat=True) for _ in range(2)]
        self.downs = nn.ModuleList([*(Rsu(*sizes) for sizes in downs), *flat])
        ups = [(4, 1024, 128, 256), (5, 512, 64, 128), (6, 256, 32, 64), (7, 128, 16, 64)]
        self.ups = nn.ModuleList([Rsu(4, 1024, 256, 512, flat=True), *(Rsu(*sizes) for sizes in ups)])
        self.sides = nn.ModuleList(conv(c, 1) for c in (64, 64, 128, 256, 512, 512))
        self.join = conv(6, 1, 1)

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        kept, made = list[torch.Tensor](), x
        for at, down in enumerate(self.downs):
            made = down(made if at == 0 else functional.max_pool2d(made, 2, 2, ceil_mode=True))
            kept.append(made)
        maps = [made]
        for up, skip in zip(self.ups, reversed(kept[:-1]), strict=True):
            made = up(torch.cat([enlarge(made, skip), skip], 1))
            maps.insert(0, made)
        sides = [side(each) for side, each in zip(self.sides, maps, strict=True)]
        sides = [sides[0], *(enlarge(each, sides[0]) for each in sides[1:])]
        return [torch.sigmoid(each) for each in (self.join(torch.cat(sides, 1)), *sides)]


class Residual(nn.Module):  # type: ignore[misc]
    """Two convolutions with a Relu before each, as MiDaS refines maps."""

    def __init__(self, c: int) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.ReLU(), conv(c, c), nn.ReLU(), conv(c, c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) + x


class Midas(nn.Module):  # type: ignore[misc]
    """MiDaS 2.1 small (Ranftl et al. 2020) on EfficientNet-Lite3."""

    def __init__(self) -> None:
        super().__init__()
        self.body = timm.create_model("tf_efficientnet_lite3", features_only=True, out_indices=(1, 2, 3, 4))
        wide = (64, 128, 256, 512)
        self.narrow = nn.ModuleList(
            conv(a, b, bias=False) for a, b in zip(self.body.feature_info.channels(), wide, strict=True)
        )
        self.one, self.two = (nn.ModuleList(Residual(c) for c in wide) for _ in range(2))
        self.out = nn.ModuleList(conv(c, max(64, c // 2), 1) for c in wide)
        self.first, self.last = conv(64, 32), nn.Sequential(conv(32, 32), nn.ReLU(), conv(32, 1, 1), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        maps = [narrow(each) for narrow, each in zip(self.narrow, self.body(x), strict=True)]
        made = maps[3]
        for at in (3, 2, 1, 0):
            made = self.two[at](made if at == 3 else made + self.one[at](maps[at]))
            made = self.out[at](functional.interpolate(made, scale_factor=2.0, mode="bilinear", align_corners=True))
        return self.last(functional.interpolate(self.first(made), scale_factor=2.0, mode="bilinear"))


class Craft(nn.Module):  # type: ignore[misc]
    """CRAFT (Baek et al. 2019) on VGG16, a text detector."""

    def __init__(self) -> None:
        super().__init__()
        net = torchvision.models.vgg16_bn(weights=None).features
        ends = (0, 12, 19, 29, 39)
        self.body = nn.ModuleList(net[a:b] for a, b in pairwise(ends))
        wide = nn.Conv2d(512, 1024, 3, padding=6, dilation=6)
        self.top = nn.Sequential(nn.MaxPool2d(3, 1, 1), wide, nn.Conv2d(1024, 1024, 1))
        sizes = ((1536, 512, 256), (768, 256, 128), (384, 128, 64), (192, 64, 32))
        self.ups = nn.ModuleList(nn.Sequential(unit(a, b, 1), unit(b, c)) for a, b, c in sizes)
        widths = ((32, 32, 3), (32, 32, 3), (32, 16, 3), (16, 16, 1))
        head = [each for a, b, size in widths for each in (conv(a, b, size), nn.ReLU())]
        self.head = nn.Sequential(*head, conv(16, 2, 1))

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        maps = list[torch.Tensor]()
        for part in self.body:
            x = part(x)
            maps.append(x)
        made = self.top(x)
        for up, skip in zip(self.ups, reversed(maps), strict=True):
            made = up(torch.cat([made if made.shape[2:] == skip.shape[2:] else enlarge(made, skip), skip], 1))
        return [self.head(made).permute(0, 2, 3, 1), made]


class Elan(nn.Module):  # type: ignore[misc]
    """Four branches of one, one, two and three convolutions, concatenated: YOLOv7 (Wang et al. 2022)."""

    def __init__(self, inside: int, c: int) -> None:
        super().__init__()
        self.sides = nn.ModuleList(unit(inside, c, 1, leaky) for _ in range(2))
        self.deep = nn.ModuleList(unit(c, c, 3, leaky) for _ in range(2))
        self.join = unit(4 * c, 2 * c, 1, leaky)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = [each(x) for each in self.sides]
        for each in self.deep:
            made.append(each(made[-1]))
        return self.join(torch.cat(made[::-1], 1))


class YoloTiny(nn.Module):  # type: ignore[misc]
    """YOLOv7-tiny with decoded boxes."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.stem = nn.Sequential(unit(3, 32, 3, leaky, stride=2), unit(32, 64, 3, leaky, stride=2), Elan(64, 32))
        self.body = nn.ModuleList(nn.Sequential(nn.MaxPool2d(2), Elan(c, c)) for c in (64, 128, 256))
        self.one, self.two = (unit(512, 256, 1, leaky) for _ in range(2))
        self.three, self.four = unit(1024, 256, 1, leaky), unit(512, 256, 1, leaky)
        self.ups = nn.ModuleList(unit(2 * c, c, 1, leaky) for c in (128, 64))
        self.skips = nn.ModuleList(unit(2 * c, c, 1, leaky) for c in (128, 64))
        self.fine = nn.ModuleList(Elan(2 * c, c // 2) for c in (128, 64))
        self.downs = nn.ModuleList(unit(c, 2 * c, 3, leaky, stride=2) for c in (64, 128))
        self.coarse = nn.ModuleList(Elan(4 * c, c) for c in (64, 128))
        self.ends = nn.ModuleList(
            nn.Sequential(unit(c, 2 * c, 3, leaky), conv(2 * c, 3 * (5 + classes), 1)) for c in (64, 128, 256)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        low = self.body[0](self.stem(x))
        middle = self.body[1](low)
        high = self.body[2](middle)
        one = self.one(high)
        pools = [functional.max_pool2d(one, size, 1, size // 2) for size in (13, 9, 5)]
        high = self.four(torch.cat([self.three(torch.cat([*pools, one], 1)), self.two(high)], 1))
        maps = [high]
        for up, skip, fine, other in zip(self.ups, self.skips, self.fine, (middle, low), strict=True):
            enlarged = functional.interpolate(up(maps[0]), scale_factor=2.0, mode="nearest")
            maps.insert(0, fine(torch.cat([skip(other), enlarged], 1)))
        for at, (down, coarse) in enumerate(zip(self.downs, self.coarse, strict=True)):
            maps[at + 1] = coarse(torch.cat([down(maps[at]), maps[at + 1]], 1))
        made = list[torch.Tensor]()
        for end, each in zip(self.ends, maps, strict=True):
            raw = end(each)
            raw = raw.view(1, 3, -1, *each.shape[2:]).permute(0, 1, 3, 4, 2).sigmoid()
            xy, wh, rest = raw[..., :2] * 2 - 0.5, (raw[..., 2:4] * 2) ** 2, raw[..., 4:]
            made.append(torch.cat([xy * 8, wh * 16, rest], -1).reshape(1, -1, raw.shape[-1]))
        return torch.cat(made, 1)


def late(inside: int, outside: int, size: int = 3, **more: Any) -> nn.Sequential:
    """Returns a convolution whose activation comes before its normalization."""
    return nn.Sequential(nn.Conv2d(inside, outside, size, **more), nn.LeakyReLU(), nn.BatchNorm2d(outside))


class Dilated(nn.Module):  # type: ignore[misc]
    """Three dilated convolutions, concatenated: SalsaNext (Cortinhal et al. 2020)."""

    def __init__(self, inside: int, c: int, *, adds: bool) -> None:
        super().__init__()
        self.short = nn.Sequential(conv(inside, c, 1), nn.LeakyReLU()) if adds else None
        self.convs = nn.ModuleList(
            [late(inside, c, padding=1), late(c, c, padding=2, dilation=2), late(c, c, 2, padding=1, dilation=2)]
        )
        self.join = late(3 * c, c, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = list[torch.Tensor]()
        for each in self.convs:
            made.append(each(made[-1] if made else x))
        joined = self.join(torch.cat(made, 1))
        return joined if self.short is None else self.short(x) + joined


class Context(nn.Module):  # type: ignore[misc]
    """SalsaNext's first blocks."""

    def __init__(self, inside: int, c: int) -> None:
        super().__init__()
        self.short = nn.Sequential(conv(inside, c, 1), nn.LeakyReLU())
        self.net = nn.Sequential(late(c, c, padding=1), late(c, c, padding=2, dilation=2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        short = self.short(x)
        return short + self.net(short)


class SalsaNext(nn.Module):  # type: ignore[misc]
    """SalsaNext: a class for each point of a lidar's range image."""

    def __init__(self, classes: int) -> None:
        super().__init__()
        self.first = nn.Sequential(Context(5, 32), Context(32, 32), Context(32, 32))
        widths = (32, 64, 128, 256, 256, 256)
        self.downs = nn.ModuleList(Dilated(a, b, adds=True) for a, b in pairwise(widths))
        ups = ((64 + 256, 128), (32 + 256, 128), (32 + 128, 64), (16 + 64, 32))
        self.ups = nn.ModuleList(Dilated(a, b, adds=False) for a, b in ups)
        self.last = conv(32, classes, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made, kept = self.first(x), list[torch.Tensor]()
        for at, down in enumerate(self.downs):
            made = down(made)
            kept.append(made)
            made = functional.avg_pool2d(made, 3, 2, 1) if at < 4 else made
        for up, skip in zip(self.ups, reversed(kept[:4]), strict=True):
            made = up(torch.cat([functional.pixel_shuffle(made, 2), skip], 1))
        return torch.softmax(self.last(made), 1)


class BoxVgg(nn.Module):  # type: ignore[misc]
    """Mousavian et al. 2017 on VGG19: orientation, confidence and sizes of a box."""

    def __init__(self) -> None:
        super().__init__()
        self.body = torchvision.models.vgg19_bn(weights=None).features
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(25088, c), nn.ReLU(), nn.Linear(c, c), nn.ReLU(), nn.Linear(c, out))
            for c, out in ((256, 4), (256, 2), (512, 3))
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        flat = self.body(x).flatten(1)
        return [head(flat) for head in self.heads]


BUILT: Mapping[str, Callable[..., nn.Module]] = {
    "box_vgg": BoxVgg, "compact": Compact, "craft": Craft, "deeplab": DeepLab, "dncnn": DnCnn, "hrnet": HrPose,
    "irse": make_irse, "midas": Midas, "mobilenet_v1": make_mobilenet_v1,
    "nafnet": NafNet, "osnet": make_osnet, "pspnet": PspNet, "quicksr": QuickSr, "rrdb": Rrdb,
    "salsanext": SalsaNext, "srgan": SrGan, "u2net": U2Net, "yolov7_tiny": YoloTiny,
}  # fmt: skip
