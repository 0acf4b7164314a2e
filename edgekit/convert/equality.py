"""Compares a converted file with its source by running both, and names the first node whose result differs."""

import contextlib
import itertools
from collections.abc import Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings, external_config
from edgekit.convert.ort_form import OrtOptions, load_settings, session_settings
from edgekit.convert.ort_format.tables import Record, open_tables, records, table, text, texts, write_tables
from edgekit.data.samples import Samples, draw_samples, limit_samples, select_samples
from edgekit.errors import RuntimeRefusal, UsageError
from edgekit.model.external import skim_model
from edgekit.model.model import Model, iterate_nodes, read_with_weights_on_disk
from edgekit.model.tensors import Array
from edgekit.prepare.shapes import find_unset, size_inputs

FLOAT_TOLERANCE = 1e-4
HALF_TOLERANCE = 1e-2
FUSED_TOLERANCE = 1e-3
QUANTIZED_TOLERANCE = 0.05
"""The limits of the largest error divided by the largest magnitude of an output, for float, half-precision, fused and
quantized models. Fused float kernels round the last bits differently, which may change a quantized value by a step."""
MAX_SAMPLES = 3
# Two sizes for dynamic dimensions: a value that was wrongly folded to a constant may be right for one size.
_OPEN_SIZES = (1, 3)

_NO_TENSORS = "its inputs are no tensors"
_RANDOM_OPS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
_QUANTIZED_OPS = frozenset(
    {"QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear", "MatMulNBits", "GatherBlockQuantized"}
)


class Equality(msgspec.Struct, frozen=True, kw_only=True):
    """The results of a converted file compared with those of its source, both run on this machine's CPU.

    `error` is the largest difference in an output divided by the largest magnitude of that output, over all samples;
    infinite if shapes, types or non-finite values differ. `first_bad` is the first node whose result differs by more
    than `tolerance`, "" if none does or it was not found. `skipped` says why nothing was compared.
    """

    samples: int
    bit_equal: bool
    error: float
    tolerance: float
    first_bad: str = ""
    skipped: str = ""

    @property
    def passed(self) -> bool:
        """True if the outputs agree within the tolerance, or could not be compared."""
        return bool(self.skipped) or self.error <= self.tolerance


def compare_with_source(source: Model, path: Path, options: OrtOptions, samples: Samples | None = None) -> Equality:
    """Runs a converted file and its source model on the same inputs, and compares their outputs.

    A float source runs without any optimisation. A quantized one runs as ONNX Runtime optimises it, because integer
    kernels round differently from Q and DQ nodes around float ones. At most `MAX_SAMPLES` samples are run; without
    samples, inputs are drawn at random.

    Raises:
        RuntimeRefusal: ONNX Runtime runs the source but not the file.
    """
    graph = skim_model(source.path).graph
    ops = {node.op_type for node in iterate_nodes(graph)}
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer)
    tolerance = HALF_TOLERANCE if half else FLOAT_TOLERANCE
    if ops & _QUANTIZED_OPS or any(op.startswith("QLinear") for op in ops):
        tolerance = QUANTIZED_TOLERANCE
    facts = Equality(samples=0, bit_equal=False, error=0.0, tolerance=tolerance)
    if drawn := sorted(ops & _RANDOM_OPS):
        return msgspec.structs.replace(facts, skipped=f"it draws random numbers: {', '.join(drawn)}")
    chosen = choose_samples(source, samples)
    if chosen is None:
        return msgspec.structs.replace(facts, skipped=_NO_TENSORS)
    settings = session_settings(options, Level.DISABLED if tolerance != QUANTIZED_TOLERANCE else options.level, source)
    compared = _compare(
        facts, (source, settings), (path, load_settings(options, source)), chosen, drawn=samples is None
    )
    if compared.passed or path.suffix != ".ort":
        return compared
    return msgspec.structs.replace(compared, first_bad=_find_first(source, path, graph, chosen, tolerance))


def compare_onnx(source: Model, changed: Model, samples: Samples | None = None) -> Equality:
    """Runs a model and a changed one on the same inputs without any optimisation, and compares their outputs.

    Raises:
        RuntimeRefusal: ONNX Runtime runs the first but not the second.
    """
    facts = Equality(samples=0, bit_equal=False, error=0.0, tolerance=FUSED_TOLERANCE)
    chosen = choose_samples(source, samples)
    if chosen is None:
        return msgspec.structs.replace(facts, skipped=_NO_TENSORS)
    unoptimized = SessionSettings(level=Level.DISABLED, threads=1)
    return _compare(facts, (source, unoptimized), (changed.path, unoptimized), chosen, drawn=samples is None)


def choose_samples(source: Model, samples: Samples | None) -> Samples | None:
    """Returns the first samples, or randomly drawn ones if there are none; None if an input is no tensor.

    One sample is drawn, or one for each size of `_OPEN_SIZES` if dimensions are open.
    """
    if samples is not None:
        return limit_samples(samples, MAX_SAMPLES)
    unset, drawn = find_unset(source.inputs, {}), list[Samples]()
    for size in _OPEN_SIZES if unset else (1,):
        inputs = source.inputs
        # A formula of dimensions may have no valid size for these numbers: ONNX Runtime's error then names the input.
        with contextlib.suppress(UsageError):
            inputs = size_inputs(inputs, dict.fromkeys(unset, size))
        drawn += filter(None, [draw_samples(inputs)])
    if not drawn:
        return None
    return msgspec.structs.replace(drawn[0], count=len(drawn), read=lambda: itertools.chain.from_iterable(drawn))


def _compare(
    facts: Equality,
    one: tuple[Model, SessionSettings],
    other: tuple[Path, SessionSettings],
    samples: Samples,
    *,
    drawn: bool,
) -> Equality:
    """Returns `facts` with the result of comparing the outputs of the file `other` with those of the model `one`.

    Nothing is compared if the model refuses inputs that were drawn at random.
    """
    source, settings = one
    try:
        wanted = _run(source.path, settings, samples, source.custom_ops)
    except RuntimeRefusal as refusal:
        if not drawn:
            raise
        if samples.count > 1:
            # With one size for all dynamic dimensions they may not fit together.
            return _compare(facts, one, other, select_samples(samples, [0]), drawn=True)
        # Why nothing was compared, without the path of a temporary file.
        reason = refusal.message.partition("': ")[2] or refusal.message
        return msgspec.structs.replace(
            facts, skipped=f"the source does not run on inputs drawn at random, so give --data: {reason[:160]}"
        )
    got = _run(*other, samples, source.custom_ops)
    errors = [_measure(left[name], right.get(name)) for left, right in zip(wanted, got, strict=True) for name in left]
    found = [error for error in errors if error is not None]
    return msgspec.structs.replace(facts, samples=samples.count, bit_equal=not found, error=max(found, default=0.0))


def _run(path: Path, settings: SessionSettings, samples: Samples, libraries: Sequence[Path]) -> list[dict[str, Array]]:
    session = CpuSession(path, msgspec.structs.replace(settings, libraries=tuple(libraries)))
    return [session.run(sample) for sample in samples]


def _measure(wanted: Array, got: Array | None) -> float | None:
    """Returns the largest error divided by the largest magnitude, or None if every bit is equal."""
    if got is None or wanted.shape != got.shape or wanted.dtype != got.dtype:
        return np.inf
    if wanted.dtype.kind not in "fiub":
        return None if np.array_equal(wanted, got) else np.inf
    if wanted.tobytes() == got.tobytes():
        return None
    left, right = wanted.astype(np.float64), got.astype(np.float64)
    finite = np.isfinite(left)
    if not np.array_equal(left[~finite], right[~finite], equal_nan=True) or not np.isfinite(right[finite]).all():
        return np.inf
    largest = np.abs(left[finite]).max(initial=0.0)
    return float(np.abs(left[finite] - right[finite]).max(initial=0.0) / max(float(largest), 1e-6))


def _find_first(source: Model, path: Path, graph: onnx.GraphProto, samples: Samples, tolerance: float) -> str:
    """Returns the name of the first node of the source whose result differs in the `.ort` file, else ""."""
    with work_folder() as work:
        # A copy of the file that also outputs all tensors that the source has too, in its order.
        with open_tables(path) as file:
            exposed_graph: Record = table(table(file.root, "model"), "graph")
            typed = {text(value, "name") for value in records(exposed_graph, "node_args") if value.get("type")}
            made = {name for node in records(exposed_graph, "nodes") for name in texts(node, "outputs")} & typed
            outputs = dict.fromkeys(name for node in graph.node for name in node.output if name)
            shared = [name for name in outputs if name in made]
            given = dict.fromkeys([*texts(exposed_graph, "outputs"), *shared])
            exposed_graph["outputs"] = [name.encode() for name in given]
            write_tables(file.root, work / "exposed.ort")
        proto = read_with_weights_on_disk(source)
        known = {value.name for value in proto.graph.output}
        proto.graph.output.extend(onnx.ValueInfoProto(name=name) for name in shared if name not in known)
        unoptimized = SessionSettings(level=Level.DISABLED, threads=1, libraries=source.custom_ops)
        config = external_config(source.path.parent)
        traced = CpuSession(proto.SerializeToString(), msgspec.structs.replace(unoptimized, config=config))
        exposed = CpuSession(work / "exposed.ort", unoptimized)
        makers = {name: node.name or node.op_type for node in graph.node for name in node.output}
        for sample in samples:
            wanted, got = traced.run(sample, shared), exposed.run(sample, shared)
            for name in shared:
                if (_measure(wanted[name], got[name]) or 0.0) > tolerance:
                    return makers[name]
    return ""
