"""Trains the demo model of edgekit and writes it with its data into `edgekit/demo`.

The model is a small MobileNetV2 (inverted residuals, depthwise convolutions, ReLU6, global pooling). The data is
scikit-learn's digits, scaled to [0, 1], resized from 8x8 to 32x32 (bilinear) and split at random, stratified by digit,
into three disjoint parts: evaluation, calibration and the rest for training. The evaluation split is used for no
choice. But the same people wrote the digits of all three parts, so the accuracy says nothing about other handwritings.

Run it from a checkout. It takes two to three minutes on two cores; the same machine and packages give the same bytes:

    uv run --group train python tools/train_demo.py
    uv run --group train python tools/train_demo.py --check    # measures the committed files, trains nothing

Without uv: `pip install jax optax scikit-learn onnx onnxruntime`.
"""

import argparse
import functools
import io
import sys
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import onnx
import onnxruntime
import optax
from onnx import helper, numpy_helper
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

FOLDER = Path(__file__).resolve().parent.parent / "edgekit" / "demo"
MODEL = "digits_mobilenet.onnx"
INPUT, OUTPUT = "image", "logits"
SIDE, CLASSES = 32, 10
OPSET, IR_VERSION = 17, 8

SEED = 2024
CALIBRATION_COUNT = 256
EVALUATION_COUNT = 400
LEAST_ACCURACY = 0.97
LOGITS_TOLERANCE = 1e-3

STEM_CHANNELS, HEAD_CHANNELS = 16, 160
STAGES = ((1, 16, 1, 1), (4, 24, 3, 2), (4, 32, 3, 2), (4, 48, 3, 1))
"""Expansion, channels, blocks and first stride of each stage, as in table 2 of the MobileNetV2 paper."""

EPOCHS, WARMUP_EPOCHS = 60, 3
BATCH = 64
PEAK_RATE = 4e-3
WEIGHT_DECAY = 0.05
LABEL_SMOOTHING = 0.05
EPSILON = 1e-3
MAX_TURN, MAX_ZOOM, MAX_SHIFT = 0.17, 0.08, 2.0
"""Limits of the augmentation in radians, as a ratio and in pixels."""

Array = npt.NDArray[Any]
Tree = dict[str, dict[str, jax.Array]]
"""Arrays by layer name and role."""


@dataclass(frozen=True)
class Split:
    """Images [N,1,32,32] in [0, 1] and their labels [N]."""

    images: Array
    labels: Array


@dataclass(frozen=True)
class Conv:
    """A convolution with batch normalization and, if `relu6`, an activation."""

    name: str
    inputs: int
    outputs: int
    kernel: int = 1
    stride: int = 1
    groups: int = 1
    relu6: bool = True


@dataclass(frozen=True)
class Block:
    """Convolutions in a row; a residual block adds its input to their output."""

    name: str
    convs: tuple[Conv, ...]
    residual: bool = False


def inverted_residual(name: str, inputs: int, outputs: int, stride: int, expansion: int) -> Block:
    """Returns MobileNetV2's block: expand, depthwise, linear projection, and a shortcut if the shapes agree."""
    hidden = inputs * expansion
    expand = (Conv(f"{name}/expand", inputs, hidden),) if expansion > 1 else ()
    depthwise = Conv(f"{name}/depthwise", hidden, hidden, kernel=3, stride=stride, groups=hidden)
    project = Conv(f"{name}/project", hidden, outputs, relu6=False)
    return Block(name, (*expand, depthwise, project), residual=stride == 1 and inputs == outputs)


def plan_network() -> Iterator[Block]:
    """Yields the blocks of the network up to the global pooling."""
    yield Block("stem", (Conv("stem/conv", 1, STEM_CHANNELS, kernel=3, stride=2),))
    channels, number = STEM_CHANNELS, 0
    for expansion, outputs, repeats, first_stride in STAGES:
        for repeat in range(repeats):
            number += 1
            stride = first_stride if repeat == 0 else 1
            yield inverted_residual(f"block{number}", channels, outputs, stride, expansion)
            channels = outputs
    yield Block("head", (Conv("head/conv", channels, HEAD_CHANNELS),))


NETWORK = tuple(plan_network())


def load_splits() -> dict[str, Split]:
    """Returns the training, calibration and evaluation splits by name."""
    digits = load_digits()
    small = jnp.asarray(digits.images[:, None] / 16, jnp.float32)
    images = np.asarray(jax.image.resize(small, (len(small), 1, SIDE, SIDE), "bilinear"))
    labels = digits.target.astype(np.int64)
    divide = functools.partial(train_test_split, random_state=SEED)
    rest, evaluation = divide(np.arange(len(labels)), test_size=EVALUATION_COUNT, stratify=labels)
    training, calibration = divide(rest, test_size=CALIBRATION_COUNT, stratify=labels[rest])
    parts = {"training": training, "calibration": calibration, "evaluation": evaluation}
    return {name: Split(images[part], labels[part]) for name, part in parts.items()}


def init_params(key: jax.Array) -> Tree:
    """Returns random weights, scaled by fan-out as in the MobileNet papers."""
    params: Tree = {}
    for conv in (conv for block in NETWORK for conv in block.convs):
        key, own_key = jax.random.split(key)
        shape = (conv.outputs, conv.inputs // conv.groups, conv.kernel, conv.kernel)
        deviation = (2 * conv.groups / (conv.outputs * conv.kernel**2)) ** 0.5
        params[conv.name] = {
            "weight": deviation * jax.random.normal(own_key, shape),
            "scale": jnp.ones(conv.outputs),
            "shift": jnp.zeros(conv.outputs),
        }
    weight = jax.random.normal(key, (CLASSES, HEAD_CHANNELS)) * HEAD_CHANNELS**-0.5
    return {**params, "classifier": {"weight": weight, "bias": jnp.zeros(CLASSES)}}


def forward(params: Tree, moments: Tree | None, images: jax.Array) -> tuple[jax.Array, Tree]:
    """Runs the network.

    Args:
        params: The trained arrays.
        moments: Mean and variance for each batch normalization; None takes those of this batch.
        images: A batch [N,1,32,32].

    Returns:
        The logits [N,10] and the moments that were used.
    """
    used: Tree = {}
    x = images
    for block in NETWORK:
        y = x
        for conv in block.convs:
            layer = params[conv.name]
            y = convolve(y, layer["weight"], conv)
            used[conv.name] = measure_moments(y) if moments is None else moments[conv.name]
            factor, offset = fold_norm(layer, used[conv.name])
            y = y * factor[:, None, None] + offset[:, None, None]
            y = jnp.clip(y, 0, 6) if conv.relu6 else y
        x = x + y if block.residual else y
    classifier = params["classifier"]
    return x.mean((2, 3)) @ classifier["weight"].T + classifier["bias"], used


def convolve(x: jax.Array, weight: jax.Array, conv: Conv) -> jax.Array:
    """Returns the convolution of NCHW images, padded so that stride 1 keeps the size.

    A depthwise one is computed as a sum of shifted images, because XLA's own takes more than twice as long to train on
    a CPU.
    """
    pad = conv.kernel // 2
    if conv.groups == 1:
        return jax.lax.conv_general_dilated(x, weight, (conv.stride,) * 2, ((pad, pad),) * 2)
    padded = jnp.pad(x, ((0, 0), (0, 0), (pad, pad), (pad, pad)))
    size, step = x.shape[-1], conv.stride
    parts = [
        padded[:, :, row : row + size : step, column : column + size : step] * weight[:, 0, row, column, None, None]
        for row, column in np.ndindex(conv.kernel, conv.kernel)
    ]
    return jnp.stack(parts).sum(0)


def measure_moments(x: jax.Array) -> dict[str, jax.Array]:
    """Returns mean and variance of each channel."""
    return {"mean": x.mean((0, 2, 3)), "variance": x.var((0, 2, 3))}


def fold_norm(layer: dict[str, jax.Array], moments: dict[str, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Returns batch normalization as a factor and an offset for each channel."""
    factor = layer["scale"] / jnp.sqrt(moments["variance"] + EPSILON)
    return factor, layer["shift"] - moments["mean"] * factor


def augment(key: jax.Array, images: jax.Array) -> jax.Array:
    """Returns the images, each rotated, zoomed and shifted a little at random."""
    limits = jnp.array([MAX_TURN, MAX_ZOOM, MAX_SHIFT, MAX_SHIFT])[:, None, None, None]
    turn, zoom, down, right = limits * jax.random.uniform(key, (4, len(images), 1, 1), minval=-1.0)
    cosine, sine = jnp.cos(turn) * (1 + zoom), jnp.sin(turn) * (1 + zoom)
    middle = (SIDE - 1) / 2
    rows, columns = jnp.mgrid[:SIDE, :SIDE] - middle
    places = [cosine * rows - sine * columns + middle + down, sine * rows + cosine * columns + middle + right]
    sample = functools.partial(jax.scipy.ndimage.map_coordinates, order=1)
    changed: jax.Array = jax.vmap(sample)(images[:, 0], places)
    return changed[:, None]


def train_network(split: Split) -> tuple[Tree, Tree]:
    """Returns the trained parameters and the moments of the whole training split."""
    init_key, augment_key = jax.random.split(jax.random.key(SEED))
    params = init_params(init_key)
    batches = len(split.labels) // BATCH
    decayed = {layer: {role: role == "weight" for role in arrays} for layer, arrays in params.items()}
    rate = optax.warmup_cosine_decay_schedule(0.0, PEAK_RATE, WARMUP_EPOCHS * batches, EPOCHS * batches)
    optimizer = optax.adamw(rate, weight_decay=WEIGHT_DECAY, mask=decayed)

    def loss_of(params: Tree, images: jax.Array, labels: jax.Array) -> jax.Array:
        wanted = optax.smooth_labels(jax.nn.one_hot(labels, CLASSES), LABEL_SMOOTHING)
        loss: jax.Array = optax.softmax_cross_entropy(forward(params, None, images)[0], wanted).mean()
        return loss

    def take_step(
        params: Tree, state: optax.OptState, number: int, images: jax.Array, labels: jax.Array
    ) -> tuple[Tree, optax.OptState, jax.Array]:
        changed = augment(jax.random.fold_in(augment_key, number), images)
        loss, gradients = jax.value_and_grad(loss_of)(params, changed, labels)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    fast_step = jax.jit(take_step)
    state = optimizer.init(params)
    for number, batch in enumerate(shuffled_batches(len(split.labels))):
        params, state, loss = fast_step(params, state, number, split.images[batch], split.labels[batch])
        if (number + 1) % (10 * batches) == 0:
            print(f"epoch {(number + 1) // batches}/{EPOCHS}: loss {float(loss):.4f}", flush=True)
    return params, forward(params, None, jnp.asarray(split.images))[1]


def shuffled_batches(count: int) -> Iterator[Array]:
    """Yields the indices of each batch of the training; images that do not fill a batch wait for the next epoch."""
    generator = np.random.default_rng(SEED)
    for _ in range(EPOCHS):
        order = generator.permutation(count)
        for start in range(0, count - BATCH + 1, BATCH):
            yield order[start : start + BATCH]


class GraphWriter:
    """Collects nodes and initializers in the order of execution."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.initializers: list[onnx.TensorProto] = []

    def add_array(self, name: str, array: npt.ArrayLike) -> str:
        """Adds a float32 initializer and returns its name."""
        self.initializers.append(numpy_helper.from_array(np.asarray(array, np.float32), name))
        return name

    def add_node(self, kind: str, name: str, inputs: list[str], output: str = "", **attributes: int | list[int]) -> str:
        """Adds a node and returns the name of its output, by default the node's own."""
        node = helper.make_node(kind, inputs, [output or name], name)
        node.attribute.extend(helper.make_attribute(key, value) for key, value in attributes.items())
        self.nodes.append(node)
        return output or name


def build_graph(params: Tree, moments: Tree) -> onnx.GraphProto:
    """Returns the network for one image, with batch normalization folded into the convolutions."""
    graph = GraphWriter()
    limits = [graph.add_array("relu6/min", 0.0), graph.add_array("relu6/max", 6.0)]
    x = INPUT
    for block in NETWORK:
        y = x
        for conv in block.convs:
            y = add_conv(graph, conv, y, params[conv.name], moments[conv.name])
            y = graph.add_node("Clip", f"{conv.name}_relu6", [y, *limits]) if conv.relu6 else y
        x = graph.add_node("Add", f"{block.name}/add", [x, y]) if block.residual else y
    x = graph.add_node("GlobalAveragePool", "pool", [x])
    x = graph.add_node("Flatten", "flatten", [x], axis=1)
    roles = [graph.add_array(f"classifier/{role}", params["classifier"][role]) for role in ("weight", "bias")]
    graph.add_node("Gemm", "classifier", [x, *roles], OUTPUT, transB=1)
    image = helper.make_tensor_value_info(INPUT, onnx.TensorProto.FLOAT, [1, 1, SIDE, SIDE])
    logits = helper.make_tensor_value_info(OUTPUT, onnx.TensorProto.FLOAT, [1, CLASSES])
    return helper.make_graph(graph.nodes, "digits_mobilenet", [image], [logits], graph.initializers)


def add_conv(graph: GraphWriter, conv: Conv, x: str, layer: dict[str, jax.Array], moments: dict[str, jax.Array]) -> str:
    """Adds a convolution with its folded weights and returns the name of its output."""
    factor, offset = fold_norm(layer, moments)
    weight = graph.add_array(f"{conv.name}/weight", layer["weight"] * factor[:, None, None, None])
    bias = graph.add_array(f"{conv.name}/bias", offset)
    return graph.add_node(
        "Conv",
        conv.name,
        [x, weight, bias],
        kernel_shape=[conv.kernel] * 2,
        strides=[conv.stride] * 2,
        pads=[conv.kernel // 2] * 4,
        group=conv.groups,
    )


def build_model(graph: onnx.GraphProto, facts: dict[str, str]) -> onnx.ModelProto:
    """Returns the checked model with the facts of its training as metadata."""
    opsets, producer = [helper.make_opsetid("", OPSET)], "edgekit tools/train_demo.py"
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=opsets, producer_name=producer)
    helper.set_model_props(model, facts)
    onnx.checker.check_model(model, full_check=True)
    return model


def run_model(model: bytes, images: Array) -> Array:
    """Returns ONNX Runtime's logits [N,10] for images run one by one."""
    session = onnxruntime.InferenceSession(model, providers=["CPUExecutionProvider"])
    return np.concatenate([session.run([OUTPUT], {INPUT: image[None]})[0] for image in images])


def measure_accuracy(logits: Array, labels: Array) -> float:
    """Returns the share of images whose largest logit is their label's."""
    return float((logits.argmax(axis=1) == labels).mean())


def pack_images(images: Array) -> bytes:
    """Returns a compressed .npz file with the images under the input's name and a constant time stamp."""
    array, packed = io.BytesIO(), io.BytesIO()
    np.save(array, images)
    entry = zipfile.ZipInfo(f"{INPUT}.npy")
    entry.compress_type = zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(packed, "w") as archive:
        archive.writestr(entry, array.getvalue(), compresslevel=9)
    return packed.getvalue()


def require_agreement(logits: Array, reference: Array) -> None:
    """Raises ValueError unless ONNX Runtime's logits match JAX's."""
    distance = float(np.abs(logits - reference).max())
    print(f"largest difference of a logit between ONNX Runtime and JAX: {distance:.1e}")
    if distance > LOGITS_TOLERANCE or (logits.argmax(axis=1) != reference.argmax(axis=1)).any():
        raise ValueError("the ONNX model does not compute what JAX computes")


def train_demo() -> None:
    """Trains the network, verifies the ONNX model and writes all files."""
    splits = load_splits()
    params, moments = train_network(splits["training"])
    images = {name: jnp.asarray(split.images) for name, split in splits.items()}
    logits = {name: np.asarray(forward(params, moments, batch)[0]) for name, batch in images.items()}
    accuracy = {name: measure_accuracy(logits[name], split.labels) for name, split in splits.items()}
    print("accuracy in JAX:", ", ".join(f"{name} {share:.2%}" for name, share in accuracy.items()))
    facts = {
        "accuracy": f"{accuracy['evaluation']:.4f}",
        "data": "scikit-learn load_digits (UCI Optical Recognition of Handwritten Digits), CC BY 4.0",
        "preprocessing": f"pixel / 16, bilinear resize from 8x8 to {SIDE}x{SIDE}, range [0, 1]",
        "samples": ", ".join(f"{len(split.labels)} {name}" for name, split in splits.items()),
        "epochs": str(EPOCHS),
        "seed": str(SEED),
        "license": "Apache-2.0",
    }
    model = build_model(build_graph(params, moments), facts).SerializeToString(deterministic=True)
    require_agreement(run_model(model, splits["evaluation"].images), logits["evaluation"])
    (FOLDER / MODEL).write_bytes(model)
    for name in ("calibration", "evaluation"):
        (FOLDER / f"{name}.npz").write_bytes(pack_images(splits[name].images))
    np.save(FOLDER / "evaluation_labels.npy", splits["evaluation"].labels)


def check_demo() -> bool:
    """Measures the files in the folder, prints the accuracy and returns True if it is good enough."""
    with np.load(FOLDER / "evaluation.npz") as data:
        images = data[INPUT]
    labels = np.load(FOLDER / "evaluation_labels.npy")
    accuracy = measure_accuracy(run_model((FOLDER / MODEL).read_bytes(), images), labels)
    print(f"accuracy on {len(labels)} evaluation images: {accuracy:.2%} (at least {LEAST_ACCURACY:.0%} wanted)")
    return accuracy >= LEAST_ACCURACY


def main() -> int:
    """Trains unless told to check only, and returns the exit code."""
    parser = argparse.ArgumentParser(description="Trains the demo model of edgekit.")
    parser.add_argument("--check", action="store_true", help="measure the committed files instead of training")
    if not parser.parse_args().check:
        train_demo()
    return 0 if check_demo() else 1


if __name__ == "__main__":
    sys.exit(main())
