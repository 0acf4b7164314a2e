"""How often `bench --against` finds a difference where there is none: a model against itself, many times.

    python tools/bench/same_twice.py [MODEL] [--turns 200] [--on host:native] [--runs 20]

The interval of 95 % should leave 1 out in at most 5 of 100 turns. Prints a line a turn that did, and the share with the
interval of Clopper and Pearson; exit code 1 where 5 % is below that interval.
"""

import argparse
import math
import tempfile
from pathlib import Path

from edgekit.bench.blocks import Effort
from edgekit.bench.interleaved import compare_on
from edgekit.bench.subject import Opening, open_subject
from edgekit.devices.find import find_device

DEMO = Path(__file__).parents[2] / "edgekit" / "demo" / "digits_mobilenet.onnx"
MOST = 0.05


def main() -> int:
    """Compares a model with itself and counts."""
    parser = argparse.ArgumentParser()
    parser.add_argument("model", nargs="?", type=Path, default=DEMO)
    parser.add_argument("--turns", type=int, default=200)
    parser.add_argument("--on", default="host:native")
    parser.add_argument("--runs", type=int, default=20)
    options = parser.parse_args()
    different, widths = 0, []
    with tempfile.TemporaryDirectory() as folder:
        subject = open_subject(options.model, Path(folder), Opening())
        device = find_device(options.on, subject.target_for(options.on.partition(":")[0]))
        for turn in range(options.turns):
            found = compare_on(subject, subject, device, Effort(runs=options.runs, threads=1), lambda _: None)
            if found.ratio is None:
                raise SystemExit(found.failure)
            low, high = found.ratio.interval
            widths.append(math.log(high / low) / 2)
            if not low <= 1 <= high:
                different += 1
                print(f"turn {turn + 1}: {found.ratio.value:.4f}, 95 % between {low:.4f} and {high:.4f}", flush=True)
            if (turn + 1) % 20 == 0:
                print(f"{different} of {turn + 1} turns so far", flush=True)
    least = find_least(different, options.turns)
    half = sorted(widths)[len(widths) // 2]
    print(
        f"{different} of {options.turns} turns differ ({different / options.turns:.1%}; at least {least:.1%} in truth)"
    )
    print(f"half of the intervals are narrower than +-{math.expm1(half):.1%}")
    return int(least > MOST)


def find_least(hits: int, turns: int) -> float:
    """Returns the lower end of the 95 % interval of a share (C. Clopper and E. Pearson, Biometrika 26, 1934)."""
    low, high = 0.0, hits / turns if turns else 0.0
    for _ in range(60):
        middle = (low + high) / 2
        tail = sum(math.comb(turns, k) * middle**k * (1 - middle) ** (turns - k) for k in range(hits, turns + 1))
        low, high = (middle, high) if tail < 0.025 else (low, middle)
    return low


if __name__ == "__main__":
    raise SystemExit(main())
