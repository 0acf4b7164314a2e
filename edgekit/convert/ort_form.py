"""Writes ORT-format files: both styles, every level, for Arm and x64, in canonical order; a level as ONNX too.

A converted file is compared with its source by running both, and the first node whose result differs is named.
"""

import contextlib
import itertools
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnx

from edgekit._files import digest_file, replacing_file, work_folder
from edgekit._ort import PRECISE, CpuSession, Level, SessionSettings, external_config, optimize_graph
from edgekit.convert.fusions import FusedKind, as_nodes, trace_fusions
from edgekit.convert.ort_format.canonical import canonicalize_file
from edgekit.convert.ort_format.tables import Record, open_tables, records, table, text, texts, write_tables
from edgekit.data.samples import Samples, draw_samples, limit_samples, select_samples
from edgekit.errors import ModelError, RuntimeRefusal, UsageError
from edgekit.graph.constants import MAIN_DOMAINS, ML_DOMAIN
from edgekit.model import model as models
from edgekit.model.external import skim_model
from edgekit.model.tensors import Array
from edgekit.prepare.constants import find_harmful
from edgekit.prepare.shapes import find_unset, size_inputs

_NONE: Mapping[str, str] = {}
REPLAY = {"session.enable_saved_runtime_optimizations": "1"}
"""The session config entry without which ONNX Runtime 1.31 ignores saved optimisations (its PR 32077)."""

Style = Literal["full", "runtime"]
Cpu = Literal["arm", "x64"]

MAX_ORT_BYTES = 2**31 - (64 << 20)
"""A larger model is refused before work starts: the format has at most 2 GB, of which its tables need a part."""


class OrtOptions(msgspec.Struct, frozen=True, kw_only=True):
    """How to write an ORT-format file.

    "full" contains every fusion for the CPU. "runtime" keeps the operators that providers take, and saves the fusions
    for the nodes that they leave to the CPU. `cpu` is the CPU that will run it: Arm has kernels for signed 8-bit
    activations, x64 has blocked layouts.
    """

    style: Style
    cpu: Cpu
    level: Level = Level.ALL


def write_ort(model: models.Model, out: Path, options: OrtOptions, *, subject: str | None = None) -> None:
    """Writes a model in canonical ORT format to `out`, whole or not at all, after loading it as an app would.

    `subject` names the model in errors.

    Raises:
        ModelError: the model is too large for the format.
        RuntimeRefusal: ONNX Runtime cannot load or convert the model.
        OutputError: `out` cannot be written.
    """
    refuse_size(model.path, model.size_bytes)
    with replacing_file(out) as temporary:
        # By default the format follows from the file's suffix, and the temporary file's suffix is not `.ort`.
        saving = {"session.save_model_format": "ORT"}
        if options.style == "runtime":
            saving["optimization.minimal_build_optimizations"] = "save"
        optimize_graph(model.path, temporary, session_settings(options, model, saving), subject=subject)
        canonicalize_file(temporary)
        # Loaded as an app would, but memory-mapped, so that this test does not copy the weights.
        mapped = {"session.use_memory_mapped_ort_model": "1", "session.use_ort_model_bytes_for_initializers": "1"}
        CpuSession(temporary, load_settings(options, model, mapped), subject=subject)


def refuse_size(path: Path, size_bytes: int, having: str = "has") -> None:
    """Refuses a size that the ORT format cannot hold; `having` is its verb, "has" or "with X weights has at least".

    Raises:
        ModelError: the model is too large for the format.
    """
    if size_bytes > MAX_ORT_BYTES:
        words = f"'{path}' {having} {size_bytes / 1e9:.1f} GB, and the ORT format ends at 2 GB"
        raise ModelError(words, hint="ship the .onnx with its external data: a target whose forms are only 'onnx' does")


def session_settings(options: OrtOptions, source: models.Model, config: Mapping[str, str] = _NONE) -> SessionSettings:
    """Returns the session settings under which the source runs like the converted file, with further entries."""
    # Blocked layouts exist on x64 alone: a file for Arm that is written on x64 must not have them.
    unblocked = () if options.cpu == "x64" else ("NchwcTransformer",)
    settings = _settings(options, source, config)
    disabled = (*unblocked, *settings.disabled_optimizers)
    return msgspec.structs.replace(settings, level=options.level, disabled_optimizers=disabled)


def load_settings(
    options: OrtOptions, source: models.Model | None = None, config: Mapping[str, str] = _NONE
) -> SessionSettings:
    """Returns the session settings with which an app would open the converted file, with further entries."""
    return _settings(options, source, {**REPLAY, **config})


def _settings(options: OrtOptions, source: models.Model | None, config: Mapping[str, str]) -> SessionSettings:
    # Prepacked weights would be in the layout of this machine's kernels. Without the second key ONNX Runtime turns s8
    # activations into u8 on x64 (qdq_s8_to_u8.cc), and the file for Arm would lose its faster kernels.
    # The third has no effect on a file in ORT format, and its source is to run in the same kernels (`EXACT_SUMS`).
    int8 = "1" if options.cpu == "arm" else "0"
    own = {"session.disable_prepacking": "1", "session.qdqisint8allowed": int8, PRECISE: "0"}
    settings = SessionSettings(config={**own, **config}, threads=1)
    if source is None:
        return settings
    harmful: tuple[str, ...] = ()
    with contextlib.suppress(ModelError):  # a file that cannot be read is refused when it is opened
        harmful = tuple(find_harmful(skim_model(source.path).graph))
    return msgspec.structs.replace(settings, disabled_optimizers=harmful, libraries=source.custom_ops)


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
RANDOM_OPS = frozenset(
    {"Bernoulli", "Multinomial", "RandomNormal", "RandomNormalLike", "RandomUniform", "RandomUniformLike"}
)
"""The operators whose results differ from run to run, apart from Dropout in training mode."""
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


def compare_with_source(
    source: models.Model, path: Path, options: OrtOptions, samples: Samples | None = None
) -> Equality:
    """Runs a converted file and its source model on the same inputs, and compares their outputs.

    A float source runs without any optimisation. A quantized one runs as ONNX Runtime optimises it, because integer
    kernels round differently from Q and DQ nodes around float ones. At most `MAX_SAMPLES` samples are run; without
    samples, inputs are drawn at random.

    Raises:
        RuntimeRefusal: ONNX Runtime runs the source but not the file.
    """
    graph = skim_model(source.path).graph
    ops = {node.op_type for node in models.iterate_nodes(graph)}
    half = any(tensor.data_type == onnx.TensorProto.FLOAT16 for tensor in graph.initializer)
    tolerance = HALF_TOLERANCE if half else FLOAT_TOLERANCE
    if ops & _QUANTIZED_OPS or any(op.startswith("QLinear") for op in ops):
        tolerance = QUANTIZED_TOLERANCE
    facts = Equality(samples=0, bit_equal=False, error=0.0, tolerance=tolerance)
    if drawn := sorted(ops & RANDOM_OPS):
        return msgspec.structs.replace(facts, skipped=f"it draws random numbers: {', '.join(drawn)}")
    if (chosen := choose_samples(source, samples)) is None:
        return msgspec.structs.replace(facts, skipped=_NO_TENSORS)
    as_is = options if tolerance == QUANTIZED_TOLERANCE else msgspec.structs.replace(options, level=Level.DISABLED)
    settings, loaded = session_settings(as_is, source), load_settings(options, source)
    compared = _compare(facts, (source.path, settings), (path, loaded), chosen, drawn=samples is None)
    if compared.passed or path.suffix != ".ort":
        return compared
    return msgspec.structs.replace(compared, first_bad=_find_first(source, path, graph, chosen, tolerance))


def compare_onnx(source: models.Model, changed: models.Model, samples: Samples | None = None) -> Equality:
    """Runs a model and a changed one on the same inputs without any optimisation, and compares their outputs.

    Raises:
        RuntimeRefusal: ONNX Runtime runs the first but not the second.
    """
    facts = Equality(samples=0, bit_equal=False, error=0.0, tolerance=FUSED_TOLERANCE)
    if (chosen := choose_samples(source, samples)) is None:
        return msgspec.structs.replace(facts, skipped=_NO_TENSORS)
    unoptimized = SessionSettings(level=Level.DISABLED, threads=1, libraries=source.custom_ops)
    return _compare(facts, (source.path, unoptimized), (changed.path, unoptimized), chosen, drawn=samples is None)


def choose_samples(source: models.Model, samples: Samples | None) -> Samples | None:
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


_Opened = tuple[Path, SessionSettings]


def _compare(facts: Equality, one: _Opened, other: _Opened, samples: Samples, *, drawn: bool) -> Equality:
    """Returns `facts` with the result of comparing the outputs of the file `other` with those of the file `one`.

    Nothing is compared if `one` refuses inputs that were drawn at random.
    """
    try:
        wanted = _run(*one, samples)
    except RuntimeRefusal as refusal:
        if not drawn:
            raise
        if samples.count > 1:
            # With one size for all dynamic dimensions they may not fit together.
            return _compare(facts, one, other, select_samples(samples, [0]), drawn=True)
        # Why nothing was compared, without the path of a temporary file.
        reason = refusal.message.partition("': ")[2] or refusal.message
        words = f"the source does not run on inputs drawn at random, so give --data: {reason[:160]}"
        return msgspec.structs.replace(facts, skipped=words)
    got = _run(*other, samples)
    errors = [_measure(left[name], right.get(name)) for left, right in zip(wanted, got, strict=True) for name in left]
    found = [error for error in errors if error is not None]
    return msgspec.structs.replace(facts, samples=samples.count, bit_equal=not found, error=max(found, default=0.0))


def _run(path: Path, settings: SessionSettings, samples: Samples) -> list[dict[str, Array]]:
    session = CpuSession(path, settings)
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


def _find_first(source: models.Model, path: Path, graph: onnx.GraphProto, samples: Samples, tolerance: float) -> str:
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
        proto = models.read_with_weights_on_disk(source)
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


OF_THIS_MACHINE = "layouts of this machine's CPU are in it: load it on the same kind of CPU only"


class TimedFile(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a file on this machine with one thread, all None if nothing was timed.

    `load_ms` is the time to make a session, `median_ms` that of a run, `ratio` that time divided by the one of the
    first file, with its 95 % `interval`.
    """

    load_ms: float | None = None
    median_ms: float | None = None
    ratio: float | None = None
    interval: tuple[float, float] | None = None


class LevelModel(TimedFile, frozen=True, kw_only=True):
    """A model as ONNX Runtime optimizes it at a level.

    `nodes` counts the nodes of the main graph. `kinds` are the fusions that made them, most frequent first.
    `casts_gone` is how many Cast nodes fewer it has than the given model (negative: more). `inserted` counts the nodes
    of ONNX Runtime's own operators by operator. `warning` says why the file is not for every machine, "" if it is. The
    `ratio` is to the model without optimization.
    """

    level: Level
    file: str
    nodes: int
    kinds: tuple[FusedKind, ...]
    casts_gone: int
    inserted: dict[str, int]
    size_bytes: int
    sha256: str
    warning: str = ""
    equality: Equality | None = None


def write_level(
    model: models.Model, level: Level, cpu: Cpu, folder: Path, samples: Samples | None = None, *, checked: bool = True
) -> LevelModel:
    """Writes a model as optimized at a level into a folder, as `model.LEVEL.onnx`; its bytes are reproducible.

    Args:
        model: the model to optimize.
        level: the optimization level.
        cpu: the CPU that will run it: "arm" gets no blocked layouts, which only x64 has.
        folder: the folder of the file.
        samples: the inputs on which both are compared; drawn at random if there are none.
        checked: whether they are compared.

    Raises:
        ModelError: the model is too large, or the file's results differ from the model's.
        RuntimeRefusal: ONNX Runtime refuses the model.
    """
    # ONNX Runtime writes the optimized model into one file.
    if model.size_bytes > models.MOST_INLINE_BYTES:
        words = f"'{model.path}' has {model.size_bytes / 1e9:.1f} GB, and an optimized ONNX file ends at 2 GB"
        raise ModelError(words, hint="leave --level out: --onnx then writes the model with its external data")
    options = OrtOptions(style="full", cpu=cpu, level=level)
    path = folder / f"model.{level.value}.onnx"
    optimize_graph(model.path, path, session_settings(options, model))
    proto = onnx.load(str(path))
    # ONNX Runtime adds ReorderOutput nodes in the order of a hash table that is seeded anew in each process: they are
    # named after their outputs, and the nodes sorted by their outputs.
    reorders = [node for node in proto.graph.node if node.op_type == "ReorderOutput"]
    for node in reorders:
        node.name = f"ReorderOutput_{node.output[0]}"
    if reorders:
        nodes = sorted(proto.graph.node, key=lambda node: next(filter(None, node.output), ""))
        models.refill(proto.graph.node, models.order_nodes(onnx.GraphProto(node=nodes)))
    models.keep_used_opsets(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))
    equality = compare_with_source(model, path, options, samples) if checked else None
    if equality is not None and not equality.passed:
        words = f"'{path.name}' gives other results than its source: error {equality.error:.2g}, at most"
        hint = "choose a lower --level, and report the model to ONNX Runtime"
        raise ModelError(f"{words} {equality.tolerance:g} is allowed", hint=hint)
    before, after = skim_model(model.path).graph, skim_model(path).graph
    casts = Counter(node.op_type for node in before.node)["Cast"] - Counter(node.op_type for node in after.node)["Cast"]
    own = Counter(node.op_type for node in after.node if node.domain not in {*MAIN_DOMAINS, ML_DOMAIN})
    blocked = any(node.domain.endswith("nchwc") or node.op_type.startswith("Nhwc") for node in after.node)
    return LevelModel(
        level=level,
        file=path.name,
        nodes=len(after.node),
        kinds=trace_fusions(before, as_nodes(after)).kinds,
        casts_gone=casts,
        inserted=dict(sorted(own.items())),
        size_bytes=path.stat().st_size,
        sha256=digest_file(path),
        warning=OF_THIS_MACHINE if blocked else "",
        equality=equality,
    )
