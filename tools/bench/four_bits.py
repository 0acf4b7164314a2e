"""Holds edgekit's weights of 8 and 4 bits against ONNX Runtime's own: models of ../shared/zoo, and nets trained here.

    python tools/bench/four_bits.py [MODEL]... [--precisions w4a16,w4a8] [--state DIR] [--cache DIR] [--table]

"stock" is ONNX Runtime's quantizer with its settings for QNN (`get_qnn_qdq_config`), MinMax, a scale per channel, and
the types of the precision. "edgekit" is plain `edgekit quantize --target qnn --precision P`. What scores a model never
calibrates it; drops are in points (images: 0.3 dB a point) with intervals of 95 %. Both run on the CPU provider.
`--state` keeps each row by what it depends on, so that a run goes on where one ended; `--cache` keeps the nets that
`four_bit_nets.py` trains. `--table` prints the rows of each model as one line of Markdown.
Returns 1 where w4a16 of edgekit loses more than 1 point, or w4a8 more than 2, beyond the interval.
"""

import argparse
import contextlib
import importlib
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import onnxruntime
from four_bit_nets import CACHE, NETS, load_net
from quantize_zoo import in_memory, score_outputs
from zoo_tasks import ZOO, ZooTask, load_task, write_calibration

from edgekit._files import digest_bytes, digest_file, write_file
from edgekit.data.samples import Samples, load_samples
from edgekit.errors import EdgekitError
from edgekit.jobs.quantize import quantize_for
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Tensors
from edgekit.prepare.clean import prepare_model
from edgekit.recipe import Data, Recipe
from edgekit.target import INTEGERS, Precision
from edgekit.verify.tasks.tasks import measure_task

_TYPES: dict[Precision, tuple[str, str]] = {
    "int8": ("QUInt8", "QInt8"),
    "int16": ("QUInt16", "QInt8"),
    "w4a16": ("QUInt16", "QInt4"),
    "w4a8": ("QUInt8", "QInt4"),
}
_ALLOWED: dict[Precision, float] = {"w4a16": 1.0, "w4a8": 2.0}
_DB_OF_POINT = 0.3
_SOURCES = Path(__file__).parents[2] / "edgekit" / "quantize"
# Read once: what runs is what was there when this began. Weights alone are another matter.
_CODE = "".join(digest_file(path) for path in sorted(_SOURCES.rglob("*.py")) if path.parent.name != "weight_only")
MODELS = (
    *NETS, "mobilenetv2_1.0_224_fp32", "squeezenet1.1_fp32", "vww_96_float", "kws_dscnn_float", "mnist_cnn_pytorch",
    "mnist8_cntk", "ppocr_cls_mbv3", "silero_vad_micro_transformer",
)  # fmt: skip
"""Twelve, of which a run is done in minutes; every other model of the zoo can be named."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What one way of quantizing a model lost, in points, with its interval; `failure` says why there is nothing."""

    model: str
    precision: Precision
    maker: str
    samples: int
    drop: float = 0.0
    interval: tuple[float, float] = (0.0, 0.0)
    size_share: float = 0.0
    seconds: float = 0.0
    expected: float | None = None
    failure: str = ""

    @property
    def keeps(self) -> bool:
        """True unless it is edgekit's and loses more than it may, beyond the interval."""
        most = _ALLOWED.get(self.precision)
        return self.maker == "stock" or most is None or (not self.failure and min(self.drop, self.interval[0]) <= most)


def bench_model(name: str, precisions: tuple[Precision, ...], state: Path | None, cache: Path) -> Iterator[Row]:
    """Yields the rows of a model."""
    keys = {(precision, maker): _key(name, precision, maker) for precision in precisions for maker in _MAKERS}
    known = {which: _read(state, key) for which, key in keys.items()}
    if all(row is not None for row in known.values()):
        yield from (row for row in known.values() if row is not None)
        return
    task = load_net(name, cache) if name in NETS else load_task(name)
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        write_calibration(task, work / "calib.npz")
        model = prepare_model(load_model(task.model), work / "prepared.onnx", task.dims)
        reference = score_outputs(task, model.path, model)
        for (precision, maker), key in keys.items():
            row = known[precision, maker] or _bench(task, model, reference, precision, maker, work)
            if state is not None:
                write_file(state / f"{key}.json", msgspec.json.encode(row))
            yield row


def _key(name: str, precision: Precision, maker: str) -> str:
    code = _CODE if maker == "edgekit" else ""
    return digest_bytes(f"{name} {precision} {maker} {onnxruntime.__version__} {code}".encode())[:24]


def _read(state: Path | None, key: str) -> Row | None:
    path = None if state is None else state / f"{key}.json"
    return msgspec.json.decode(path.read_bytes(), type=Row) if path is not None and path.is_file() else None


def _bench(task: ZooTask, model: Model, reference: list[Tensors], precision: Precision, maker: str, work: Path) -> Row:
    row = Row(model=task.name, precision=precision, maker=maker, samples=len(task.labels))
    out, began = work / f"{maker}-{precision}.onnx", time.process_time()
    try:
        expected = _MAKERS[maker](task, model, precision, work, out)
        seconds = time.process_time() - began
        rows = score_outputs(task, out, model)
    except Exception as error:  # whatever ONNX Runtime's quantizer dies of is the finding
        if maker == "edgekit" and not isinstance(error, EdgekitError):
            raise
        return msgspec.structs.replace(row, failure=f"{type(error).__name__}: {error}"[:120])
    found = measure_task(task.limit, in_memory(reference), in_memory(rows), task.labels)
    factor = 100.0 if found.unit == "share" else 1.0 / _DB_OF_POINT
    low, high = found.interval or (found.difference or 0.0,) * 2
    return msgspec.structs.replace(
        row,
        drop=-factor * (found.difference or 0.0),
        interval=(-factor * high, -factor * low),
        size_share=out.stat().st_size / model.size_bytes,
        seconds=seconds,
        expected=expected,
    )


def _quantize_stock(_task: ZooTask, model: Model, precision: Precision, work: Path, out: Path) -> float | None:
    quantization: Any = importlib.import_module("onnxruntime.quantization")
    qnn: Any = importlib.import_module("onnxruntime.quantization.execution_providers.qnn")
    ready = work / "stock-ready.onnx"
    # It returns False where nothing is to be done, and 1.31 trips over metadata.
    with contextlib.suppress(TypeError):
        qnn.qnn_preprocess_model(str(model.path), str(ready))
    ready = ready if ready.is_file() else model.path
    samples: Samples = load_samples(str(work / "calib.npz"), model.inputs)

    class Reader(quantization.CalibrationDataReader):  # type: ignore[misc] # untyped base
        def __init__(self) -> None:
            self.rows = iter(samples)

        def get_next(self) -> Any:
            return next(self.rows, None)

    activation, weight = (quantization.QuantType[name] for name in _TYPES[precision])
    config = qnn.get_qnn_qdq_config(
        str(ready), Reader(), activation_type=activation, weight_type=weight, per_channel=True
    )
    quantization.quantize(str(ready), str(out), config)
    return None


def _quantize_edgekit(task: ZooTask, _model: Model, precision: Precision, work: Path, out: Path) -> float | None:
    recipe = Recipe(targets=("qnn",), dims=task.dims, precision=precision)
    report = quantize_for(task.model, Data(source=str(work / "calib.npz")), out, recipe)
    return report.predicted.drop_estimate


_MAKERS = {"stock": _quantize_stock, "edgekit": _quantize_edgekit}


def describe(row: Row) -> str:
    """Returns a row as a line."""
    head = f"{row.model:28} {row.precision:6} {row.maker:8}"
    if row.failure:
        return f"{head} FAILS: {row.failure}"
    guess = "" if row.expected is None else f", expected {100 * row.expected:.2f}"
    line = (
        f"{head} drop {row.drop:7.2f} ({row.interval[0]:.2f} to {row.interval[1]:.2f}) of {row.samples} samples{guess}"
    )
    return f"{line}; {row.size_share:.0%} of float, {row.seconds:.0f} CPU-s {'' if row.keeps else 'NO'}"


def write_line(rows: Sequence[Row]) -> str:
    """Returns the rows of a model as a line of a Markdown table: drop and half its interval, stock and edgekit."""
    cells = {(row.precision, row.maker): row for row in rows}

    def cell(precision: Precision, maker: str) -> str:
        row = cells.get((precision, maker))
        if row is None or row.failure:
            return "-" if row is None else "fails"
        return f"{row.drop:.2f} ± {(row.interval[1] - row.interval[0]) / 2:.2f}"

    pairs = [f"{cell(precision, 'stock')} / {cell(precision, 'edgekit')}" for precision in INTEGERS]
    seconds = sum(row.seconds for row in rows if row.maker == "edgekit")
    return f"| {rows[0].model} | {rows[0].samples} | {' | '.join(pairs)} | {seconds:.0f} |"


def main() -> int:
    """Benches the models named on the command line, all of them by default."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(MODELS))
    parser.add_argument("--precisions", default=",".join(INTEGERS))
    parser.add_argument("--state", type=Path, metavar="DIR", help="keep rows, and go on from them")
    parser.add_argument("--cache", type=Path, metavar="DIR", default=CACHE, help="where trained nets are kept")
    parser.add_argument("--table", action="store_true", help="print lines of Markdown")
    args = parser.parse_args()
    if not ZOO.is_dir():
        print(f"needs {ZOO}")
        return 2
    chosen = tuple(precision for precision in INTEGERS if precision in args.precisions.split(","))
    if args.state is not None:
        args.state.mkdir(parents=True, exist_ok=True)
    good = True
    for name in args.models:
        rows: list[Row] = []
        for row in bench_model(name, chosen, args.state, args.cache):
            good = good and row.keeps
            rows.append(row)
            if not args.table:
                print(describe(row), flush=True)
        if args.table:
            print(write_line(rows), flush=True)
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
