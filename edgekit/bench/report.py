"""The report of a benchmark: times, their confidence intervals, and how far they can be trusted."""

import msgspec

from edgekit.bench.latency import Ratio
from edgekit.devices.device import SkippedDevice
from edgekit.evidence import Evidence


class BenchRun(msgspec.Struct, frozen=True, kw_only=True):
    """The times of one subject on one device, in milliseconds per run.

    `provider` is the target's, or the CPU provider if the target's took no node; `provider_nodes` counts the nodes of
    each. `interval_ms` is the 95 % confidence interval of the median. A run takes `batch` samples, `concurrency` runs
    are made at once, and `throughput_per_s` counts samples. With a `queue`, such as "200/s, 5 ms", times are those from
    a request to its answer: requests arrive at 200/s, and a batch of at most `batch` requests starts when the oldest
    has waited 5 ms, or with "full" only when the batch is full. `load_ms` and `first_ms` are the cold start: the time
    to make the session, and its first run. `warmup` runs were left out before the times were steady. `model_bytes` is
    the size of all loaded files. `threads` and `inter_threads` of 0 mean that ONNX Runtime chose; the latter matter
    only if nodes ran in `parallel`. `energy_mj` is the energy per sample in millijoules of all processor packages,
    including other programs, if the system reports it. `warnings` say why the figures are less reliable than they look.
    The figures are 0 if `failure` says that the device failed.
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
        """How nodes are executed, in words; "" for sequential execution."""
        return "" if not self.parallel else f"parallel, {self.inter_threads or 'ORT chooses how many'} at once"


class Comparison(msgspec.Struct, frozen=True, kw_only=True):
    """How the other subject (B) compares with the subject (A) on one device, in interleaved rounds.

    `ratio` is None if the comparison failed; `failure` says why.
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

    `regressions` say what is slower than in the last recorded benchmark by more than was allowed.
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
        """True if something ran, nothing failed, and nothing is slower than allowed."""
        failures = [*(run.failure for run in self.runs), *(found.failure for found in self.comparisons)]
        return bool(failures) and all(failure is None for failure in failures) and not self.regressions
