"""What package, join and sign share: which bundles they release though these did not pass, and what they say of it."""

from collections.abc import Sequence
from typing import Annotated

from edgekit.bundle.sign import TestResult
from edgekit.cli.declare import From, Option
from edgekit.cli.options import AcceptUnproven
from edgekit.cli.screen import show_line
from edgekit.jobs.release import Allowed, Doubt

AllowFailed = Annotated[bool, Option("Accept bundles that failed or were not verified; the result says so.")]


def allow_doubtful(accept_unproven: AcceptUnproven, allow_failed: AllowFailed) -> Allowed:
    """Returns which bundles may be released though they did not pass."""
    return Allowed(unproven=accept_unproven, failed=allow_failed)


Allowance = Annotated[Allowed, From(allow_doubtful)]


def show_doubts(doubts: Sequence[Doubt]) -> None:
    """Says on stderr which bundles were released although they did not pass, so that scripts' output stays as it is."""
    for doubt in doubts:
        show_line(f"allowed: bundle '{doubt.bundle}' {doubt.reason}", aside=True)


def describe_attested(result: TestResult) -> str:
    """Returns in words what the holder of a key says of the verification."""
    devices = ", ".join(dict.fromkeys(run.device for run in result.edgekit_runs))
    failed = "".join(f"; not passed: {name}" for name in result.failed_tests)
    failed += "".join(f"; not proven: {name}" for name in result.warned_tests)
    return f"its verification {result.result}" + (f" on {devices}" if devices else "") + failed
