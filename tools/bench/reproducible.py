"""Builds the demo's bundles many times and counts distinct ones: `python reproducible.py [RUNS] [TARGET...]`.

Each run is a process with its own folder, umask, PYTHONHASHSEED, environment size, number of CPUs, and, as root, user.
The digests are those of the joined bundles, so they cover every file of every target except the evidence.
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
SAMPLES = "16"
NOBODY = 65534
PYTHONS = (sys.executable, "/usr/bin/python3")
"""Another user may not be allowed to run the first Python, if it is in a home folder."""
MODULES = os.pathsep.join(path for path in sys.path if path.endswith("site-packages") or Path(path) == Path.cwd())


def make_argv(out: Path, targets: list[str], run: int) -> list[str]:
    """Returns the command of a run, with another user and other CPUs than the run before."""
    wanted = [word for target in targets for word in ("--target", target)]
    files = [str(DEMO / "digits_mobilenet.onnx"), "--data", str(DEMO / "calibration.npz")]
    build = ["build", *files, "--samples", SAMPLES, "--no-verify", "--json", "--out", str(out)]
    pinned = ["taskset", "-c", str(run % (os.cpu_count() or 1))] if shutil.which("taskset") and run % 3 else []
    user = [*find_user(run), *pinned]
    python = next((path for path in PYTHONS if can_run([*user, path])), None)
    if python is None:
        raise SystemExit(f"no Python that another user may run: {', '.join(PYTHONS)}")
    return [*user, python, "-m", "edgekit", *build, *wanted]


def find_user(run: int) -> list[str]:
    """Returns the prefix that runs a command as another user: in every other run, if that is possible."""
    if os.geteuid() != 0 or not shutil.which("setpriv") or not run % 2:
        return []
    return ["setpriv", f"--reuid={NOBODY - run}", f"--regid={NOBODY}", "--clear-groups"]


def can_run(argv: list[str]) -> bool:
    """Says whether a Python starts and finds edgekit's dependencies."""
    env = {**os.environ, "PYTHONPATH": MODULES}
    done = subprocess.run([*argv, "-c", "import onnxruntime, onnx"], env=env, capture_output=True, check=False)
    return done.returncode == 0


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
        "PYTHONPATH": os.pathsep.join((str(DEMO.parents[1]), MODULES)),
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
