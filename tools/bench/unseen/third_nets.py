"""A third set of unseen families: a reader of thousands of classes, a speaker encoder of LSTMs, a sentence encoder."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import onnx
import optax
from collapse_families import rename_last
from collapse_net import Net
from collapse_train import Values, train_net
from unseen_nets import TRAIN, Unseen

from edgekit.model.tensors import Array, Tensors

HALVES = 100
"""Forms of the upper and of the lower half of a glyph, so there are HALVES squared of these."""
STEPS, _GLYPH, _HIGH = 24, 12, 16
FRAMES, BANDS = 60, 32
WORDS, LENGTH = 3000, 24
_COUNTS, _VOICES = (8000, 256, 600), (6000, 128, 300)


@functools.cache
def write_glyphs(part: int) -> tuple[Array, Array]:
    """Returns lines [N,1,16,96] of glyphs, and the class of each step [N,24]: 0 is blank."""
    shapes = np.random.default_rng(7).random((2, HALVES, _HIGH // 2, _GLYPH)) < 0.4
    rng = np.random.default_rng(2000 + part)
    images = rng.normal(0, 0.15, (_COUNTS[part], 1, _HIGH, 4 * STEPS)).astype(np.float32)
    steps = np.zeros((_COUNTS[part], STEPS), np.int64)
    for image, classes in zip(images, steps, strict=True):
        left, ink = int(rng.integers(0, 6)), rng.uniform(0.6, 1.0)
        while left + _GLYPH <= 4 * STEPS:
            upper, lower = rng.integers(0, HALVES, 2)
            image[0, :, left : left + _GLYPH] += ink * np.concatenate([shapes[0, upper], shapes[1, lower]])
            classes[(left + _GLYPH // 2) // 4] = 1 + HALVES * upper + lower
            left += _GLYPH + int(rng.integers(1, 5))
    return images, steps


@functools.cache
def speak(part: int) -> tuple[Array, Array]:
    """Returns logarithms of spectra [N,60,32] of voices, and the speaker of each; each part has its own speakers."""
    rng, count = np.random.default_rng(2100 + part), _VOICES[part]
    speakers = 300 if part == TRAIN else count // 4
    bands, who = np.arange(BANDS), rng.integers(0, speakers, count)
    lows = rng.uniform(3, 28, (speakers, 4))
    widths, depths = rng.uniform(1, 3, (speakers, 4)), rng.uniform(1, 4, (speakers, 4))
    pace = rng.uniform(0.15, 0.8, speakers)
    times = np.arange(FRAMES)
    rows = np.empty((count, FRAMES, BANDS), np.float32)
    for row, one in zip(rows, who, strict=True):
        moves = np.sin(pace[one] * times[:, None] + rng.uniform(0, 6, 4)) * rng.uniform(0.5, 2, 4)
        peaks = lows[one] + moves
        hills = depths[one] * np.exp(-(((bands - peaks[..., None]).swapaxes(1, 2) / widths[one]) ** 2))
        row[:] = hills.sum(-1) + rng.normal(0, 0.6, (FRAMES, BANDS)) + rng.normal(0, 0.5)
    return rows, who


def _draw_topics() -> Array:
    return np.random.default_rng(8).integers(200, WORDS, (150, 40))


@functools.cache
def say(part: int) -> tuple[Array, Array]:
    """Returns numbers of words [N,24] of sentences, and the topic of each."""
    topics = _draw_topics()
    rng = np.random.default_rng(2200 + part)
    which = rng.integers(0, len(topics), _COUNTS[part])
    words = (200 * rng.random((_COUNTS[part], LENGTH)) ** 2).astype(np.int64)
    about = rng.random((_COUNTS[part], LENGTH)) < 0.35
    own = topics[which[:, None], rng.integers(0, topics.shape[1], words.shape)]
    strays = rng.random(words.shape) < 0.08
    words = np.where(about, own, words)
    return np.where(strays, rng.integers(200, WORDS, words.shape), words), which


def _normalise(net: Net, x: str, width: int, spread: float = 0.0) -> str:
    name = f"ln{len(net.arrays)}"
    gain = net.constant(np.exp(net.rng.normal(0, spread, width)), name, trained=True)
    shift = net.constant(np.zeros(width), f"{name}.shift", trained=True)
    return net.add("LayerNormalization", [x, gain, shift], axis=-1, epsilon=1e-6)


def _gelu(net: Net, x: str) -> str:
    gate = net.add("Erf", [net.add("Div", [x, net.constant(np.float32(2**0.5))])])
    y = net.add("Mul", [x, net.add("Add", [gate, net.constant(np.float32(1.0))])])
    return net.add("Mul", [y, net.constant(np.float32(0.5))])


def _attend(net: Net, x: str, length: int, width: int, heads: int) -> str:
    shape, size = net.constant(np.array([0, length, heads, width // heads])), width // heads
    query, key, value = (net.add("Reshape", [net.linear(x, width, width), shape]) for _ in range(3))
    scaled = net.add("Mul", [net.add("Transpose", [query], perm=[0, 2, 1, 3]), net.constant(np.float32(size**-0.5))])
    scores = net.add("MatMul", [scaled, net.add("Transpose", [key], perm=[0, 2, 3, 1])])
    mixed = net.add("MatMul", [net.add("Softmax", [scores], axis=-1), net.add("Transpose", [value], perm=[0, 2, 1, 3])])
    joined = net.add(
        "Reshape", [net.add("Transpose", [mixed], perm=[0, 2, 1, 3]), net.constant(np.array([0, length, width]))]
    )
    return net.linear(joined, width, width, gain=0.03)


def _transform(net: Net, x: str, length: int, width: int, heads: int, spread: float) -> str:
    """Adds a block of BERT: each part behind its sum is normalised."""
    x = _normalise(net, net.add("Add", [x, _attend(net, x, length, width, heads)]), width, spread)
    inside = net.linear(_gelu(net, net.linear(x, width, 3 * width)), 3 * width, width, gain=0.03)
    return _normalise(net, net.add("Add", [x, inside]), width, spread)


def _unite(net: Net, x: str, axis: int) -> str:
    """Adds the division of vectors by their length."""
    length = net.add("ReduceL2", [x], axes=[axis], keepdims=1)
    net.outputs[net.add("Div", [x, length], "embedding")] = ()
    return "embedding"


def make_glyph_reader() -> Net:
    """Returns a line reader after SVTR (Y. Du et al., 2022): convolutions, attention, Softmax over 10,001 classes.

    It is taught whether there is a glyph, and its two halves; the score of a glyph is the sum of these three, which the
    last layer computes for every pair of halves.
    """
    net, width = Net("ctc_many", 17, seed=201), 64
    net.inputs["image"] = (1, _HIGH, 4 * STEPS)

    def block(x: str, sizes: tuple[int, int], stride: int = 1) -> str:
        return net.add("HardSwish", [net.norm(net.conv(x, sizes, stride=stride, bias=False), sizes[1], 0.4)])

    x = block(block(block("image", (1, 16), 2), (16, 24)), (24, 40), 2)
    x = net.add("Transpose", [net.add("Reshape", [x, net.constant(np.array([0, 160, STEPS]))])], perm=[0, 2, 1])
    x = _normalise(net, net.linear(x, 160, width), width)
    for _ in range(2):
        x = _transform(net, x, STEPS, width, 4, 0.0)
    last = len(net.nodes)
    net.outputs[rename_last(net, net.linear(x, width, 1 + 2 * HALVES), "parts")] = (STEPS, 1 + 2 * HALVES)
    images, steps = write_glyphs(TRAIN)

    def loss(values: Values, rows: Values) -> Any:
        parts, steps = values["parts"], rows["steps"]
        present = optax.sigmoid_binary_cross_entropy(parts[..., 0], 1.0 * (steps > 0))
        pair = jnp.maximum(steps - 1, 0)
        named = optax.softmax_cross_entropy_with_integer_labels
        halves = named(parts[..., 1 : 1 + HALVES], pair // HALVES) + named(parts[..., 1 + HALVES :], pair % HALVES)
        return (present + (steps > 0) * halves).mean()

    train_net(net, {"image": images, "steps": steps}, loss, steps=700, batch=32, rate=3e-3)
    product, total = net.nodes[last:]
    for name in (product.input[1], total.input[1]):
        present, upper, lower = np.split(net.arrays[name], [1, 1 + HALVES], axis=-1)
        pairs = upper[..., :, None] + lower[..., None, :]
        every = pairs.reshape(*pairs.shape[:-2], HALVES**2) + present
        # Where there is a glyph its score lies between 16 and 34, elsewhere 95 % of all scores lie below 13.
        nothing = np.full_like(present, 20.0 if name == total.input[1] else 0.0)
        net.arrays[name] = np.concatenate([nothing, every], -1).astype(np.float32)
    del net.outputs["parts"]
    net.outputs[net.add("Softmax", ["parts"], "scores", axis=-1)] = (STEPS, 1 + HALVES**2)
    return net


def make_speaker() -> Net:
    """Returns a speaker encoder after GE2E (L. Wan et al., 2018): three LSTM layers, the last step, length one."""
    net, size = Net("speaker_lstm", 14, seed=202), 64
    net.inputs["spectra"] = (FRAMES, BANDS)
    x = net.add("Transpose", ["spectra"], perm=[1, 0, 2])
    for inputs in (BANDS, size, size):
        shapes = {"w": (1, 4 * size, inputs), "r": (1, 4 * size, size), "b": (1, 8 * size)}
        names = [
            net.constant(net.rng.uniform(-1, 1, shape) / size**0.5, f"{role}{len(net.nodes)}", trained=True)
            for role, shape in shapes.items()
        ]
        x = net.add("Squeeze", [net.add("LSTM", [x, *names], hidden_size=size), net.constant(np.array([1]))])
    last = [net.constant(np.array([number])) for number in (FRAMES - 1, FRAMES, 0)]
    x = net.add("Squeeze", [net.add("Slice", [x, *last]), net.constant(np.array([0]))])
    weight = net.constant(net.rng.normal(0, 0.2, (48, size)), "project", trained=True)
    bias = net.constant(np.zeros(48), "project.bias", trained=True)
    net.outputs[_unite(net, net.add("Gemm", [x, weight, bias], transB=1), 1)] = (48,)
    return _tell_apart(net, "spectra", speak(TRAIN), 48, 1000, 2e-3)


def make_sentences() -> Net:
    """Returns a sentence encoder after MiniLM: words, four blocks, the mean."""
    net, width = Net("sentence_bert", 17, seed=203), 96
    net.inputs["words"], net.kinds["words"] = (LENGTH,), onnx.TensorProto.INT64
    words = net.rng.normal(0, 0.5, (WORDS, width))
    for topic in _draw_topics():
        # Words that occur together begin alike, as those of a model that was taught before.
        words[topic] += net.rng.normal(0, 0.5, width)
    table = net.constant(words, "table", trained=True)
    place = net.constant(net.rng.normal(0, 0.1, (1, LENGTH, width)), "places", trained=True)
    x = _normalise(net, net.add("Add", [net.add("Gather", [table, "words"], axis=0), place]), width, 0.2)
    for _ in range(4):
        x = _transform(net, x, LENGTH, width, 4, 0.2)
    x = net.add("ReduceMean", [x], axes=[1], keepdims=0)
    net.outputs[_unite(net, x, 1)] = (width,)
    return _tell_apart(net, "words", say(TRAIN), width, 150, 7e-4)


def _tell_apart(net: Net, source: str, data: tuple[Array, Array], width: int, steps: int, rate: float) -> Net:
    """Trains an embedding: a row of a table for each class, of which the nearest shall be its own."""
    rows, classes = data
    net.constant(net.rng.normal(0, 1, (int(classes.max()) + 1, width)), "rows", trained=True)

    def loss(values: Values, given: Values) -> Any:
        table = values["rows"]
        near = 12 * values["embedding"] @ (table / jnp.linalg.norm(table, axis=1, keepdims=True)).T
        chances = jax.nn.log_softmax(near)
        return -jnp.take_along_axis(chances, given["class"][:, None], 1).mean()

    train_net(net, {source: rows, "class": classes}, loss, steps=steps, batch=64, rate=rate)
    del net.arrays["rows"]
    net.trained.discard("rows")
    return net


def read_lines(scores: Array) -> list[list[int]]:
    """Returns the classes of each line, without blanks and repeats, of scores [N,steps,classes]."""
    return [
        [int(now) for now, before in zip(row, [0, *row[:-1]], strict=True) if now not in {0, before}]
        for row in scores.argmax(-1)
    ]


def _score_lines(rows: list[Tensors], steps: Any) -> float:
    found = read_lines(np.concatenate([row["scores"] for row in rows]))
    return 100 * float(np.mean([one == list(two[two > 0]) for one, two in zip(found, steps, strict=True)]))


def find_neighbours(rows: list[Tensors]) -> Array:
    """Returns for each sample the one whose vector is nearest to its own."""
    vectors = np.concatenate([row["embedding"] for row in rows])
    likeness = vectors @ vectors.T
    np.fill_diagonal(likeness, -np.inf)
    return np.asarray(likeness.argmax(1))


def _score_neighbours(rows: list[Tensors], classes: Any) -> float:
    return 100 * float((classes[find_neighbours(rows)] == classes).mean())


THIRD = {
    "ctc_many": Unseen(make=make_glyph_reader, data=write_glyphs, score="lines"),
    "speaker_lstm": Unseen(make=make_speaker, data=speak, score="neighbour"),
    "sentence_bert": Unseen(make=make_sentences, data=say, score="neighbour"),
}
THIRD_SCORES: dict[str, Callable[[list[Tensors], Any], float]] = {"lines": _score_lines, "neighbour": _score_neighbours}
