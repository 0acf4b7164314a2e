"""What 4 bits cost a small language model whose head is tied to its embedding, by how its weights are rounded.

    python tools/bench/tied_head.py [--steps 400] [--cache DIR]

A decoder of two blocks learns words of this repository's pages (needs `pip install -r tools/lock/train.txt`); one page
in five, on which it never learned, is scored. The rows: the float model, and all weights in blocks of 32, rounded to
the nearest and by samples (`--rounding comq`). The columns: perplexity; the divergence (Kullback and Leibler) of the
float model's words from it, in thousandths of a nat; and how far the stored embedding lies from the float one. What was
trained is kept in `--cache`.
"""

import argparse
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

import numpy as np
import onnx
from architectures import gelu
from onnx import numpy_helper

sys.path.insert(0, str(Path(__file__).parent / "collapse"))

from collapse_net import Net
from collapse_train import Values, train_net

from edgekit._files import digest_bytes
from edgekit._ort import CpuSession, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array
from edgekit.prepare.clean import prepare_model
from edgekit.quantize.weight_only.convert import WeightOnlyOptions, compress_weights

_PAGES = Path(__file__).parents[2] / "docs"
_WORDS, _TOKENS, _WIDTH, _HEADS, _DEPTH = 1500, 32, 128, 4, 2
_LEARNED_FROM, _BLOCK = 64, 32


def read_pages() -> list[Array]:
    """Returns rows of words [N, tokens + 1] to learn from, and those of pages that are held out."""
    pages = [re.findall(r"\w+|[^\w\s]", path.read_text().lower()) for path in sorted(_PAGES.rglob("*.md"))]
    known = [word for word, _ in Counter(word for page in pages for word in page).most_common(_WORDS - 1)]
    place = {word: index + 1 for index, word in enumerate(known)}
    sides: tuple[list[int], list[int]] = ([], [])
    for index, page in enumerate(pages):
        sides[index % 5 == 0].extend(place.get(word, 0) for word in page)
    size = _TOKENS + 1
    return [np.array(side[: len(side) // size * size]).reshape(-1, size) for side in sides]


def make_net() -> Net:
    """Returns the decoder: learned positions, a causal mask, and the embedding as its head."""
    net = Net("words", 17, seed=0)
    net.inputs["ids"] = (_TOKENS,)
    table = net.constant(net.rng.normal(0, 1 / _WIDTH**0.5, (_WORDS, _WIDTH)), "table", trained=True)
    places = net.constant(net.rng.normal(0, 0.1, (_TOKENS, _WIDTH)), "places", trained=True)
    mask = net.constant(np.triu(np.full((_TOKENS, _TOKENS), -1e4), 1))
    split, joined = net.constant(np.array([0, 0, _HEADS, -1])), net.constant(np.array([0, 0, _WIDTH]))
    root = net.constant(np.float32((_WIDTH // _HEADS) ** 0.5))
    x = net.add("Add", [net.add("Gather", [table, "ids"], axis=0), places])
    for _ in range(_DEPTH):
        normal = _normal(net, x)
        rows = [net.add("Reshape", [net.linear(normal, _WIDTH, _WIDTH), split]) for _ in range(3)]
        query, key, value = (
            net.add("Transpose", [row], perm=perm)
            for row, perm in zip(rows, ([0, 2, 1, 3], [0, 2, 3, 1], [0, 2, 1, 3]), strict=True)
        )
        scores = net.add("Add", [net.add("Div", [net.add("MatMul", [query, key]), root]), mask])
        mixed = net.add("MatMul", [net.add("Softmax", [scores], axis=-1), value])
        mixed = net.add("Reshape", [net.add("Transpose", [mixed], perm=[0, 2, 1, 3]), joined])
        x = net.add("Add", [x, net.linear(mixed, _WIDTH, _WIDTH)])
        hidden = gelu(net, net.linear(_normal(net, x), _WIDTH, 4 * _WIDTH))
        x = net.add("Add", [x, net.linear(hidden, 4 * _WIDTH, _WIDTH)])
    net.add("MatMul", [_normal(net, x), net.add("Transpose", [table], perm=[1, 0])], "logits")
    net.outputs["logits"] = (_TOKENS, _WORDS)
    return net


def _normal(net: Net, x: str) -> str:
    ones, zeros = (net.constant(value(_WIDTH), f"n{len(net.arrays)}", trained=True) for value in (np.ones, np.zeros))
    return net.add("LayerNormalization", [x, ones, zeros], axis=-1, epsilon=1e-5)


def load_words(cache: Path, learning: Array, steps: int) -> Model:
    """Returns the trained decoder, trained now where it is not in the cache."""
    path = cache / f"words-{digest_bytes(learning.tobytes())[:12]}-{steps}.onnx"
    if not path.is_file():
        net = make_net()
        train_net(net, {"ids": learning[:, :-1], "next": learning[:, 1:]}, _loss, steps=steps, batch=16, rate=3e-3)
        proto = net.to_onnx()
        proto.graph.input[0].type.tensor_type.elem_type = onnx.TensorProto.INT64
        cache.mkdir(parents=True, exist_ok=True)
        onnx.save(proto, str(path))
    return load_model(path)


def _loss(values: Values, rows: Values) -> object:
    import jax  # noqa: PLC0415 - only where something is trained

    logs = jax.nn.log_softmax(values["logits"])
    return -jax.numpy.take_along_axis(logs, rows["next"][..., None], axis=-1).mean()


def score_words(model: Model, reference: Model, rows: Array) -> tuple[float, float]:
    """Returns the perplexity of a model over rows of words, and its divergence from another in thousandths of a nat."""
    sessions = [CpuSession(each.path, SessionSettings(threads=1)) for each in (model, reference)]
    loss = apart = 0.0
    for row in rows:
        own, other = (_log_shares(session.run({"ids": row[None, :-1]})["logits"][0]) for session in sessions)
        loss -= float(own[np.arange(_TOKENS), row[1:]].sum())
        apart += float((np.exp(other) * (other - own)).sum())
    count = len(rows) * _TOKENS
    return float(np.exp(loss / count)), 1000 * apart / count


def _log_shares(logits: Array) -> Array:
    logits = logits.astype(np.float64) - logits.max(axis=-1, keepdims=True)
    return np.asarray(logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True)))


def compare_tables(model: Model, light: Model) -> float:
    """Returns the ratio in dB of the table of words to what rounding changes of it."""
    proto = onnx.load(str(light.path))
    stored = {each.name: numpy_helper.to_array(each) for each in proto.graph.initializer}
    weights = {each.name: numpy_helper.to_array(each) for each in onnx.load(str(model.path)).graph.initializer}
    product = next(node for node in proto.graph.node if "logits" in node.output)
    packed, scales, table = stored[product.input[1]], stored[product.input[2]], weights["table"]
    whole = np.stack([packed & 15, packed >> 4], axis=-1).reshape(_WORDS, -1, _BLOCK).astype(np.float32) - 8
    found = (whole * scales.reshape(_WORDS, -1, 1)).reshape(_WORDS, -1)
    return float(10 * np.log10((table**2).sum() / ((table - found) ** 2).sum()))


def main() -> int:
    """Prints the perplexity of each way to round."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--cache", type=Path, metavar="DIR", default=Path.home() / ".cache/edgekit/tied_head")
    args = parser.parse_args()
    learning, held_out = read_pages()
    model = load_words(args.cache, learning, args.steps)
    rows = learning[np.linspace(0, len(learning) - 1, _LEARNED_FROM).astype(int)]
    samples = Samples(source="pages", count=len(rows), read=lambda: ({"ids": row[None, :-1]} for row in rows))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        prepared = prepare_model(model, work / "prepared.onnx", {})
        print("| rounding | perplexity | divergence | table |")
        print(f"| float | {score_words(prepared, prepared, held_out)[0]:.2f} | | |", flush=True)
        for rounding in ("nearest", "comq"):
            options = WeightOnlyOptions(form="int4", rounding=rounding, block=_BLOCK)
            given = None if rounding == "nearest" else samples
            light = compress_weights(prepared, options, work / f"{rounding}.onnx", given)
            perplexity, apart = score_words(light.model, prepared, held_out)
            noise = compare_tables(prepared, light.model)
            print(f"| {rounding} | {perplexity:.2f} | {apart:.2f} | {noise:.1f} dB |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
