"""Runs the benchmarks of a group, or all: `python tools/bench/run.py [accuracy|bytes|corpus|speed|...]...`.

`--list` shows what each proves. A benchmark that fails does not stop the others; the exit code is 1 if one failed.
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).parent


class Bench(NamedTuple):
    """A program of this folder with its arguments, and what it proves."""

    group: str
    command: str
    proves: str


BENCHES = (
    Bench("accuracy", "quantize_zoo.py", "INT8 of real models against 24 settings of ONNX Runtime's quantizer"),
    Bench("accuracy", "predict_coverage.py", "the interval of the estimated drop holds the true one"),
    Bench("speed", "check_speed.py", "check against ONNX Runtime's usability checker"),
    Bench("speed", "build_zoo.py", "seconds and memory of a build for four targets"),
    Bench("speed", "quantize_ratio.py", "plain quantize costs at most 3 times ONNX Runtime's quantize_static"),
    Bench("speed", "quantize_ratio.py --growth", "and grows with the nodes, not with their square"),
    Bench("speed", "calibrate_ratio.py", "calibration against plain inference over the same samples"),
    Bench("speed", "peak_memory.py", "models of 90 MB to 3 GB are prepared, checked and made smaller in little memory"),
    Bench("speed", "file_sizes.py", "INT8 files against the floor of weights and scales"),
    Bench("verify", "seeded_faults.py --layers 1 --kinds promised", "a seeded fault is found, and its layer named"),
    Bench("verify", "false_alarms.py", "at most one honest run in 1,000 is accused of lying"),
    Bench("verify", "zoo_alarms.py", "and of real models on all devices of their targets"),
    Bench("corpus", "../corpus/corpus.py bench", "verdicts on networks of strangers against an oracle without gates"),
    Bench("stories", "stories.py", "nine users, from the first command to a package that a project compiles and runs"),
    Bench("bytes", "reproducible.py 20", "the same bundles whatever the folder, user, cores or hash seed"),
    Bench("bytes", "quantize_onnx_suite.py", "every float node model of onnx is quantized or refused in one line"),
    Bench("bytes", "convert_onnx_suite.py", "every node model of onnx is converted or refused in one line"),
)


def main() -> int:
    """Runs the benchmarks of the named groups."""
    groups = sorted({bench.group for bench in BENCHES})
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=", ".join(groups))
    parser.add_argument("--list", action="store_true", help="show what each bench proves")
    args = parser.parse_args()
    for group in args.groups:
        if group not in groups:
            parser.error(f"there is no group '{group}': {', '.join(groups)}")
    chosen = [bench for bench in BENCHES if not args.groups or bench.group in args.groups]
    if args.list:
        print("\n".join(f"{bench.group:9} {bench.command:45} {bench.proves}" for bench in chosen))
        return 0
    return max(run_bench(bench) for bench in chosen)


def run_bench(bench: Bench) -> int:
    """Runs one benchmark and returns 1 if it failed."""
    print(f"== {bench.command}: {bench.proves}", flush=True)
    program, *words = bench.command.split()
    return int(subprocess.run([sys.executable, str(HERE / program), *words], check=False).returncode != 0)


if __name__ == "__main__":
    sys.exit(main())
