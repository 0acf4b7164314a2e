import platform
import resource
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from edgekit.devices.far import ort_runner
from edgekit.machine import describe_machine, own_peak_bytes, peak_bytes


def test_it_says_what_figures_depend_on_and_names_no_host() -> None:
    found = describe_machine()
    assert found["machine"] == platform.machine()
    assert int(found["cores"]) >= 1
    assert found["cpu"]
    assert socket.gethostname() not in found.values()


@pytest.mark.parametrize(("system", "unit"), [("linux", 1024), ("darwin", 1)])
def test_the_peak_of_memory_has_the_unit_of_the_system(monkeypatch: pytest.MonkeyPatch, system: str, unit: int) -> None:
    monkeypatch.setattr(sys, "platform", system)
    assert peak_bytes(SimpleNamespace(ru_maxrss=5000)) == 5000 * unit
    assert own_peak_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    monkeypatch.setattr(ort_runner, "_STATUS", Path("/nowhere"))
    assert ort_runner._peak_rss_bytes() == resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def test_a_child_is_counted_with_its_parent() -> None:
    assert own_peak_bytes(with_child=True) >= own_peak_bytes() > 1 << 20
