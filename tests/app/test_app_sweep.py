"""Cells built elsewhere: what a store keeps, and a cluster whose workers die, share phones, or differ."""

import json
import os
import shutil
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from group_models import make_talk
from tiny_models import parse_model

from edgekit.app import result
from edgekit.app.cells import open_store
from edgekit.app.config import App, SweepTable, list_cells, load_app
from edgekit.app.result import AppReport
from edgekit.app.run import run_app
from edgekit.app.workers import TOPIC, list_slots, use_processes
from edgekit.bundle.group import open_group
from edgekit.cli.main import run_command
from edgekit.errors import UsageError
from edgekit.progress import say_nothing

TEXT = """
[models.one]
path = "one.onnx"
data = { source = "samples.npz" }
[models.two]
path = "two.onnx"
data = { source = "samples.npz" }
"""
UNVERIFIED = """
[targets.cpu]
precision = "fp32"
[verify]
enabled = false
"""
TEXT += UNVERIFIED
GROUP = f"""
[groups.talk]
path = "talk.toml"
data = {{ source = "talk.npz" }}
{UNVERIFIED}"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The folder of an app of two small models, that builds in a second."""
    for name, factor in (("one", 1.0), ("two", 2.0)):
        graph = f"agraph (float[1,4] x) => (float[1,4] y) <float a = {{{factor}}}> {{ y = Mul(x, a) }}"
        parse_model(graph, tmp_path / f"{name}.onnx")
    np.savez(tmp_path / "samples.npz", x=np.random.default_rng(0).normal(size=(8, 4)).astype(np.float32))
    (tmp_path / "edgekit.toml").write_text(TEXT)
    return tmp_path


def _app(folder: Path, **sweep: Any) -> App:
    app = load_app(folder / "edgekit.toml")
    return msgspec.structs.replace(app, table=msgspec.structs.replace(app.table, sweep=SweepTable(**sweep)))


def _list_states(report: AppReport) -> dict[str, tuple[str, str]]:
    return {f"{cell.model}/{cell.target}": (cell.state, cell.sha256) for cell in report.cells}


@pytest.mark.parametrize("kind", ["folder", "file", "memory"])
def test_a_store_returns_the_folders_that_were_put_in(kind: str, tmp_path: Path) -> None:
    store = open_store({"folder": f"{tmp_path}/in", "file": f"file://{tmp_path}/in", "memory": "memory://in"}[kind])
    (tmp_path / "a").write_bytes(b"first")
    assert not store.has("cells/ab/abc.tar")
    assert not store.get("cells/ab/abc.tar", tmp_path / "b")
    for content in (b"first", b"second"):
        (tmp_path / "a").write_bytes(content)
        store.put("cells/ab/abc.tar", tmp_path / "a")
        assert store.has("cells/ab/abc.tar")
        assert open_store(store.place).get("cells/ab/abc.tar", tmp_path / "b")
        assert (tmp_path / "b").read_bytes() == content


def test_a_store_that_cannot_be_used_is_refused_in_one_line(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="cannot open store 'nowhere://x'"):
        open_store("nowhere://x")
    monkeypatch.setattr("edgekit.app.workers._CONNECT_S", 1)
    assert run_command(["run", str(folder / "edgekit.toml"), "--scheduler", "tcp://127.0.0.1:1"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("edgekit: error: no scheduler answers at 'tcp://127.0.0.1:1'")
    assert said.count("\n") == 1


def test_a_second_machine_takes_finished_cells(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    store = str(tmp_path_factory.mktemp("store"))
    first = run_app(_app(folder, store=store))
    other = tmp_path_factory.mktemp("other") / "app"
    shutil.copytree(folder, other, ignore=shutil.ignore_patterns("build"))
    (other / "edgekit.toml").write_text(TEXT.replace("models.one", "models.uno"))
    second = run_app(_app(other, store=store))
    # Nobody verified them: they count nowhere as passed.
    assert 'tests="0"' in (folder / "build" / "junit.xml").read_text()
    assert (folder / "build" / "summary.md").read_text().strip() == ""
    sha = {name: found[1] for name, found in _list_states(first).items()}
    assert _list_states(second) == {"uno/cpu": ("kept", sha["one/cpu"]), "two/cpu": ("kept", sha["two/cpu"])}
    told = json.loads((other / "build/uno/cpu/report.json").read_bytes())
    assert told["bundles"][0]["path"] == str(other / "build/uno/cpu/one-cpu")
    assert (other / "build" / second.cells[0].report).is_file()
    # What lies there damaged is made again, and mended.
    damaged = next(path for path in Path(store).rglob("*.tar") if second.cells[0].key in path.name)
    damaged.write_bytes(damaged.read_bytes()[: damaged.stat().st_size // 2])
    shutil.rmtree(other / "build")
    third = run_app(_app(other, store=store))
    assert _list_states(third) == {"uno/cpu": ("built", sha["one/cpu"]), "two/cpu": ("kept", sha["two/cpu"])}
    shutil.rmtree(other / "build")
    assert {state for state, _ in _list_states(run_app(_app(other, store=store))).values()} == {"kept"}


@pytest.mark.long
def test_a_cell_that_kills_its_process_fails_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    # The data of the second are a function by which its process dies, as of a native library.
    place = tmp_path_factory.mktemp("module")
    (place / "deadly.py").write_text("import os\ndef make(): os.kill(os.getpid(), 9)\n")
    monkeypatch.setenv("PYTHONPATH", f"{place}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.syspath_prepend(str(place))
    first, second = TEXT.split("[models.two]")
    (folder / "edgekit.toml").write_text(first + "[models.two]" + second.replace("samples.npz", "deadly:make"))
    # Both in one process, and once more the one that was not finished.
    monkeypatch.setattr("edgekit.app.workers._SHARES_PER_WORKER", 1)
    monkeypatch.setattr("edgekit.app.workers._TRIES", 1)
    app = _app(folder)
    one, two = use_processes(app, list_cells(app), 1, say_nothing)
    assert (one.state, one.verdict) == ("built", "pass")
    assert two.headline.startswith("It cannot be built: its process died 1 times: ")


@pytest.fixture
def cluster() -> Iterator[Any]:
    """Two workers of two threads in this process; one of them, `lab`, has a board."""
    distributed = pytest.importorskip("distributed")
    options = {"nthreads": 2, "dashboard_address": ":0"}
    lab = {**options, "resources": {"ssh:board": 2}, "name": "lab"}
    with distributed.SpecCluster(
        workers={"desk": {"cls": distributed.Worker, "options": {**options, "name": "desk"}},
                 "lab": {"cls": distributed.Worker, "options": lab}},
        scheduler={"cls": distributed.Scheduler, "options": {"dashboard_address": ":0"}},
        silence_logs=50,
    ) as cluster:  # fmt: skip
        yield cluster


def _events(cluster: Any) -> list[tuple[float, dict[str, Any]]]:
    with pytest.importorskip("distributed").Client(cluster.scheduler_address, set_as_default=False) as client:
        return list(client.get_events(TOPIC))


@pytest.mark.slow
def test_cells_that_share_a_board_run_in_turn_on_the_machine_that_has_it(folder: Path, cluster: Any) -> None:
    text = TEXT.replace("enabled = false", 'on = ["ssh:board"]\nrequire = ["ssh:board"]')
    (folder / "edgekit.toml").write_text(text)
    app = _app(folder, scheduler=cluster.scheduler_address)
    assert list_slots(app) == ("ssh:board",)
    report = run_app(app)
    assert [(cell.verdict, cell.evidence) for cell in report.cells] == [("fail", "none")] * 2, report.cells
    # Two slots are on offer, and still the board is one's alone.
    said = [(event["what"], event["worker"]) for _, event in _events(cluster)]
    lab = cluster.workers["lab"].address
    assert said == [("begin", lab), ("done", lab)] * 2


@pytest.mark.long
@pytest.mark.slow
def test_a_worker_that_is_killed_loses_nothing_that_was_finished(folder: Path) -> None:
    distributed = pytest.importorskip("distributed")
    alone = _list_states(run_app(_app(folder)))
    shutil.rmtree(folder / "build")
    options = {"n_workers": 1, "threads_per_worker": 1, "dashboard_address": ":0", "silence_logs": 50}
    with distributed.LocalCluster(**options) as cluster:
        (nanny,) = cluster.workers.values()
        killed, ended = list[int](), threading.Event()
        cells = [folder / "build" / name / "cpu" / "cell.json" for name in ("one", "two")]

        def kill() -> None:
            # If the run fails, for example since a busy machine answers too late, the thread ends too.
            while not ended.wait(0.01) and not any(cell.exists() for cell in cells):
                pass
            killed.append(nanny.process.pid)
            os.kill(killed[0], signal.SIGKILL)

        killer = threading.Thread(target=kill)
        killer.start()
        try:
            report = run_app(_app(folder, scheduler=cluster.scheduler_address))
        finally:
            ended.set()
            killer.join()
        events = _events(cluster)
    assert killed
    assert _list_states(report) == alone
    done = [event["key"] for _, event in events if event["what"] == "done"]
    assert sorted(done) == sorted(cell.key for cell in report.cells)
    assert events[-1][1] == {**events[-2][1], "what": "done", "seconds": events[-1][1]["seconds"]}


@pytest.mark.slow
def test_a_group_is_built_by_a_worker_and_taken_from_the_store(tmp_path: Path, cluster: Any) -> None:
    folder, other = tmp_path / "app", tmp_path / "other"
    folder.mkdir()
    make_talk(folder, samples=4)
    (folder / "edgekit.toml").write_text(GROUP)
    shutil.copytree(folder, other)
    (cell,) = run_app(_app(folder, scheduler=cluster.scheduler_address, store=str(tmp_path / "store"))).cells
    assert (cell.state, [event["what"] for _, event in _events(cluster)]) == ("built", ["begin", "done"])
    assert open_group(folder / "build" / cell.bundle).sha256 == cell.sha256
    (other / "edgekit.toml").write_text(GROUP.replace("groups.talk", "groups.said"))
    (kept,) = run_app(_app(other, store=str(tmp_path / "store"))).cells
    assert (kept.state, kept.sha256, kept.report) == ("kept", cell.sha256, "said/cpu/report.json")
    told = json.loads((other / "build" / kept.report).read_bytes())
    assert told["targets"][0]["path"] == str(other / "build" / kept.bundle)
    # A store has the folder of the group alone.
    text = (folder / "talk.toml").read_text()
    (folder / "talk.toml").write_text(text.replace("decode.onnx", "../other/decode.onnx"))
    (lost,) = run_app(_app(folder, scheduler=cluster.scheduler_address)).cells
    assert "decode.onnx' lies outside of the folder of 'talk.toml'" in lost.headline


@pytest.mark.slow
def test_a_worker_of_another_version_says_so(folder: Path, cluster: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    honest, client = result.make_key, threading.current_thread()
    # Workers run in threads of their own; what they would make has another key.
    monkeypatch.setattr(
        "edgekit.app.cells.make_key", lambda *words: honest(*words) + "x" * (threading.current_thread() is not client)
    )
    report = run_app(_app(folder, scheduler=cluster.scheduler_address))
    assert all("would make something else" in cell.headline for cell in report.cells)
