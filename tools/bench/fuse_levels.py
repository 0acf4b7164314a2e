"""What `convert --fuse transformer` brings beside what ONNX Runtime fuses by itself, level by level, in one table.

    python tools/bench/fuse_levels.py [NAME | MODEL.onnx FAMILY] [--rounds N]

NAME is one of tools/bench/architectures.py (encoder25m). Every session has one thread. CPU seconds are compared, in
rounds that take all sessions in turn, so that a busy machine hits them alike; the interval is Student's for the
logarithms of the ratios to the model as it is at the level `all`.
"""

import argparse
import math
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import msgspec
import numpy as np
import onnx
from architectures import ARCHITECTURES
from quantize_ratio import write_model

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.bench.latency import compare_rounds
from edgekit.data.random_samples import draw_samples
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.prepare.clean import prepare_model
from edgekit.prepare.transformer import FuseOptions, fuse_transformer

LEVELS = (Level.DISABLED, Level.BASIC, Level.EXTENDED, Level.ALL)
RUNS = 3


class Way(msgspec.Struct, frozen=True):
    """A model opened at a level: its name, how many nodes run, the fused ones among them, and what loading took."""

    name: str
    level: Level
    nodes: int
    fused: dict[str, int]
    load_s: float
    session: CpuSession


def main() -> int:
    """Prints the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", default="encoder25m")
    parser.add_argument("family", nargs="?", default="bert")
    parser.add_argument("--rounds", type=int, default=8)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        source, sample = _open(options.model, Path(folder))
        ways = list(_open_ways(source, options.family, Path(folder)))
        wanted = ways[0].session.run(sample)
        rounds = [[_spend(way.session, sample) for way in ways] for _ in range(options.rounds)]
        base = next(at for at, way in enumerate(ways) if (way.name, way.level) == ("as it is", Level.ALL))
        print("| model | level | nodes | fused by name | load, CPU s | run, CPU ms | beside 'all' as it is | SQNR dB |")
        print("|---|---|--:|---|--:|--:|---|--:|")
        for at, way in enumerate(ways):
            ratio = compare_rounds([(one[base], one[at]) for one in rounds])
            low, high = ratio.interval
            beside = "1" if at == base else f"{ratio.value:.2f} ({low:.2f} to {high:.2f})"
            spent = 1e3 * median(one[at] for one in rounds)
            fused = ", ".join(f"{count} {op}" for op, count in way.fused.items()) or "-"
            print(
                f"| {way.name} | {way.level} | {way.nodes} | {fused} | {way.load_s:.2f} | {spent:.1f} | {beside} |"
                f" {_compare(wanted, way.session.run(sample)):.0f} |"
            )
    return 0


def _open(name: str, folder: Path) -> tuple[Model, Tensors]:
    if name in ARCHITECTURES:
        architecture = ARCHITECTURES[name]()
        return load_model(write_model(architecture, folder, 1)[0]), architecture.draw(np.random.default_rng(0))
    model = load_model(Path(name))
    samples = draw_samples(model.inputs)
    if samples is None:
        raise SystemExit(f"no sample can be drawn for '{name}'")
    return model, next(iter(samples))


def _open_ways(source: Model, family: str, folder: Path) -> Iterator[Way]:
    options = FuseOptions(model_type=family)
    fused = fuse_transformer(
        source, options, folder / "fused.onnx", lambda model, out: prepare_model(model, out, {})
    ).model
    for name, model in (("as it is", source), ("fused", fused)):
        for level in LEVELS:
            saved = folder / "saved.onnx"
            start = time.process_time()
            session = CpuSession(model.path, SessionSettings(level=level, threads=1))
            load_s = time.process_time() - start
            CpuSession(model.path, SessionSettings(level=level, threads=1, save_to=saved))
            nodes = onnx.load(saved, load_external_data=False).graph.node
            contrib = Counter(node.op_type for node in nodes if node.domain.startswith("com.microsoft"))
            yield Way(name, level, len(nodes), dict(sorted(contrib.items())), load_s, session)


def _spend(session: CpuSession, sample: Tensors) -> float:
    """Returns the CPU seconds of a run: the least of a few, as whatever disturbs one makes it longer."""
    spent: list[float] = []
    for _ in range(RUNS):
        start = time.process_time()
        session.run(sample)
        spent.append(time.process_time() - start)
    return min(spent)


def _compare(wanted: dict[str, Array], found: dict[str, Array]) -> float:
    """Returns the worst signal-to-noise ratio of the outputs in dB, 200 at most."""
    ratios = [
        10 * math.log10(float(np.square(value).sum()) / max(float(np.square(found[name] - value).sum()), 1e-20))
        for name, value in wanted.items()
    ]
    return min(200.0, *ratios)


if __name__ == "__main__":
    raise SystemExit(main())
