"""Shared by all tests: hypothesis profiles, fixtures, and CI's rule that no test may be skipped that can run there."""

import gc
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest
from demo_paths import CALIBRATION, MODEL
from fixture_types import MakeOnce
from hypothesis.internal.conjecture import providers
from tiny_models import parse_model

import edgekit
from edgekit._files import one_at_a_time, staged_folder
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.cli.main import run_command

hypothesis.settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", max_examples=5000, deadline=None)
hypothesis.settings.load_profile("quick")

# A shell that starts pytest with & or nohup makes it ignore some signals, and child processes would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# Collections by count are rarer than usual: they were a tenth of the time of tests that make many small objects.
gc.set_threshold(10_000, 20, 20)

TARGETS = Path(__file__).parents[1] / "targets"
SLOW_FIXTURES = frozenset({"arm_runner", "browser", "demo_build", "host_runner", "tutorial"})
_EMULATED = re.compile(r'\[\[verification\]\]\ndevice = "(?:android|arm64)"\nform = "\w+"\nsamples = \d+\n')
CANNOT_RUN_IN_CI = (
    "ios-sim is not installed",
    "labgrid is not installed",
    "needs a Mac",
    "needs ../shared/zoo",
    "needs a user who is not root",
    "onnxruntime-ep-openvino is not installed",
    "onnxruntime-ep-webgpu is not installed",
)


def pytest_configure(config: pytest.Config) -> None:
    """Leaves out what hypothesis reads for its draws outside `make fuzz`: each worker would parse all of edgekit."""
    if config.getoption("--hypothesis-profile") is None:
        providers._get_local_constants = lambda: providers._local_constants


def pytest_itemcollected(item: pytest.Item) -> None:
    """Marks as slow every test that uses one of the fixtures that take seconds."""
    if isinstance(item, pytest.Function) and not SLOW_FIXTURES.isdisjoint(item.fixturenames):
        item.add_marker("slow")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts slow tests first, so that no worker has a long one left when the others have ended."""
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)


def pytest_collection_finish() -> None:
    """Excludes the imported modules and collected tests from garbage collection."""
    _freeze()


_ENDED = itertools.count(1)
_MODULES = [0]


def pytest_runtest_logfinish() -> None:
    """Excludes what tests left or imported from garbage collection: a build collects ten times, all that is there."""
    if len(sys.modules) > _MODULES[-1] or next(_ENDED) % 100 == 0:
        _freeze()


def _freeze() -> None:
    _MODULES[:] = [len(sys.modules)]
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,  # noqa: ARG001 - pytest's signature
    call: pytest.CallInfo[None],  # noqa: ARG001
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure if CI is set, unless its reason cannot be removed in CI."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(word in reason for word in CANNOT_RUN_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI, where it can run: {reason}"
    return report


@pytest.fixture
def relu_model(tmp_path: Path) -> Path:
    """A model with one input `x` float32[1,3] and one output `y`."""
    return parse_model("(float[1,3] x) => (float[1,3] y) { y = Relu(x) }", tmp_path / "relu.onnx")


@pytest.fixture
def shown(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command, which must end with an exit code, 0 by default; returns what it printed."""

    def run(arguments: Sequence[str], code: int = 0) -> str:
        capsys.readouterr()
        assert run_command([*arguments]) == code
        return capsys.readouterr().out

    return run


@pytest.fixture
def answer(shown: Callable[..., str]) -> Callable[..., Any]:
    """Runs a command with --json, which must end with an exit code, 0 by default; returns its output."""
    return lambda arguments, code=0: json.loads(shown([*arguments, "--json"], code))


@pytest.fixture
def refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Runs a command in `tmp_path` that must be refused in one line with a hint, without a file; returns the line."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))

    def list_files() -> list[Path]:
        # Python keeps the bytecode of a user's own module beside it, as for any import.
        return sorted(path for path in tmp_path.rglob("*") if "__pycache__" not in path.parts)

    def run(*arguments: str) -> str:
        before = list_files()
        capsys.readouterr()
        assert run_command([*arguments]) == 2
        shown, said = capsys.readouterr()
        assert shown == ""
        assert said.startswith("edgekit: error: ")
        assert said.endswith(")\n")
        assert said.count("\n") == 1
        assert list_files() == before
        return said

    return run


@pytest.fixture(scope="session")
def make_once(tmp_path_factory: pytest.TempPathFactory) -> MakeOnce:
    """Makes a named folder that all workers of this run share; tests must not change its content."""
    own = tmp_path_factory.getbasetemp()
    shared = own.parent if "PYTEST_XDIST_WORKER" in os.environ else own

    def make(name: str, fill: Callable[[Path], object]) -> Path:
        folder = shared / f"once-{name}"
        with one_at_a_time(folder):
            if not folder.is_dir():
                with staged_folder(folder) as staging:
                    fill(staging)
        return folder

    return make


@pytest.fixture(scope="session")
def without_arm(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], str]:
    """Returns a target that is verified without emulated 64-bit Arm, on which the tests verify the demo."""

    def make(target: str) -> str:
        folder = tmp_path_factory.mktemp("targets") / target
        shutil.copytree(TARGETS / target, folder)
        (folder / "target.toml").write_text(_EMULATED.sub("", (folder / "target.toml").read_text()))
        return str(folder)

    return make


@pytest.fixture(scope="session")
def sized(make_once: MakeOnce) -> Bundle:
    """A bundle for the CPU of several sizes."""
    import bucket_models  # noqa: PLC0415 - imports all that builds

    return open_bundle(make_once("buckets", bucket_models.make) / "out" / "net-cpu")


@pytest.fixture(scope="session")
def stepped(make_once: MakeOnce) -> Bundle:
    """A bundle for the CPU of a model with state."""
    import stepped_models  # noqa: PLC0415

    return open_bundle(make_once("recurrent", stepped_models.make) / "out" / "recurrent-cpu")


@pytest.fixture(scope="session")
def built_wheel(make_once: MakeOnce) -> Path:
    """The wheel, built by the command of `make wheel`."""

    def build_wheel(out: Path) -> None:
        command = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(out)]
        subprocess.run(command, cwd=Path(__file__).parents[1], check=True, capture_output=True)

    (path,) = make_once("wheel", build_wheel).glob("*.whl")
    return path


@pytest.fixture(scope="session")
def demo_build(make_once: MakeOnce) -> Path:
    """A build of the digits with few samples: `bundles` holds one for each target that edgekit ships, and one more.

    `digits_mobilenet-plain` is the bundle for XNNPACK, with the CPU's provider.
    """
    return make_once("demo-build", _build_demo)


@pytest.fixture(scope="session")
def demo_bundles(demo_build: Path) -> Path:
    """A folder with a bundle of the digits for each target that edgekit ships."""
    return demo_build / "bundles"


def _build_demo(folder: Path) -> None:
    plain = folder / "plain"
    shutil.copytree(TARGETS / "xnnpack", plain)
    text = (plain / "target.toml").read_text()
    for old, new in (
        ('"xnnpack"', '"plain"'),
        ("XnnpackExecutionProvider", "CPUExecutionProvider"),
        ('intra_op_num_threads = "4"\n', ""),
    ):
        text = text.replace(old, new, 1)
    (plain / "target.toml").write_text(text)
    recipe = edgekit.Recipe(samples=16, targets=("all", str(plain)))
    data = edgekit.Data(source=str(CALIBRATION))
    edgekit.build(MODEL, data, folder / "bundles", recipe, verify=False)
    (folder / "bundles" / "digits_mobilenet-plain").rename(folder / "digits_mobilenet-plain")
