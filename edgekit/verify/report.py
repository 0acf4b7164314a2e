"""The result of a verification: the facts, and the verdict that is computed from them in one place."""

from collections.abc import Sequence
from pathlib import Path
from typing import Literal, TypeVar

import msgspec

from edgekit._files import open_regular, write_file
from edgekit._ort import CPU_PROVIDER
from edgekit.bundle.folder import VERIFY, Bundle
from edgekit.check.report import Placed
from edgekit.devices.device import SkippedDevice
from edgekit.errors import DataError, reading
from edgekit.evidence import Evidence, Judged, Judgement, Verdict, worst_verdict
from edgekit.serialize import UNDECODABLE, NotebookPage, fill, ready_type, to_json
from edgekit.target import Thresholds
from edgekit.verify.layers.comparison import LayerReport, name_first_bad
from edgekit.verify.run_report import RunReport

Step = Literal["prepare", "quantize", "convert", "provider", "device"]

_ADVICE: dict[str, str] = {
    "prepare": "the prepared model is not the source model; compare them with edgekit compare SOURCE PREPARED --layers",
    "quantize": "calibrate with more data like the app's, or try --precision int16 or fp16; edgekit quantize --max-drop"
    " takes the tensors that cost most out of 8 bits",
    "convert": "ONNX Runtime's fused kernels differ; convert at a lower --level",
    "provider": "it rounds otherwise (half precision, kernels of its own); leave nodes where it matters to the CPU",
    "device": "the device computes otherwise than its emulator; compare driver and runtime versions",
}


class AttributionStep(msgspec.Struct, frozen=True, kw_only=True):
    """How far the model is from the source model after one step of the pipeline, and the loss since the step before.

    `sqnr_db` and `top1_agreement` compare the worst output with the source model's; `noise_share` is the part of the
    final error energy that this step added, negative if it removed some. `top1_loss` and `accuracy_loss` are what the
    step cost; summed over all steps they give the whole loss.
    """

    step: Step
    sqnr_db: float | None
    top1_agreement: float | None
    accuracy: float | None
    noise_share: float | None = None
    top1_loss: float | None = None
    accuracy_loss: float | None = None


class VerifyReport(Judged, NotebookPage, msgspec.Struct, frozen=True, kw_only=True):
    """Whether a bundle gives on its devices what the float model gives.

    It passes if at least one device ran the target's provider, every device that ran passed, and the provider takes
    enough of the work to be worth using; a skipped device proves nothing. If nothing fails, but something could not be
    decided or no device ran that provider, it is not proven. `taken_macs` is the predicted share of that work. The
    sizes are those of the file that an app loads and of the float model. `bundle_sha256` is the digest of the bundle's
    manifest. `layers` are those of the quantized model against the float one, if both were available.
    `attributed_device` is the device of the run that the attribution explains. `ancestry` holds the sha256 of model and
    data, `regressions` what is worse than in the last passed run of the same model and target. `machine` describes the
    machine that edgekit ran on, if emulators or simulators ran too. `alterations` say what in the bundle's model is not
    as it was built, `notes` what was left out, and why. `required` names the devices that had to run. `chance`
    says that the float model guesses the labels no better than chance does, or is "": if it says so, nothing is proven,
    however well a device agrees.
    """

    bundle: str
    target: str
    runs: tuple[RunReport, ...]
    skipped: tuple[SkippedDevice, ...]
    taken_macs: float = 1.0
    min_taken_macs: float = 0.0
    attribution: tuple[AttributionStep, ...] = ()
    layers: tuple[LayerReport, ...] = ()
    attributed_device: str | None = None
    bundle_sha256: str = ""
    size_bytes: int = 0
    source_size_bytes: int = 0
    max_size_bytes: int | None = None
    max_size_share: float | None = None
    needs_placement: bool = False
    ancestry: dict[str, str] = {}
    regressions: tuple[str, ...] = ()
    machine: dict[str, str] = {}
    alterations: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    required: tuple[str, ...] = ()
    chance: str = ""

    @property
    def placed(self) -> Placed | None:
        """Where the target's own provider put the nodes, by the strongest evidence available; None if there is none."""
        # A session of an ORT file does not name what its provider compiled; that of the ONNX file in the same bundle
        # does.
        placements = (placed for run in self.runs for placed in (run.placed, *(file.placed for file in run.files)))
        return min(filter(None, placements), key=lambda placed: Evidence(placed.evidence).rank, default=None)

    @property
    def first_bad_layer(self) -> str | None:
        """The first layer of the quantized model whose own error stands out, or None."""
        return name_first_bad(self.layers)

    @property
    def advice(self) -> str | None:
        """What to do about the step that loses the most, or None if the loss was not attributed to steps."""
        shares = [(step.noise_share, step.step) for step in self.attribution if step.noise_share is not None]
        if not shares:
            return None
        share, step = max(shares)
        # By the error that each step added: a later step may remove some of it.
        added = sum(part for part, _ in shares if part > 0)
        lost = next((found.accuracy_loss for found in self.attribution if found.step == step), None)
        cost = f" and loses {100 * lost:.1f} points of accuracy" if lost and lost > 0 else ""
        where = f", first in layer '{self.first_bad_layer}'" if self.first_bad_layer and step == "quantize" else ""
        part = share / added if added else 0.0
        return f"the step '{step}' makes {part:.0%} of the error{cost}{where}: {_ADVICE[step]}"

    @property
    def verdict(self) -> Verdict:
        """Whether the bundle passes, if that can be decided."""
        whole = Judgement(failures=self.failures, unproven=self.unproven).verdict
        return worst_verdict((whole, *(run.verdict for run in self.runs)))

    @property
    def unproven(self) -> tuple[str, ...]:
        """Why the bundle as a whole is not proven, one line per reason; each run has its own lines."""
        guessed = (self.chance,) if self.chance else ()
        if not self.runs:
            return (*guessed, "no device ran, so nothing is proven")
        # The CPU provider takes every node, so nothing needs to observe it; another provider may take none, or compute
        # differently.
        if any(run.observes_placement or run.provider == CPU_PROVIDER for run in self.runs):
            return guessed
        run = self.runs[0]
        evidence = "" if run.device == run.evidence else f" ({run.evidence})"
        unused = f"no run used {run.provider}: {run.device}{evidence} shows what the file computes elsewhere"
        return (*guessed, unused)

    @property
    def failures(self) -> tuple[str, ...]:
        """Why the bundle as a whole fails, one line per reason; each run has its own lines."""
        found: list[str] = []
        if self.needs_placement and not any(run.observes_placement for run in self.runs):
            found.append("no run observed what the provider takes: verify on a device, or where the provider runs here")
        if not self.taken_macs >= self.min_taken_macs:
            found.append(f"the provider takes {self.taken_macs:.0%} of the work, less than {self.min_taken_macs:.0%}")
        if self.max_size_bytes is not None and self.size_bytes > self.max_size_bytes:
            found.append(f"the model has {self.size_bytes} bytes, more than {self.max_size_bytes}")
        if (most := self.max_size_share) is not None and self.size_bytes > most * self.source_size_bytes:
            share = self.size_bytes / max(1, self.source_size_bytes)
            found.append(f"the model has {share:.0%} of the float model's size, more than {most:.0%}")
        for name in self.required:
            if not any(_is_named(run.device, name) for run in self.runs):
                reasons = (skip.reason for skip in self.skipped if _is_named(skip.device, name))
                reason = next(reasons, "nothing named it")
                found.append(f"device '{name}' was asked for and did not run: {reason}")
        return (*found, *self.alterations, *self.regressions)

    @property
    def evidence(self) -> Evidence | None:
        """The strongest evidence of the runs that passed, or None if no run passed."""
        return min((run.evidence for run in self.runs if run.passed), key=lambda kind: kind.rank, default=None)


def recheck_report(report: VerifyReport, thresholds: Thresholds) -> VerifyReport:
    """Returns the same facts judged by other thresholds; nothing runs again."""
    runs = tuple(msgspec.structs.replace(run, thresholds=thresholds) for run in report.runs)
    return fill(VerifyReport, thresholds, report, runs=runs)


def require_devices(report: VerifyReport, names: Sequence[str]) -> VerifyReport:
    """Returns the report in which it is a failure that one of these devices did not run.

    A name is that of a device or of a kind: "qnn-htp-sim" also matches "qnn-htp-sim:v73".
    """
    return msgspec.structs.replace(report, required=tuple(dict.fromkeys((*report.required, *names))))


def _is_named(device: str, name: str) -> bool:
    return device == name or device.startswith(f"{name}:")


_Report = TypeVar("_Report")

# A report of a thousand layers on eight devices takes some megabytes.
_MAX_REPORT_BYTES = 64 << 20


def write_report(bundle: Bundle, report: VerifyReport) -> Path:
    """Writes `verify.json` into the bundle, next to the files that the manifest covers, and returns its path.

    Raises:
        OutputError: the bundle cannot be written.
    """
    path = bundle.folder / VERIFY
    write_file(path, to_json(report).encode())
    return path


def read_report(path: Path) -> VerifyReport:
    """Returns the facts of a `verify.json`; its verdicts are not trusted but computed again.

    Raises:
        DataError: the file is missing or malformed.
    """
    return read_facts(path, VerifyReport)


def read_facts(path: Path, kind: type[_Report]) -> _Report:
    """Returns a `verify.json` as a report of the given type.

    Raises:
        DataError: the file is missing or malformed.
    """
    hint = "edgekit verify BUNDLE writes it"
    with reading(f"'{path}'", DataError, hint), open_regular(path) as file:
        data = file.read(_MAX_REPORT_BYTES + 1)
    if len(data) > _MAX_REPORT_BYTES:
        raise DataError(f"'{path}' has more than {_MAX_REPORT_BYTES} bytes", hint=hint)
    try:
        return msgspec.json.decode(data, type=ready_type(kind))
    except UNDECODABLE as error:
        raise DataError(f"'{path}' is malformed: {error}", hint=f"{hint} again") from error


def read_known(bundle: Bundle) -> VerifyReport | None:
    """Returns what an earlier verification of exactly this bundle found, or None if none can be read.

    No digest covers this file, and anybody may have written it: it is history, and no verdict may depend on it.
    """
    try:
        report = read_report(bundle.folder / VERIFY)
    except DataError:
        return None
    return report if report.bundle_sha256 == bundle.sha256 else None
