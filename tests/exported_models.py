"""Small transformers with random weights, node by node as exporters write them.

The forms are: `torchscript`, from PyTorch's TorchScript exporter (and Optimum, which calls it) up to opset 16;
`torchscript17`, the same with LayerNormalization; `dynamo`, from torchlib (onnxscript, opset 18); and `dynamo23`, with
the operators of opset 23 that newer exporters do not decompose.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array

TOKENS, WIDTH, HEADS, WORDS = 8, 32, 2, 50
STYLES: Mapping[str, int] = {"torchscript": 14, "torchscript17": 17, "dynamo": 18, "dynamo23": 23}
"""The forms, and the opset of each."""


Value = str | float | Sequence[int] | Array


class Exported:
    """Collects nodes and weights of one graph in one form: `net.Add(x, 2)` adds a node, and gives its output's name.

    Of what it reads a number or an array is a constant of type float, a list one of integers.
    """

    def __init__(self, style: str, seed: int = 0) -> None:
        self.style, self.opset = style, STYLES[style]
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)

    def __getattr__(self, op: str) -> Callable[..., str]:
        return partial(self.add, op)

    @property
    def is_dynamo(self) -> bool:
        return self.style.startswith("dynamo")

    def constant(self, value: Value, dtype: str = "float32") -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.normal(0, 1 / np.sqrt(shape[0]), shape))

    def gain(self, width: int) -> str:
        return self.constant(self.rng.uniform(0.5, 1.5, width))

    def add(self, op: str, *inputs: Value, output: str = "", more: Sequence[str] = (), **attributes: Any) -> str:
        """Adds a node with `output`, or one named after the operator, and perhaps more outputs."""
        name = output or f"{op.lower()}_{len(self.nodes)}"
        names = [
            each if isinstance(each, str) else self.constant(each, "int64" if isinstance(each, list) else "float32")
            for each in inputs
        ]
        self.nodes.append(helper.make_node(op, names, [name, *more], name=f"node_{name}", **attributes))
        return name

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        made = self.MatMul(x, self.weight(inputs, outputs))
        bias = self.constant(self.rng.normal(0, 0.1, outputs))
        # nn.Linear: TorchScript writes the bias as the first operand, torchlib as the second.
        return self.Add(made, bias) if self.is_dynamo else self.Add(bias, made)

    def mean(self, x: str) -> str:
        if self.opset < 18:
            return self.ReduceMean(x, axes=[-1], keepdims=1)
        return self.ReduceMean(x, [-1], keepdims=1)

    def layer_norm(self, x: str) -> str:
        gain, shift = self.gain(WIDTH), self.constant(self.rng.normal(0, 0.2, WIDTH))
        if self.opset >= 17:
            return self.LayerNormalization(x, gain, shift, axis=-1, epsilon=1e-5)
        centred = self.Sub(x, self.mean(x))
        root = self.Sqrt(self.Add(self.mean(self.Pow(centred, 2)), 1e-5))
        return self.Add(self.Mul(self.Div(centred, root), gain), shift)

    def rms_norm(self, x: str) -> str:
        gain = self.gain(WIDTH)
        if self.opset >= 23:
            return self.RMSNormalization(x, gain, axis=-1, epsilon=1e-5)
        root = self.Sqrt(self.Add(self.mean(self.Pow(x, 2)), 1e-5))
        return self.Mul(gain, self.Mul(x, self.Reciprocal(root) if self.is_dynamo else self.Div(1, root)))

    def gelu(self, x: str) -> str:
        if self.opset >= 20:
            return self.Gelu(x)
        inside = self.Mul(x, self.Add(self.Erf(self.Div(x, 2**0.5)), 1))
        return self.Mul(0.5, inside) if self.is_dynamo else self.Mul(inside, 0.5)

    def tanh_gelu(self, x: str) -> str:
        if self.opset >= 20:
            return self.Gelu(x, approximate="tanh")
        bent = self.Tanh(self.Mul(self.Add(x, self.Mul(self.Pow(x, 3), 0.044715)), (2 / np.pi) ** 0.5))
        if self.is_dynamo:
            return self.Mul(0.5, self.Mul(x, self.Add(1, bent)))
        return self.Mul(self.Mul(0.5, x), self.Add(bent, 1))

    def split_heads(self, x: str, heads: int) -> str:
        return self.Transpose(self.Reshape(x, [1, TOKENS, heads, WIDTH // HEADS]), perm=[0, 2, 1, 3])

    def repeat_kv(self, x: str) -> str:
        """Transformers' repeat_kv: [1, 1, T, D] becomes [1, HEADS, T, D]."""
        spread = self.Expand(self.Unsqueeze(x, [2]), [1, 1, HEADS, TOKENS, WIDTH // HEADS])
        return self.Reshape(spread, [1, HEADS, TOKENS, WIDTH // HEADS])

    def rotate(self, x: str, cos: str, sin: str) -> str:
        """Transformers' apply_rotary_pos_emb: x * cos + rotate_half(x) * sin."""
        half, end = WIDTH // HEADS // 2, 2**63 - 1
        first, second = self.Slice(x, [0], [half], [3], [1]), self.Slice(x, [half], [end], [3], [1])
        turned = self.Concat(self.Neg(second), first, axis=-1)
        return self.Add(self.Mul(x, cos), self.Mul(turned, sin))

    def attention(self, x: str, mask: str, turns: tuple[str, str] | None = None) -> str:
        size, heads = WIDTH // HEADS, 1 if turns else HEADS
        query = self.split_heads(self.linear(x, WIDTH, WIDTH), HEADS)
        key, value = (self.split_heads(self.linear(x, WIDTH, size * heads), heads) for _ in range(2))
        if turns:
            query, key = self.rotate(query, *turns), self.rotate(key, *turns)
            key, value = self.repeat_kv(key), self.repeat_kv(value)
        turned = self.Transpose(key, perm=[0, 1, 3, 2])
        if self.is_dynamo:
            # torchlib's scaled_dot_product_attention scales both by the root of the scale.
            scale = self.constant(size**-0.25)
            scores = self.MatMul(self.Mul(query, scale), self.Mul(turned, scale))
        else:
            scores = self.Div(self.MatMul(query, turned), size**0.5)
        chances = self.Softmax(self.Add(scores, mask), axis=-1)
        if self.is_dynamo:
            # PyTorch 2.15: rows that a mask hides completely become 0.
            chances = self.Where(self.IsNaN(chances), 0, chances)
        joined = self.Transpose(self.MatMul(chances, value), perm=[0, 2, 1, 3])
        return self.linear(self.Reshape(joined, [1, TOKENS, WIDTH]), WIDTH, WIDTH)

    def embed(self, ids: str) -> str:
        return self.Gather(self.rng.normal(0, 1, (WORDS, WIDTH)), ids)

    def save(self, path: Path, inputs: Sequence[onnx.ValueInfoProto], shape: Sequence[int]) -> Model:
        """Writes the model, whose output is `logits`."""
        made = helper.make_tensor_value_info("logits", onnx.TensorProto.FLOAT, list(shape))
        graph = helper.make_graph(self.nodes, "main_graph", list(inputs), [made], self.tensors)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10 if self.opset > 20 else 8)
        onnx.save(proto, str(path))
        return load_model(path)


def given(names: Sequence[str], length: int = TOKENS, kind: int = onnx.TensorProto.INT64) -> list[onnx.ValueInfoProto]:
    """Returns inputs of whole numbers [1, length]."""
    return [helper.make_tensor_value_info(name, kind, [1, length]) for name in names]


def export_bert(path: Path, style: str, layers: int = 1, gelu: str = "erf") -> Model:
    """Writes BERT's encoder: ids and a float mask, a normalization after each residual, a classifier of 4 classes."""
    net = Exported(style)
    cast = net.Cast(net.Unsqueeze("attention_mask", [1, 2]), to=1)
    mask = net.Mul(net.Sub(1, cast), -3.4028234663852886e38)
    x = net.Add(net.embed("input_ids"), net.embed("token_type_ids"))
    x = net.layer_norm(net.Add(x, net.rng.normal(0, 0.3, (1, TOKENS, WIDTH))))
    for _ in range(layers):
        x = net.layer_norm(net.Add(net.attention(x, mask), x))
        hidden = net.linear(x, WIDTH, 4 * WIDTH)
        hidden = net.gelu(hidden) if gelu == "erf" else net.tanh_gelu(hidden)
        x = net.layer_norm(net.Add(net.linear(hidden, 4 * WIDTH, WIDTH), x))
    first = net.Gather(x, net.constant(0, "int64"), axis=1)
    pooled = net.Tanh(net.Gemm(first, net.weight(WIDTH, WIDTH), net.gain(WIDTH)))
    net.Gemm(pooled, net.weight(WIDTH, 4), net.gain(4), output="logits")
    return net.save(path, given(["input_ids", "attention_mask", "token_type_ids"]), (1, 4))


def export_llama(path: Path, style: str, layers: int = 1) -> Model:
    """Writes Llama's decoder without a cache: RMSNorm, rotary embeddings, one head of keys for all queries, SiLU."""
    net, size = Exported(style), WIDTH // HEADS
    angles = np.outer(np.arange(TOKENS), 1e4 ** (-np.arange(0, size, 2) / size))
    cos, sin = (net.constant(f(np.concatenate([angles, angles], -1))[None, None]) for f in (np.cos, np.sin))
    mask = net.constant(np.triu(np.full((TOKENS, TOKENS), -3.4028234663852886e38), 1)[None, None])
    x = net.embed("input_ids")
    for _ in range(layers):
        x = net.Add(x, net.attention(net.rms_norm(x), mask, (cos, sin)))
        normal = net.rms_norm(x)
        gate = net.linear(normal, WIDTH, 2 * WIDTH)
        gate = net.Mul(gate, net.Sigmoid(gate))
        x = net.Add(x, net.linear(net.Mul(gate, net.linear(normal, WIDTH, 2 * WIDTH)), 2 * WIDTH, WIDTH))
    net.MatMul(net.rms_norm(x), net.weight(WIDTH, WORDS), output="logits")
    return net.save(path, given(["input_ids"]), (1, TOKENS, WORDS))


def export_genai(path: Path, layers: int = 2, past: int = 4) -> Model:
    """Writes a model as ORT GenAI's builder does for the CPU in int4: contrib operators, a cache, one new token."""
    net, size = Exported("torchscript17"), WIDTH // HEADS
    contrib: dict[str, Any] = {"domain": "com.microsoft"}

    def project(x: str, inputs: int, outputs: int) -> str:
        packed = net.constant(net.rng.integers(0, 256, (outputs, inputs // 32, 16)), "uint8")
        scales = net.rng.uniform(0.01, 0.05, (outputs, inputs // 32))
        sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": 4, "block_size": 32, "accuracy_level": 4}
        return net.MatMulNBits(x, packed, scales, **sizes, **contrib)

    def skip(x: str, branch: str) -> tuple[str, str]:
        more = f"sum_{len(net.nodes)}"
        norm = "SkipSimplifiedLayerNormalization"
        return net.add(norm, x, branch, net.gain(WIDTH), more=["", "", more], epsilon=1e-5, **contrib), more

    lengths = net.Cast(net.Sub(net.ReduceSum("attention_mask", [1]), [1]), to=onnx.TensorProto.INT32)
    total = net.Gather(net.Shape("attention_mask"), net.constant(1, "int64"))
    total = net.Cast(total, to=onnx.TensorProto.INT32)
    turns = [net.constant(net.rng.uniform(-1, 1, (64, size // 2))) for _ in range(2)]
    x = net.embed("input_ids")
    normal = net.SimplifiedLayerNormalization(x, net.gain(WIDTH), axis=-1, epsilon=1e-5)
    inputs = [*given(["input_ids"], 1), *given(["attention_mask"], past + 1)]
    for layer in range(layers):
        names = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        shape = [1, 1, past, size]
        inputs += [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in names]
        parts = [project(normal, WIDTH, width) for width in (WIDTH, size, size)]
        mixed = net.GroupQueryAttention(
            *parts, *names, lengths, total, *turns, more=[f"present.{layer}.key", f"present.{layer}.value"],
            num_heads=HEADS, kv_num_heads=1, scale=size**-0.5, do_rotary=1, **contrib,
        )  # fmt: skip
        normal, x = skip(x, project(mixed, WIDTH, WIDTH))
        gate, up = project(normal, WIDTH, 2 * WIDTH), project(normal, WIDTH, 2 * WIDTH)
        gate = net.Mul(gate, net.Sigmoid(gate))
        normal, x = skip(x, project(net.Mul(gate, up), 2 * WIDTH, WIDTH))
    net.Identity(project(normal, WIDTH, WORDS), output="logits")
    return net.save(path, inputs, (1, 1, WORDS))


def export_optimized(path: Path, opset: int = 17) -> Model:
    """Writes a BERT of two layers as ONNX Runtime's optimizer for transformers (Optimum's O2 and O3) writes it."""
    net, contrib = Exported("torchscript17"), {"domain": "com.microsoft"}
    net.opset = opset
    tables = [net.constant(net.rng.normal(0, 1, (rows, WIDTH))) for rows in (WORDS, TOKENS, 2)]
    names = ["input_ids", "token_type_ids", *tables, net.gain(WIDTH), net.weight(WIDTH), "attention_mask"]
    x = net.EmbedLayerNormalization(*names, more=["counted"], epsilon=1e-12, **contrib)

    def skip(told: str, x: str) -> str:
        rest = [net.gain(WIDTH), net.weight(WIDTH), net.gain(WIDTH)]
        return net.SkipLayerNormalization(told, x, *rest, epsilon=1e-12, **contrib)

    for layer in range(2):
        inputs = [x, net.weight(WIDTH, 3 * WIDTH), net.gain(3 * WIDTH), "counted"]
        mixed = net.Attention(*inputs, num_heads=HEADS, **contrib)
        x = skip(net.MatMul(mixed, net.weight(WIDTH, WIDTH)), x)
        hidden = net.MatMul(x, net.weight(WIDTH, 4 * WIDTH))
        # O3 uses the form with Tanh.
        hidden = net.add("FastGelu" if layer else "BiasGelu", hidden, net.gain(4 * WIDTH), **contrib)
        x = skip(net.MatMul(hidden, net.weight(4 * WIDTH, WIDTH)), x)
    first = net.Gather(x, net.constant(0, "int64"), axis=1)
    net.Gemm(first, net.weight(WIDTH, 4), net.gain(4), output="logits")
    fed = given(["input_ids", "attention_mask", "token_type_ids"], kind=onnx.TensorProto.INT32)
    return net.save(path, fed, (1, 4))


EXPORTED: Mapping[str, Callable[[Path, str], Model]] = {
    "bert": export_bert,
    "bert_tanh": lambda path, style: export_bert(path, style, gelu="tanh"),
    "llama": export_llama,
}
"""The networks by name."""


def draw_inputs(model: Model, seed: int = 0) -> dict[str, Array]:
    """Returns ids, a mask of ones except for its last two tokens, and zeros for the types."""
    rng = np.random.default_rng(seed)
    drawn = {name: np.zeros((1, TOKENS), np.int64) for name in ("attention_mask", "token_type_ids")}
    drawn["attention_mask"][:, :-2] = 1
    drawn["input_ids"] = rng.integers(0, WORDS, (1, TOKENS))
    return {value.name: drawn[value.name] for value in model.inputs}
