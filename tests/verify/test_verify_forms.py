"""The model files of a bundle: a changed one is refused or fails, and each one opens where an app's runtime runs."""

import json
import shutil
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import onnx
import pytest
from bundle_models import edit_json
from devices_models import require_device
from fixture_types import MakeOnce, present
from group_models import make_speech
from msgspec.structs import replace
from onnx import numpy_helper
from tiny_models import parse_net, save_net
from verify_devices import InProcess, from_list
from verify_models import break_layer, find_weights

from edgekit._files import digest_file
from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.archive import opened_folder
from edgekit.bundle.folder import MANIFEST, VERIFY, Bundle, open_bundle
from edgekit.bundle.group import Group, open_group
from edgekit.bundle.sign import make_key
from edgekit.cli.main import run_command
from edgekit.data.samples import Samples
from edgekit.devices.device import LEAST_SAMPLES, DeviceRun, Job
from edgekit.errors import BundleError, DeviceError
from edgekit.evidence import Evidence
from edgekit.jobs.build import build
from edgekit.jobs.group import build_group
from edgekit.jobs.release import Allowed, sign_verified
from edgekit.model.model import load_model
from edgekit.model.tensors import Array, Tensors
from edgekit.recipe import Data, Recipe
from edgekit.report.tables import GroupBuild
from edgekit.report.text import list_verify_remarks
from edgekit.verify.on_devices import GroupReport, verify_group
from edgekit.verify.own_model import list_broken_forms
from edgekit.verify.report import VerifyReport
from edgekit.verify.run import verify_bundle


@pytest.fixture(scope="module", params=["nnapi", "coreml"])
def built(request: pytest.FixtureRequest, network_build: Path) -> Path:
    return network_build / "out" / f"network-{request.param}"


@pytest.fixture
def bundle(built: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(built, tmp_path / "bundle"))


def make_digests_anew(folder: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        for name, entry in manifest["files"].items():
            entry |= {"sha256": digest_file(folder / name), "size_bytes": (folder / name).stat().st_size}

    edit_json(folder / MANIFEST, change)


def change(folder: Path, layer: str, corrupt: Callable[[Array], Array]) -> None:
    path = folder / "model.onnx"
    break_layer(load_model(path), path, layer, corrupt)


def verify(folder: Path) -> VerifyReport:
    return verify_bundle(open_bundle(folder), [InProcess()])


def swap(values: Array) -> Array:
    values[[2, 3]] = values[[3, 2]]
    return values


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layer", "corrupt"),
    [
        pytest.param("conv0", swap, id="swapped channels"),
        pytest.param("conv2", lambda values: values // np.array(2, values.dtype), id="scale"),
        pytest.param("conv4", lambda values: values.swapaxes(2, 3), id="wrong transpose"),
    ],
)
def test_a_changed_onnx_file_fails_the_self_test(bundle: Path, layer: str, corrupt: Callable[[Array], Array]) -> None:
    change(bundle, layer, corrupt)
    make_digests_anew(bundle)
    report = verify(bundle)
    assert "'model.onnx' does not pass the bundle's self-test" in report.alterations[0]
    assert not report.passed


@pytest.mark.slow
def test_a_changed_ort_file_does_not_fit_the_onnx_file_beside_it(bundle: Path, built: Path) -> None:
    path = bundle / "model.runtime.ort"
    data = path.read_bytes()
    # Made from the float32 model, where the bundle is of fp16.
    models = [onnx.load(str(each)) for each in (bundle / "model.onnx", built.parents[1] / "network.onnx")]
    stored = [numpy_helper.to_array(each) for model in models for each in find_weights(model, "conv3")]
    weight = next(each for each in stored if each.tobytes() in data)
    path.write_bytes(data.replace(weight.tobytes(), np.ascontiguousarray(weight[::-1]).tobytes()))
    make_digests_anew(bundle)
    report = verify(bundle)
    assert "'model.runtime.ort' does not pass the bundle's self-test" in report.alterations[0]
    assert not report.passed


def test_fused_kernels_may_round_what_was_quantized_before_otherwise(tmp_path: Path) -> None:
    """Its own error at the build is none, since the file itself is the reference; a step is 4 % of the output."""
    rng = np.random.default_rng(0)
    proto = parse_net(
        """(float[1,16] x) => (float[1,8] y)
        <float s = {0.05}, int8 z = {0}> {
        a = QuantizeLinear(x, s, z)  b = DequantizeLinear(a, s, z)  c = DequantizeLinear(w, s, z)  d = MatMul(b, c)
        e = QuantizeLinear(d, s, z)  f = DequantizeLinear(e, s, z)  h = Sigmoid(f)  i = QuantizeLinear(h, s, z)
        j = DequantizeLinear(i, s, z)  k = DequantizeLinear(v, s, z)  l = MatMul(j, k)
        m = QuantizeLinear(l, s, z)  y = DequantizeLinear(m, s, z) }""",
        {name: rng.integers(-9, 9, shape).astype(np.int8) for name, shape in (("w", (16, 16)), ("v", (16, 8)))},
    )
    onnx.save(proto, str(tmp_path / "m.onnx"))
    np.savez(tmp_path / "rows.npz", x=rng.normal(size=(32, 16)).astype(np.float32))
    data = Data(source=str(tmp_path / "rows.npz"))
    build(tmp_path / "m.onnx", data, tmp_path / "out", Recipe(targets=("cpu",)), verify=False)
    assert list(list_broken_forms(open_bundle(tmp_path / "out" / "m-cpu"))) == []


def choosy(file: str, *, refuses: bool) -> InProcess:
    """A device that answers otherwise where it is given one file: it refuses it, or leaves it to the CPU."""

    def retell(job: Job, run: DeviceRun) -> dict[str, Any]:
        if job.model.name != file:
            return {}
        if refuses:
            return {"outputs": from_list([]), "failure": "Schema was not found"}
        return {"placement": tuple(replace(node, provider=CPU_PROVIDER) for node in run.placement)}

    return InProcess(name="android", retell=retell)


@pytest.fixture(scope="module")
def bundles(network_build: Path) -> dict[str, Bundle]:
    return {target: open_bundle(network_build / "out" / f"network-{target}") for target in ("cpu", "nnapi")}


def other_files(bundle: Bundle) -> set[str]:
    manifest = bundle.manifest
    return {names[0] for form, names in manifest.forms.items() if form != manifest.form}


@pytest.mark.parametrize("target", ["cpu", "nnapi"])
def test_every_file_is_opened_and_told_of(target: str, bundles: dict[str, Bundle]) -> None:
    report = verify_bundle(bundles[target], [InProcess(name="android:phone", evidence=Evidence.SAME_BINARY)])
    (run,) = report.runs
    assert report.passed
    assert {file.file for file in run.files} == other_files(bundles[target])
    assert all(file.provider_nodes and file.outputs and file.load_ms > 0 for file in run.files)
    assert {output.samples for file in run.files for output in file.outputs} == {LEAST_SAMPLES}
    told = list(list_verify_remarks(report))
    assert all(any(f"'{file.file}' opens too: " in line for line in told) for file in run.files)


def test_other_devices_run_what_they_are_planned_to_run(bundles: dict[str, Bundle]) -> None:
    (run,) = verify_bundle(bundles["cpu"], [InProcess(name="arm64")]).runs
    assert run.files == ()


@pytest.mark.parametrize(
    ("refuses", "words"), [(True, "does not run there: Schema was not found"), (False, "takes no node there")]
)
def test_a_file_that_an_app_cannot_use_fails_the_run(bundles: dict[str, Bundle], refuses: bool, words: str) -> None:
    file = min(other_files(bundles["nnapi"]))
    report = verify_bundle(bundles["nnapi"], [choosy(file, refuses=refuses)])
    (run,) = report.runs
    (gate,) = (gate for gate in run.gates if gate.name == "file" and gate.failures)
    assert gate.subject == file
    assert f"the bundle ships '{file}'" in gate.failures[0]
    assert words in gate.failures[0]
    assert not report.passed


def test_the_simulator_s_library_opens_the_files_of_a_core_ml_bundle(network_build: Path) -> None:
    device = require_device("ios-sim", "coreml")
    bundle = open_bundle(network_build / "out" / "network-coreml")
    (run,) = verify_bundle(bundle, [device], layers=True).runs
    assert run.passed, run.failures
    assert len(present(run.located).layers) > 5
    assert run.provider_nodes.keys() == {"CoreMLExecutionProvider"}
    assert {file.file: set(file.provider_nodes) for file in run.files} == {
        "model.runtime.ort": {"CoreMLExecutionProvider"}
    }


def test_a_model_in_float16_runs_on_core_ml_in_the_ort_format_too(tmp_path: Path) -> None:
    """ONNX Runtime puts a Cast of the weights before a layer that its CPU provider has in float32 alone."""
    device = require_device("ios-sim", "coreml")
    rng, text = np.random.default_rng(0), "y = ConvTranspose<strides=[2,2], pads=[1,1,1,1]>(x, w)"
    weights = rng.normal(size=(3, 4, 4, 4)).astype(np.float16)
    model = save_net(f"(float16[1,3,8,8] x) => (float16[1,4,16,16] y) {{ {text} }}", tmp_path / "m.onnx", w=weights)
    np.savez(tmp_path / "d.npz", x=rng.normal(size=(16, 1, 3, 8, 8)).astype(np.float16))
    data = Data(source=str(tmp_path / "d.npz"))
    (summary,) = build(model.path, data, tmp_path / "out", Recipe(targets=("coreml",)), verify=False).bundles
    (run,) = verify_bundle(open_bundle(present(summary.path)), [device]).runs
    assert run.passed, run.failures
    assert [set(file.provider_nodes) for file in run.files] == [{"CoreMLExecutionProvider"}]


def test_android_s_own_binary_opens_the_files_of_a_bundle(bundles: dict[str, Bundle]) -> None:
    report = verify_bundle(bundles["cpu"], [require_device("android:x86_64", "cpu")])
    (run,) = report.runs
    assert report.passed, run.failures
    assert {file.file: set(file.provider_nodes) for file in run.files} == {
        file: {CPU_PROVIDER} for file in other_files(bundles["cpu"])
    }
    assert msgspec.json.decode(msgspec.json.encode(run.files[0]))["failure"] is None


# Groups verified end to end: an honest device passes, one that is wrong, or stops on the way, fails.


def make(folder: Path) -> None:
    path, source = make_speech(folder), str(folder / "speech.npz")
    data = Data(source=source, evaluation=source, labels=folder / "speech.txt")
    report: GroupBuild = build_group(path, data, folder / "out", Recipe(targets=("cpu",)), verify=False)
    assert (report.targets[0].failure, report.verdict, report.golden_samples) == (None, "not proven", 40)


@pytest.fixture(scope="module")
def speech(make_once: MakeOnce) -> Group:
    return open_group(make_once("speech", make) / "out" / "speech-cpu")


class Deaf(InProcess, frozen=True, kw_only=True):
    """Forgets what the encoder heard."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        def read() -> Iterator[Tensors]:
            for sample in job.samples:
                yield {**sample, "memory": sample["memory"] * 0} if "memory" in sample else sample

        forgetful = Samples(source="", count=job.samples.count, read=read)
        return super().run_job(replace(job, samples=forgetful), work)


class Tired(InProcess, frozen=True, kw_only=True):
    """Runs single models, and not for as long as a text takes."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        def read() -> Iterator[Tensors]:
            yield from islice(job.samples, 60)
            raise DeviceError("the battery is empty", hint="charge it")

        tiring = replace(job, samples=Samples(source="", count=job.samples.count, read=read))
        return super().run_job(tiring if work.name.startswith("decoder-") else job, work)


class Dying(InProcess, frozen=True, kw_only=True):
    """Runs single models, and dies within a text."""

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        if not work.name.startswith("decoder-"):
            return super().run_job(job, work)
        first = Samples(source="", count=job.samples.count, read=lambda: islice(job.samples, 60))
        run = super().run_job(replace(job, samples=first), work)
        return replace(run, failure="was ended by SIGSEGV", crashed=True)


def run(group: Group, device: InProcess) -> GroupReport:
    return verify_group(group, lambda _: [device])


def test_a_device_that_stops_within_a_text_fails_and_an_emulator_that_crashes_proves_nothing(speech: Group) -> None:
    report = run(speech, Tired())
    assert {member.verdict for member in report.members.values()} == {"pass"}
    assert report.verdict == "fail"
    assert "the battery is empty" in report.runs[0].judgement.failures[0]
    report = run(speech, Dying())
    assert {member.verdict for member in report.members.values()} == {"pass"}
    assert report.verdict == "not proven"
    (doubt,) = report.runs[0].judgement.unproven
    assert "the emulator crashed, which proves nothing: member 'decoder': was ended by SIGSEGV" in doubt


def test_a_device_that_does_not_hear_fails_by_the_metric_and_none_proves_nothing(speech: Group) -> None:
    report = run(speech, Deaf())
    assert report.verdict == "fail"
    assert "points worse than the float model" in report.runs[0].judgement.failures[0]
    report = verify_group(speech, lambda _: [])
    assert (report.verdict, report.runs) == ("not proven", ())


@pytest.mark.slow
def test_a_group_passes_in_qnns_simulator(tmp_path: Path) -> None:
    require_device("qnn-htp-sim", "qnn")
    path, source = make_speech(tmp_path, samples=4), str(tmp_path / "speech.npz")
    data = Data(source=source, evaluation=source, labels=tmp_path / "speech.txt")
    build_group(path, data, tmp_path / "out", Recipe(targets=("qnn",), forms=("onnx",)), verify=False)
    folder = tmp_path / "out" / "speech-qnn"
    assert run_command(["group", "verify", str(folder), "--require", "qnn-htp-sim", "-q"]) == 0
    (whole,) = json.loads((folder / VERIFY).read_bytes())["runs"]
    assert (whole["evidence"], whole["task"]["got"], whole["runs"]["encoder"]) == ("simulator", 1.0, 1)
    # As many turns of one session as the longest text has tokens.
    assert whole["runs"]["decoder"] > 2


@pytest.fixture
def passed(speech: Group, tmp_path: Path) -> Path:
    """A group that passed on an honest device."""
    folder = Path(shutil.copytree(speech.folder, tmp_path / "speech-cpu"))
    assert verify_group(open_group(folder), lambda _: [InProcess()]).passed
    return folder


def test_a_signed_group_says_what_was_verified_and_shows_every_change(passed: Path, tmp_path: Path) -> None:
    public, other = make_key(tmp_path / "release.pem"), make_key(tmp_path / "other.pem")
    signed, doubts = sign_verified(passed, tmp_path / "release.pem")
    assert (doubts, signed.attested.result) == ((), "PASSED")
    assert open_group(passed, key=public).attested == signed.attested
    whole = [run for run in signed.attested.edgekit_runs if run.bundle == "speech-cpu"]
    assert whole[0].metric == {"exact-match": 1.0}
    assert {"speech-cpu", "speech-cpu/encoder", "speech-cpu/decoder"} <= set(signed.attested.passed_tests)
    with pytest.raises(BundleError, match="another key"):
        open_group(passed, key=other)
    (passed / "README.md").write_bytes(b"x" * (passed / "README.md").stat().st_size)
    with pytest.raises(BundleError, match="was altered"):
        open_group(passed, key=public)


def test_a_group_that_did_not_pass_is_signed_only_where_that_is_allowed(speech: Group, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(speech.folder, tmp_path / "speech-cpu", ignore=shutil.ignore_patterns(VERIFY)))
    make_key(tmp_path / "release.pem")
    with pytest.raises(BundleError, match="was not verified as it is now"):
        sign_verified(folder, tmp_path / "release.pem")
    verify_group(open_group(folder), lambda _: [Deaf()])
    with pytest.raises(BundleError, match="did not pass its verification"):
        sign_verified(folder, tmp_path / "release.pem")
    signed, (doubt,) = sign_verified(folder, tmp_path / "release.pem", allowed=Allowed(failed=True))
    assert (doubt.verdict, signed.attested.result) == ("fail", "FAILED")
    assert "speech-cpu" in signed.attested.failed_tests


def test_a_packed_group_verifies(passed: Path, tmp_path: Path, refused: Callable[..., str]) -> None:
    make_key(tmp_path / "release.pem")
    sign_verified(passed, tmp_path / "release.pem")
    words = ["package", str(passed), "--as", "tar", "--key", str(tmp_path / "release.pem.pub")]
    for name in ("a.tar", "b.tar"):
        assert run_command([*words, "--out", str(tmp_path / name)]) == 0
    assert (tmp_path / "a.tar").read_bytes() == (tmp_path / "b.tar").read_bytes()
    with opened_folder(tmp_path / "a.tar") as folder:
        assert open_group(folder, key=tmp_path / "release.pem.pub").attested is not None
    said = refused("package", str(passed), "--as", "aar", "--out", str(tmp_path / "aar"))
    assert "has no code that runs several models" in said
    said = refused("package", str(passed), "--as", "zip", "--name", "mine", "--out", str(tmp_path / "z.zip"))
    assert "under its own name" in said
