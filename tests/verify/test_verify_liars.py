"""Every kind of lying device that we know of, against the whole of verify: it fails, or the report tells of it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from msgspec.structs import replace
from tiny_models import save_net
from verify_devices import Absent, InProcess, Lie, Retell, from_list

from edgekit._ort import CPU_PROVIDER, CpuSession, Level, SessionSettings
from edgekit.bundle.expected import EXPECTED
from edgekit.bundle.folder import GOLDEN, Bundle, open_bundle
from edgekit.bundle.golden import Golden, make_golden, read_inputs, read_outputs
from edgekit.data.npz import read_rows
from edgekit.data.samples import Samples, order_for_runs, select_samples
from edgekit.devices.device import DeviceRun, Job, PlacedNode
from edgekit.evidence import Evidence
from edgekit.jobs.build import build
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.recipe import Data, Recipe
from edgekit.verify.run import verify_bundle

pytestmark = pytest.mark.slow

COUNT, CLASSES = 16, 12


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A bundle of a quantized network, a float model of the same layers and other weights, and samples not in it."""

    bundle: Bundle
    other: Path
    unseen: Golden


def save_network(path: Path, seed: int) -> Path:
    """Two convolutions and two heads of as many classes; NNAPI leaves the Softplus of the second to the CPU."""
    rng = np.random.default_rng(seed)
    shapes = {"w0": (CLASSES, 3, 3, 3), "w1": (CLASSES, CLASSES, 3, 3), "wy": (CLASSES, CLASSES), "wz": (CLASSES,) * 2}
    weights = {
        name: rng.normal(scale=(2 / np.prod(shape[1:])) ** 0.5, size=shape).astype(np.float32)
        for name, shape in shapes.items()
    }
    body = """[conv0] c0 = Conv<pads = [1,1,1,1]>(x, w0) [relu0] r0 = Relu(c0)
      [conv1] c1 = Conv<pads = [1,1,1,1]>(r0, w1) [relu1] r1 = Relu(c1) [pool] pooled = GlobalAveragePool(r1)
      [flatten] flat = Flatten(pooled) [head_y] y = Gemm(flat, wy) [head_z] raw = Gemm(flat, wz)
      [softplus] z = Softplus(raw)"""
    save_net(f"(float[1,3,12,12] x) => (float[1,{CLASSES}] y, float[1,{CLASSES}] z) {{ {body} }}", path, **weights)
    return path


def draw_images(count: int, seed: int) -> Array:
    """Images that differ in brightness and colour, so that outputs differ after pooling."""
    rng = np.random.default_rng(seed)
    shift = rng.normal(size=(count, 1, 3, 1, 1))
    return np.asarray(rng.normal(size=(count, 1, 3, 12, 12)) + 2.0 * shift, np.float32)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    folder = tmp_path_factory.mktemp("liars")
    model, other = (save_network(folder / f"network{seed}.onnx", seed) for seed in (0, 1))
    for name, count in (("data", 2 * COUNT), ("eval", COUNT), ("unseen", COUNT)):
        np.savez(folder / f"{name}.npz", x=draw_images(count, len(name)))
    data = Data(source=str(folder / "data.npz"), evaluation=str(folder / "eval.npz"))
    build(model, data, folder / "out", Recipe(targets=("nnapi",)), verify=False)
    rows = [{"x": row} for row in draw_images(COUNT, 9)]
    golden = make_golden(load_model(model), from_list(rows), folder / "golden")
    return Case(bundle=open_bundle(folder / "out" / "network0-nnapi"), other=other, unseen=golden)


def change(alter: Callable[[Array], Array]) -> Lie:
    return lambda rows: [{name: alter(value) for name, value in row.items()} for row in rows]


def spoil(value: float) -> Lie:
    """Changes one value of one sample."""
    place = np.arange(CLASSES) == 5
    return lambda rows: [*rows[:3], {**rows[3], "y": np.where(place, np.float32(value), rows[3]["y"])}, *rows[4:]]


def drift_off(rows: list[Tensors]) -> list[Tensors]:
    """What varies as the outputs do, whatever came in."""
    rng = np.random.default_rng(0)

    def draw(name: str) -> Array:
        values = np.stack([row[name] for row in rows])
        return rng.normal(values.mean(axis=0), values.std(axis=0), size=values.shape).astype(np.float32)

    y, z = draw("y"), draw("z")
    return [{"y": y[index], "z": z[index]} for index in range(len(rows))]


def expected_only(rows: list[Tensors], bundle: Bundle) -> list[Tensors]:
    """What the self-test expects for its samples, and nothing of worth for all others."""
    chosen = [one.row for one in bundle.manifest.golden.chosen]
    own = dict(zip(chosen, read_rows(bundle.folder / GOLDEN / EXPECTED), strict=True))
    return [own.get(index, {name: np.zeros_like(row[name]) for name in row}) for index, row in enumerate(rows)]


def replace_nodes(alter: Callable[[PlacedNode], PlacedNode | None]) -> Retell:
    return lambda _, run: {"placement": tuple(node for node in map(alter, run.placement) if node is not None)}


def move(names: Sequence[str], provider: str = CPU_PROVIDER) -> Retell:
    return replace_nodes(lambda node: replace(node, provider=provider) if node.name in names else node)


def hide(name: str) -> Retell:
    return replace_nodes(lambda node: None if node.name == name else node)


def add_node(_job: Job, run: DeviceRun) -> dict[str, Any]:
    npu = next(node.provider for node in run.placement if node.provider != CPU_PROVIDER)
    return {"placement": (*run.placement, PlacedNode(name="conv2", op="Conv", domain="", provider=npu))}


def lying(lie: Lie) -> Callable[[Case], InProcess]:
    return lambda _: InProcess(lie=lie)


def telling(**told: Any) -> Callable[[Case], InProcess]:
    return lambda _: InProcess(retell=lambda _job, _run: told)


def retelling(retell: Retell) -> Callable[[Case], InProcess]:
    return lambda _: InProcess(retell=retell)


def replay_float(noise: float) -> Callable[[Case], InProcess]:
    def make(case: Case) -> InProcess:
        rng = np.random.default_rng(0)
        rows = list(in_order_of_runs(read_outputs(case.bundle.golden)))
        return InProcess(lie=lambda _: change(lambda y: (y + noise * rng.normal(size=y.shape)).astype(y.dtype))(rows))

    return make


def recorded(case: Case) -> InProcess:
    """Says for any samples what it once said for the golden ones."""
    kept: list[Tensors] = []

    def keep(rows: list[Tensors]) -> list[Tensors]:
        kept.extend(rows)
        return rows

    verify_bundle(case.bundle, [InProcess(lie=keep)])
    return InProcess(lie=lambda _: kept)


def other_model(case: Case) -> InProcess:
    session = CpuSession(case.other, SessionSettings(level=Level.DISABLED))
    return InProcess(lie=lambda _: [*map(session.run, in_order_of_runs(read_inputs(case.bundle.golden)))])


def stick(rows: list[Tensors]) -> list[Tensors]:
    mean = np.mean([row["y"][0, 3] for row in rows])
    stuck = [row["y"].copy() for row in rows]
    for y in stuck:
        y[0, 3] = mean
    return [{**row, "y": y} for row, y in zip(rows, stuck, strict=True)]


def leak(rows: list[Tensors]) -> list[Tensors]:
    return [
        {name: row[name] * np.float32(0.9) + before[name] * np.float32(0.1) for name in row}
        for row, before in zip(rows, [rows[0], *rows[:-1]], strict=True)
    ]


def softmax(value: Array) -> Array:
    powers = np.exp(value.astype(np.float64) - float(value.max()))
    return np.asarray(powers / powers.sum(), value.dtype)


FAILS: dict[str, tuple[Callable[[Case], InProcess], str]] = {
    "another model ran": (other_model, "below"),
    "the reference, to the bit": (replay_float(0.0), "float model's to the bit"),
    "two classes swapped in every sample": (
        lying(lambda rows: [{**row, "y": row["y"][:, [1, 0, *range(2, CLASSES)]]} for row in rows]),
        "has its elements in another order",
    ),
    "a class stuck at its mean": (lying(stick), "has element 3 the same for every sample"),
    "a tenth of the sample before": (lying(leak), "of the sample before"),
    "times that are no numbers": (telling(latency_ms=(math.nan,) * COUNT), "which is no time"),
    "the float model, on other kernels": (replay_float(1e-6), "dB nearer to the float model's"),
    "answers recorded from golden samples": (recorded, "below"),
    "the self-test's answers, and nothing else": (
        lambda case: InProcess(lie=lambda rows: expected_only(rows, case.bundle)), "below"
    ),
    "NaN": (lying(spoil(np.nan)), "NaN or infinite"),
    "infinity": (lying(spoil(np.inf)), "NaN or infinite"),
    "zeros": (lying(change(np.zeros_like)), "is the same for every sample"),
    "the first output for all samples": (lying(lambda rows: [rows[0]] * len(rows)), "is the same for every sample"),
    "late by one sample": (lying(lambda rows: [rows[0], *rows[:-1]]), "follows the sample before"),
    "early by one sample": (lying(lambda rows: [*rows[1:], rows[0]]), "below"),
    "samples in reverse": (lying(lambda rows: rows[::-1]), "came back for other samples"),
    "two samples swapped": (lying(lambda rows: [rows[1], rows[0], *rows[2:]]), "came back for other samples"),
    "samples in any order": (
        lying(lambda rows: [rows[i] for i in np.random.default_rng(1).permutation(len(rows))]), "below"
    ),
    "outputs that do not follow the inputs": (lying(drift_off), "below"),
    "scaled": (lying(change(lambda y: y * 2)), "from what the bundle's own model gives here"),
    "shifted": (lying(change(lambda y: y + y.std() * 3)), "from what the bundle's own model gives here"),
    "one softmax too many": (lying(change(softmax)), "is the reference after one softmax too many"),
    "classes in another order": (lying(change(lambda y: y[:, ::-1])), "has its elements in another order"),
    "outputs swapped": (lying(lambda rows: [{"y": row["z"], "z": row["y"]} for row in rows]), "came back as"),
    "one sample too few": (lying(lambda rows: rows[:-1]), "came back for 15 of 16"),
    "nothing": (lying(lambda _: []), "compared with no sample"),
    "an output left out": (lying(lambda rows: [{"y": row["y"]} for row in rows]), "is missing in sample 0"),
    "outputs cut off": (lying(change(lambda y: y[:, :5])), "has shape"),
    "another type": (lying(change(lambda y: y.astype(np.float16))), "has dtype"),
    "half of the samples, and no word of it": (lying(lambda rows: rows[:8]), "came back for 8 of 16"),
    "it died": (lambda _: InProcess(failure="was ended by SIGSEGV"), "was ended by SIGSEGV"),
    "it is gone": (lambda _: Absent(), "was unplugged"),
    "everything ran on the CPU": (lambda _: InProcess(provider=CPU_PROVIDER), "silent fallback"),
    "no placement": (lambda _: InProcess(nodes=0), "placement was not observed"),
    "nodes of another model": (lambda _: InProcess(nodes=6), "its placement is not whole"),
    "a node that nobody predicted": (retelling(add_node), "Conv more than the 2 there are"),
    "a node of the model left out": (retelling(hide("conv1")), "its placement is not whole"),
    "a layer on the CPU": (retelling(move(["conv1"])), "was predicted to take ran on"),
    "an older ONNX Runtime": (
        telling(versions={"onnxruntime": "1.12.0"}, evidence=Evidence.DEVICE), "it ran ONNX Runtime 1.12.0"
    ),
    "a provider of another name": (lambda _: InProcess(provider="NnapiExecutionProvider2"), "silent fallback"),
}  # fmt: skip

TOLD: dict[str, tuple[Callable[[Case], InProcess], str]] = {
    "it computes in half precision": (
        lying(change(lambda y: y.astype(np.float16).astype(np.float32))), "only values of half precision"
    ),
    "half of the samples, and it says so": (
        lambda _: InProcess(lie=lambda rows: rows[:8], stopped_early=True), "stopped after 8 of 16 samples"
    ),
    "a node without work left out": (retelling(hide("softplus")), "lacks 1 node predicted for the CPU"),
    "times of 0 ms": (telling(latency_ms=(0.0,) * COUNT), "its times are left out"),
    "times longer than it took": (telling(latency_ms=(1e6,) * COUNT), "its times are left out"),
    "no word of the version": (telling(versions={}), "does not say which ONNX Runtime ran"),
}  # fmt: skip


def in_order_of_runs(samples: Samples) -> Samples:
    return select_samples(samples, order_for_runs(samples.count, samples.count, 1))


def ask(case: Case, make: Callable[[Case], InProcess], golden: Golden | None = None) -> tuple[str, str]:
    """Returns the verdict on a run, and all that the report says of it."""
    (run,) = verify_bundle(case.bundle, [make(case)], golden=golden).runs
    return run.verdict, " / ".join((*run.failures, *run.notes))


def test_an_honest_device_passes_and_nothing_is_told_of_it(case: Case) -> None:
    assert ask(case, lambda _: InProcess()) == ("pass", "")
    assert ask(case, lambda _: InProcess(), case.unseen) == ("pass", "")


@pytest.mark.parametrize("kind", FAILS)
def test_a_device_that_lies_fails_and_the_report_says_why(case: Case, kind: str) -> None:
    make, words = FAILS[kind]
    # Who answers for golden samples alone is found by others.
    verdict, said = ask(case, make, case.unseen if make is recorded else None)
    assert verdict == "fail"
    assert words in said


@pytest.mark.parametrize("kind", TOLD)
def test_a_lie_that_changes_no_figure_is_told(case: Case, kind: str) -> None:
    make, words = TOLD[kind]
    verdict, said = ask(case, make)
    assert verdict == "pass"
    assert words in said


def test_there_are_as_many_kinds_as_the_docs_say() -> None:
    page = (Path(__file__).parents[2] / "docs" / "concepts" / "security.md").read_text()
    assert f"{len(FAILS) + len(TOLD)} kinds of lie" in page
