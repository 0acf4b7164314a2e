"""The self-test of a bundle: a few golden samples, and the outputs that the bundle's own model gives for them.

The float outputs and the self-test of an earlier build can be taken over, so that a build on another kind of CPU gives
the same bytes.
"""

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import helper, numpy_helper

from edgekit._files import digest_file, replace_file
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bundle.golden import INPUTS, OUTPUTS, Golden, read_inputs, read_outputs, write_rows
from edgekit.bundle.manifest import ChosenSample, GoldenFacts, Manifest
from edgekit.data.samples import Samples, load_samples, select_samples, spread_indices
from edgekit.errors import DataError, RuntimeRefusal, UsageError
from edgekit.model.model import load_model, read_proto, refill
from edgekit.model.tensors import Array, Tensors
from edgekit.target import Form, Precision

EXPECTED = "expected.npz"
"""What the model in the bundle gives for the chosen samples."""
CANDIDATES = 16
"""How many golden samples, spread evenly, the samples of the self-test are chosen from."""

# As a share of the largest number of the output: kernels differ by their order of sums and by how they round.
_LEAST_TOLERANCE: dict[Precision, float] = {
    "int8": 0.02, "w4a8": 0.02, "int16": 0.005, "w4a16": 0.005, "fp16": 0.15, "fp32": 0.001,
}  # fmt: skip
# Of half precision it is twice what Core ML's provider showed on the zoo (0.08, magika): formulas of its own, not
# rounding alone. Of 8 bits, devices were up to 0.35 off (SqueezeNet, NNAPI), which the shifted grids below explain.
_HALF_STEP, _MOST_OFF = 0.499, 0.5
# A session of the shifted model has the whole model in memory once more.
_MOST_BYTES = 256 << 20
# A device may be as far from the expected output again as that is from the float model's at its worst.
_ERROR_FACTOR = 2.0
# The ONNX file first: it is the source that the others were converted from. A context runs in its vendor's library
# only.
_RUNNABLE: tuple[Form, ...] = ("onnx", "full", "runtime")


class _Seen(msgspec.Struct, frozen=True, kw_only=True):
    """What a sample is chosen by, and how far its outputs are from the float model's: `errors` and `sizes` by output.

    `fed` are the shapes of the inputs, `shapes` those of the outputs.
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
    golden: Golden, files: Mapping[Form, Sequence[Path]], precision: Precision, out: Path
) -> GoldenFacts:
    """Writes `expected.npz` into the folder `out` and returns the golden facts with the self-test in them.

    The bundle's own model runs on the CPU provider of this machine without optimisation. Of at most CANDIDATES golden
    samples three are chosen: the one with the median output energy, the one with the largest input, and the one whose
    output is furthest from the float model's. Of inputs with open dimensions they all have the sizes that most have:
    loaders read rows of one shape. Outputs whose shape depends on the data are left out. Where no file of the bundle
    runs here, or no output is left, there is no self-test, and `expected_from` says why.

    Raises:
        DataError: the golden samples cannot be read, or an output changes its shape.
        OutputError: the file cannot be written.
    """
    form: Form | None = next((form for form in _RUNNABLE if files.get(form)), None)
    untested = GoldenFacts(
        samples=golden.samples, has_labels=golden.has_labels, chosen=(), tolerance={}, expected_from=""
    )
    if form is None:
        words = "nothing: the bundle has no file that runs on a CPU"
        return msgspec.structs.replace(untested, expected_from=words)
    try:
        # Not optimised: fusions differ between versions and machines of ONNX Runtime, and would be in the expected
        # numbers.
        session = CpuSession(files[form][0], SessionSettings(level=Level.DISABLED))
        every = list(_look(session, golden))
        # The samples of the shapes that most of them have.
        common = max(every, key=lambda item: sum(other.fed == item.fed for other in every))
        seen = [item for item in every if item.fed == common.fed]
        chosen = _choose(seen)
        is_open = not all(spec.is_static for spec in golden.inputs)
        fixed = {
            spec.name
            for spec in golden.outputs
            if (is_open or spec.is_static) and len({item.shapes[spec.name] for item in seen}) == 1
        }
        if not fixed:
            words = "nothing: the shape of each output depends on the data"
            return msgspec.structs.replace(untested, expected_from=words)
        inputs = select_samples(read_inputs(golden), [item.row for item in chosen])
        given = map(session.run, inputs)
        rows = [{name: value for name, value in outputs.items() if name in fixed} for outputs in given]
        write_rows(out / EXPECTED, rows)
        moved = _measure_shift(files[form][0], inputs, rows)
    except RuntimeRefusal as error:
        return msgspec.structs.replace(untested, expected_from=f"nothing: {error.message}")
    return msgspec.structs.replace(
        untested,
        chosen=chosen,
        tolerance=_set_tolerance(seen, fixed, _LEAST_TOLERANCE[precision], moved),
        expected_from=f"'{form}' on CPUExecutionProvider, not optimised",
    )


def _look(session: CpuSession, golden: Golden) -> Iterator[_Seen]:
    rows = spread_indices(golden.samples, CANDIDATES)
    inputs, outputs = (select_samples(samples, rows) for samples in (read_inputs(golden), read_outputs(golden)))
    for row, sample, wanted in zip(rows, inputs, outputs, strict=True):
        got = session.run(sample)
        real = {name: value for name, value in wanted.items() if _is_real(value) and got[name].shape == value.shape}
        errors = {name: got[name].astype(np.float64) - value for name, value in real.items()}
        yield _Seen(
            row=row,
            reach=max((_largest(value) for value in sample.values() if value.dtype.kind in "fiu"), default=0.0),
            energy=sum(_energy(value) for value in real.values()),
            # Relative to each output, so that one of large numbers does not decide alone.
            noise=sum(_energy(errors[name]) / max(_energy(value), 1e-30) for name, value in real.items()),
            errors={name: _largest(value) for name, value in errors.items()},
            sizes={name: _largest(value) for name, value in real.items()},
            fed={name: value.shape for name, value in sample.items()},
            shapes={name: value.shape for name, value in got.items()},
        )


def _choose(seen: Sequence[_Seen]) -> tuple[ChosenSample, ...]:
    """Returns the chosen samples by row: each reason has one of its own, as long as there are so many."""
    left, picked = list(seen), dict[int, str]()
    for reason, choose in _REASONS.items():
        if left:
            chosen = choose(left)
            picked[chosen.row] = reason
            left.remove(chosen)
    return tuple(msgspec.convert({"row": row, "reason": picked[row]}, ChosenSample) for row in sorted(picked))


# The reasons for which samples are chosen, the first reason first.
_REASONS: Mapping[str, Callable[[Sequence[_Seen]], _Seen]] = {
    "worst-error": lambda seen: max(seen, key=lambda item: item.noise),
    "extreme": lambda seen: max(seen, key=lambda item: item.reach),
    "typical": lambda seen: sorted(seen, key=lambda item: item.energy)[len(seen) // 2],
}


def _measure_shift(path: Path, inputs: Samples, rows: Sequence[Tensors]) -> dict[str, float]:
    """Returns by how much each output moves where every rounding goes the other way: half a step up, or down.

    A vendor's kernels round halves otherwise, or cut off: a bias of half a step in each layer, which adds up
    where honest rounding cancels. A device that computes the same model may be so far from this machine: on QNN's
    simulator a keyword spotter was off by 0.22 of its largest score, and so it moves by 0.19.
    """
    moved: dict[str, float] = {}
    for sign in (1.0, -1.0):
        if (shifted := _shift_grids(path, sign * _HALF_STEP)) is None:
            return {}
        session = CpuSession(shifted, SessionSettings(level=Level.DISABLED), subject=path.name)
        for sample, row in zip(inputs, rows, strict=True):
            got = session.run(sample)
            for name, value in row.items():
                if _is_real(value) and got[name].shape == value.shape:
                    moved[name] = max(moved.get(name, 0.0), _largest(got[name].astype(np.float64) - value))
    return {name: value for name, value in moved.items() if math.isfinite(value)}


def _shift_grids(path: Path, steps: float) -> bytes | None:
    """Returns an ONNX model that adds so many steps before each QuantizeLinear of one scale, None if it has none."""
    if path.suffix != ".onnx" or path.stat().st_size > _MOST_BYTES:
        return None
    proto = read_proto(load_model(path))
    graph = proto.graph
    constants = {tensor.name: tensor for tensor in graph.initializer}
    nodes: list[onnx.NodeProto] = []
    for node in graph.node:
        scale = constants.get(node.input[1]) if node.op_type == "QuantizeLinear" else None
        if scale is not None and node.input[0] not in constants and math.prod(scale.dims) == 1:
            offset, sum_ = f"{node.output[0]}.edgekit_offset", f"{node.output[0]}.edgekit_shifted"
            by = numpy_helper.to_array(scale).reshape(())
            graph.initializer.append(numpy_helper.from_array(np.asarray(by * steps, by.dtype), offset))
            nodes.append(helper.make_node("Add", [node.input[0], offset], [sum_]))
            node.input[0] = sum_
        nodes.append(node)
    if len(nodes) == len(graph.node):
        return None
    refill(graph.node, nodes)
    return proto.SerializeToString()


def _set_tolerance(
    seen: Sequence[_Seen], fixed: Collection[str], share: float, moved: Mapping[str, float]
) -> dict[str, float]:
    tolerance: dict[str, float] = {}
    for name in sorted({name for item in seen for name in item.errors if name in fixed}):
        worst = max(item.errors.get(name, 0.0) for item in seen)
        size = max(item.sizes.get(name, 0.0) for item in seen)
        # Half of the largest number at most: beyond, a device that gives zeros would pass.
        shift = min(_ERROR_FACTOR * moved.get(name, 0.0), _MOST_OFF * size)
        wanted = max(_ERROR_FACTOR * worst, share * (size or 1.0), shift)
        if math.isfinite(wanted):
            # Two digits: more would differ between machines without meaning anything.
            tolerance[name] = float(f"{wanted:.1e}")
    return tolerance


def _is_real(value: Array) -> bool:
    return value.dtype.kind == "f"


def _largest(value: Array) -> float:
    return float(np.max(np.abs(value.astype(np.float64)), initial=0.0))


def _energy(value: Array) -> float:
    return float(np.sum(np.square(value.astype(np.float64))))


LIMIT = 1e-3
"""How far a recorded output may lie from what this machine computes, as a share of the largest number in it."""


class Recorded(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of an earlier build: its folder, opened and checked, and its manifest."""

    folder: Path
    manifest: Manifest


def adopt_reference(golden: Golden, recorded: Recorded) -> None:
    """Puts the recorded outputs of the float model in the place of those that this machine computed.

    Raises:
        UsageError: the bundle was made with other samples, or its outputs are not those of this model.
        DataError: the recorded outputs cannot be read.
    """
    # Inputs are data, not measurements: they must be the same to the byte.
    entry = recorded.manifest.files.get(f"golden/{INPUTS}")
    if entry is None or entry.sha256 != digest_file(golden.folder / INPUTS):
        words = f"'{recorded.folder}' was made with other golden samples"
        raise UsageError(words, hint="give the data it was made with")
    adopt_outputs(golden, recorded, recorded.folder / "golden" / OUTPUTS)


def adopt_outputs(golden: Golden, recorded: Recorded, file: Path) -> None:
    """Takes over outputs in a `file` of a recorded bundle, whose inputs were compared.

    Raises:
        UsageError: the recorded outputs are not those of this model.
        DataError: they cannot be read.
    """
    theirs = load_samples(str(file), golden.outputs)
    for index, (own, other) in enumerate(zip(read_outputs(golden), theirs, strict=True)):
        for name, value in own.items():
            if not _is_near(value, other.get(name)):
                raise UsageError(
                    f"output '{name}' of golden sample {index} in '{recorded.folder}' is not what the model gives here",
                    hint="build without --golden",
                )
    _copy(file, golden.folder / OUTPUTS)


def adopt_expected(recorded: Recorded, models: Mapping[Form, Sequence[Path]], out: Path) -> GoldenFacts | None:
    """Copies the recorded self-test into the folder `out` and returns its facts, if it is of exactly these model files.

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
    # Against the largest number: near zero a relative tolerance would refuse differences in the last bits.
    reach = float(np.max(np.abs(own), initial=0.0))
    return bool(np.allclose(own, theirs, rtol=0.0, atol=LIMIT * reach, equal_nan=True))


def _copy(source: Path, target: Path) -> None:
    if not source.is_file():
        raise DataError(f"there is no '{source}'", hint="build without --golden")
    replace_file(source, target)
