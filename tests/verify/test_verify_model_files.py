"""Every model file that a bundle ships is opened where the device is the runtime that an app links."""

from pathlib import Path

import msgspec
import pytest
from devices_models import present
from verify_devices import InProcess, tell_truth

from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.folder import Bundle, open_bundle
from edgekit.devices.device import DeviceRun, Job
from edgekit.evidence import Evidence
from edgekit.report.text import list_verify_remarks
from edgekit.verify.run import verify_bundle


class Choosy(InProcess, frozen=True, kw_only=True):
    """Answers otherwise where it is given one file: it refuses it, or leaves it to the CPU."""

    file: str
    refuses: bool

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        asked = job.model.name == self.file
        inner = InProcess(
            name=self.name,
            evidence=self.evidence,
            lie=(lambda _: []) if asked and self.refuses else tell_truth,
            failure="Schema was not found" if asked and self.refuses else None,
            provider=CPU_PROVIDER if asked else None,
        )
        return inner.run_job(job, work)


@pytest.fixture(scope="module")
def built(network_build: Path) -> dict[str, Bundle]:
    return {target: open_bundle(network_build / "out" / f"network-{target}") for target in ("cpu", "nnapi")}


def other_files(bundle: Bundle) -> set[str]:
    manifest = bundle.manifest
    return {names[0] for form, names in manifest.forms.items() if form != manifest.form}


@pytest.mark.parametrize("target", ["cpu", "nnapi"])
def test_every_file_is_opened_and_told_of(target: str, built: dict[str, Bundle]) -> None:
    report = verify_bundle(built[target], [InProcess(name="android:phone", evidence=Evidence.SAME_BINARY)])
    (run,) = report.runs
    assert report.passed
    assert {file.file for file in run.files} == other_files(built[target])
    assert all(file.provider_nodes and file.outputs and file.load_ms > 0 for file in run.files)
    told = list(list_verify_remarks(report))
    assert all(any(f"'{file.file}' opens too: " in line for line in told) for file in run.files)


def test_other_devices_run_what_they_are_planned_to_run(built: dict[str, Bundle]) -> None:
    (run,) = verify_bundle(built["cpu"], [InProcess(name="arm64")]).runs
    assert run.files == ()


@pytest.mark.parametrize(
    ("refuses", "words"), [(True, "does not run there: Schema was not found"), (False, "takes no node there")]
)
def test_a_file_that_an_app_cannot_use_fails_the_run(built: dict[str, Bundle], refuses: bool, words: str) -> None:
    file = min(other_files(built["nnapi"]))
    report = verify_bundle(built["nnapi"], [Choosy(name="android", file=file, refuses=refuses)])
    (run,) = report.runs
    (gate,) = (gate for gate in run.gates if gate.name == "file" and gate.failures)
    assert gate.subject == file
    assert f"the bundle ships '{file}'" in gate.failures[0]
    assert words in gate.failures[0]
    assert not report.passed


def test_the_simulator_s_library_opens_the_files_of_a_core_ml_bundle(demo_build: Path) -> None:
    device = present("ios-sim", "coreml")
    bundle = open_bundle(next((demo_build / "bundles").glob("*-coreml")))
    (run,) = verify_bundle(bundle, [device], layers=True).runs
    assert run.passed, run.failures
    assert run.located is not None
    assert run.located.operations["stem/conv"][0].startswith("conv 'stem/conv")
    assert run.provider_nodes.keys() == {"CoreMLExecutionProvider"}
    assert {file.file: set(file.provider_nodes) for file in run.files} == {
        "model.runtime.ort": {"CoreMLExecutionProvider"}
    }


def test_android_s_own_binary_opens_the_files_of_a_bundle(built: dict[str, Bundle]) -> None:
    report = verify_bundle(built["cpu"], [present("android:x86_64", "cpu")])
    (run,) = report.runs
    assert report.passed, run.failures
    assert {file.file: set(file.provider_nodes) for file in run.files} == {
        file: {CPU_PROVIDER} for file in other_files(built["cpu"])
    }
    assert msgspec.json.decode(msgspec.json.encode(run.files[0]))["failure"] is None
