"""What every test shares: hypothesis profiles, and CI's rule that nothing may be skipped which can run there."""

import os
import signal
from collections.abc import Generator
from pathlib import Path

import hypothesis
import pytest
from tiny_models import parse_model

hypothesis.settings.register_profile("quick", max_examples=25, deadline=None, derandomize=True)
hypothesis.settings.register_profile("fuzz", max_examples=5000, deadline=None)
hypothesis.settings.load_profile("quick")

# A shell that starts us with &, or nohup, would have all that we start ignore what is sent to it.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

CANNOT_RUN_IN_CI = ("needs a Mac", "needs ../shared/zoo", "needs a user who is not root")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item,  # noqa: ARG001 - pytest's signature
    call: pytest.CallInfo[None],  # noqa: ARG001
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turns a skip into a failure where CI is set, unless its reason is one that CI cannot mend."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else str(report.longrepr)
        if not any(word in reason for word in CANNOT_RUN_IN_CI):
            report.outcome = "failed"
            report.longrepr = f"skipped in CI, where it can run: {reason}"
    return report


@pytest.fixture
def relu_model(tmp_path: Path) -> Path:
    """A model with one input `x` float32[1,3] and one output `y`."""
    return parse_model(
        '<ir_version: 8, opset_import: ["" : 17]> g (float[1,3] x) => (float[1,3] y) { y = Relu(x) }',
        tmp_path / "relu.onnx",
    )
