"""What each optimization level makes of a graph: the nodes that are left, and those that ONNX Runtime fused."""

from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

from edgekit._ort import CPU_PROVIDER, Level, SessionSettings, optimize_graph
from edgekit.devices.device import Job
from edgekit.errors import EdgekitError
from edgekit.model.model import load_model, read_proto
from edgekit.tune.report import LevelRow, TriedSetting

# A level is written to be counted: gigabytes of weights are not written five times for that.
_MOST_BYTES = 500_000_000


def list_levels(job: Job, tried: Mapping[Level, TriedSetting], work: Path) -> Iterator[LevelRow]:
    """Yields a row for each level that was measured; nodes are those that the CPU provider of this machine runs."""
    work.mkdir()
    for level, found in tried.items():
        nodes, fused = _count(job, level, work / f"{level.value}.onnx")
        yield LevelRow(
            level=level.value,
            nodes=nodes,
            fused=fused,
            load_ms=None if found.fault else found.load_ms,
            median_ms=None if found.fault else found.median_ms,
        )


def _count(job: Job, level: Level, out: Path) -> tuple[int | None, dict[str, int]]:
    small = job.model.suffix == ".onnx" and job.model.stat().st_size < _MOST_BYTES
    if job.target.provider != CPU_PROVIDER or not small:
        return None, {}
    try:
        optimize_graph(job.model, out, SessionSettings(level=level, config=dict(job.target.session.config)))
        nodes = read_proto(load_model(out), weights=False).graph.node
    except EdgekitError:
        return None, {}
    fused = Counter(node.op_type for node in nodes if node.domain not in {"", "ai.onnx", "ai.onnx.ml"})
    return len(nodes), dict(sorted(fused.items()))
