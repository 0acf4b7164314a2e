"""Builds the demo's bundles many times and counts distinct ones: `python bundle_reproducible.py [RUNS] [TARGET...]`.

Each run is a process with its own folder, umask, PYTHONHASHSEED, environment size, number of CPUs, and, as root, user.
The digests are those of the joined bundles, so every file of every target but the evidence counts.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import edgekit
from edgekit.bundle.multi import find_bundles, join_bundles

DEMO = Path(edgekit.__file__).parent / "demo"
SAMPLES = "32"
NOBODY = 65534


def make_argv(out: Path, targets: list[str], run: int) -> list[str]:
    """Returns the command of a run: its user and its CPUs differ from those of the run before."""
    wanted = [word for target in targets for word in ("--target", target)]
    files = [str(DEMO / "digits_mobilenet.onnx"), "--data", str(DEMO / "calibration.npz")]
    build = ["build", *files, "--samples", SAMPLES, "--no-verify", "--json", "--out", str(out)]
    argv = [sys.executable, "-m", "edgekit", *build, *wanted]
    cpus = os.cpu_count() or 1
    if shutil.which("taskset") and run % 3:
        argv = ["taskset", "-c", str(run % cpus), *argv]
    if os.geteuid() == 0 and shutil.which("setpriv") and run % 2:
        argv = ["setpriv", f"--reuid={NOBODY + run - 1}", f"--regid={NOBODY}", "--clear-groups", *argv]
    return argv


def build_once(folder: Path, targets: list[str], run: int) -> str:
    """Returns the digest of all bundles of one build."""
    place = folder / ("nested/" * (run % 4)) / f"run-{'x' * run}"
    place.mkdir(parents=True)
    for path in (place, *place.relative_to(folder).parents):
        (folder / path).chmod(0o777)
    env = {
        **os.environ,
        "PYTHONHASHSEED": str(run * 7919),
        "TMPDIR": str(place),
        "HOME": str(place),
        "PADDING": "p" * run * 97,
        "PYTHONDONTWRITEBYTECODE": "1",
        "TZ": f"UTC{run % 12:+d}",
    }
    os.umask(0o022 if run % 2 else 0o077 if os.geteuid() != 0 else 0o002)
    argv = make_argv(place / "out", targets, run)
    done = subprocess.run(argv, env=env, cwd=place, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"run {run} failed: {done.stderr[-800:]}")
    return join_bundles(find_bundles([place / "out"]), place / "joined").sha256


def main() -> int:
    """Returns 1 if the runs did not all give the same bytes."""
    runs = int(sys.argv[1]) if len(sys.argv) > 1 else 20
    targets = sys.argv[2:] or ["nnapi", "coreml", "xnnpack"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        digests = [build_once(Path(folder), targets, run) for run in range(runs)]
    counts = {digest: digests.count(digest) for digest in set(digests)}
    print(json.dumps({"runs": runs, "targets": targets, "equal": max(counts.values()), "digests": counts}, indent=2))
    return 0 if len(counts) == 1 else 1


if __name__ == "__main__":
    sys.exit(main())
