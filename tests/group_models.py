"""Small groups of models that solve a task exactly, with data and labels, for tests and benchmarks.

`make_speech` makes an encoder and a decoder without a cache, `make_talk` a prefill and a decode model with equal
weights and a KV cache, `make_digits` a detector and a classifier of boxes.
"""

import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
from tiny_models import parse_net

from edgekit.model.tensors import Array

FRAMES, LETTERS, WIDTH = 8, "ab cdefgh", 24
START, END = 9, 10
WORDS, WINDOW, PROMPT, MOST = 16, 12, 6, 5


def _save(path: Path, graph: str, weights: Mapping[str, Array]) -> Path:
    """Writes a graph in onnx's text form with these weights."""
    parsed = parse_net(graph, weights).SerializeToString()
    # The text form does not allow names with dots, which caches have.
    proto = onnx.ModelProto.FromString(parsed.replace(b"past_", b"past.").replace(b"present_", b"present."))
    for place, node in enumerate(proto.graph.node):
        node.name = f"node_{place}"
    proto.graph.name = path.stem
    onnx.save(proto, str(path))
    return path


def make_speech(folder: Path, samples: int = 40, seed: int = 0) -> Path:
    """Writes an encoder, a decoder, `speech.npz`, `speech.txt` and `speech.toml`, and returns the last.

    A frame of sound is a noisy code of a letter; the decoder spells the letters up to a frame of silence.
    """
    rng = np.random.default_rng(seed)
    tokens = len(LETTERS) + 2
    # The codes are so far apart that noise and 8 bits leave each closest to its own letter.
    codes = np.linalg.qr(rng.normal(size=(WIDTH, WIDTH)))[0][:tokens].astype(np.float32) * 4
    mix = rng.normal(size=(WIDTH, WIDTH)).astype(np.float32) / np.float32(WIDTH**0.5)
    _save(
        folder / "encoder.onnx",
        f"""(float[1,{FRAMES},{WIDTH}] sound) => (float[1,{FRAMES},{2 * WIDTH}] memory) {{
          mixed = MatMul(sound, mix) bent = Tanh(mixed) memory = Concat<axis = 2>(bent, mixed) }}""",
        {"mix": mix},
    )
    # This inverts the encoder, and finds the nearest code.
    ask = np.concatenate([np.zeros((WIDTH, tokens)), np.linalg.inv(mix) @ codes.T]).astype(np.float32)
    embedding = rng.normal(size=(tokens, WIDTH)).astype(np.float32)
    weights = {
        "embedding": embedding,
        "ask": ask,
        "context": (rng.normal(size=(WIDTH, tokens)) * 0.05).astype(np.float32),
    }
    _save(
        folder / "decoder.onnx",
        f"""(int64[1,{FRAMES}] ids, float[1,{FRAMES},{2 * WIDTH}] memory) => (float[1,{FRAMES},{tokens}] logits) {{
          words = Gather(embedding, ids) said = MatMul(words, context) heard = MatMul(memory, ask)
          logits = Add(heard, said) }}""",
        weights,
    )
    texts = [rng.integers(0, len(LETTERS), rng.integers(2, FRAMES)) for _ in range(samples)]
    heard = [np.concatenate([text, np.full(FRAMES - len(text), END)]) for text in texts]
    noise = rng.normal(size=(samples, 1, FRAMES, WIDTH)) * 0.1
    np.savez(folder / "speech.npz", sound=(codes[np.stack(heard)][:, None] + noise).astype(np.float32))
    (folder / "speech.txt").write_text("".join("".join(LETTERS[letter] for letter in text) + "\n" for text in texts))
    path = folder / "speech.toml"
    path.write_text(
        f"""[members.encoder]
model = "encoder.onnx"

[members.decoder]
model = "decoder.onnx"

[tokens]
start = [{START}]
end = {END}
most = {FRAMES}

[[stages]]
run = "encoder"

[[stages]]
run = "decoder"
repeat = true
text = {{ input = "ids", scores = "logits" }}

[metric]
name = "exact-match"
decoder = "indices"
alphabet = "{LETTERS}??"
max_drop = 5
gate = "estimate"
"""
    )
    return path


def talk_weights(seed: int = 0) -> dict[str, Array]:
    """Returns the weights that the prefill and decode models of `make_talk` share."""
    rng = np.random.default_rng(seed)
    names = {"embed": (WORDS, WIDTH), "where": (64, WIDTH), **dict.fromkeys(("wq", "wk", "wv", "wo"), (WIDTH, WIDTH))}
    drawn = {name: rng.normal(size=shape) / np.sqrt(shape[-1]) for name, shape in names.items()}
    drawn["head"] = rng.normal(size=(WIDTH, WORDS))
    return {name: value.astype(np.float32) for name, value in drawn.items()}


def _attention(rows: int, past: int) -> str:
    """Returns one causal layer after a window of `past`; the mask covers the window and the new tokens."""
    names = ("key", "value")
    caches = "".join(f", float[1,{past},{WIDTH}] past_{name}" for name in names) if past else ""
    made = "".join(f", float[1,{past + rows},{WIDTH}] present_{name}" for name in names)
    remember = "Concat<axis = 1>(past_{0}, new_{0})" if past else "Identity(new_{0})"
    return f"""(int64[1,{rows}] ids, int64[1,{rows}] positions, int64[1,{past + rows}] mask{caches})
      => (float[1,{rows},{WORDS}] logits{made}) <float one = {{1}}, float far = {{30}}, int64[1] axis = {{1}}> {{
        words = Gather(embed, ids) places = Gather(where, positions) x = Add(words, places)
        q = MatMul(x, wq) new_key = MatMul(x, wk) new_value = MatMul(x, wv)
        present_key = {remember.format("key")} present_value = {remember.format("value")}
        turned = Transpose<perm = [0, 2, 1]>(present_key) raw = MatMul(q, turned)
        seen = Cast<to = 1>(mask) hidden = Sub(seen, one) away = Mul(hidden, far) bias = Unsqueeze(away, axis)
        masked = Add(raw, bias) {"" if past else "scaled = Add(masked, causal)"}
        share = Softmax<axis = -1>({"masked" if past else "scaled"}) mixed = MatMul(share, present_value)
        told = MatMul(mixed, wo) y = Add(x, told) logits = MatMul(y, head) }}"""


def make_talk(folder: Path, samples: int = 24, seed: int = 0) -> Path:
    """Writes a prefill and a decode model with one causal layer, `talk.npz` and `talk.toml`, and returns the last."""
    causal = np.triu(np.full((PROMPT, PROMPT), -30.0, np.float32), 1)
    for name, rows, past in (("prefill", PROMPT, 0), ("decode", 1, WINDOW)):
        more = {} if past else {"causal": causal[None]}
        _save(folder / f"{name}.onnx", _attention(rows, past), {**talk_weights(seed), **more})
    rng = np.random.default_rng(seed + 1)
    np.savez(folder / "talk.npz", prompt=rng.integers(0, WORDS, (samples, 1, 4)))
    path = folder / "talk.toml"
    path.write_text(
        f"""[members.prefill]
model = "prefill.onnx"

[members.decode]
model = "decode.onnx"

[tokens]
start = "data.prompt"
most = {MOST}

[[stages]]
run = "prefill"
text = {{ input = "ids", scores = "logits", mask = "mask", positions = "positions" }}

[[stages]]
run = "decode"
repeat = true
text = {{ input = "ids", scores = "logits", mask = "mask", positions = "positions" }}
"""
    )
    return path


def talk_on(tokens: Sequence[int], seed: int = 0) -> list[int]:
    """Returns the right answers of prefill and decode of `make_talk`, computed over the whole text at each token."""
    w, known = {name: value.astype(np.float64) for name, value in talk_weights(seed).items()}, list(tokens)
    for _ in range(MOST):
        x = w["embed"][known] + w["where"][np.arange(len(known))]
        raw = (x @ w["wq"]) @ (x @ w["wk"]).T + np.triu(np.full((len(x), len(x)), -1e9), 1)
        share = np.exp(raw - raw.max(axis=-1, keepdims=True))
        share /= share.sum(axis=-1, keepdims=True)
        known.append(int(((x + share @ (x @ w["wv"]) @ w["wo"]) @ w["head"])[-1].argmax()))
    return known[len(tokens) :]


def make_digits(folder: Path, samples: int = 24, seed: int = 0) -> Path:
    """Writes a detector, a classifier, `digits.npz`, `digits.txt` and `digits.toml`, and returns the last.

    An image [1, 2, 16, 32] has squares of 8 pixels in a row of four places; the first channel says where, the sum of
    the second which class. The detector scores the four places; the classifier averages the crop.
    """
    boxes = np.array([[[8 * place, 4, 8 * place + 8, 12] for place in range(4)]], np.float32)
    _save(
        folder / "detector.onnx",
        """(float[1,2,16,32] picture) => (float[1,4,4] boxes, float[1,4] scores)
          <float[1,2,1,1] pick = {1, 0}, int64[1] begin = {1}, int64[1] end = {2}, int64[1] rows = {2},
           int64[2] flat = {1, 4}, int64[3] column = {1, 4, 1}, float nothing = {0}> {
          cells = AveragePool<kernel_shape = [8, 8], strides = [8, 8], pads = [4, 0, 4, 0]>(picture)
          lit = Conv(cells, pick) row = Slice(lit, begin, end, rows) scores = Reshape(row, flat)
          still = Mul(scores, nothing) moved = Reshape(still, column) boxes = Add(corners, moved) }""",
        {"corners": boxes},
    )
    # The class whose level, 0.2 to 0.8, is nearest: 2 x y - y^2 is largest there.
    levels = np.array([0.2, 0.5, 0.8])
    weights = {"weight": np.stack([0 * levels, 2 * levels]).astype(np.float32), "bias": -(levels**2).astype(np.float32)}
    _save(
        folder / "classifier.onnx",
        """(float[1,2,6,6] crop) => (float[1,3] classes) {
          mean = GlobalAveragePool(crop) flat = Flatten(mean) classes = Gemm(flat, weight, bias) }""",
        weights,
    )
    rng = np.random.default_rng(seed)
    pictures, texts = np.zeros((samples, 1, 2, 16, 32), np.float32), list[str]()
    for row in pictures:
        kinds = rng.integers(0, 3, 4)
        there = rng.permutation(4) < rng.integers(1, 5)
        for place in np.flatnonzero(there):
            row[0, 0, 4:12, 8 * place : 8 * place + 8] = 1
            row[0, 1, 4:12, 8 * place : 8 * place + 8] = levels[kinds[place]] + rng.normal(size=(8, 8)) * 0.05
        texts.append(" ".join(str(kind) for kind in kinds[there]))
    np.savez(folder / "digits.npz", picture=pictures)
    (folder / "digits.txt").write_text("".join(f"{text}\n" for text in texts))
    path = folder / "digits.toml"
    path.write_text(
        """[members.detector]
model = "detector.onnx"

[members.classifier]
model = "classifier.onnx"

[[stages]]
run = "detector"

[[stages]]
run = "classifier"

[stages.crop]
input = "crop"
image = "data.picture"
boxes = "detector.boxes"
scores = "detector.scores"
result = "classes"
most = 4

[metric]
name = "exact-match"
decoder = "strings"
max_drop = 5
gate = "estimate"
"""
    )
    return path


def run_program(folder: Path) -> str:
    """Returns the output of a group's own program on its golden samples, and the last 500 characters of its stderr."""
    program = [sys.executable, str(folder / "app" / "edgekit_group.py")]
    done = subprocess.run(program, capture_output=True, text=True, check=False)
    return done.stdout + done.stderr[-500:]
