"""Trains three small networks of the kinds on which plans collapsed.

    python strangers_train.py reader|sentence|speaker SECONDS FOLDER

Needs PyTorch (tools/lock/corpus.txt). The figures were taken with 130, 90 and 70 CPU seconds.
"""

import math, sys, time
import numpy as np, torch
from torch import nn
import torch.nn.functional as F

torch.set_num_threads(1)
OUT = sys.argv[3]


class Block(nn.Module):
    def __init__(self, width, heads, outliers=0):
        super().__init__()
        self.heads, self.qkv, self.out = (
            heads,
            nn.ModuleList(nn.Linear(width, width) for _ in range(3)),
            nn.Linear(width, width),
        )
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        with torch.no_grad():
            for norm in (self.one, self.two):
                norm.weight[:outliers] = torch.tensor([12.0, 6.0, 4.0])[:outliers]
                norm.bias[:outliers] = torch.tensor([-8.0, 5.0, -3.0])[:outliers]

    def forward(self, x, mask=None):
        n, t, w = x.shape
        q, k, v = (layer(x).view(n, t, self.heads, w // self.heads).transpose(1, 2) for layer in self.qkv)
        s = q @ k.transpose(-1, -2) / math.sqrt(w // self.heads)
        if mask is not None:
            s = s + mask
        x = self.one(x + self.out((s.softmax(-1) @ v).transpose(1, 2).reshape(n, t, w)))
        return self.two(x + self.down(F.gelu(self.up(x))))


class Sentence(nn.Module):
    def __init__(self, words=3000, width=64, length=24):
        super().__init__()
        self.table, self.place = nn.Embedding(words, width), nn.Parameter(0.1 * torch.randn(1, length, width))
        self.norm, self.blocks = nn.LayerNorm(width), nn.ModuleList(Block(width, 4, 3) for _ in range(6))
        for part in (self.blocks[-1].two.weight, self.blocks[-1].two.bias):
            part.data[:3] = 1.0 if part is self.blocks[-1].two.weight else 0.0

    def forward(self, input_ids, attention_mask):
        m = attention_mask.float()
        mask = (1.0 - m)[:, None, None, :] * -10000.0
        x = self.norm(self.table(input_ids) + self.place)
        for b in self.blocks:
            x = b(x, mask)
        x = (x * m[..., None]).sum(1) / m.sum(1, keepdim=True).clamp(min=1e-9)
        return F.normalize(x, dim=-1)


def sentences(rng, count, two=False):
    topics = np.random.default_rng(8).integers(300, 3000, (200, 30))
    which = rng.integers(0, 200, count)
    length = rng.integers(8, 25, count)

    def view(base):
        w = base.copy()
        return np.where(rng.random(w.shape) < 0.15, rng.integers(0, 3000, w.shape), w)

    common = (300 * rng.random((count, 24)) ** 2).astype(np.int64)
    own = topics[which[:, None], rng.integers(0, 30, common.shape)]
    base = np.where(rng.random(common.shape) < 0.5, own, common)
    mask = (np.arange(24) < length[:, None]).astype(np.int64)
    if not two:
        return base * mask, mask
    rng_perm = np.argsort(rng.random(base.shape) + 10 * (1 - mask), 1)
    return (view(base) * mask, mask), (np.take_along_axis(view(base), rng_perm, 1) * mask, mask)


class Speaker(nn.Module):
    def __init__(self, bands=40, size=64):
        super().__init__()
        self.lstm, self.last = nn.LSTM(bands, size, 3, batch_first=True), nn.Linear(size, 64)

    def forward(self, mels):
        y, (h, _) = self.lstm(mels)
        return F.normalize(F.relu(self.last(h[-1])), dim=-1)


def voices(rng, speakers, who):
    n, frames, bands = len(who), 60, 40
    s = np.random.default_rng(speakers)
    count = 4000
    low, width, depth = s.uniform(3, 37, (count, 5)), s.uniform(1, 3, (count, 5)), s.uniform(0.5, 4, (count, 5))
    pace, tilt = s.uniform(0.1, 0.8, count), s.uniform(-0.05, 0.05, count)
    t = np.arange(frames)
    out = np.empty((n, frames, bands), np.float32)
    for i, one in enumerate(who):
        moves = np.sin(pace[one] * t[:, None] + rng.uniform(0, 6, 5)) * rng.uniform(0.5, 2, 5)
        peaks = (low[one] + moves)[:, None, :]
        energy = (depth[one] * (1 + 0.4 * np.sin(0.3 * t[:, None] * rng.uniform(0.5, 2, 5) + rng.uniform(0, 6, 5))))[
            :, None
        ]
        hills = (energy * np.exp(-(((np.arange(bands)[None, :, None] - peaks) / width[one]) ** 2))).sum(-1)
        out[i] = np.exp(hills + tilt[one] * np.arange(bands) + rng.normal(0, 0.5, (frames, bands)) + rng.normal(0, 0.3))
    return (out / 50).astype(np.float32)


HALVES, STEPS, WIDE = 100, 24, 12
SHAPES = np.random.default_rng(7).random((2, HALVES, 8, WIDE)) < 0.4


def lines(rng, count):
    images = rng.normal(0, 0.12, (count, 1, 16, 4 * STEPS)).astype(np.float32)
    steps = np.zeros((count, STEPS), np.int64)
    for image, classes in zip(images, steps):
        left, ink = int(rng.integers(0, 8)), rng.uniform(0.6, 1)
        while left + WIDE <= 4 * STEPS:
            u, l = rng.integers(0, HALVES, 2)
            image[0, :, left : left + WIDE] += ink * np.concatenate([SHAPES[0, u], SHAPES[1, l]])
            classes[(left + WIDE // 2) // 4] = 1 + HALVES * u + l
            left += WIDE + int(rng.integers(1, 8))
    return images, steps


class Reader(nn.Module):
    def __init__(self, width=64):
        super().__init__()

        def conv(i, o, stride, groups=1):
            return nn.Sequential(
                nn.Conv2d(i, o, 3, stride, 1, groups=groups, bias=False), nn.BatchNorm2d(o), nn.Hardswish()
            )

        self.stem = nn.Sequential(conv(1, 24, 2), conv(24, 24, 1, 24), conv(24, 48, 2), conv(48, 48, 1, 48))
        self.into, self.norm = nn.Linear(48 * 4, width), nn.LayerNorm(width)
        self.blocks = nn.ModuleList(Block(width, 4) for _ in range(2))
        self.last = nn.Linear(width, 1 + 2 * HALVES)

    def forward(self, image):
        x = self.stem(image)
        x = x.flatten(1, 2).transpose(1, 2)
        x = self.norm(self.into(x))
        for b in self.blocks:
            x = b(x)
        return self.last(x)


opt = [None]


def train(net, loss, steps, rate, seconds):
    opt[0] = torch.optim.AdamW(net.parameters(), rate, weight_decay=1e-3)
    start = time.process_time()
    for step in range(10**6):
        share = (time.process_time() - start) / seconds
        if share >= 1:
            break
        for g in opt[0].param_groups:
            g["lr"] = rate * min(1, (step + 1) / 50) * (0.5 + 0.5 * math.cos(math.pi * share))
        value = loss(share)
        opt[0].zero_grad()
        value.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt[0].step()
        if step % 50 == 0:
            print(step, round(share, 2), float(value.detach()), flush=True)


def main(name, seconds):
    torch.manual_seed(5)
    rng = np.random.default_rng(11)
    if name == "sentence":
        net = Sentence()

        def loss(share):
            (a, am), (b, bm) = sentences(rng, 48, True)
            x, y = net(torch.tensor(a), torch.tensor(am)), net(torch.tensor(b), torch.tensor(bm))
            return F.cross_entropy(x @ y.T * 20, torch.arange(48))

        train(net, loss, 0, 1e-3, seconds)
        draw = lambda r, n: dict(zip(("input_ids", "attention_mask"), sentences(r, n)))
    elif name == "speaker":
        net = Speaker()
        bank = nn.Parameter(torch.randn(1000, 64))
        net.bank = bank
        who = rng.integers(0, 500, 5000)
        data = torch.tensor(voices(rng, 1, who))
        label = torch.tensor(who)

        def loss(share):
            pick = torch.tensor(rng.integers(0, len(data), 48))
            return F.cross_entropy(net(data[pick]) @ F.normalize(bank, dim=-1).T * 20, label[pick])

        train(net, loss, 0, 3e-3, seconds)
        draw = lambda r, n: {"mels": voices(r, 2, r.integers(0, 150, n))}
    else:
        net = Reader()
        data = lines(rng, 6000)
        images, steps = map(torch.tensor, data)

        def loss(share):
            pick = torch.tensor(rng.integers(0, len(images), 48 if share < 0.8 else 12))
            out, want = net(images[pick]), steps[pick]
            if share < 0.8:
                ink, pair = want > 0, (want - 1).clamp(min=0)
                named = F.cross_entropy(out[..., 1 : 1 + HALVES][ink], pair[ink] // HALVES) + F.cross_entropy(
                    out[..., 1 + HALVES :][ink], pair[ink] % HALVES
                )
                return F.binary_cross_entropy_with_logits(out[..., 0], ink.float()) + named
            if out.shape[-1] == 1 + 2 * HALVES:
                with torch.no_grad():
                    w, c = net.last.weight, net.last.bias

                    def pairs(p, nothing):
                        each = (p[1 : 1 + HALVES, None] + p[None, 1 + HALVES :]).reshape(HALVES**2, *p.shape[1:]) + p[0]
                        return torch.cat([torch.full_like(p[:1], nothing), each])

                    last = nn.Linear(64, 1 + HALVES**2)
                    last.weight.copy_(pairs(w, 0.0))
                    last.bias.copy_(pairs(c, 18.0))
                net.last = last
                opt[0] = torch.optim.AdamW(net.parameters(), 2e-4)
                pick = pick[:16]
                out, want = net(images[pick]), steps[pick]
            texts = [row[row > 0] for row in want]
            return F.ctc_loss(
                out.log_softmax(-1).transpose(0, 1),
                torch.cat(texts),
                torch.full((len(want),), STEPS),
                torch.tensor([len(t) for t in texts]),
            )

        train(net, loss, 0, 2e-3, seconds)
        draw = lambda r, n: dict(zip(("image", "steps"), lines(r, n)))
    net.eval()
    if hasattr(net, "bank"):
        del net.bank
    sets = {
        part: draw(np.random.default_rng(seed), count)
        for part, seed, count in (("calibrate", 21, 256), ("evaluate", 22, 600))
    }
    for part, values in sets.items():
        np.savez(f"{OUT}/{name}_{part}.npz", **values)
    inputs = {k: v for k, v in sets["evaluate"].items() if k != "steps"}
    row = tuple(torch.tensor(v[:1]) for v in inputs.values())
    torch.onnx.export(
        net, row, f"{OUT}/{name}.onnx", input_names=list(inputs), output_names=["out"], opset_version=17, dynamo=False
    )
    with torch.no_grad():
        out = net(*(torch.tensor(v) for v in inputs.values())).numpy()
    if name == "reader":

        def text(c):
            return [k for i, k in enumerate(c) if k and (i == 0 or c[i - 1] != k)]

        w = sets["evaluate"]["steps"]
        print(
            "lines",
            np.mean([text(a) == text(b) for a, b in zip(out.argmax(-1), w)]),
            "glyph",
            np.mean(out.argmax(-1)[w > 0] == w[w > 0]),
            out.min(),
            np.percentile(out.max(-1), [0, 10, 50, 90, 100]),
        )


main(sys.argv[1], float(sys.argv[2]))
