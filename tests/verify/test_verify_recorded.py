"""A run as a file: an honest one is judged as if it ran here, a lying one fails, and it says who stands for it."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from fixture_types import Shown, present
from msgspec.structs import replace

from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.bundle.golden import read_outputs
from edgekit.bundle.sign import make_key
from edgekit.data.data_check import digest_samples
from edgekit.data.samples import order_for_runs, select_samples
from edgekit.devices.find import DeviceChoice
from edgekit.devices.process.exchange import encode_tensors
from edgekit.errors import BundleError, DataError, UsageError
from edgekit.verify.on_devices import RunFiles, verify_on
from edgekit.verify.report import VerifyReport
from edgekit.verify.run_report import RunReport

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def bundle(network_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle") / "network-cpu"
    return open_bundle(Path(shutil.copytree(network_build / "out" / "network-cpu", folder)))


@pytest.fixture(scope="module")
def here(bundle: Bundle, tmp_path_factory: pytest.TempPathFactory) -> tuple[RunReport, Path]:
    """The run of this machine, and the file to which it was written."""
    path = tmp_path_factory.mktemp("runs") / "host.run"
    report = verify_on(bundle, DeviceChoice(names=("host",)), files=RunFiles(export=path))
    assert report.passed
    return report.runs[0], path


@pytest.fixture
def exported(here: tuple[RunReport, Path]) -> Path:
    return here[1]


def judge(bundle: Bundle, path: Path, key: Path | None = None) -> VerifyReport:
    return verify_on(bundle, DeviceChoice(), files=RunFiles(recorded=(path,), run_key=key))


def alter(path: Path, out: Path, changes: dict[str, Any], body: bytes | None = None) -> Path:
    """Writes a run that claims something else, and whose outputs are others where there is a `body`."""
    head, line, rest = path.read_bytes().split(b"\n", 2)
    out.write_bytes(b"\n".join((head, json.dumps(json.loads(line) | changes).encode(), rest if body is None else body)))
    return out


def test_an_honest_run_passes_as_if_it_ran_here(bundle: Bundle, here: tuple[RunReport, Path]) -> None:
    own, path = here
    report = judge(bundle, path)
    (run,) = report.runs
    assert report.passed
    assert (run.device, run.evidence, run.samples) == ("host (recorded)", own.evidence, own.samples)
    assert (run.outputs, run.outputs_sha256) == (own.outputs, own.outputs_sha256)
    assert run.provider_nodes == own.provider_nodes
    assert run.latency_ms is not None
    assert run.notes[0] == "host.run: as claimed: nobody signed it"


def test_a_file_that_lies_fails(bundle: Bundle, exported: Path, tmp_path: Path) -> None:
    rest = exported.read_bytes().split(b"\n", 2)[2]
    outputs = read_outputs(bundle.golden)
    replayed = select_samples(outputs, order_for_runs(outputs.count, outputs.count, 1))
    swapped = bytearray(rest)
    # The first of the values: its exponent.
    swapped[rest.index(b"\n") + 4] ^= 0x40
    made_up = {"name": "made up", "op": "Conv", "domain": "", "provider": "CPUExecutionProvider"}
    lies: dict[str, tuple[dict[str, Any], bytes | None]] = {
        "is of another bundle": ({"bundle_sha256": "0" * 64}, None),
        "is of another model file": ({"model_sha256": "0" * 64}, None),
        "is of other samples": ({"inputs_sha256": "0" * 64}, None),
        "has outputs with another digest than it claims": ({}, bytes(swapped)),
        "holds 3 outputs of": ({"samples": 3}, None),
        "holds 10000 outputs of": ({"samples": 10_000}, None),
        "ends early": ({}, rest[:-1]),
        "has data after its last output": ({}, rest + b"x"),
        "is the float model's to the bit": (
            {"outputs_sha256": digest_samples(replayed)}, b"".join(encode_tensors(sample) for sample in replayed)
        ),
        "its placement is not whole": ({"placement": [made_up]}, None),
    }  # fmt: skip
    for words, (changes, body) in lies.items():
        report = judge(bundle, alter(exported, tmp_path / "lie.run", changes, body))
        (run,) = report.runs
        assert not report.passed, words
        assert words in " ".join((run.failure or "", *run.failures))


def test_wrong_outputs_with_a_right_digest_fail(bundle: Bundle, exported: Path, tmp_path: Path) -> None:
    wrong = [{name: -value for name, value in sample.items()} for sample in read_outputs(bundle.golden)]
    samples = replace(read_outputs(bundle.golden), read=lambda: iter(wrong))
    body = b"".join(map(encode_tensors, wrong))
    path = alter(exported, tmp_path / "lie.run", {"outputs_sha256": digest_samples(samples)}, body)
    (run,) = judge(bundle, path).runs
    assert not run.passed
    assert run.failure is None
    assert run.located is None


@pytest.mark.parametrize(
    "data", [b"", b"no run\nat all\n", b'{"format":"edgekit-run-2","seal":null}\n{}\n', b"\0" * 100_000]
)
def test_what_is_no_run_is_refused_in_one_line(data: bytes, bundle: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "x.run"
    path.write_bytes(data)
    with pytest.raises(DataError, match="is no recorded run") as caught:
        judge(bundle, path)
    assert "\n" not in caught.value.message
    with pytest.raises(DataError, match="cannot read"):
        judge(bundle, tmp_path / "none.run")
    path.write_bytes(b'{"format":"edgekit-run-1","seal":null}\n{}\n')
    with pytest.raises(DataError, match="edgekit-run-1, not edgekit-run-2: another version of edgekit wrote it"):
        judge(bundle, path)


def test_a_signed_run_says_so_and_an_altered_one_is_refused(bundle: Bundle, tmp_path: Path) -> None:
    public, other = make_key(tmp_path / "mac.pem"), make_key(tmp_path / "other.pem")
    path = tmp_path / "signed.run"
    files = RunFiles(export=path, sign_key=tmp_path / "mac.pem")
    assert verify_on(bundle, DeviceChoice(names=("host",)), files=files).passed
    assert judge(bundle, path, public).runs[0].notes[0] == "signed.run: signed with the key 'mac.pem.pub'"
    assert "as claimed: it is signed with the key" in judge(bundle, path).runs[0].notes[0]
    with pytest.raises(BundleError, match="is signed with another key"):
        judge(bundle, path, other)
    faster = alter(path, tmp_path / "faster.run", {"latency_ms": [0.1] * bundle.golden.samples})
    with pytest.raises(BundleError, match="was altered after it was signed"):
        judge(bundle, faster, public)


def test_an_unsigned_run_is_refused_where_a_key_is_asked_for(bundle: Bundle, exported: Path, tmp_path: Path) -> None:
    with pytest.raises(BundleError, match="is not signed"):
        judge(bundle, exported, make_key(tmp_path / "mac.pem"))


def test_the_run_of_one_device_is_exported(bundle: Bundle, tmp_path: Path) -> None:
    for names in ((), ("host", "arm64")):
        with pytest.raises(UsageError, match="--export writes the run of one device"):
            verify_on(bundle, DeviceChoice(names=names), files=RunFiles(export=tmp_path / "a.run"))


def test_the_command_verify_judges_an_imported_run(bundle: Bundle, exported: Path, shown: Shown) -> None:
    told = shown(["verify", str(bundle.folder), "--import", str(exported)])
    assert "as claimed: nobody signed it" in " ".join(told.split())


def test_a_recorded_run_of_a_model_with_state_holds_its_steps(stepped: Bundle, tmp_path: Path) -> None:
    path = tmp_path / "host.run"
    here = verify_on(stepped, DeviceChoice(names=("host",)), files=RunFiles(export=path))
    (run,) = judge(stepped, path).runs
    assert run.passed, run.failures
    assert present(run.state) == here.runs[0].state

    def judge_state(path: Path) -> str:
        (run,) = judge(stepped, path).runs
        return " ".join(run.failures)

    # The outputs of a run without the last.
    rest = path.read_bytes().split(b"\n", 2)[2]
    fewer = alter(path, tmp_path / "fewer.run", {"turns": 15}, rest[: rest.rindex(b"[{")])
    assert "15 of 16 steps" in judge_state(fewer)
    spoiled = alter(path, tmp_path / "other.run", {"turns_sha256": "0" * 64})
    assert "has turns with another digest than it claims" in judge_state(spoiled)
