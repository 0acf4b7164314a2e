"""Holds ways to round weights to 4 bits against each other on the same nets, with 16-bit activations for `qnn`.

    python tools/bench/four_bit_methods.py [NET]... [--methods comq,qronos,...] [--cache DIR]

A line a net: the ratio in dB on held-out samples, and the CPU seconds of rounding. No weight keeps 8 bits but those of
depthwise convolutions. "awq" first scales the channels behind each normalisation by a power of their energy (J. Lin et
al., arXiv:2306.00978), the best of three; "rotated" turns what normalisations read by a random orthogonal matrix that
is folded into the weights (QuaRot, S. Ashkboos et al., arXiv:2404.00456). Both then round as the name behind the "+"
says. "blocks" and "lpbq" give 32 inputs a scale of their own, any or of LPBQ, and round by COMQ.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnx
from four_bit_nets import CACHE, NETS, load_net
from four_bit_rotations import rotate_streams, scale_streams
from onnx import numpy_helper
from zoo_tasks import ZOO, load_task, write_calibration

from edgekit.data.samples import load_samples
from edgekit.model.model import Model, load_model, save_proto
from edgekit.model.tensors import Array
from edgekit.prepare.clean import prepare_model
from edgekit.quantize import calibrate_model
from edgekit.quantize.calibration.moments import InputMoments, open_moments
from edgekit.quantize.graph.float_graph import read_float_graph
from edgekit.quantize.graph.layers import Layer, read_layers
from edgekit.quantize.mixed_precision.candidates import Draft, place_draft
from edgekit.quantize.mixed_precision.score import judge_candidate
from edgekit.quantize.mixed_precision.variants import strip_weights
from edgekit.quantize.plan import draft_plan
from edgekit.quantize.qdq.build import round_weights
from edgekit.quantize.rounding.weights import Rounding
from edgekit.quantize.weight_only.blocks import BlockForm
from edgekit.quantize.weight_only.learned import round_blocks
from edgekit.target import load_target

MODELS = (
    *NETS, "mnist_cnn_pytorch", "kws_dscnn_float", "silero_vad_micro_transformer", "ppocr_cls_mbv3",
    "squeezenet1.1_fp32",
)  # fmt: skip
_EXPONENTS = (0.25, 0.5, 0.75)
_BLOCK = 32
Tried = tuple[float, float]
"""The ratio in dB, and CPU seconds."""


class Bench(msgspec.Struct, frozen=True, kw_only=True):
    """A prepared model, the file with its calibration samples, and a folder to work in."""

    model: Model
    samples: Path
    work: Path

    def draft(self, model: Model, name: str) -> Draft:
        """Returns a draft of the model, or of one that computes the same."""
        samples = load_samples(str(self.samples), self.model.inputs)
        calibration = calibrate_model(model, samples, work=self.work / name)
        graph = read_float_graph(model)
        plan = draft_plan(model, graph, calibration, load_target("qnn"), "w4a16")
        return Draft(graph=graph, calibration=calibration, plan=plan)


def try_rounding(draft: Draft, rounding: Rounding) -> Tried:
    """Returns what a rounding of the product comes to."""
    placed, began = place_draft(draft), time.process_time()
    plan = msgspec.structs.replace(draft.plan, rounding=rounding)
    qdq = round_weights(placed, draft.graph, plan, draft.statistics)
    seconds = time.process_time() - began
    return judge_candidate(qdq, draft.compared, draft.statistics), seconds


def try_blocks(draft: Draft, *, lpbq: bool) -> Tried:
    """Returns what scales of blocks come to; layers of fewer inputs than a block keep what COMQ gives a channel."""
    placed, began = place_draft(draft), time.process_time()
    plan = msgspec.structs.replace(draft.plan, rounding="comq")
    channels = _weights_of(round_weights(placed, draft.graph, plan, draft.statistics))
    proto = strip_weights(placed, draft.graph)
    stored = {tensor.name: tensor for tensor in proto.graph.initializer}
    form = BlockForm(bits=4, block=_BLOCK, lpbq=lpbq)
    with open_moments(draft.statistics / "moments.npz") as read:
        for layer in read_layers(draft.graph):
            moments = read(layer.node)
            if moments is None or layer.node not in channels:
                continue
            weight = numpy_helper.to_array(stored[layer.weight])
            matrix = layer.to_matrix(weight)
            if layer.weight in plan.bits and layer.groups == 1 and layer.inputs >= _BLOCK:
                found = _round_blocks(layer, matrix, moments, form)
            else:
                found = layer.to_matrix(channels[layer.node])
            _store(stored, layer.weight, layer.from_matrix(found, weight.shape))
            if layer.bias is not None:
                mean_error = ((matrix - found) * moments.mean[:, None]).sum(axis=2).reshape(-1)
                _store(stored, layer.bias, numpy_helper.to_array(stored[layer.bias]) + mean_error)
    seconds = time.process_time() - began
    return judge_candidate(proto, draft.compared, draft.statistics, keep_float_weights=True), seconds


def _round_blocks(layer: Layer, matrix: Array, moments: InputMoments, form: BlockForm) -> Array:
    if layer.bias is not None:
        moments = msgspec.structs.replace(moments, mean=np.zeros_like(moments.mean))
    values, scales = round_blocks(matrix[0].T, moments, form)
    return ((values.astype(np.float32) - 8) * scales[..., None]).reshape(len(values), -1)[None, :, : layer.inputs]


def _weights_of(qdq: onnx.ModelProto) -> Mapping[str, Array]:
    """Returns by node what the quantized weight stands for."""
    stored = {tensor.name: tensor for tensor in qdq.graph.initializer}
    made = {node.output[0]: node for node in qdq.graph.node if node.op_type == "DequantizeLinear"}
    found: dict[str, Array] = {}
    for node in qdq.graph.node:
        source = made.get(node.input[1]) if len(node.input) > 1 else None
        if source is not None and source.input[0] in stored:
            integers, scale = (numpy_helper.to_array(stored[name]) for name in source.input[:2])
            axis = next((item.i for item in source.attribute if item.name == "axis"), 1)
            shape = [-1 if index == axis else 1 for index in range(integers.ndim)] if scale.ndim else ()
            found[node.name] = integers.astype(np.float32) * scale.reshape(shape)
    return found


def _store(stored: Mapping[str, onnx.TensorProto], name: str, value: Array) -> None:
    stored[name].CopyFrom(numpy_helper.from_array(value.astype(np.float32), name))


def try_turned(bench: Bench, draft: Draft, change: Callable[[onnx.ModelProto], int], rounding: Rounding) -> Tried:
    """Returns what a rounding comes to on a model that computes the same with other weights."""
    proto = onnx.ModelProto()
    proto.CopyFrom(draft.graph.model)
    if not change(proto):
        return float("nan"), 0.0
    turned = save_proto(proto, bench.work / "turned.onnx")
    return try_rounding(bench.draft(turned, f"turned-{turned.sha256[:12]}"), rounding)


def try_awq(bench: Bench, draft: Draft, rounding: Rounding) -> Tried:
    """Returns the best of AWQ's exponents, and the seconds of all."""
    scale = partial(scale_streams, graph=draft.graph, statistics=draft.statistics)
    tried = [try_turned(bench, draft, partial(scale, exponent=each), rounding) for each in _EXPONENTS]
    return max(ratio for ratio, _ in tried), sum(seconds for _, seconds in tried)


def try_rotated(bench: Bench, draft: Draft, rounding: Rounding) -> Tried:
    """Returns what a rounding comes to where the stream between blocks is turned."""
    return try_turned(bench, draft, partial(rotate_streams, graph=draft.graph), rounding)


def _plainly(_: Bench, draft: Draft, rounding: Rounding) -> Tried:
    return try_rounding(draft, rounding)


def _in_blocks(_: Bench, draft: Draft, *, lpbq: bool) -> Tried:
    return try_blocks(draft, lpbq=lpbq)


METHODS: Mapping[str, Callable[[Bench, Draft], Tried]] = {
    "nearest": partial(_plainly, rounding="nearest"),
    "gptq": partial(_plainly, rounding="gptq"),
    "comq": partial(_plainly, rounding="comq"),
    "qronos": partial(_plainly, rounding="qronos"),
    "blocks": partial(_in_blocks, lpbq=False),
    "lpbq": partial(_in_blocks, lpbq=True),
    "awq+comq": partial(try_awq, rounding="comq"),
    "awq+qronos": partial(try_awq, rounding="qronos"),
    "rotated+comq": partial(try_rotated, rounding="comq"),
    "rotated+qronos": partial(try_rotated, rounding="qronos"),
}


def main() -> int:
    """Benches the nets named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("nets", nargs="*", default=list(MODELS))
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--cache", type=Path, metavar="DIR", default=CACHE, help="where trained nets are kept")
    args = parser.parse_args()
    if not ZOO.is_dir():
        print(f"needs {ZOO}")
        return 2
    chosen = args.methods.split(",")
    print(f"| net | {' | '.join(chosen)} |", flush=True)
    for name in args.nets:
        task = load_net(name, args.cache) if name in NETS else load_task(name)
        with tempfile.TemporaryDirectory() as folder:
            work = Path(folder)
            write_calibration(task, work / "calib.npz")
            model = prepare_model(load_model(task.model), work / "prepared.onnx", task.dims)
            bench = Bench(model=model, samples=work / "calib.npz", work=work)
            draft = bench.draft(model, "plain")
            tried = [METHODS[method](bench, draft) for method in chosen]
        print(f"| {name} | {' | '.join(f'{ratio:.1f} dB, {seconds:.1f} s' for ratio, seconds in tried)} |", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
