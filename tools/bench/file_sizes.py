"""Prints the size of INT8 files relative to float files, and the least size that any QDQ file must have.

    python tools/bench/file_sizes.py [--targets qnn,xnnpack] [MODEL.onnx [DIM=SIZE]...]

Without a model it uses those of ../shared/zoo and the demo's. The least size is that of 8-bit weights, their scales,
32-bit biases and the scales of these, without nodes, names, shapes and zero points. Calibration uses two random
samples, because sizes hardly depend on the data. "float" counts the nodes that stay float.
"""

import argparse
import sys
import tempfile
from pathlib import Path

import onnx
from build_zoo import DIMS, ROOT
from calibrate_ratio import random_images
from onnx import numpy_helper
from quantize_zoo import int8_targets
from zoo_tasks import ZOO, require_zoo

from edgekit.model.model import load_model, read_proto
from edgekit.prepare import ready_model
from edgekit.quantize import calibrate_model, plan_quantization, quantize_model
from edgekit.target import load_target

_MODELS = (
    "kws_dscnn_float", "mnist_cnn_pytorch", "superres_core_224", "ppocr_cls_mbv3", "vww_96_float", "fastestdet",
    "ultraface_rfb320", "magika_v3_3", "squeezenet1.1_fp32", "mobilenetv2_1.0_224_fp32",
)  # fmt: skip
_SIZES = {**DIMS, "mobilenetv2_1.0_224_fp32": ("N=1",), "ppocr_cls_mbv3": ("x:0=1", "x:2=48", "x:3=192")}


def floor_bytes(graph: onnx.GraphProto) -> int:
    """Returns the bytes of the weights and biases of a QDQ graph and of their scales."""
    stored = {tensor.name: tensor for tensor in graph.initializer}
    read = [node.input for node in graph.node if node.op_type == "DequantizeLinear" and node.input[0] in stored]
    names = {name for inputs in read for name in inputs[:2]}
    return sum(numpy_helper.to_array(stored[name]).nbytes for name in names)


def measure(source: Path, dims: tuple[str, ...], targets: list[str]) -> str:
    """Returns a line of figures."""
    sizes = {name: int(size) for name, size in (dim.rsplit("=", 1) for dim in dims)}
    line = f"{source.stem:26}{source.stat().st_size:>10} B"
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        model = ready_model(load_model(source), work, sizes).model
        seen = calibrate_model(model, random_images(model, 2), work=work, methods=("minmax",), fitting=False)
        for name in targets:
            plan = plan_quantization(model, seen, load_target(name, {}), "int8", method="minmax")
            made = quantize_model(model, plan, seen, work / f"{name}.onnx")
            least = floor_bytes(read_proto(made.model).graph)
            shares = (100 * size / source.stat().st_size for size in (made.size_after, least))
            line += f"  {name} {next(shares):.1f} % (floor {next(shares):.1f}, float {len(made.float_nodes)})"
    return line


def main() -> int:
    """Prints a line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", help="a model, then DIM=SIZE")
    parser.add_argument("--targets", default=",".join(int8_targets()))
    args = parser.parse_args()
    targets = args.targets.split(",")
    if args.model:
        print(measure(Path(args.model[0]), tuple(args.model[1:]), targets))
        return 0
    print(measure(ROOT / "edgekit/demo/digits_mobilenet.onnx", (), targets), flush=True)
    require_zoo()
    for name in _MODELS:
        print(measure(ZOO / "models" / f"{name}.onnx", _SIZES.get(name, ()), targets), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
