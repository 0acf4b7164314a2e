"""The report of a build and of a quantization: the facts, and the verdict computed from them."""

from pathlib import Path

import msgspec

from edgekit.check.report import CheckReport, Placed
from edgekit.evidence import Judged, Verdict, worst_verdict
from edgekit.forecasts.forecast import ForecastReport
from edgekit.progress import StageTime
from edgekit.quantize import Candidate
from edgekit.quantize.accuracy.predict import Prediction
from edgekit.quantize.apply import QuantizedFacts
from edgekit.quantize.calibration.calibrate import CalibrationReport
from edgekit.quantize.plan import NarrowConstants
from edgekit.serialize import NotebookPage
from edgekit.target import Form, Precision
from edgekit.verify.report import VerifyReport


class TargetBuild(Judged, msgspec.Struct, frozen=True, kw_only=True):
    """What was built for one target, of a model or of a group.

    `failure` says in one line why nothing was; `path` is then None. `notes` say what it lacks and which choices edgekit
    made.
    """

    target: str
    path: Path | None = None
    failure: str | None = None
    notes: tuple[str, ...] = ()
    verify: Judged | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether it was made and passed verification; what was not verified is not proven."""
        return "fail" if self.path is None else "not proven" if self.verify is None else self.verify.verdict


class BundleSummary(TargetBuild, frozen=True, kw_only=True):
    """The bundle of a model for one target.

    `sha256` is the digest of the manifest, which holds the digests of `files`. `size_before` and `size_after` are those
    of the original float model and of the file that an app should load, external files included. `quantized_nodes` and
    `float_nodes` count the nodes that were quantized and those that stayed float. `census` counts operators by file.
    """

    title: str
    precision: Precision | None = None
    precision_reason: str = ""
    forms: dict[Form, tuple[str, ...]] = {}
    form_reason: str = ""
    sha256: str = ""
    files: dict[str, str] = {}
    size_before: int = 0
    size_after: int = 0
    quantized_nodes: int = 0
    float_nodes: int = 0
    census: dict[str, dict[str, int]] = {}
    check: CheckReport | None = None
    verify: VerifyReport | None = None

    @property
    def placed(self) -> Placed | None:
        """The placement of the nodes: as a device reported it, else as predicted; None if neither is known."""
        seen = None if self.verify is None else self.verify.placed
        return seen or (None if self.check is None else self.check.placed)


class BuildReport(Judged, NotebookPage, msgspec.Struct, frozen=True, kw_only=True):
    """The report of a build for all its targets.

    `fixes` counts the nodes that each automatic rewrite changed in the float model. `peak_rss_bytes` is the peak of
    this process plus that of its largest child process. `data_warnings` lists what looks wrong with the samples,
    `fixed_axes` the axes that the export fixed although no target needs that. `verified` is True if verification was
    asked for. `forecast` is for the phones that the recipe names. `stages` are the parts of `seconds`, in order.
    """

    model: str
    sha256: str
    verified: bool
    calibration_samples: int
    data_warnings: tuple[str, ...] = ()
    fixed_axes: tuple[str, ...] = ()
    golden_samples: int
    fixes: dict[str, int]
    bundles: tuple[BundleSummary, ...]
    seconds: float
    stages: tuple[StageTime, ...] = ()
    peak_rss_bytes: int
    versions: dict[str, str]
    report: Path
    forecast: ForecastReport | None = None

    @property
    def verdict(self) -> Verdict:
        """Whether all bundles were made and passed any verification asked for, and the forecast keeps its limit."""
        goal: Verdict = "pass" if self.forecast is None else self.forecast.verdict
        if not self.verified:
            return worst_verdict(("fail" if any(bundle.path is None for bundle in self.bundles) else "pass", goal))
        return worst_verdict((*(bundle.verdict for bundle in self.bundles), goal))


class TrialReport(msgspec.Struct, frozen=True, kw_only=True):
    """One plan of a search: its name (`step`), the expected drop, and the share of the work that the target takes.

    `integer_macs` is the share of the work that is done in integers. `samples` is the number of samples that the plan
    was measured on: fewer than all if these showed that it is clearly worse than another plan.
    """

    step: str
    samples: int
    drop_estimate: float | None
    sqnr_db: float
    taken_macs: float
    integer_macs: float = 1.0


class ActivationReport(msgspec.Struct, frozen=True, kw_only=True):
    """An activation of a quantized model: the operator that computes it, its bits, its planned and its observed range.

    `sqnr_db` is the SQNR of the outputs when it alone is quantized, None if that was not measured.
    """

    tensor: str
    op: str
    bits: int
    low: float
    high: float
    seen_low: float
    seen_high: float
    sqnr_db: float | None

    @property
    def clips(self) -> bool:
        """True if observed values lie outside the range by more than a hundredth of it."""
        # A grid of 8 bits has steps of 1/255 of its range: a hundredth is two or three of them, more than rounding.
        margin = (self.high - self.low) / 100
        return self.seen_low < self.low - margin or self.seen_high > self.high + margin


class QuantizeReport(NotebookPage, QuantizedFacts, msgspec.Struct, frozen=True, kw_only=True):
    """A model quantized for a target, which nodes stayed float and why, and what was tried, best first.

    `fixes` counts the nodes that each automatic rewrite changed before. `narrow` are the constants of float nodes that
    are stored in 8 or 16 bits. `predicted` is the expected loss. `trials` are those of a search, in order;
    `max_drop` is its goal in points. `met` says whether the chosen trial reaches it, None if no goal was set;
    `goal_note` says what that judgement leaves out. `advice` says what would lose less, if more than 2 points are
    lost. `float_warning` names a tensor that stays float although its values overflow half precision, in which the
    target computes floats. `taken` is the part of the file that the target takes by its rules, `taken_macs` its
    share of the work; `refused` says that no session is expected to start, `refusal` why. `layers` are the
    quantized activations in graph order, if they were asked for. `left_out` lists the steps for which the time
    budget was too short; `failed` gives by step why other steps were left out.
    """

    model: str
    out: Path
    target: str
    precision: Precision
    samples: int
    data_warnings: tuple[str, ...]
    calibration: CalibrationReport
    fixes: dict[str, int]
    narrow: NarrowConstants = NarrowConstants()
    predicted: Prediction
    taken: str = ""
    taken_macs: float = 1.0
    refused: bool = False
    refusal: str = ""
    steps: tuple[Candidate, ...]
    trials: tuple[TrialReport, ...]
    max_drop: float | None
    met: bool | None
    goal_note: str
    advice: str = ""
    float_warning: str = ""
    layers: tuple[ActivationReport, ...]
    left_out: tuple[str, ...] = ()
    failed: dict[str, str] = {}
    seconds: float
    peak_rss_bytes: int

    @property
    def float_bytes(self) -> int:
        """The bytes of the constants that stay float."""
        return sum(self.float_constants.values())
