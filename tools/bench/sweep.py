"""A sweep on a Dask cluster whose workers are killed at random, against one process and against the pool.

Makes small networks, builds and verifies each for two variants of the target `cpu`, and says of each way what it cost:

    one        one process, one cell after the other
    pool       `edgekit run --workers N`
    cluster    N worker processes of Dask, nobody killed
    killed     the same, and so many of its workers ended by SIGKILL, whichever and whenever
    scheduler  with a few cells: the scheduler itself is killed, another one started, and the run with it

It fails where a result is missing, differs by a byte from that of one process, was begun again after it was finished,
or where the cluster needs more than 5 % more CPU time than the pool.

With `--state DIR` what was finished there is not done again: a way that was cut begins anew, the others stay.
"""

import argparse
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import dask
import numpy as np
import onnx
from distributed import Client, LocalCluster
from onnx import TensorProto, helper, numpy_helper

from edgekit._files import digest_file
from edgekit.app.config import list_cells, load_app
from edgekit.app.result import read_result

ALLOWED = 1.05
# As docs/how-to/sweep.md advises: what Dask looks at many times a second is of no use to cells that take seconds.
QUIET: Mapping[str, object] = {
    "distributed.logging.distributed": "error",
    "distributed.worker.profile.enabled": False,
    "distributed.admin.tick.interval": "500ms",
    "distributed.admin.system-monitor.interval": "5s",
    "distributed.worker.memory.monitor-interval": "2s",
}
WAYS = ("one", "pool", "cluster", "killed")
TEXT = """[targets.cpu]
precision = "int8"
[targets.float]
target = "cpu"
precision = "fp32"
[verify]
on = ["host"]
"""


def main() -> int:
    """Runs the sweep in each way and compares."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", type=int, default=200)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layers", type=int, default=1, help="convolutions of each network: what a cell costs")
    parser.add_argument(
        "--skip", action="append", default=[], choices=("one", "pool", "cluster", "killed", "scheduler")
    )
    parser.add_argument("--state", type=Path, metavar="DIR")
    args = parser.parse_args()
    if args.state is not None:
        return _compare(args.state, args)
    with tempfile.TemporaryDirectory() as folder:
        return _compare(Path(folder), args)


def _compare(folder: Path, args: argparse.Namespace) -> int:
    if not (folder / "edgekit.toml").exists():
        folder.mkdir(parents=True, exist_ok=True)
        make_app(folder, args.cells // 2, args.layers)
    wanted = [way for way in WAYS if way not in args.skip]
    told = {way: _measure(folder, way, args) for way in wanted}
    found = {way: digests(folder, way) for way in told}
    whole = next(iter(found.values()), {})
    problems = [f"{way}: differs from {wanted[0]}" for way in wanted if found[way] != whole]
    problems += [
        f"{way}: {len(each)} results, not {args.cells}" for way, each in found.items() if len(each) != args.cells
    ]
    problems += [problem for each in told.values() for problem in each["problems"]]
    if {"pool", "cluster"} <= told.keys():
        ratio = told["cluster"]["cpu"] / told["pool"]["cpu"]
        print(f"cluster against pool: {ratio:.3f} of its CPU seconds")
        problems += ["the cluster costs too much"] if ratio > ALLOWED else []
    if "scheduler" not in args.skip:
        with tempfile.TemporaryDirectory() as place:
            problems += _end_scheduler(Path(place), args.workers)
    print("\n".join(problems) or "all equal, none twice")
    return int(bool(problems))


def _measure(folder: Path, way: str, args: argparse.Namespace) -> dict[str, Any]:
    """Returns what a way cost and what was wrong with it, as it was told when it was finished."""
    place = folder / f"{way}.json"
    if not place.exists():
        shutil.rmtree(folder / way, ignore_errors=True)
        start, before, problems = time.monotonic(), _spent(), _run_way(folder, way, args)
        facts = {"cpu": _spent() - before, "wall": time.monotonic() - start, "problems": problems}
        place.write_text(json.dumps(facts))
    told: dict[str, Any] = json.loads(place.read_bytes())
    each = told["cpu"] / args.cells
    size = sum(path.stat().st_size for path in (folder / way / ".store").rglob("*.tar")) / args.cells
    kept = f", {size / 1e3:.0f} kB in the store" if size else ""
    print(f"{way:8} {told['cpu']:8.1f} s of CPU, {told['wall']:8.1f} s; a cell {each:.3f} s{kept}", flush=True)
    return told


def _run_way(folder: Path, way: str, args: argparse.Namespace) -> list[str]:
    """Returns what was wrong with one way."""
    match way:
        case "one":
            return _run(folder, way)
        case "pool":
            return _run(folder, way, "--workers", str(args.workers))
        case "cluster":
            with _cluster(args.workers) as cluster:
                return _run(folder, way, "--scheduler", cluster.scheduler_address)
        case _:
            return _run_killed(folder, args)


def _run_killed(folder: Path, args: argparse.Namespace) -> list[str]:
    with _cluster(args.workers) as cluster:
        killer = Killer(cluster, args.kills, args.seed, folder / "killed")
        killer.start()
        problems = _run(folder, "killed", "--scheduler", cluster.scheduler_address)
        killed = killer.stop()
        again = find_again(cluster)
    print(f"{killed} workers killed, {len(again)} cells begun again after they were finished")
    problems += [f"begun again after it was finished: {key}" for key in again]
    return problems + ([f"{killed} kills, not {args.kills}"] if killed != args.kills else [])


def _end_scheduler(folder: Path, workers: int) -> list[str]:
    """Kills the scheduler when a third of the cells are there, starts another, and returns what was built again."""
    make_app(folder, 6, layers=1)
    (folder / "run.toml").write_text('out = "run"\n' + (folder / "edgekit.toml").read_text())
    results = list_results(folder / "run")
    with _scheduler(workers) as (address, process):
        run = subprocess.Popen(_command(folder / "run.toml", "--scheduler", address), stderr=subprocess.PIPE, text=True)
        while sum(path.exists() for path in results) < 4:
            time.sleep(0.05)
        process.kill()
        _, said = run.communicate()
    early = {path: path.stat().st_mtime_ns for path in results if path.exists()}
    with _scheduler(workers) as (address, _):
        subprocess.run(_command(folder / "run.toml", "--scheduler", address), check=True, stdout=subprocess.DEVNULL)
    count = sum(path.exists() for path in results)
    print(f"scheduler killed with {len(early)} of 12 cells done: {said.strip()!r}; {count} after the next run")
    again = [str(path) for path, stamp in early.items() if path.stat().st_mtime_ns != stamp]
    return [f"built again: {path}" for path in again] + ([] if count == 12 and run.returncode == 2 else ["cells lost"])


@contextmanager
def _scheduler(workers: int) -> Iterator[tuple[str, "subprocess.Popen[bytes]"]]:
    """Yields the address and the process of a scheduler of its own, with workers."""
    with tempfile.TemporaryDirectory() as place:
        file, quiet = Path(place) / "scheduler.json", subprocess.DEVNULL
        dask_command = [sys.executable, "-m", "dask"]
        words = ["scheduler", "--port", "0", "--no-dashboard", "--scheduler-file", str(file)]
        scheduler = subprocess.Popen([*dask_command, *words], stderr=quiet)
        while not file.exists():
            time.sleep(0.1)
        words = [
            "worker",
            "--scheduler-file",
            str(file),
            "--nthreads",
            "1",
            "--nworkers",
            str(workers),
            "--no-dashboard",
        ]
        started = subprocess.Popen([*dask_command, *words], stderr=quiet)
        try:
            yield json.loads(file.read_bytes())["address"], scheduler
        finally:
            for process in (started, scheduler):
                process.terminate()
                process.wait()


def make_app(folder: Path, models: int, layers: int) -> None:
    """Writes so many small networks, samples for them, and their `edgekit.toml`."""
    entries: list[str] = []
    for seed in range(models):
        onnx.save(make_net(seed, layers), folder / f"net{seed}.onnx")
        entries += [f'[models.net{seed}]\npath = "net{seed}.onnx"', f'[models.net{seed}.data]\nsource = "samples.npz"']
    np.savez(folder / "samples.npz", x=np.random.default_rng(0).normal(size=(16, 3, 16, 16)).astype(np.float32))
    (folder / "edgekit.toml").write_text("\n".join([*entries, TEXT]))


def make_net(seed: int, layers: int) -> onnx.ModelProto:
    """Returns convolutions, pooled and classified, with weights of their own."""
    rng = np.random.default_rng(seed)
    weights: dict[str, np.ndarray] = {}
    nodes: list[onnx.NodeProto] = []
    tensor, channels = "x", 3
    for layer in range(layers):
        weights[f"w{layer}"] = rng.normal(size=(8, channels, 3, 3)).astype(np.float32) * 0.2
        nodes += [
            helper.make_node("Conv", [tensor, f"w{layer}"], [f"c{layer}"], pads=[1, 1, 1, 1]),
            helper.make_node("Relu", [f"c{layer}"], [f"r{layer}"]),
        ]
        tensor, channels = f"r{layer}", 8
    weights["v"] = rng.normal(size=(8, 10)).astype(np.float32) * 0.3
    nodes += [
        helper.make_node("GlobalAveragePool", [tensor], ["p"]),
        helper.make_node("Flatten", ["p"], ["f"]),
        helper.make_node("MatMul", ["f", "v"], ["y"]),
    ]
    graph = helper.make_graph(
        nodes,
        f"net{seed}",
        [helper.make_tensor_value_info("x", TensorProto.FLOAT, [1, 3, 16, 16])],
        [helper.make_tensor_value_info("y", TensorProto.FLOAT, [1, 10])],
        [numpy_helper.from_array(value, name) for name, value in weights.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def digests(folder: Path, out: str) -> dict[str, dict[str, str]]:
    """Returns the digest of each file of each bundle; what verification measured (times) is none of them."""
    found: dict[str, dict[str, str]] = {}
    for cell in list_cells(load_app(folder / f"{out}.toml")):
        result = read_result(folder / out / cell.model / cell.target)
        if result is not None and result.bundle:
            bundle = folder / out / result.bundle
            files = {path for path in bundle.rglob("*") if path.is_file() and path.name != "verify.json"}
            found[cell.name] = {path.relative_to(bundle).as_posix(): digest_file(path) for path in files}
    return found


def list_results(out: Path) -> list[Path]:
    """Returns where the result of each cell will lie."""
    cells = list_cells(load_app(out.parent / "edgekit.toml"))
    return [out / cell.model / cell.target / "cell.json" for cell in cells]


class Killer(threading.Thread):
    """Ends workers by SIGKILL, spread over the results that are still to come."""

    def __init__(self, cluster: LocalCluster, kills: int, seed: int, out: Path) -> None:
        super().__init__(daemon=True)
        self._cluster, self._random, self._out = cluster, random.Random(seed), out  # noqa: S311 - a draw that repeats
        self._kills, self._done, self._ended = kills, 0, threading.Event()

    def run(self) -> None:
        """Kills one whenever as many results have come as were drawn for it."""
        results = list_results(self._out)
        for count in sorted(self._random.sample(range(len(results) * 9 // 10), self._kills)):
            while sum(path.exists() for path in results) < count and not self._ended.is_set():
                time.sleep(0.02)
            # Somewhere within the cell that it works at.
            time.sleep(self._random.uniform(0.0, 1.0))
            while not self._ended.is_set() and not self._kill():
                time.sleep(0.1)

    def stop(self) -> int:
        """Returns how many were killed."""
        self._ended.set()
        self.join()
        return self._done

    def _kill(self) -> bool:
        # Only those that work: a nanny whose worker dies while it starts gives up, and Dask would run out of workers.
        known = set(self._cluster.scheduler_info["workers"])
        workers = [nanny for nanny in self._cluster.workers.values() if nanny.worker_address in known]
        pids = [nanny.process.pid for nanny in workers if nanny.process is not None and nanny.process.pid]
        if not pids:
            return False
        os.kill(self._random.choice(pids), signal.SIGKILL)
        self._done += 1
        return True


def find_again(cluster: LocalCluster) -> list[str]:
    """Returns the keys of cells that were begun after they had been finished."""
    with Client(cluster.scheduler_address, set_as_default=False) as client:  # type: ignore[no-untyped-call]
        events = [(stamp, event) for stamp, event in client.get_events("edgekit")]
    finished: dict[str, float] = {}
    for stamp, event in events:
        if event["what"] == "done":
            finished.setdefault(event["key"], stamp)
    return [
        event["key"]
        for stamp, event in events
        if event["what"] == "begin" and stamp > finished.get(event["key"], stamp)
    ]


@contextmanager
def _cluster(workers: int) -> Iterator[LocalCluster]:
    dask.config.set({**QUIET, "distributed.admin.low-level-log-length": 100_000})
    with LocalCluster(  # type: ignore[no-untyped-call]
        n_workers=workers, threads_per_worker=1, processes=True, dashboard_address=":0", silence_logs=50
    ) as cluster:
        # Under load a nanny may give up to restart its worker: then another one comes.
        cluster.adapt(minimum=workers, maximum=workers)
        yield cluster


def _run(folder: Path, out: str, *words: str) -> list[str]:
    """Returns what was said of cells that did not pass."""
    file = folder / f"{out}.toml"
    file.write_text(f'out = "{out}"\n' + (folder / "edgekit.toml").read_text())
    subprocess.run(_command(file, *words), check=False, stdout=subprocess.DEVNULL)
    report = json.loads((folder / out / "report.json").read_bytes())
    bad = [cell for cell in report["cells"] if cell["verdict"] != "pass"]
    return [f"{out}: {cell['model']}/{cell['target']}: {cell['headline']}" for cell in bad]


def _command(file: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "edgekit", "run", str(file), "--quiet", *words]


def _spent() -> float:
    mine, others = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return mine.ru_utime + mine.ru_stime + others.ru_utime + others.ru_stime


if __name__ == "__main__":
    sys.exit(main())
