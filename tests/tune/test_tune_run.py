"""Settings on real sessions: told to the runners, raced, held against the reference, written into a bundle."""

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from bundle_models import PASSED, make_bundle, tuned_for
from devices_models import require_runner, run_in
from fixture_types import Answer, Refused, Shown
from tiny_models import parse_model

from edgekit._ort import Level
from edgekit.bench.bench import Effort
from edgekit.bench.subject import Opening, open_subject
from edgekit.bundle.folder import open_bundle
from edgekit.bundle.manifest import MachineClass, SessionSetting, TunedSession, encode_json
from edgekit.bundle.multi import join_bundles, sign_bundle
from edgekit.bundle.sign import make_key
from edgekit.devices.bundled import find_class, find_tuned, set_job
from edgekit.devices.device import Device
from edgekit.devices.find import find_device, known_device
from edgekit.devices.local.runner import host_abi
from edgekit.errors import BundleError
from edgekit.evidence import Evidence
from edgekit.profile.events import read_trace
from edgekit.report import tables, timing
from edgekit.report.pages import make_page
from edgekit.target import load_target
from edgekit.tune.race import Entrant
from edgekit.tune.space import has_branches
from edgekit.tune.tune import TriedSetting, TuneReport, apply_setting, require_bundle

pytestmark = pytest.mark.slow

EVERYTHING = SessionSetting(
    level=Level.BASIC,
    threads=1,
    inter_threads=2,
    parallel=True,
    arena=False,
    memory_pattern=False,
    io_binding=True,
    config={"session.disable_prepacking": "1"},
)


@pytest.fixture(scope="module", autouse=True)
def _runner() -> None:
    require_runner(host_abi())


@pytest.fixture(params=["host", "host:native"])
def device(request: pytest.FixtureRequest) -> Device:
    return find_device(request.param, load_target("cpu"))


def branches(path: Path) -> Path:
    """Eight products side by side, and their sum."""
    products = " ".join(
        f"t{i} = MatMul(x, x)" if i == 0 else f"s{i} = Add(x, x) t{i} = MatMul(s{i}, x)" for i in range(8)
    )
    total = f"y = Sum({', '.join(f't{i}' for i in range(8))})"
    return parse_model(f"g (float[128,128] x) => (float[128,128] y) {{ {products} {total} }}", path)


def tuned(setting: SessionSetting, **machine: object) -> TunedSession:
    here = find_class(known_device("host"))
    assert here is not None
    return tuned_for(msgspec.structs.replace(here, **machine), setting)


def test_runners_apply_the_session_options_of_a_setting(device: Device, tmp_path: Path) -> None:
    plain = open_subject(branches(tmp_path / "m.onnx"), tmp_path / "w", Opening()).job_for(device)
    told = set_job(plain, EVERYTHING)
    (one,) = run_in(device, plain, tmp_path / "a").outputs
    run = run_in(device, msgspec.structs.replace(told, trace=True), tmp_path / "b")
    (other,) = run.outputs
    np.testing.assert_allclose(one["y"], other["y"], rtol=1e-4)
    assert run.trace is not None
    threads = {event["tid"] for event in json.loads(run.trace.read_bytes()) if event.get("cat") == "Node"}
    main = {event["tid"] for event in json.loads(run.trace.read_bytes()) if event["name"] == "model_run"}
    # Sequential nodes run where the call came from; parallel ones in a pool of their own.
    assert not threads <= main
    assert read_trace(run.trace).executions


def test_a_setting_beyond_reason_is_refused(tmp_path: Path) -> None:
    model, device = branches(tmp_path / "m.onnx"), find_device("host:native", load_target("cpu"))
    job = open_subject(model, tmp_path / "w", Opening()).job_for(device)
    run = run_in(device, msgspec.structs.replace(job, inter_threads=2000), tmp_path / "a")
    assert "'inter_threads' is larger than 1024" in str(run.failure)


def test_a_graph_with_branches_is_told_from_a_chain(tmp_path: Path) -> None:
    chain = parse_model("g (float[1,8] x) => (float[1,8] y) { a = Relu(x) y = Add(a, x) }", tmp_path / "chain.onnx")
    host = find_device("host", load_target("cpu"))
    jobs = [open_subject(path, tmp_path, Opening()).job_for(host) for path in (chain, branches(tmp_path / "b.onnx"))]
    assert [has_branches(job) for job in jobs] == [False, True]


def assert_ends_in_time(rounds: list[dict[str, Any]], budget_s: float) -> None:
    """Holds that no round began which, if it was no slower than the slowest before it, would have ended too late.

    The first round always runs. On a busy machine it may take most of the budget, and then it is the only one.
    """
    taken = [(one["seconds"], len(one["measured"])) for one in rounds]
    assert taken
    for number in range(1, len(taken)):
        slowest = max(seconds / count for seconds, count in taken[:number])
        assert sum(seconds for seconds, _ in taken[:number]) + slowest * taken[number][1] <= budget_s


def test_the_json_of_tune_has_its_documented_keys(tmp_path: Path, shown: Shown, answer: Answer) -> None:
    model = branches(tmp_path / "m.onnx")
    (page, state) = tmp_path / "t.html", tmp_path / "s.json"
    arguments = ["tune", str(model), "--on", "host:native", "--time-budget", "2s", "-q", "--html", str(page)]
    report = answer([*arguments, "--state", str(state)])
    assert report["goal"] == "latency"
    assert {"decisions", "tried", "chosen", "final", "machine", "busy"} <= report.keys()
    assert {one["entrant"]["name"] for one in report["tried"]} >= {"defaults", "1 thread"}
    assert report["budget_s"] == 2.0
    assert_ends_in_time(json.loads(state.read_bytes())["done"], 2.0)
    # What was not decided says so, and nothing is claimed.
    assert any("time was over" in one["reason"] for one in report["decisions"])
    assert "<script src" not in page.read_text()
    assert "http" not in page.read_text().replace("http-equiv", "")
    assert "the defaults stay" in shown([*arguments, "--state", str(state)])


def test_one_device_at_a_time(tmp_path: Path, refused: Refused) -> None:
    model = str(branches(tmp_path / "m.onnx"))
    assert "one device at a time" in refused("tune", model, "--on", "host", "--on", "host:native")
    assert "--apply writes into a bundle" in refused("tune", model, "--apply")


def test_a_setting_in_a_bundle_holds_on_its_machines_only(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, target="xnnpack")
    before = bundle.manifest
    assert apply_setting(bundle.folder, tuned(EVERYTHING)) == f"'{bundle.folder / 'manifest.json'}'"
    after = open_bundle(bundle.folder).manifest
    assert msgspec.structs.replace(after, tuned=msgspec.UNSET) == before
    host, arm = find_device("host", load_target("cpu")), find_device("arm64", load_target("cpu"))
    assert find_tuned(after, host) == EVERYTHING
    assert find_tuned(after, arm) is None
    job = open_subject(bundle.folder, tmp_path / "w", Opening()).job_for(host)
    assert (job.level, job.threads, job.parallel, job.arena) == (Level.BASIC, 1, True, False)
    assert (Effort(threads=2).apply(job).threads, Effort().apply(job).threads) == (2, 1)
    plain = open_subject(bundle.folder, tmp_path / "p", Opening(tuned=False)).job_for(host)
    assert (plain.level, plain.threads) == (Level.ALL, 0)
    # The same machines again: it takes the place of the one before.
    apply_setting(bundle.folder, tuned(SessionSetting(threads=3)))
    apply_setting(bundle.folder, tuned(SessionSetting(threads=4), cores=0))
    again = open_bundle(bundle.folder).manifest
    assert [one.setting.threads for one in again.tuned or ()] == [3, 4]
    assert find_tuned(again, host) == SessionSetting(threads=3)


def test_tuning_a_bundle_removes_its_signature(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, target="cpu")
    public = make_key(tmp_path / "k")
    sign_bundle(bundle.folder, tmp_path / "k", PASSED)
    open_bundle(bundle.folder, key=public)
    assert "edgekit sign" in apply_setting(bundle.folder, tuned(EVERYTHING))
    with pytest.raises(BundleError, match="not signed"):
        open_bundle(bundle.folder, key=public)


def test_a_bundle_of_several_targets_is_not_tuned(tmp_path: Path) -> None:
    joined = join_bundles([make_bundle(tmp_path, target="cpu")], tmp_path / "j")
    with pytest.raises(BundleError, match="tune the bundle before you join it"):
        require_bundle(joined.folder / joined.index.variants[0].folder)


def test_a_setting_may_use_only_options_that_a_bundle_may_state(tmp_path: Path) -> None:
    bundle = make_bundle(tmp_path, target="cpu")
    for setting in (
        SessionSetting(config={"ep.context_file_path": "1"}),
        SessionSetting(config={"session.disable_prepacking": "../x"}),
        SessionSetting(provider_options={"backend_path": "x"}),
        SessionSetting(form="full/../x"),
    ):
        with pytest.raises(BundleError):
            apply_setting(bundle.folder, tuned(setting))
        assert open_bundle(bundle.folder).manifest == bundle.manifest
        forged = msgspec.structs.replace(bundle.manifest, tuned=(tuned(setting),))
        (bundle.folder / "manifest.json").write_bytes(encode_json(forged))
        with pytest.raises(BundleError):
            open_bundle(bundle.folder)
        (bundle.folder / "manifest.json").write_bytes(encode_json(bundle.manifest))


def test_a_class_holds_for_its_machines() -> None:
    own = MachineClass(system="linux", machine="x86_64", cores=2)
    assert own.holds(own)
    assert not own.holds(msgspec.structs.replace(own, cores=4))
    assert msgspec.structs.replace(own, cores=0).holds(own)
    assert not own.holds(msgspec.structs.replace(own, machine="aarch64"))


def test_the_page_has_a_row_for_each_setting_and_escapes_names() -> None:
    tried = (
        TriedSetting(entrant=Entrant(name="defaults"), measurements=2, median_ms=2, sqnr_db=45),
        TriedSetting(entrant=Entrant(name="fast"), measurements=2, median_ms=1, sqnr_db=240),
        TriedSetting(entrant=Entrant(name="dead"), measurements=1, fault="failed: <i>"),
    )
    report = TuneReport(
        subject="<b>m</b>",
        device="host",
        evidence=Evidence.EMULATED,
        provider="CPUExecutionProvider",
        goal="latency",
        defaults=Entrant(name="defaults"),
        chosen=Entrant(name="fast"),
        tried=tried,
    )
    page = make_page("tune", tables, timing, report=report)
    assert '<td class="number" data-value="45">45.0 dB</td>' in page
    assert '<td class="number" data-value="240">equal</td>' in page
    assert "&lt;i&gt;" in page
    assert "<b>m</b>" not in page
