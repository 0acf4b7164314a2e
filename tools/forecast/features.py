"""Exports the networks of nets.toml, and stores their amounts of work in targets/forecast/networks.json.

    python tools/forecast/features.py [--compile] [NAME...]

The work is counted by kind. With --compile QNN's compiler plans each network in each precision that was measured, and
the bytes that its plans move are stored too; this takes a minute or two for each. Known results are not compiled again.
It needs the Python of the corpus (`tools/corpus/corpus.py make`), or that of EDGEKIT_CORPUS_PYTHON. The graphs, without
weights, stay in ~/.cache/edgekit/forecast; plans are made with random weights.
"""

import json
import os
import random
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

from edgekit._files import work_folder
from edgekit.errors import EdgekitError
from edgekit.forecasts.features import SOC, Traffic, compile_traffic, join_graph, measure_work
from edgekit.forecasts.forecast import BITS
from edgekit.forecasts.model import Bits, KnownNetwork, load_table, read_networks
from edgekit.graph.inference import infer_model
from edgekit.machine import cache_folder
from edgekit.model.external import skim_model
from edgekit.model.model import Model, load_model
from edgekit.prepare.clean import sketch_model
from edgekit.quantize.apply import quantize_model
from edgekit.quantize.calibration.calibrate import assume_ranges
from edgekit.quantize.graph.float_graph import float_activations, read_float_graph
from edgekit.quantize.plan import draft_plan
from edgekit.quantize.ranges import TensorRange
from edgekit.target import Precision, load_target

HERE = Path(__file__).parent
OUT = HERE.parent.parent / "targets" / "forecast" / "networks.json"
_CORPUS = Path.home() / ".cache/edgekit/corpus/venv/bin/python"
PYTHON = Path(os.environ.get("EDGEKIT_CORPUS_PYTHON", _CORPUS))
KEPT = cache_folder() / "forecast"
# A quarter of an hour: the largest networks take minutes on a busy machine.
_SECONDS = 900.0
_PRECISIONS: Mapping[Bits, Precision] = {"w8a8": "int8", "w8a16": "int16"}


def find_graphs(names: list[str]) -> Iterator[tuple[str, Path]]:
    """Yields the networks with the files of their prepared graphs, without weights: from the cache, or exported."""
    KEPT.mkdir(parents=True, exist_ok=True)
    files = {name: KEPT / f"{name.replace('/', '+')}.onnx" for name in names}
    yield from ((name, file) for name, file in files.items() if file.is_file())
    missing = [name for name, file in files.items() if not file.is_file()]
    if not missing:
        return
    with work_folder() as work:
        # One process for all: it takes minutes to load the libraries on a busy machine.
        command = [str(PYTHON), str(HERE / "standalone/export_nets.py"), str(HERE / "nets.toml"), str(work), *missing]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as child:
            for line in child.stdout or ():
                # The libraries talk as they are imported.
                if not line.startswith("{"):
                    continue
                said = json.loads(line)
                exported = work / files[said["name"]].name
                if "failure" in said:
                    print(f"{said['name']}: {said['failure']}")
                    continue
                try:
                    sketch = sketch_model(load_model(exported), work / "sketch.onnx", {})
                    files[said["name"]].write_bytes(infer_model(skim_model(sketch.path)).SerializeToString())
                    yield said["name"], files[said["name"]]
                except EdgekitError as error:
                    print(f"{said['name']}: {error}")
                exported.unlink(missing_ok=True)


def draw_weights(graph: Path, out: Path) -> None:
    """Writes a graph with the missing weights as random numbers, because a compiler would merge equal ones."""
    proto, rng = onnx.load(graph, load_external_data=False), np.random.default_rng(0)
    for tensor in proto.graph.initializer:
        count = int(np.prod(tensor.dims))
        held = tensor.raw_data or tensor.float_data or tensor.int32_data or tensor.int64_data
        if count and (not held or tensor.HasField("data_location")):
            drawn = 0.05 * rng.standard_normal(count, dtype=np.float32)
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.data_type)
            tensor.CopyFrom(numpy_helper.from_array(drawn.astype(dtype).reshape(list(tensor.dims)), tensor.name))
    onnx.save(proto, out)


def quantize_blindly(model: Model, precision: Precision, out: Path) -> Model:
    """Quantizes a prepared float model with random ranges: its outputs mean nothing, only its size does.

    Raises:
        ModelError: no node of the model can be quantized.
    """
    # If all ranges were the same, the compiler would not need operators that convert one range to another.
    ranges = {name: _draw_range(name) for name in float_activations(read_float_graph(model))}
    calibration = assume_ranges(model, ranges)
    plan = draft_plan(model, read_float_graph(model), calibration, load_target("qnn", {"soc_model": SOC}), precision)
    return quantize_model(model, plan, calibration, out).model


def _draw_range(name: str) -> TensorRange:
    drawn = random.Random(name)  # noqa: S311 - the same for each name, and no secret
    return TensorRange(low=-drawn.uniform(0.5, 2.0), high=drawn.uniform(0.5, 2.0))


def list_measured(name: str) -> list[Bits]:
    """Returns float, and the precisions in which a network was measured entirely on an NPU."""
    table = load_table()
    rows = {bits: table.find_rows(table.find_key(name), bits).values() for bits in BITS}
    return [bits for bits in BITS if any(row.unit == "NPU" and not row.cpu_layers for row in rows[bits])]


def compile_drawn(graph: Path, bits: Bits) -> Traffic:
    """Returns the compiler's plan for a graph with random weights, and random ranges if it is quantized.

    Raises:
        EdgekitError: it cannot be quantized, or the compiler refuses it or fails.
    """
    with work_folder() as work:
        draw_weights(graph, work / "drawn.onnx")
        model = load_model(work / "drawn.onnx")
        if bits != "float":
            model = quantize_blindly(model, _PRECISIONS[bits], work / "quantized.onnx")
        return compile_traffic(model.path.name, work, timeout_s=_SECONDS)


def measure_network(graph: Path, family: str, precisions: list[Bits], known: KnownNetwork | None) -> KnownNetwork:
    """Returns the work of a network, and the plans of the precisions that are not known yet."""
    proto = onnx.load(graph, load_external_data=False)
    operators = sum(node.op_type != "Constant" for node in proto.graph.node)
    traffic = dict(known.traffic) if known is not None else {}
    for bits in precisions:
        if bits not in traffic:
            try:
                traffic[bits] = compile_drawn(graph, bits)
            except EdgekitError as error:
                print(f"  {bits}: {error}")
    work_done = measure_work(join_graph(proto))
    kinds = {kind: float(round(amount)) for kind, amount in work_done.kinds.items()}
    return KnownNetwork(family=family, macs=work_done.macs, operators=operators, kinds=kinds, traffic=traffic)


def write_networks(known: Mapping[str, KnownNetwork]) -> None:
    """Writes the file with one network in each line, and amounts as whole numbers."""
    rows = {name: msgspec.to_builtins(network) for name, network in known.items()}
    for name, network in known.items():
        rows[name]["kinds"] = {kind: round(amount) for kind, amount in network.kinds.items()}
    lines = (f'  "{name}": {json.dumps(row)}' for name, row in rows.items())
    OUT.write_text("{\n" + ",\n".join(lines) + "\n}\n")


def main() -> None:
    """Counts the named networks, or all, and writes the file again after each."""
    specs: dict[str, Any] = tomllib.loads((HERE / "nets.toml").read_text())
    names, compiles = [word for word in sys.argv[1:] if word != "--compile"], "--compile" in sys.argv
    known = read_networks(OUT) if OUT.is_file() else {}
    for name, graph in find_graphs(names or list(specs)):
        precisions = list_measured(name) if compiles else []
        known[name] = measure_network(graph, specs[name]["family"], precisions, known.get(name))
        print(f"{name}: {known[name].macs / 1e9:.2f} GMAC, {known[name].operators} operators", flush=True)
        write_networks({each: known[each] for each in sorted(known) if each in specs})


if __name__ == "__main__":
    main()
