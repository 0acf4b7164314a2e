"""The self-test of a bundle: a few golden samples, and the outputs of the bundle's own model for them.

The float outputs and the self-test of an earlier build can be copied, so that a build on another kind of CPU has the
same bytes.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit._files import digest_file, replace_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.golden import INPUTS, OUTPUTS, Golden, KnownOutputs, read_inputs, read_outputs, write_rows
from edgekit.bundle.manifest import ChosenSample, GoldenFacts, Manifest
from edgekit.data.samples import Samples, load_samples, select_samples, spread_indices
from edgekit.errors import DataError, RuntimeRefusal, UsageError
from edgekit.model.model import load_model, read_proto, refill
from edgekit.model.tensors import Array, Tensors
from edgekit.serialize import ready_type
from edgekit.target import Form, Precision

EXPECTED = "expected.npz"
"""The outputs of the bundle's model for the chosen samples."""
CANDIDATES = 16
"""The number of golden samples, evenly spread, from which those of the self-test are chosen."""

# The smallest tolerance, as a share of the largest absolute value of the output: kernels differ in their order of sums
# and in rounding.
_MIN_TOLERANCE: dict[Precision, float] = {
    "int8": 0.02, "w4a8": 0.02, "int16": 0.01, "w4a16": 0.01, "fp16": 0.15, "fp32": 0.001,
}  # fmt: skip
# For 16 bits it is half of that for 8: QNN's HTP computes Softplus of them with 45 dB (targets/qnn/NOTES.md).
# For fp16 it is twice the largest difference of Core ML's provider on the models of the zoo (0.08, magika), which has
# formulas of its own. With 8 bits, devices differed by up to 0.35 (SqueezeNet, NNAPI): `_measure_shift` explains that.
_HALF_STEP, _STEPS_OF_8_BITS, _MAX_SHIFT_SHARE = 0.499, 257, 0.5
# A session of the shifted model has the whole model in memory once more.
_MAX_MODEL_BYTES = 256 << 20
# The tolerance is at least twice the largest error of the bundle's model against the float model.
_ERROR_FACTOR = 2.0
# The ONNX file first: the others were converted from it. A context runs only in its vendor's library.
_RUNNABLE: tuple[Form, ...] = ("onnx", "full", "runtime")


class _Candidate(msgspec.Struct, frozen=True, kw_only=True):
    """The figures by which a sample is chosen, and by output the largest error and the largest value (`sizes`).

    `reach` is the largest absolute input value, `energy` the sum of squares of the float outputs, `noise` the sum of
    relative squared errors. `fed` are the shapes of the inputs, `shapes` those of the outputs.
    """

    row: int
    reach: float
    energy: float
    noise: float
    errors: dict[str, float]
    sizes: dict[str, float]
    fed: dict[str, tuple[int, ...]]
    shapes: dict[str, tuple[int, ...]]


def write_expected(
    golden: Golden,
    files: Mapping[Form, Sequence[Path]],
    precision: Precision,
    out: Path,
    known: KnownOutputs | None = None,
) -> GoldenFacts:
    """Writes `expected.npz` into the folder `out` and returns the golden facts with the self-test.

    The bundle's own model runs on the CPU provider of this machine without optimisation. Of at most CANDIDATES golden
    samples three are chosen: the one with the median output energy, the one with the largest input, and the one with
    the largest error against the float model. Its outputs are added to `known`. With open dimensions, all three have
    the most frequent sizes, because loaders read rows of one shape. Outputs whose shape depends on the data are left
    out. If no file of the bundle runs here, or no output is left, there is no self-test, and `expected_from` says why.

    Raises:
        DataError: the golden samples cannot be read, or an output changes its shape.
        OutputError: the file cannot be written.
    """
    form: Form | None = next((form for form in _RUNNABLE if files.get(form)), None)
    count, labelled = golden.samples, golden.has_labels
    no_self_test = GoldenFacts(samples=count, has_labels=labelled, chosen=(), tolerance={}, expected_from="")
    if form is None:
        words = "nothing: the bundle has no file that runs on a CPU"
        return msgspec.structs.replace(no_self_test, expected_from=words)
    try:
        # Not optimised, because fusions depend on ONNX Runtime's version and on the machine.
        session = CpuSession(files[form][0], SessionSettings(level=Level.DISABLED))
        run = partial((known or KnownOutputs()).run, session)
        all_candidates = list(_run_candidates(run, golden))
        # Only samples whose inputs have the most frequent shapes are candidates.
        most_common = max(all_candidates, key=lambda item: sum(other.fed == item.fed for other in all_candidates))
        candidates = [item for item in all_candidates if item.fed == most_common.fed]
        remaining, reasons = list(candidates), dict[int, str]()
        for reason, choose in _REASONS.items():
            if remaining:
                sample = choose(remaining)
                reasons[sample.row] = reason
                remaining.remove(sample)
        chosen = tuple(
            msgspec.convert({"row": row, "reason": reasons[row]}, ready_type(ChosenSample)) for row in sorted(reasons)
        )
        is_open = not all(spec.is_static for spec in golden.inputs)
        sized = [spec.name for spec in golden.outputs if is_open or spec.is_static]
        fixed = {name for name in sized if len({item.shapes[name] for item in candidates}) == 1}
        if not fixed:
            words = "nothing: the shape of each output depends on the data"
            return msgspec.structs.replace(no_self_test, expected_from=words)
        inputs = select_samples(read_inputs(golden), [item.row for item in chosen])
        outputs_of_samples = map(run, inputs)
        rows = [{name: value for name, value in outputs.items() if name in fixed} for outputs in outputs_of_samples]
        write_rows(out / EXPECTED, rows)
        shifts = _measure_shift(files[form][0], inputs, rows)
    except RuntimeRefusal as error:
        return msgspec.structs.replace(no_self_test, expected_from=f"nothing: {error.message}")
    tolerance: dict[str, float] = {}
    for name in sorted({name for item in candidates for name in item.errors if name in fixed}):
        worst = max(item.errors.get(name, 0.0) for item in candidates)
        size = max(item.sizes.get(name, 0.0) for item in candidates)
        # At most half of the largest value: with more, a device that returns zeros would pass.
        shift = min(_ERROR_FACTOR * shifts.get(name, 0.0), _MAX_SHIFT_SHARE * size)
        tolerance_value = max(_ERROR_FACTOR * worst, _MIN_TOLERANCE[precision] * (size or 1.0), shift)
        if math.isfinite(tolerance_value):
            # Two digits, because further ones differ between machines.
            tolerance[name] = float(f"{tolerance_value:.1e}")
    source = f"'{form}' on CPUExecutionProvider, not optimised"
    return msgspec.structs.replace(no_self_test, chosen=chosen, tolerance=tolerance, expected_from=source)


def _run_candidates(run: Callable[[Tensors], Tensors], golden: Golden) -> Iterator[_Candidate]:
    rows = spread_indices(golden.samples, CANDIDATES)
    inputs, outputs = (select_samples(samples, rows) for samples in (read_inputs(golden), read_outputs(golden)))
    for row, sample, reference in zip(rows, inputs, outputs, strict=True):
        output = run(sample)
        real = {name: value for name, value in reference.items() if value.dtype.kind == "f"}
        comparable = {name: value for name, value in real.items() if output[name].shape == value.shape}
        errors = {name: _subtract(output[name], value) for name, value in comparable.items()}
        yield _Candidate(
            row=row,
            reach=max((_largest(value) for value in sample.values() if value.dtype.kind in "fiu"), default=0.0),
            energy=sum(_energy(value) for value in comparable.values()),
            # Relative to each output, so that one with large values does not dominate.
            noise=sum(_energy(errors[name]) / max(_energy(value), 1e-30) for name, value in comparable.items()),
            errors={name: _largest(value) for name, value in errors.items()},
            sizes={name: _largest(value) for name, value in comparable.items()},
            fed={name: value.shape for name, value in sample.items()},
            shapes={name: value.shape for name, value in output.items()},
        )


# The reasons for which samples are chosen, in order of priority.
_REASONS: Mapping[str, Callable[[Sequence[_Candidate]], _Candidate]] = {
    "worst-error": lambda seen: max(seen, key=lambda item: item.noise),
    "extreme": lambda seen: max(seen, key=lambda item: item.reach),
    "typical": lambda seen: sorted(seen, key=lambda item: item.energy)[len(seen) // 2],
}


def _measure_shift(path: Path, inputs: Samples, rows: Sequence[Tensors]) -> dict[str, float]:
    """Returns by how much each output changes if half a quantization step is added or subtracted before each rounding.

    A vendor's kernels may truncate or round halves differently, which is a bias of half a step in each layer that adds
    up. A device with the same model may differ so much from this machine: a keyword spotter differed by 0.22 of its
    largest score on QNN's simulator, and changes by 0.19 here.
    """
    shifts: dict[str, float] = {}
    for sign in (1.0, -1.0):
        if (shifted := _shift_grids(path, sign * _HALF_STEP)) is None:
            return {}
        session = CpuSession(shifted, SessionSettings(level=Level.DISABLED), subject=path.name)
        for sample, row in zip(inputs, rows, strict=True):
            output = session.run(sample)
            for name, value in row.items():
                if value.dtype.kind == "f" and output[name].shape == value.shape:
                    shifts[name] = max(shifts.get(name, 0.0), _largest(_subtract(output[name], value)))
    return {name: value for name, value in shifts.items() if math.isfinite(value)}


def _shift_grids(path: Path, steps: float) -> bytes | None:
    """Returns an ONNX model with an Add of so many steps before each per-tensor QuantizeLinear, None without any."""
    if path.suffix != ".onnx" or path.stat().st_size > _MAX_MODEL_BYTES:
        return None
    proto = read_proto(load_model(path))
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    # QNN's HTP rounds the second factor of a product of two activations to 8 bits (targets/qnn/NOTES.md).
    factors = {node.input[1] for node in graph.node if node.op_type == "MatMul"}
    coarse = {node.input[0] for node in graph.node if node.op_type == "DequantizeLinear" and node.output[0] in factors}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        scale = constants.get(node.input[1]) if node.op_type == "QuantizeLinear" else None
        if scale is not None and node.input[0] not in constants and math.prod(scale.dims) == 1:
            offset, sum_ = f"{node.output[0]}.edgekit_offset", f"{node.output[0]}.edgekit_shifted"
            by = numpy_helper.to_array(scale).reshape(())
            zero = constants.get(node.input[2]) if len(node.input) > 2 else None
            is_coarse = node.output[0] in coarse and zero is not None and zero.data_type == onnx.TensorProto.UINT16
            by = np.asarray(by * steps * (_STEPS_OF_8_BITS if is_coarse else 1), by.dtype)
            graph.initializer.append(numpy_helper.from_array(by, offset))
            nodes.append(helper.make_node("Add", [node.input[0], offset], [sum_]))
            node.input[0] = sum_
        nodes.append(node)
    if len(nodes) == len(graph.node):
        return None
    refill(graph.node, nodes)
    return proto.SerializeToString()


def _subtract(value: Array, other: Array) -> Array:
    """Returns the differences of two tensors; equal infinite values do not differ."""
    return np.subtract(value, other, out=np.zeros(value.shape), where=value != other, dtype=np.float64)


def _largest(value: Array) -> float:
    """Returns the largest absolute value; a NaN counts as infinite, as it would be lost among other values."""
    largest = float(np.max(np.abs(value.astype(np.float64)), initial=0.0))
    return math.inf if math.isnan(largest) else largest


def _energy(value: Array) -> float:
    return float(np.sum(np.square(value.astype(np.float64))))


MAX_DIFFERENCE = 1e-3
"""The largest difference of a recorded output from that of this machine, as a share of its largest absolute value."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of an earlier build: its folder, opened and checked, and its manifest."""

    folder: Path
    manifest: Manifest


def adopt_reference(golden: Golden, recorded: Recorded) -> None:
    """Replaces the outputs of the float model that this machine computed by the recorded ones.

    Raises:
        UsageError: the bundle was made with other samples, or its outputs are not those of this model.
        DataError: the recorded outputs cannot be read.
    """
    # Inputs are not computed, so they must be identical.
    entry = recorded.manifest.files.get(f"golden/{INPUTS}")
    if entry is None or entry.sha256 != digest_file(golden.folder / INPUTS):
        words = f"'{recorded.folder}' was made with other golden samples"
        raise UsageError(words, hint="give the data it was made with")
    adopt_outputs(golden, recorded, recorded.folder / "golden" / OUTPUTS)


def adopt_outputs(golden: Golden, recorded: Recorded, file: Path) -> None:
    """Replaces the golden outputs by those in a `file` of a recorded bundle with the same inputs.

    Raises:
        UsageError: the recorded outputs are not those of this model.
        DataError: they cannot be read.
    """
    theirs = load_samples(str(file), golden.outputs)
    for index, (own, other) in enumerate(zip(read_outputs(golden), theirs, strict=True)):
        for name, value in own.items():
            if not _is_near(value, other.get(name)):
                words = f"output '{name}' of golden sample {index} in '{recorded.folder}' is not what the model gives"
                raise UsageError(f"{words} here", hint="build without --golden")
    _copy(file, golden.folder / OUTPUTS)


def adopt_expected(recorded: Recorded, models: Mapping[Form, Sequence[Path]], out: Path) -> GoldenFacts | None:
    """Copies the recorded self-test into `out` and returns its facts; None if it is not of exactly these model files.

    Raises:
        DataError: the recorded bundle lacks the file.
    """
    known = {name: entry.sha256 for name, entry in recorded.manifest.files.items()}
    is_same = all(known.get(path.name) == digest_file(path) for paths in models.values() for path in paths)
    if not is_same or not recorded.manifest.golden.chosen:
        return None
    _copy(recorded.folder / "golden" / EXPECTED, out / EXPECTED)
    return recorded.manifest.golden


def _is_near(own: Array, theirs: Array | None) -> bool:
    if theirs is None or own.shape != theirs.shape or own.dtype != theirs.dtype:
        return False
    if own.dtype.kind != "f":
        return bool(np.array_equal(own, theirs))
    # Relative to the largest value: near zero, a tolerance for each value would refuse differences in the last bits.
    reach = float(np.max(np.abs(own), initial=0.0))
    return bool(np.allclose(own, theirs, rtol=0.0, atol=MAX_DIFFERENCE * reach, equal_nan=True))


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise DataError(f"there is no '{source}'", hint="build without --golden")
    replace_file(source, target)
