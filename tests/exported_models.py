"""Small transformers with random weights, node by node as exporters write them.

The forms are: `torchscript`, from PyTorch's TorchScript exporter (and Optimum, which calls it) up to opset 16;
`torchscript17`, the same with LayerNormalization; `dynamo`, from torchlib (onnxscript, opset 18); and `dynamo23`, with
the operators of opset 23 that newer exporters do not decompose.
"""

from collections.abc import Callable, Mapping, Sequence
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


class Exported:
    """Collects nodes and weights of one graph in one form."""

    def __init__(self, style: str, seed: int = 0) -> None:
        self.style, self.opset = style, STYLES[style]
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self.rng = np.random.default_rng(seed)

    @property
    def is_dynamo(self) -> bool:
        return self.style.startswith("dynamo")

    def constant(self, value: Any, dtype: str = "float32") -> str:
        name = f"c{len(self.tensors)}"
        self.tensors.append(numpy_helper.from_array(np.asarray(value, dtype), name))
        return name

    def weight(self, *shape: int) -> str:
        return self.constant(self.rng.normal(0, 1 / np.sqrt(shape[0]), shape))

    def gain(self, width: int) -> str:
        return self.constant(self.rng.uniform(0.5, 1.5, width))

    def add(self, op: str, inputs: Sequence[str], output: str = "", **attributes: Any) -> str:
        name = output or f"{op.lower()}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, list(inputs), [name], name=f"node_{name}", **attributes))
        return name

    def linear(self, x: str, inputs: int, outputs: int) -> str:
        made = self.add("MatMul", [x, self.weight(inputs, outputs)])
        bias = self.constant(self.rng.normal(0, 0.1, outputs))
        # nn.Linear: TorchScript writes the bias as the first operand, torchlib as the second.
        return self.add("Add", [made, bias] if self.is_dynamo else [bias, made])

    def mean(self, x: str) -> str:
        if self.opset < 18:
            return self.add("ReduceMean", [x], axes=[-1], keepdims=1)
        return self.add("ReduceMean", [x, self.constant([-1], "int64")], keepdims=1)

    def layer_norm(self, x: str) -> str:
        gain, shift = self.gain(WIDTH), self.constant(self.rng.normal(0, 0.2, WIDTH))
        if self.opset >= 17:
            return self.add("LayerNormalization", [x, gain, shift], axis=-1, epsilon=1e-5)
        centred = self.add("Sub", [x, self.mean(x)])
        variance = self.mean(self.add("Pow", [centred, self.constant(2)]))
        root = self.add("Sqrt", [self.add("Add", [variance, self.constant(1e-5)])])
        return self.add("Add", [self.add("Mul", [self.add("Div", [centred, root]), gain]), shift])

    def rms_norm(self, x: str) -> str:
        gain = self.gain(WIDTH)
        if self.opset >= 23:
            return self.add("RMSNormalization", [x, gain], axis=-1, epsilon=1e-5)
        variance = self.mean(self.add("Pow", [x, self.constant(2)]))
        root = self.add("Sqrt", [self.add("Add", [variance, self.constant(1e-5)])])
        if self.is_dynamo:
            return self.add("Mul", [gain, self.add("Mul", [x, self.add("Reciprocal", [root])])])
        return self.add("Mul", [gain, self.add("Mul", [x, self.add("Div", [self.constant(1), root])])])

    def gelu(self, x: str) -> str:
        if self.opset >= 20:
            return self.add("Gelu", [x])
        grown = self.add("Add", [self.add("Erf", [self.add("Div", [x, self.constant(2**0.5)])]), self.constant(1)])
        inside, half = self.add("Mul", [x, grown]), self.constant(0.5)
        return self.add("Mul", [half, inside] if self.is_dynamo else [inside, half])

    def tanh_gelu(self, x: str) -> str:
        if self.opset >= 20:
            return self.add("Gelu", [x], approximate="tanh")
        cubed = self.add("Mul", [self.add("Pow", [x, self.constant(3)]), self.constant(0.044715)])
        bent = self.add("Tanh", [self.add("Mul", [self.add("Add", [x, cubed]), self.constant((2 / np.pi) ** 0.5)])])
        if self.is_dynamo:
            return self.add(
                "Mul", [self.constant(0.5), self.add("Mul", [x, self.add("Add", [self.constant(1), bent])])]
            )
        return self.add("Mul", [self.add("Mul", [self.constant(0.5), x]), self.add("Add", [bent, self.constant(1)])])

    def split_heads(self, x: str, heads: int) -> str:
        shape = self.constant([1, TOKENS, heads, WIDTH // HEADS], "int64")
        return self.add("Transpose", [self.add("Reshape", [x, shape])], perm=[0, 2, 1, 3])

    def repeat_kv(self, x: str) -> str:
        """Transformers' repeat_kv: [1, 1, T, D] becomes [1, HEADS, T, D]."""
        opened = self.add("Unsqueeze", [x, self.constant([2], "int64")])
        spread = self.add("Expand", [opened, self.constant([1, 1, HEADS, TOKENS, WIDTH // HEADS], "int64")])
        return self.add("Reshape", [spread, self.constant([1, HEADS, TOKENS, WIDTH // HEADS], "int64")])

    def rotate(self, x: str, cos: str, sin: str) -> str:
        """Transformers' apply_rotary_pos_emb: x * cos + rotate_half(x) * sin."""
        half, end = WIDTH // HEADS // 2, 2**63 - 1
        first, second = (
            self.add("Slice", [x, *(self.constant([at], "int64") for at in (start, stop, 3, 1))])
            for start, stop in ((0, half), (half, end))
        )
        turned = self.add("Concat", [self.add("Neg", [second]), first], axis=-1)
        return self.add("Add", [self.add("Mul", [x, cos]), self.add("Mul", [turned, sin])])

    def attention(self, x: str, mask: str, turns: tuple[str, str] | None = None) -> str:
        size, heads = WIDTH // HEADS, 1 if turns else HEADS
        query = self.split_heads(self.linear(x, WIDTH, WIDTH), HEADS)
        key, value = (self.split_heads(self.linear(x, WIDTH, size * heads), heads) for _ in range(2))
        if turns:
            query, key = self.rotate(query, *turns), self.rotate(key, *turns)
            key, value = self.repeat_kv(key), self.repeat_kv(value)
        turned = self.add("Transpose", [key], perm=[0, 1, 3, 2])
        if self.is_dynamo:
            # torchlib's scaled_dot_product_attention scales both by the root of the scale.
            scale = self.constant(size**-0.25)
            scores = self.add("MatMul", [self.add("Mul", [query, scale]), self.add("Mul", [turned, scale])])
        else:
            scores = self.add("Div", [self.add("MatMul", [query, turned]), self.constant(size**0.5)])
        chances = self.add("Softmax", [self.add("Add", [scores, mask])], axis=-1)
        if self.is_dynamo:
            # PyTorch 2.15: rows that a mask hides completely become 0.
            chances = self.add("Where", [self.add("IsNaN", [chances]), self.constant(0), chances])
        joined = self.add("Transpose", [self.add("MatMul", [chances, value])], perm=[0, 2, 1, 3])
        flat = self.add("Reshape", [joined, self.constant([1, TOKENS, WIDTH], "int64")])
        return self.linear(flat, WIDTH, WIDTH)

    def embed(self, ids: str) -> str:
        return self.add("Gather", [self.constant(self.rng.normal(0, 1, (WORDS, WIDTH))), ids])

    def save(self, path: Path, inputs: Sequence[onnx.ValueInfoProto], output: str, shape: Sequence[int]) -> Model:
        made = helper.make_tensor_value_info(output, onnx.TensorProto.FLOAT, list(shape))
        graph = helper.make_graph(self.nodes, "main_graph", list(inputs), [made], self.tensors)
        imports = [helper.make_opsetid("", self.opset), helper.make_opsetid("com.microsoft", 1)]
        proto = helper.make_model(graph, opset_imports=imports, ir_version=10 if self.opset > 20 else 8)
        onnx.save(proto, str(path))
        return load_model(path)


def export_bert(path: Path, style: str, layers: int = 1, gelu: str = "erf") -> Model:
    """Writes BERT's encoder: ids and a float mask, a normalization after each residual, a classifier of 4 classes."""
    net = Exported(style)
    cast = net.add("Cast", [net.add("Unsqueeze", ["attention_mask", net.constant([1, 2], "int64")])], to=1)
    mask = net.add("Mul", [net.add("Sub", [net.constant(1), cast]), net.constant(-3.4028234663852886e38)])
    x = net.add("Add", [net.embed("input_ids"), net.embed("token_type_ids")])
    x = net.layer_norm(net.add("Add", [x, net.constant(net.rng.normal(0, 0.3, (1, TOKENS, WIDTH)))]))
    for _ in range(layers):
        x = net.layer_norm(net.add("Add", [net.attention(x, mask), x]))
        hidden = net.linear(x, WIDTH, 4 * WIDTH)
        hidden = net.gelu(hidden) if gelu == "erf" else net.tanh_gelu(hidden)
        x = net.layer_norm(net.add("Add", [net.linear(hidden, 4 * WIDTH, WIDTH), x]))
    first = net.add("Gather", [x, net.constant(0, "int64")], axis=1)
    pooled = net.add("Tanh", [net.add("Gemm", [first, net.weight(WIDTH, WIDTH), net.gain(WIDTH)])])
    net.add("Gemm", [pooled, net.weight(WIDTH, 4), net.gain(4)], "logits")
    names = ("input_ids", "attention_mask", "token_type_ids")
    inputs = [helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1, TOKENS]) for name in names]
    return net.save(path, inputs, "logits", (1, 4))


def export_llama(path: Path, style: str, layers: int = 1) -> Model:
    """Writes Llama's decoder without a cache: RMSNorm, rotary embeddings, one head of keys for all queries, SiLU."""
    net = Exported(style)
    size = WIDTH // HEADS
    angles = np.outer(np.arange(TOKENS), 1e4 ** (-np.arange(0, size, 2) / size))
    turns = tuple(net.constant(f(np.concatenate([angles, angles], -1))[None, None]) for f in (np.cos, np.sin))
    mask = net.constant(np.triu(np.full((TOKENS, TOKENS), -3.4028234663852886e38), 1)[None, None])
    x = net.embed("input_ids")
    for _ in range(layers):
        x = net.add("Add", [x, net.attention(net.rms_norm(x), mask, (turns[0], turns[1]))])
        normal = net.rms_norm(x)
        gate = net.linear(normal, WIDTH, 2 * WIDTH)
        gate = net.add("Mul", [gate, net.add("Sigmoid", [gate])])
        x = net.add(
            "Add", [x, net.linear(net.add("Mul", [gate, net.linear(normal, WIDTH, 2 * WIDTH)]), 2 * WIDTH, WIDTH)]
        )
    net.add("MatMul", [net.rms_norm(x), net.weight(WIDTH, WORDS)], "logits")
    ids = helper.make_tensor_value_info("input_ids", onnx.TensorProto.INT64, [1, TOKENS])
    return net.save(path, [ids], "logits", (1, TOKENS, WORDS))


def export_genai(path: Path, layers: int = 2, past: int = 4) -> Model:
    """Writes a model as ORT GenAI's builder does for the CPU in int4: contrib operators, a cache, one new token."""
    net, size = Exported("torchscript17"), WIDTH // HEADS
    contrib: dict[str, Any] = {"domain": "com.microsoft"}

    def project(x: str, inputs: int, outputs: int) -> str:
        packed = net.constant(net.rng.integers(0, 256, (outputs, inputs // 32, 16)), "uint8")
        scales = net.constant(net.rng.uniform(0.01, 0.05, (outputs, inputs // 32)))
        sizes: dict[str, Any] = {"K": inputs, "N": outputs, "bits": 4, "block_size": 32, "accuracy_level": 4}
        return net.add("MatMulNBits", [x, packed, scales], **sizes, **contrib)

    def skip(x: str, branch: str) -> tuple[str, str]:
        made = net.add("SkipSimplifiedLayerNormalization", [x, branch, net.gain(WIDTH)], epsilon=1e-5, **contrib)
        net.nodes[-1].output.extend(["", "", f"{made}_sum"])
        return made, f"{made}_sum"

    counted = net.add("ReduceSum", ["attention_mask", net.constant([1], "int64")])
    lengths = net.add("Cast", [net.add("Sub", [counted, net.constant([1], "int64")])], to=onnx.TensorProto.INT32)
    total = net.add("Gather", [net.add("Shape", ["attention_mask"]), net.constant(1, "int64")])
    total = net.add("Cast", [total], to=onnx.TensorProto.INT32)
    turns = [net.constant(net.rng.uniform(-1, 1, (64, size // 2))) for _ in range(2)]
    x = net.embed("input_ids")
    normal, shape = (
        net.add("SimplifiedLayerNormalization", [x, net.gain(WIDTH)], axis=-1, epsilon=1e-5),
        [1, 1, past, size],
    )
    inputs = [
        helper.make_tensor_value_info(name, onnx.TensorProto.INT64, [1, length])
        for name, length in (("input_ids", 1), ("attention_mask", past + 1))
    ]
    for layer in range(layers):
        names = [f"past_key_values.{layer}.{part}" for part in ("key", "value")]
        inputs += [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape) for name in names]
        parts = [project(normal, WIDTH, width) for width in (WIDTH, size, size)]
        mixed = net.add(
            "GroupQueryAttention", [*parts, *names, lengths, total, *turns], num_heads=HEADS, kv_num_heads=1,
            scale=size**-0.5, do_rotary=1, **contrib,
        )  # fmt: skip
        net.nodes[-1].output.extend([f"present.{layer}.key", f"present.{layer}.value"])
        normal, x = skip(x, project(mixed, WIDTH, WIDTH))
        gate, up = project(normal, WIDTH, 2 * WIDTH), project(normal, WIDTH, 2 * WIDTH)
        gate = net.add("Mul", [gate, net.add("Sigmoid", [gate])])
        normal, x = skip(x, project(net.add("Mul", [gate, up]), 2 * WIDTH, WIDTH))
    net.nodes.append(helper.make_node("Identity", [project(normal, WIDTH, WORDS)], ["logits"], name="node_logits"))
    return net.save(path, inputs, "logits", (1, 1, WORDS))


def export_optimized(path: Path, opset: int = 17) -> Model:
    """Writes a BERT of two layers as ONNX Runtime's optimizer for transformers (Optimum's O2 and O3) writes it."""
    net, contrib = Exported("torchscript17"), {"domain": "com.microsoft"}
    net.opset = opset
    tables = [net.constant(net.rng.normal(0, 1, (rows, WIDTH))) for rows in (WORDS, TOKENS, 2)]
    names = ["input_ids", "token_type_ids", *tables, net.gain(WIDTH), net.weight(WIDTH), "attention_mask"]
    x = net.add("EmbedLayerNormalization", names, epsilon=1e-12, **contrib)
    net.nodes[-1].output.append("counted")
    for layer in range(2):
        inputs = [x, net.weight(WIDTH, 3 * WIDTH), net.gain(3 * WIDTH), "counted"]
        mixed = net.add("Attention", inputs, num_heads=HEADS, **contrib)
        told = net.add("MatMul", [mixed, net.weight(WIDTH, WIDTH)])
        skip = [told, x, net.gain(WIDTH), net.weight(WIDTH), net.gain(WIDTH)]
        x = net.add("SkipLayerNormalization", skip, epsilon=1e-12, **contrib)
        hidden = net.add("MatMul", [x, net.weight(WIDTH, 4 * WIDTH)])
        # O3 uses the form with Tanh.
        hidden = net.add("FastGelu" if layer else "BiasGelu", [hidden, net.gain(4 * WIDTH)], **contrib)
        told = net.add("MatMul", [hidden, net.weight(4 * WIDTH, WIDTH)])
        skip = [told, x, net.gain(WIDTH), net.weight(WIDTH), net.gain(WIDTH)]
        x = net.add("SkipLayerNormalization", skip, epsilon=1e-12, **contrib)
    first = net.add("Gather", [x, net.constant(0, "int64")], axis=1)
    net.add("Gemm", [first, net.weight(WIDTH, 4), net.gain(4)], "logits")
    fed = ("input_ids", "attention_mask", "token_type_ids")
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.INT32, [1, TOKENS]) for name in fed]
    return net.save(path, values, "logits", (1, 4))


EXPORTED: Mapping[str, Callable[[Path, str], Model]] = {
    "bert": export_bert,
    "bert_tanh": lambda path, style: export_bert(path, style, gelu="tanh"),
    "llama": export_llama,
}
"""The networks by name."""


def draw_inputs(model: Model, seed: int = 0) -> dict[str, Array]:
    """Returns ids, a mask of ones except for its last two tokens, and zeros for the types."""
    rng = np.random.default_rng(seed)
    mask = np.ones((1, TOKENS), np.int64)
    mask[:, -2:] = 0
    drawn = {
        "input_ids": rng.integers(0, WORDS, (1, TOKENS)),
        "attention_mask": mask,
        "token_type_ids": np.zeros((1, TOKENS), np.int64),
    }
    return {value.name: drawn[value.name] for value in model.inputs}
