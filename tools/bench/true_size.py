"""Networks of today at true size, from check to verification: `python true_size.py [NAME]... --state DIR --table`.

For each of them and each target it runs `edgekit check`, `build --no-verify` and `verify` as a user does, each in a
process of its own, and says their CPU seconds and the most memory that one process had. A model with a cache runs
sequences of 16 steps. Weights are drawn, so that it says nothing of accuracy: what counts is that all of it runs, what
it costs, and which nodes QNN's simulator takes of the float graph and of the bundle's.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
from architectures import ARCHITECTURES
from quantize_ratio import compile_package, write_model
from row_state import add_state_option, resume_rows

NAMES = ("vit-s", "whisper-tiny", "whisper-tiny-decoder", "encoder110m", "lm100m")
STATEFUL = frozenset({"lm100m"})
DEVICES = {"cpu": "host", "qnn": "qnn-htp-sim"}
STEPS = 16


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one network on one target: a figure for each stage, and the nodes that a device took."""

    name: str
    target: str
    nodes: int
    size_mb: float
    float_taken: str
    taken: str
    seconds: dict[str, float]
    peaks_mb: dict[str, float]
    bundle_mb: float
    worst: str
    verdict: str


class Ended(msgspec.Struct, frozen=True, kw_only=True):
    """A command that came to its end."""

    code: int
    seconds: float
    peak_mb: float
    said: str
    error: str


def run_command(words: Sequence[str]) -> Ended:
    """Runs `edgekit` in a process of its own; the peak is that of the largest process it started, or itself."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as error:
        child = subprocess.Popen([sys.executable, "-m", "edgekit", *words], stdout=out, stderr=error)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)
        out.seek(0)
        error.seek(0)
        return Ended(
            code=child.returncode,
            seconds=round(usage.ru_utime + usage.ru_stime, 1),
            peak_mb=round(usage.ru_maxrss / 1024),
            said=out.read(),
            error=error.read().strip()[-600:],
        )


def measure(name: str, target: str, precision: str, samples: int, work: Path) -> list[Row]:
    """Returns what became of one network on one target, one row; a stage that fails is its verdict, and the last."""
    # In a process of its own: what a child was forked from counts as its peak.
    subprocess.run([sys.executable, __file__, "--make", name, str(work), "--samples", str(samples)], check=True)
    model, data = work / "model.onnx", work / "data.npz"
    out, seconds, peaks = work / "out", dict[str, float](), dict[str, float]()
    row = Row(
        name=name, target=target, nodes=0, size_mb=round(model.stat().st_size / 1e6, 1),
        float_taken="-", taken="-", seconds=seconds, peaks_mb=peaks, bundle_mb=0, worst="-", verdict="",
    )  # fmt: skip
    observe = ["--observe"] if target == "qnn" else []
    steps = ["--steps", str(STEPS)] if name in STATEFUL else []
    bundle = out / f"model-{target}"
    stages = {
        "check": ["check", str(model), "--target", target, *observe, "--json"],
        "build": ["build", str(model), "--data", str(data), "--target", target, "--precision", precision, *steps,
                  "--no-verify", "--out", str(out), "--json"],
        "verify": ["verify", str(bundle), "--require", DEVICES[target], "--json"],
    }  # fmt: skip
    for stage, words in stages.items():
        ended = run_command(words)
        seconds[stage], peaks[stage] = ended.seconds, ended.peak_mb
        found = json.loads(ended.said) if ended.said.startswith(("{", "[")) else {}
        row = add_figures(row, stage, found, bundle)
        # 3: what is only built is not proven yet.
        if ended.code not in {"verify": (0, 1, 3), "build": (0, 3)}.get(stage, (0,)) or not found:
            said = f"{stage}: exit {ended.code}: {ended.error or ended.said[-300:]}"
            return [msgspec.structs.replace(row, verdict=said)]
    return [row]


def add_figures(row: Row, stage: str, found: Any, bundle: Path) -> Row:
    """Returns a row with what a stage's report says."""
    change: dict[str, Any] = {}
    if stage == "check" and found:
        change["nodes"] = len(found["targets"][row.target]["model_nodes"])
        change["float_taken"] = count_taken(found) if row.target == "qnn" else "-"
    elif stage == "build" and bundle.is_dir():
        change["bundle_mb"] = round(sum(path.stat().st_size for path in bundle.rglob("*") if path.is_file()) / 1e6, 1)
    elif stage == "verify" and found:
        run = found["runs"][0]
        counts = run["provider_nodes"]
        change["taken"] = f"{sum(counts.values()) - counts.get('CPUExecutionProvider', 0)}/{sum(counts.values())}"
        if row.target == "cpu":
            change["taken"] = f"{sum(counts.values())}/{sum(counts.values())}"
        worst = min((each for each in run["outputs"]), key=lambda each: float(each["sqnr_db"] or 0), default=None)
        change["worst"] = "-" if worst is None else f"{worst['sqnr_db']:.1f} dB ({worst['name']})"
        reasons = "; ".join(run["failures"][:2])
        change["verdict"] = found["verdict"] + (f": {reasons}" if reasons else "")
    return msgspec.structs.replace(row, **change)


def count_taken(found: Any) -> str:
    """Returns how many nodes of a checked graph the simulator took, as it said itself, and how many it was shown."""
    seen = found["targets"]["qnn"]["observed"]
    return "-" if seen is None else f"{seen['taken']}/{seen['nodes']}"


def show_table(rows: Iterable[Row]) -> None:
    """Prints rows as Markdown."""
    print(
        "| network | MB | target | float graph | bundle's | check: CPU-s, MB | build: CPU-s, MB | verify: CPU-s, MB "
        "| bundle MB | result |"
    )
    print("|---|---|---|---|---|---|---|---|---|---|")
    for row in rows:
        costs = " | ".join(
            f"{row.seconds[stage]:.0f}, {row.peaks_mb[stage]:.0f}" if stage in row.seconds else "-"
            for stage in ("check", "build", "verify")
        )
        print(
            f"| {row.name} | {row.size_mb:.0f} | {row.target} | {row.float_taken} | {row.taken} | {costs} "
            f"| {row.bundle_mb:.0f} | {row.verdict}, {row.worst} |"
        )


def main() -> int:
    """Measures the networks that are named, all by default; returns 1 if one does not pass."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=NAMES, help=", ".join(NAMES))
    parser.add_argument("--target", action="append", choices=sorted(DEVICES))
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--samples", type=int, default=2 * STEPS)
    parser.add_argument("--make", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--table", action="store_true", help="print the rows as Markdown")
    add_state_option(parser)
    args = parser.parse_args()
    if args.make:
        write_model(ARCHITECTURES[args.make[0]](), Path(args.make[1]), args.samples)
        return 0
    compile_package()
    rows: list[Row] = []
    for name in args.names:
        for target in args.target or ("cpu", "qnn"):
            key = f"{name}-{target}-{args.precision}-{args.samples}"
            with tempfile.TemporaryDirectory(dir=os.environ.get("BENCH_FOLDER")) as folder:
                make = partial(measure, name, target, args.precision, args.samples, Path(folder))
                rows += resume_rows(args.state, key, Row, make)
            print(rows[-1], flush=True)
    if args.table:
        show_table(rows)
    return int(any(not row.verdict.startswith("pass") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
