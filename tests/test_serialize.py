"""JSON of a report has its fields and its public properties."""

import json
from pathlib import Path

import msgspec

from edgekit.evidence import Evidence
from edgekit.serialize import to_builtins, to_json


class _Report(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    value: float
    path: Path
    evidence: Evidence

    @property
    def passed(self) -> bool:
        return self.value > 0


def test_properties_enums_paths_and_infinities() -> None:
    report = _Report(name="a", value=float("inf"), path=Path("x/y"), evidence=Evidence.SAME_EP)
    assert to_builtins((report,)) == [
        {"name": "a", "value": None, "path": "x/y", "evidence": "same-ep", "passed": True},
    ]
    assert json.loads(to_json(report))["passed"] is True


def test_evidence_is_ordered() -> None:
    assert Evidence.DEVICE.is_at_least(Evidence.SIMULATOR)
    assert not Evidence.PREDICTED.is_at_least(Evidence.EMULATED)
    assert all(kind.meaning for kind in Evidence)
