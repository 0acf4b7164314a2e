"""What a benchmark found: times, how sure they are, and what they are worth."""

import msgspec

from edgekit.bench.latency import Ratio
from edgekit.devices.device import SkippedDevice
from edgekit.evidence import Evidence


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one subject on one device, in milliseconds for one run.

    `provider` is the target's, or the CPU's where that took no node; `provider_nodes` counts the nodes of each.
    `interval_ms` holds the median with 95 % confidence. A run takes `batch` samples, `concurrency` runs are made at
    once, and `throughput_per_s` counts the samples of all. With a `queue`, such as
    "200/s, 5 ms", times are those from a request to its answer; at most `batch` were run at once, when the first had
    waited so long, or when they were "full". `load_ms` and `first_ms` are the cold start: making the
    session, and its first run; `warmup` runs were left out until the times were steady. `model_bytes` counts the files
    that were loaded. `threads` and `inter_threads` of 0 mean that ONNX Runtime chose; the latter count where nodes ran
    in `parallel`. `energy_mj` are the millijoules a sample that all packages of the processor used, whoever ran on
    them, where the system tells. `warnings` say why the figures are worth less than they look. The figures are 0 where
    `failure` says that the device failed.
    """

    device: str
    evidence: Evidence
    provider: str
    provider_nodes: dict[str, int] = {}
    batch: int = 1
    concurrency: int = 1
    io_binding: bool = False
    queue: str = ""
    median_ms: float = 0.0
    mean_ms: float = 0.0
    p90_ms: float = 0.0
    p95_ms: float = 0.0
    p99_ms: float = 0.0
    min_ms: float = 0.0
    max_ms: float = 0.0
    std_ms: float = 0.0
    interval_ms: tuple[float, float] = (0.0, 0.0)
    throughput_per_s: float = 0.0
    load_ms: float = 0.0
    first_ms: float = 0.0
    peak_rss_bytes: int = 0
    model_bytes: int = 0
    energy_mj: float | None = None
    warmup: int = 0
    iterations: int = 0
    threads: int = 0
    inter_threads: int = 0
    parallel: bool = False
    versions: dict[str, str] = {}
    warnings: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def execution(self) -> str:
        """How nodes are executed, in words; "" where one follows the other."""
        return "" if not self.parallel else f"parallel, {self.inter_threads or 'ORT chooses how many'} at once"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How the other subject (B) compares with the subject (A) on one device, in interleaved rounds.

    `ratio` is None where `failure` says that there is none.
    """

    device: str
    evidence: Evidence
    a: str
    b: str
    a_median_ms: float = 0.0
    b_median_ms: float = 0.0
    ratio: Ratio | None = None
    failure: str | None = None


class BenchReport(msgspec.Struct, frozen=True, kw_only=True):
    """The times of a subject on several devices, in the order in which they were asked for.

    `regressions` say what is slower than in the last recorded benchmark, beyond what was allowed.
    """

    subject: str
    runs: tuple[BenchRun, ...] = ()
    skipped: tuple[SkippedDevice, ...] = ()
    against: str | None = None
    comparisons: tuple[Comparison, ...] = ()
    notes: tuple[str, ...] = ()
    regressions: tuple[str, ...] = ()

    @property
    def succeeded(self) -> bool:
        """True if something ran, nothing failed, and nothing is slower than was allowed."""
        failures = [*(run.failure for run in self.runs), *(found.failure for found in self.comparisons)]
        return bool(failures) and all(failure is None for failure in failures) and not self.regressions
