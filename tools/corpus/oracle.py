"""Finds the truth about a bundle without edgekit's gates: does it start, and answer as the float model?

The library that apps link runs the file, and stock ONNX Runtime runs the float model, on samples that were used for
nothing else. The decision for which the output is made is compared, in plain numpy. Above one bound the answer is
right, as nobody would complain; below another it is wrong, as everybody would; between them the truth is left open.
"""

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

import msgspec
import numpy as np
import onnxruntime
from table import Answers, Net

from edgekit._files import work_folder
from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.folder import open_bundle, read_target
from edgekit.data.samples import load_samples
from edgekit.devices.bundled import make_job, plan_run
from edgekit.devices.find import find_device
from edgekit.model.tensors import Array

DEVICES: Mapping[str, str] = {
    "nnapi": "android:x86_64", "xnnpack": "android:x86_64", "coreml": "ios-sim", "qnn": "qnn-htp-sim", "cpu": "host"
}  # fmt: skip
"""The targets, and the device that runs each one's real library."""

# ONNX's operators, those of ONNX Runtime (FusedConv, QLinearMatMul), and partitions, which are named after providers.
_MULTIPLIES = re.compile("Conv|MatMul|Gemm|LSTM|GRU|RNN|Attention|Einsum|ExecutionProvider")
State = Literal["right", "wrong", "open", "does not start"]
_BUDGET_S = 30.0


class Truth(msgspec.Struct, frozen=True, kw_only=True):
    """The oracle's answer about one bundle: `agreement` is 1 if nothing differs, over `samples` samples.

    `taken` is the share of the session's nodes that are not left to the CPU provider, of those that multiply if there
    are any: two LSTMs may be most of the work of 70 nodes. None if it was not observed.
    """

    state: State
    agreement: float | None = None
    samples: int = 0
    taken: float | None = None
    failure: str | None = None


def share_equal(wanted: Array, got: Array, axis: int) -> float:
    """Returns the share of equal decisions, with the classes along `axis`."""
    return float((wanted.argmax(axis) == got.argmax(axis)).mean())


def explained(wanted: Array, got: Array) -> float:
    """Returns the share of the variance between samples that is kept (R2), 0 where none is."""
    spread = ((wanted - wanted.mean(0)) ** 2).sum()
    return max(0.0, float(1 - ((got - wanted) ** 2).sum() / max(spread, 1e-12)))


def same_neighbours(wanted: Array, got: Array) -> float:
    """Returns how equally samples resemble each other in both: the correlation of the cosines of all pairs."""

    def cosines(rows: Array) -> Array:
        rows = rows.reshape(len(rows), -1).astype(np.float64)
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-12)
        return np.asarray((rows @ rows.T)[np.triu_indices(len(rows), 1)])

    return max(0.0, float(np.corrcoef(cosines(wanted), cosines(got))[0, 1]))


def same_boxes(wanted: Array, got: Array) -> float:
    """Returns the F1 of the detections (left, top, right, bottom, score, class) that both have, at an IoU of 0.5."""
    scores = [_match_boxes(*pair) for pair in zip(wanted, got, strict=True)]
    return float(np.mean(scores))


def _match_boxes(wanted: Array, got: Array) -> float:
    wanted, got = (rows.reshape(-1, rows.shape[-1]) for rows in (wanted, got))
    least = 0.5 * min(wanted[:, 4].max(), 0.5)
    wanted, got = wanted[wanted[:, 4] > least], got[got[:, 4] > least]
    area = [np.prod(np.maximum(rows[:, 2:4] - rows[:, :2], 0), axis=1) for rows in (wanted, got)]
    low, high = np.maximum(wanted[:, None, :2], got[None, :, :2]), np.minimum(wanted[:, None, 2:4], got[None, :, 2:4])
    both = np.prod(np.maximum(high - low, 0), axis=2)
    overlap = (both / np.maximum(area[0][:, None] + area[1] - both, 1e-9)) * (wanted[:, None, 5] == got[None, :, 5])
    found = (overlap.max(1, initial=0) > 0.5).sum() + (overlap.max(0, initial=0) > 0.5).sum()
    return float(found / max(len(wanted) + len(got), 1))


MEASURES: Mapping[Answers, tuple[Callable[[Array, Array], float], float, float]] = {
    "classes": (lambda wanted, got: share_equal(wanted, got, -1), 0.9, 0.75),
    "sequence": (lambda wanted, got: share_equal(wanted, got, -1), 0.9, 0.75),
    "map": (lambda wanted, got: share_equal(wanted, got, 2), 0.9, 0.75),
    "values": (explained, 0.9, 0.7),
    "vector": (same_neighbours, 0.9, 0.7),
    "boxes": (same_boxes, 0.9, 0.75),
}
"""For each kind of output its measure (of stacked samples), and the bounds of right and wrong."""


def ask_oracle(folder: Path, net: Net) -> Truth:
    """Runs a bundle's file in the library that apps link, and compares its outputs with the float model's.

    The first output is the network's answer, others are values; the worst output decides.

    Raises:
        BundleError: the bundle cannot be opened.
        DeviceError: the device is not on this machine, which says nothing of the bundle.
    """
    bundle = open_bundle(folder)
    device = find_device(DEVICES[bundle.manifest.target], read_target(bundle))
    samples = load_samples(str(net.folder / "held.npz"), bundle.manifest.inputs)
    job = make_job(bundle, plan_run(bundle, device, samples.count), samples)
    with work_folder() as work:
        run = device.run_job(msgspec.structs.replace(job, budget_s=_BUDGET_S), work)
        if run.failure is not None:
            return Truth(state="does not start", failure=run.failure)
        rows = list(run.outputs)
    wanted = run_float(net, len(rows))
    truths = [
        judge("values" if index else net.answers, wanted[name], np.stack([row[name] for row in rows]))
        for index, name in enumerate(wanted)
    ]
    truth = max(truths, key=lambda truth: ("right", "open", "wrong").index(truth.state))
    nodes = [node for node in run.placement if _MULTIPLIES.search(node.op)] or run.placement
    taken = np.mean([node.provider != CPU_PROVIDER for node in nodes]) if nodes else None
    return msgspec.structs.replace(truth, taken=None if taken is None else round(float(taken), 3))


def run_float(net: Net, count: int) -> dict[str, Array]:
    """Returns stock ONNX Runtime's outputs for the first samples, stacked, by output name."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    session = onnxruntime.InferenceSession(str(net.folder / "model.onnx"), options, providers=["CPUExecutionProvider"])
    frozen = {
        value.name: np.asarray(net.freeze[value.name], np.int64 if "int64" in value.type else np.float32)
        for value in session.get_inputs()
        if value.name in net.freeze
    }
    with np.load(net.folder / "held.npz") as held:
        rows = [{name: held[name][index] for name in held.files} for index in range(count)]
    answers = [session.run(None, {**row, **frozen}) for row in rows]
    names = [output.name for output in session.get_outputs()]
    return {name: np.stack(values) for name, values in zip(names, zip(*answers, strict=True), strict=True)}


def judge(answers: Answers, wanted: Array, got: Array) -> Truth:
    """Returns the truth for lists of outputs, one for each sample: NaN is wrong, even if everything else agrees."""
    if wanted.shape != got.shape or not np.isfinite(got).all():
        return Truth(state="wrong", agreement=0.0, samples=len(got))
    measure, right, wrong = MEASURES[answers]
    agreement = measure(wanted, got)
    state: State = "right" if agreement >= right else "wrong" if agreement < wrong else "open"
    return Truth(state=state, agreement=round(agreement, 4), samples=len(got))
