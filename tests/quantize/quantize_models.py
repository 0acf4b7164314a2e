"""Tiny float models and samples for the tests of the quantize stage."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from fixture_types import present
from onnx import numpy_helper
from tiny_models import parse_net

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.data.samples import Samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, StatedOutput, Tensors
from edgekit.quantize import Calibration, QuantizedModel, QuantPlan, calibrate_model, plan_quantization, quantize_model
from edgekit.quantize.accuracy.predict import FloatReference, Prediction
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.mixed_precision.candidates import Draft
from edgekit.quantize.mixed_precision.goal_search import find_plan
from edgekit.quantize.mixed_precision.plan_search import Search, Searched
from edgekit.quantize.plan import draft_plan
from edgekit.target import Precision, Target, load_target

CONV_NET = """
  net (float[1,3,8,8] x) => (float[1,4] y) {
    c1 = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w1, b1)
    r1 = Relu(c1)
    c2 = Conv<kernel_shape=[3,3], pads=[1,1,1,1], group=8>(r1, w2, b2)
    s = Add(c2, r1)
    p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(s)
    c3 = Conv<kernel_shape=[1,1]>(p, w3, b3)
    g = GlobalAveragePool(c3)
    f = Flatten(g)
    z = Gemm<transB=1>(f, w4, b4)
    y = Softmax(z)
  }
"""
COLLAPSING = """g (float[1,32] x) => (float[1,32] y) {
  h = MatMul(x, w) c = Mul(h, h) d = Mul(c, c) e = Mul(d, d) f = MatMul(e, v) y = Tanh(f) }"""
"""A net that 8 bits ruin, since products magnify the noise of one tensor."""
CONV_SHAPES = {
    "w1": (8, 3, 3, 3), "b1": (8,), "w2": (8, 1, 3, 3), "b2": (8,),
    "w3": (16, 8, 1, 1), "b3": (16,), "w4": (4, 16), "b4": (4,),
}  # fmt: skip


def make_model(
    text: str,
    path: Path,
    weights: Mapping[str, tuple[int, ...]] | None = None,
    constants: Mapping[str, Array] | None = None,
) -> Model:
    """Writes a model given in onnx's text form, with constants and seeded random weights; every node gets a name."""
    proto = parse_net(text, constants)
    rng = np.random.default_rng(7)
    for name, shape in (weights or {}).items():
        fan = int(np.prod(shape[1:])) or 1
        value = rng.normal(0, 1 / np.sqrt(fan), shape) if len(shape) > 1 else rng.normal(0, 0.1, shape)
        proto.graph.initializer.append(numpy_helper.from_array(value.astype(np.float32), name))
    for index, node in enumerate(proto.graph.node):
        node.name = node.name or f"n{index}_{node.op_type}"
    onnx.save(proto, str(path))
    return load_model(path)


def conv_net(folder: Path) -> Model:
    """A small CNN with a depthwise Conv, a residual Add, pooling and a classifier."""
    return make_model(CONV_NET, folder / "conv_net.onnx", CONV_SHAPES)


def read_activations(model: Model, names: Iterable[str], samples: Samples) -> list[Tensors]:
    """What some tensors inside a model are for each sample."""
    proto = onnx.load(str(model.path))
    del proto.graph.output[:]
    proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in names)
    session = CpuSession(proto.SerializeToString(), SessionSettings(level=Level.DISABLED))
    return [session.run(sample) for sample in samples]


def make_samples(arrays: Sequence[Tensors], source: str = "test data") -> Samples:
    """Samples from a list."""

    def read() -> Iterator[Tensors]:
        yield from arrays

    return Samples(source=source, count=len(arrays), read=read)


def random_samples(model: Model, count: int = 12, seed: int = 1) -> Samples:
    """Seeded normal samples for the float inputs of a model."""
    rng = np.random.default_rng(seed)

    def draw(shape: tuple[int | str | None, ...] | None) -> Array:
        return rng.normal(size=[dim if isinstance(dim, int) else 1 for dim in shape or ()]).astype(np.float32)

    return make_samples([{spec.name: draw(spec.shape) for spec in model.inputs} for _ in range(count)])


def plan_model(
    model: Model,
    folder: Path,
    target: str,
    samples: Samples | None = None,
    method: str = "minmax",
    precision: Precision = "int8",
) -> tuple[Calibration, QuantPlan]:
    """A calibration with these samples, or with random ones, and a plan for a target."""
    calibration = calibrate_model(model, random_samples(model) if samples is None else samples, work=folder / "work")
    return calibration, plan_quantization(model, calibration, load_target(target), precision, method=method)


def quantize(
    model: Model,
    folder: Path,
    target: str = "cpu",
    samples: Samples | None = None,
    method: str = "auto",
    precision: Precision = "int8",
) -> QuantizedModel:
    """A model in integers for a target, calibrated with these samples, or with random ones."""
    calibration, plan = plan_model(model, folder, target, samples, method, precision)
    return quantize_model(model, plan, calibration, folder / f"{target}.onnx")


def draft_of(model: Model, calibration: Calibration, target: str, precision: Precision = "int8") -> Draft:
    """A graph with the plan of which nothing is chosen yet."""
    graph = read_float_graph(model)
    plan = draft_plan(model, graph, calibration, load_target(target), precision)
    return Draft(graph=graph, calibration=calibration, plan=plan)


def make_search(
    calibrated: tuple[Model, Calibration],
    judge: FloatReference | Callable[[Model], Prediction],
    target: Target,
    work: Path,
    precision: Precision = "int8",
    **more: Any,
) -> Search:
    """A search for a plan that is judged by what a reference, or a function, says."""
    model, calibration = calibrated
    judged: dict[str, Any] = (
        {"measure": judge.predict_drop, "compare": judge.compare}
        if isinstance(judge, FloatReference)
        else {"measure": judge, "compare": lambda _one, _two: 0.0}
    )
    return Search(
        model=model, calibration=calibration, target=target, precision=precision, work=work, **(judged | more)
    )


def choose_plan(calibrated: tuple[Model, Calibration], samples: Samples, target: Target, folder: Path) -> QuantPlan:
    """The plan that the default mode chooses for 8 bits."""
    search = make_search(calibrated, FloatReference(calibrated[0], samples), target, folder)
    return find_plan(search, max_drop=None, narrow=False)[0]


def find_searched(
    folder: Path, model: Model, arrays: Sequence[Tensors], target: Target, precision: Precision = "int8"
) -> Searched:
    """The search for a plan of a net whose output `y` holds values."""
    samples = make_samples(arrays)
    reference = FloatReference(model, samples, {"y": StatedOutput(kind="values")})
    calibration = calibrate_model(model, samples, work=folder / "work")
    search = make_search((model, calibration), reference, target, folder, precision)
    return present(find_plan(search, max_drop=None, narrow=False)[1])


def predicted(
    drop: float | None,
    interval: tuple[float, float] | None = None,
    *,
    sqnr_db: float = 30.0,
    same: float | None = None,
    samples: int = 48,
    **more: Any,
) -> Prediction:
    """What a quantized model is told to lose, with the share of decisions that are the same."""
    told = {"source": "test", **more}
    return Prediction(
        samples=samples, sqnr_db=sqnr_db, top1_agreement=same, drop_estimate=drop, drop_interval=interval, **told
    )


def sqnr_db(model: Model, other: Model, samples: Iterable[Tensors] = ()) -> float:
    """The ratio of the output `y` of a model to the difference of another's, over these samples or random ones."""
    rows = list(samples) or list(random_samples(model, count=8, seed=9))
    sessions = [CpuSession(each.path, SessionSettings()) for each in (model, other)]
    wanted, found = (np.stack([each.run(row)["y"] for row in rows]).astype(np.float64) for each in sessions)
    return float(10 * np.log10((wanted**2).sum() / ((wanted - found) ** 2).sum()))


class Units:
    """A QDQ model: its constants, makers and QuantizeLinear nodes by name, and the nodes between its Q and DQ nodes."""

    def __init__(self, model: Model) -> None:
        graph = onnx.load(str(model.path)).graph
        self.stored = {tensor.name: numpy_helper.to_array(tensor) for tensor in graph.initializer}
        self.makers = {name: node for node in graph.node for name in node.output}
        self.rounders = {node.input[0]: node for node in graph.node if node.op_type == "QuantizeLinear"}
        self.nodes = [node for node in graph.node if not node.op_type.endswith("eLinear")]

    def read(self, node: onnx.NodeProto, at: int) -> list[Array]:
        """The scale and zero point of an input."""
        return [self.stored[name] for name in self.makers[node.input[at]].input[1:]]

    def constant(self, node: onnx.NodeProto, at: int) -> Array:
        """The integers of a constant input."""
        return self.stored[self.makers[node.input[at]].input[0]]

    def write(self, node: onnx.NodeProto) -> list[Array]:
        """The scale and zero point of the output."""
        return [self.stored[name] for name in self.rounders[node.output[0]].input[1:]]

    def find(self, op: str) -> onnx.NodeProto:
        """The last node of an operator."""
        return [node for node in self.nodes if node.op_type == op][-1]


def dequantized_constants(model: Model, name: str) -> list[Array]:
    """The constants of the DQ node that makes a tensor, or the weight of the layer with that output."""
    units = Units(model)
    node = units.makers[name]
    node = node if node.op_type == "DequantizeLinear" else units.makers[node.input[1]]
    return [units.stored[each] for each in node.input if each in units.stored]


def op_types(model: Model) -> list[str]:
    """The operators of a model's main graph, in order."""
    return [node.op_type for node in onnx.load(str(model.path)).graph.node]
