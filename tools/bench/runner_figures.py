"""The runner's figures against a plain C loop on the same library: size, cold start, latency, memory.

    python tools/bench/runner_figures.py [MODEL]

Both programs run in turn, many times, because this machine may be busy; medians and least values of each are compared.
"""

import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np

from edgekit._ort import CPU_PROVIDER
from edgekit._proc import run_process, stream_process
from edgekit.devices.local.runner import NativeRunner, build_runner, find_missing_runner, host_abi
from edgekit.devices.process.exchange import FarJob, FarRun, decode_run, encode_tensors
from edgekit.model.model import load_model
from edgekit.model.tensors import Array

HERE = Path(__file__).parent
DEMO = HERE.parents[1] / "edgekit" / "demo" / "digits_mobilenet.onnx"
ROUNDS, WARMUP, RUNS = 9, 20, 200
MAX_SIZE_BYTES, MAX_START_MS, MAX_LATENCY_SHARE, MAX_GROWTH_BYTES = 300_000, 30.0, 0.02, 4 << 20


class Figure(msgspec.Struct, frozen=True, kw_only=True):
    """A figure, what it must not pass, and both as text."""

    name: str
    value: float
    limit: float
    unit: str


def main() -> int:
    """Prints each figure and returns 1 if one passes its limit."""
    model = Path(sys.argv[1]) if len(sys.argv) > 1 else DEMO
    with tempfile.TemporaryDirectory() as folder:
        figures = list(measure(model, Path(folder)))
    for figure in figures:
        verdict = "ok" if figure.value <= figure.limit else "TOO MUCH"
        print(f"{figure.name:44} {figure.value:10.3f} {figure.unit:5} limit {figure.limit:g}  {verdict}")
    return 0 if all(figure.value <= figure.limit for figure in figures) else 1


def measure(model: Path, work: Path) -> Iterator[Figure]:
    """Yields the figures of a model with one float input."""
    for abi in ("linux-x64", "linux-arm64"):
        missing = find_missing_runner(abi)
        if missing is None or (missing.command or "").startswith("edgekit runner build"):
            size_bytes = build_runner(abi, print).program.stat().st_size
            yield Figure(name=f"size, {abi}", value=size_bytes / 1e3, limit=MAX_SIZE_BYTES / 1e3, unit="kB")
    runner = build_runner(host_abi(), print)
    (spec,) = load_model(model).inputs
    shape = [dim if isinstance(dim, int) else 1 for dim in spec.shape or ()]
    sample = np.random.default_rng(1).normal(0, 1, shape).astype(np.float32)
    plain = compile_plain(work)
    sample.tofile(work / "input.raw")
    words = [str(runner.library), str(model), str(work / "input.raw")]
    dims = [str(dim) for dim in shape]

    starts, shares, least_shares = list[float](), list[float](), list[float]()
    for _ in range(ROUNDS):
        mine, mine_ms = run_runner(runner, model, spec.name, sample, samples=1, repeat=WARMUP + RUNS)
        theirs = json.loads(run_checked([str(plain), *words, str(RUNS), *dims]))
        warm = mine.latency_ms[WARMUP:]
        shares.append(statistics.median(warm) / theirs["median_ms"] - 1)
        least_shares.append(min(warm) / theirs["least_ms"] - 1)
        _, mine_ms = run_runner(runner, model, spec.name, sample, samples=1, repeat=1)
        start = time.perf_counter()
        run_checked([str(plain), *words, "1", *dims])
        starts.append(mine_ms - (time.perf_counter() - start) * 1e3)
    yield Figure(
        name="cold start beyond ONNX Runtime's, median", value=statistics.median(starts), limit=MAX_START_MS, unit="ms"
    )
    for name, values in (("median", shares), ("least", least_shares)):
        value = abs(statistics.median(values))
        yield Figure(
            name=f"latency off a C loop, by the {name} run", value=value * 100, limit=MAX_LATENCY_SHARE * 100, unit="%"
        )

    few, _ = run_runner(runner, model, spec.name, sample, samples=50)
    many, _ = run_runner(runner, model, spec.name, sample, samples=2000)
    growth = (many.peak_rss_bytes - few.peak_rss_bytes) / (1 << 20)
    yield Figure(
        name="memory of 2000 samples beyond that of 50", value=growth, limit=MAX_GROWTH_BYTES / (1 << 20), unit="MiB"
    )


def compile_plain(work: Path) -> Path:
    """Returns the program of `plain_loop.c`."""
    program = work / "plain_loop"
    run_checked(["cc", "-O2", "-o", str(program), str(HERE / "plain_loop.c"), "-ldl"])
    return program


def run_runner(
    runner: NativeRunner, model: Path, name: str, sample: Array, *, samples: int, repeat: int = 1
) -> tuple[FarRun, float]:
    """Returns what the runner says of a run, and the milliseconds from its start to its end."""
    far = FarJob(
        model=str(model.resolve()), provider=CPU_PROVIDER, runtime=str(runner.library), threads=1, samples=samples,
        repeat=repeat,
    )  # fmt: skip
    message = encode_tensors({name: sample})
    tail = bytearray()

    def feed() -> Iterator[bytes]:
        yield msgspec.json.encode(far) + b"\n"
        for _ in range(samples):
            yield message

    def take(stream: "object") -> None:
        while data := stream.read1(1 << 16):  # type: ignore[attr-defined]
            tail.extend(data)
            del tail[: -(1 << 20)]

    start = time.perf_counter()
    finished = stream_process([str(runner.program), "--pipe"], timeout_s=600, feed=feed(), take=take)
    spent_ms = (time.perf_counter() - start) * 1e3
    if not finished.succeeded:
        raise SystemExit(f"the runner {finished.ending}: {finished.stderr}")
    return decode_run(bytes(tail[tail.rindex(b'{"status"') :])), spent_ms


def run_checked(argv: list[str]) -> str:
    """Returns what a program prints."""
    finished = run_process(argv, timeout_s=600)
    if not finished.succeeded:
        raise SystemExit(f"{argv[0]} {finished.ending}: {finished.stderr}")
    return finished.stdout


if __name__ == "__main__":
    sys.exit(main())
