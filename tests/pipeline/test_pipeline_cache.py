"""A calibration that was killed goes on from where it was kept, and gives the same bytes."""

import fcntl
import hashlib
import os
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tiny_models import parse_model

from edgekit.cli.main import run_command
from edgekit.errors import DataError, OutputError
from edgekit.jobs.build import build
from edgekit.jobs.build_inputs import BuildCache
from edgekit.jobs.quantize import QuantizeOptions, quantize_for
from edgekit.quantize.calibration import passes
from edgekit.quantize.calibration.store import Checkpoint, parse_arrays, read_checkpoint, write_checkpoint
from edgekit.recipe import Data, Recipe
from edgekit.report.summary import QuantizeReport

pytestmark = pytest.mark.slow

COUNT = 90
BAD = 86
"""A sample that gives nothing to histograms."""
RECIPE = Recipe(targets=("nnapi",))
SLOW = """
import time
import numpy as np

passes = 0

def samples():
    global passes
    passes += 1
    for row in np.load("d.npz")["x"]:
        time.sleep({seconds} if passes > 3 else 0)  # counted, fitted, judged; then calibrated with
        yield {{"x": row}}
"""
HANGING = """
from pathlib import Path

def endless():
    began = time.time()
    for sample in samples():
        # The fourth pass measures everything, the fifth the extremes of the other samples.
        if passes == {number} and any(path.stat().st_mtime > began for path in Path().glob("cache/*/measured")):
            Path("hangs").touch()
            time.sleep(60)  # until it is ended
        yield sample
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_folder(tmp_path)


@pytest.fixture(scope="module")
def once(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder whose calibration is kept."""
    folder = make_folder(tmp_path_factory.mktemp("once"))
    run(folder)
    return folder


@pytest.fixture
def known(once: Path, tmp_path: Path) -> Path:
    """A folder of its own whose calibration is kept."""
    return shutil.copytree(once, tmp_path / "known")


def make_folder(folder: Path) -> Path:
    weights = ", ".join(str(0.01 * (index % 7 - 3)) for index in range(108))
    parse_model(
        "g (float[1,3,8,8] x) => (float[1,4,6,6] y)"
        f"<float[4,3,3,3] w = {{{weights}}}> {{ c = Conv(x, w)  e = Exp(c)  y = Relu(e) }}",
        folder / "m.onnx",
    )
    write_data(folder)
    return folder


def write_data(folder: Path, *, bad: int | None = None, count: int = COUNT) -> None:
    rows = np.random.default_rng(0).normal(size=(count, 1, 3, 8, 8)).astype(np.float32)
    if bad is not None:
        rows[bad] *= 1e5  # finite, but its exponential is not
    np.savez(folder / "d.npz", x=rows)


def run(folder: Path, cache: str | None = "cache", method: str = "mse") -> tuple[bytes, QuantizeReport, list[str]]:
    said: list[str] = []
    kept = None if cache is None else str(folder / cache)
    how = QuantizeOptions(method=method, cache=kept)
    data = Data(source=str(folder / "d.npz"))
    report = quantize_for(folder / "m.onnx", data, folder / "q.onnx", RECIPE, how, said.append)
    return (folder / "q.onnx").read_bytes(), report, [step for step in said if "calibrat" in step]


def parts(folder: Path) -> dict[str, Path]:
    return {path.name: path for path in folder.glob("cache/calibration-*/*")}


def test_a_finished_calibration_is_read_and_gives_the_same_bytes(folder: Path) -> None:
    without, first, again = run(folder, None), run(folder), run(folder)
    assert without[0] == first[0] == again[0]
    assert (first[1].calibration.known, again[1].calibration.known) == (0, COUNT)
    assert again[2] == [f"the calibration with {COUNT} samples is read from the cache"]
    assert [stat & 0o77 for stat in (path.parent.stat().st_mode for path in parts(folder).values())] == [0, 0]


@pytest.mark.parametrize(
    ("number", "sent", "code"),
    [
        pytest.param(4, signal.SIGKILL, -9, marks=pytest.mark.long),
        (5, signal.SIGKILL, -9),
        pytest.param(4, signal.SIGINT, 130, marks=pytest.mark.long),
    ],
)
def test_a_killed_command_goes_on(folder: Path, number: int, sent: signal.Signals, code: int) -> None:
    (folder / "slow.py").write_text(SLOW.format(seconds=0.03) + HANGING.format(number=number))
    arguments = ["quantize", "m.onnx", "--data", "slow:endless", "--target", "nnapi", "--method", "mse"]
    command = [sys.executable, "-m", "edgekit", *arguments, "--cache", "cache", "--out", "q.onnx"]
    child = subprocess.Popen(command, cwd=folder, stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
    end = time.monotonic() + 60
    while not (folder / "hangs").exists():
        assert time.monotonic() < end
        time.sleep(0.02)
    child.send_signal(sent)
    assert child.wait() == code
    assert not (folder / "q.onnx").exists()
    # The same samples, whatever they are read from.
    again = run(folder)
    known = again[1].calibration.known
    assert known in (range(8, 64, 8) if number == 4 else range(72, COUNT, 8))
    assert any(f"{known} known from the cache" in step for step in again[2])
    assert again[0] == run(folder, None)[0]


def test_the_float_model_runs_once_for_all_builds(folder: Path) -> None:
    data, said = Data(source=str(folder / "d.npz")), list[str]()

    def make(target: str) -> tuple[bytes, int]:
        said.clear()
        recipe, out = Recipe(targets=(target,), precision="fp32", samples=12), folder / target
        build(folder / "m.onnx", data, out, recipe, verify=False, cache=folder / "cache", progress=said.append)
        outputs = (out / f"m-{target}" / "golden" / "outputs.npz").read_bytes()
        return outputs, sum("float model gives" in step for step in said)

    ran, read = make("nnapi"), make("xnnpack")
    assert (ran, read) == ((ran[0], 0), (ran[0], 1))
    (kept,) = folder.glob("cache/golden-*/outputs.npz")
    assert kept.parent.stat().st_mode & 0o77 == 0
    # Other samples are not those that are known.
    np.savez(folder / "d.npz", x=np.random.default_rng(1).normal(size=(12, 1, 3, 8, 8)).astype(np.float32))
    others = make("nnapi")
    assert others[0] != ran[0]
    assert others[1] == 0


def test_builds_of_one_model_share_what_depends_on_no_target(folder: Path) -> None:
    """The samples are read once, each bundle is that of a build by itself, and samples that changed are read again."""
    data, work = Data(source=str(folder / "d.npz")), folder / "work"
    work.mkdir()
    kept, said = BuildCache(work=work), list[str]()

    def make(target: str, cache: BuildCache | None = None) -> str:
        said.clear()
        out, recipe = folder / f"{target}-{cache is None}", Recipe(targets=(target,), samples=12)
        report = build(folder / "m.onnx", data, out, recipe, verify=False, cache=cache, progress=said.append)
        return report.bundles[0].sha256

    first = make("nnapi", kept)
    assert "read the samples" in said
    second = make("xnnpack", kept)
    assert not {"read the samples", "run the float model", "calibrate"} & {*said}
    assert (first, second) == (make("nnapi"), make("xnnpack"))
    np.savez(folder / "d.npz", x=np.random.default_rng(1).normal(size=(12, 1, 3, 8, 8)).astype(np.float32))
    assert make("xnnpack", kept) == make("xnnpack") != second


def test_a_bad_sample_that_is_mended_costs_only_what_follows(folder: Path) -> None:
    write_data(folder, bad=BAD)
    with pytest.raises(DataError, match=f"sample {BAD} .* infinity in tensor 'e'"):
        run(folder)
    write_data(folder)
    mended = run(folder)
    assert (mended[1].calibration.known, mended[0]) == (COUNT - 2, run(folder, None)[0])


def test_other_data_settings_or_models_are_measured_anew(known: Path) -> None:
    assert run(known, method="auto")[1].calibration.known == 0
    assert run(known, method="minmax")[1].calibration.known == 0
    write_data(known, count=COUNT + 1)
    assert run(known)[1].calibration.known == 0
    np.savez(known / "d.npz", x=np.load(known / "d.npz")["x"][::-1])
    other = run(known)
    assert other[1].calibration.known == 0
    assert "it is of other samples" in other[1].calibration.notes[0]
    (known / "m.onnx").write_bytes((known / "m.onnx").read_bytes().replace(b"c", b"d"))
    assert run(known)[1].calibration.known == 0


HOSTILE: dict[str, Callable[[bytes], bytes]] = {
    "flipped": lambda data: data[:-100] + bytes([data[-100] ^ 1]) + data[-99:],
    "cut": lambda data: data[:-100],
    "empty": lambda _data: b"",
    "longer": lambda data: data + b"x",
    "foreign": lambda _data: b"PK\x03\x04" * 100,
    "table beyond the file": lambda data: (
        (cut := data[:-40] + struct.pack("<Q", 1 << 62)) + hashlib.sha256(cut).digest()
    ),
    "huge": lambda data: data + bytes(200 << 20),
}

_USUAL = {"flipped", "longer", "table beyond the file"}


@pytest.mark.parametrize("how", [pytest.param(how, marks=[pytest.mark.long] * (how not in _USUAL)) for how in HOSTILE])
def test_a_damaged_file_is_noticed_and_measured_again(known: Path, how: str) -> None:
    good = (known / "q.onnx").read_bytes()
    path = parts(known)["measured"]
    path.write_bytes(HOSTILE[how](path.read_bytes()))
    again = run(known)
    assert (again[0], again[1].calibration.known) == (good, 0)
    assert again[1].calibration.notes[0].startswith(f"'{path}' is not used: ")
    assert run(known)[1].calibration.known == COUNT


def test_a_well_formed_file_of_another_shape_is_noticed(known: Path) -> None:
    good = (known / "q.onnx").read_bytes()
    path = parts(known)["measured"]
    key = str(parse_arrays(np.fromfile(path, np.uint8)[:-32])["key"])
    found = read_checkpoint(path, key, 1 << 28)
    assert found is not None
    for name, array in (
        ("edgekit.lows.best", np.zeros(3)),
        ("edgekit.lows.best", found.arrays["edgekit.lows.best"] * np.nan),
        ("histogram.0.counts", found.arrays["histogram.0.counts"] - 1),
        ("histogram.0.counts", found.arrays["histogram.0.counts"][:-1]),
        ("histogram.9.counts", found.arrays["histogram.0.counts"]),
        ("held.1:in:x", np.zeros(3)),
        ("unknown", np.zeros(3)),
        ("edgekit.lows.sums", None),
    ):
        arrays = {each: its for each, its in {**found.arrays, name: array}.items() if its is not None}
        write_checkpoint(path, key, Checkpoint(seen=found.seen, arrays=arrays))
        again = run(known)
        assert again[0] == good, name
        assert "does not fit this model" in again[1].calibration.notes[0]
    with pytest.raises(DataError, match="another model, other settings"):
        read_checkpoint(path, "0" * 64, 1 << 28)


def test_links_and_pipes_are_not_read(known: Path) -> None:
    path = parts(known)["measured"]
    path.rename(known / "elsewhere")
    path.symlink_to(known / "elsewhere")
    assert run(known)[1].calibration.known == 0
    path.unlink()
    os.mkfifo(path)
    assert run(known)[1].calibration.known == 0


def test_a_cache_that_another_run_has_open_is_left_to_it(known: Path) -> None:
    path = parts(known)["measured"]
    written = path.stat().st_mtime_ns
    with path.with_name("lock").open("rb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        again = run(known)
    (note,) = again[1].calibration.notes
    assert note.startswith(f"another run has '{path.parent}' open, or this system has no locks: this one keeps nothing")
    assert path.stat().st_mtime_ns == written


def test_what_a_killed_run_left_half_written_is_swept_up(known: Path) -> None:
    (parts(known)["lock"].parent / ".edgekit-abc").mkdir()
    run(known)
    assert parts(known).keys() == {"lock", "measured"}


def test_a_cache_that_cannot_be_made_is_refused(folder: Path) -> None:
    (folder / "cache").touch()
    with pytest.raises(OutputError, match="cannot write"):
        run(folder)


def test_a_build_reads_what_quantize_kept(folder: Path) -> None:
    data = str(folder / "d.npz")
    steps: list[str] = []
    run(folder, method="auto")
    build(
        folder / "m.onnx", Data(source=data, evaluation=data), folder / "out", RECIPE,
        verify=False, cache=folder / "cache", progress=steps.append,
    )  # fmt: skip
    assert f"the calibration with {COUNT} samples is read from the cache" in steps


def test_a_slow_calibration_says_how_long_it_will_take(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "slow_rows.py").write_text(SLOW.format(seconds=0.003))
    monkeypatch.chdir(folder)
    monkeypatch.setattr(passes, "_PROGRESS_SECONDS", 0.1)
    arguments = ["quantize", "m.onnx", "--data", "slow_rows:samples", "--target", "nnapi", "--method", "minmax", "-v"]
    assert run_command([*arguments, "--out", "q.onnx"]) == 0
    assert re.search(rf"calibrate: \d+ of {COUNT} samples, about \d+ s left", capsys.readouterr().err)
