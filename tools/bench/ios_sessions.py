"""Opens sessions of ONNX Runtime's library for the iOS simulator on generated models, and counts how they end.

    python tools/bench/ios_sessions.py [--sessions N] [--first SEED] [--computed EVERY] [--set NAME=VALUE]

Each session is a process of its own. Of every EVERY-th model one sample is computed too, and held against this
machine's CPU provider without optimisation, whose integers may differ. There a Reciprocal that Core ML takes is written
as ONNX Runtime's builder writes it, 1 / (x + 0.0001): near zero that is another function, and no error of edgekit's.
Printed are how many sessions were made, computed, refused (with the words), ended by a signal or out of time, apart
from those that check refuses too; the largest memory of a session; and by how much this process grew. It returns 1 if
one hung or ended by a signal that check did not foretell, if memory grew by more than a GB, or if what was computed
lies below 40 dB.
"""

import argparse
import itertools
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import msgspec
import numpy as np
import onnx
from onnx import numpy_helper

sys.path.insert(0, str(Path(__file__).parents[1]))
from placement_models import write_models

from edgekit._files import work_folder
from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.devices.device import DeviceRun, Job
from edgekit.devices.ios.ios import IosSimulator
from edgekit.devices.observe import draw_samples
from edgekit.graph.rewrite import set_nodes
from edgekit.machine import peak_bytes
from edgekit.model.model import Model, load_model, read_proto, save_proto
from edgekit.target import Target, load_target
from edgekit.verify.metrics.compare import compare_outputs

_TIMEOUT_S = 60.0
_LEAST_DB = 40.0
_MOST_GROWTH = 1 << 30
# What the builder writes as the epsilon of an `inverse`; Core ML itself has the same by default.
_EPSILON = 1e-4


def main() -> int:
    """Prints the counts; returns 1 if one of the promises above is broken."""
    options = _parse_options()
    target = load_target("coreml", dict(pair.split("=", 1) for pair in options.set))
    ends: Counter[str] = Counter()
    far: list[str] = []
    largest, begun, grown = 0, time.monotonic(), 0
    with tempfile.TemporaryDirectory() as models:
        # ONNX Runtime itself refuses some.
        paths = write_models(["generated"], Path(models), range(options.first, options.first + 2 * options.sessions))
        for index, path in enumerate(itertools.islice(paths, options.sessions)):
            model = load_model(path)
            job = _make_job(model, target, computed=index % options.computed == 0)
            with work_folder() as work:
                run = IosSimulator().run_job(job, work)
                far += [f"{path.name}: {line}" for line in _compare(model, job, run, work)]
            largest = max(largest, run.peak_rss_bytes)
            ends[_describe_end(run, foretold=job.check.is_refused)] += 1
            # The first sessions load modules; only what comes after them is growth.
            grown = _own_peak() if index == 20 else grown
    return _report(ends, far, largest, _own_peak() - grown, time.monotonic() - begun)


def _parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=1000)
    parser.add_argument("--first", type=int, default=1000, help="the first seed; the rules were corrected with 0 to 59")
    parser.add_argument("--computed", type=int, default=4, metavar="EVERY")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    return parser.parse_args()


def _make_job(model: Model, target: Target, *, computed: bool) -> Job:
    return Job(
        model=model.path,
        target=target,
        precision="fp32",
        outputs=model.outputs,
        check=check_model(model, target),
        samples=draw_samples(model, int(computed)),
        timeout_s=_TIMEOUT_S,
    )


def _describe_end(run: DeviceRun, *, foretold: bool) -> str:
    if run.failure is None:
        return "computed" if run.outputs.count else "made"
    words = run.failure
    if foretold:
        return f"refused by check too: {words[:120]}"
    if "SIG" in words:
        return f"SIGNAL: {words[:120]}"
    return f"HUNG: {words[:120]}" if "time" in words and "ran out" in words else f"refused: {words[:120]}"


def _compare(model: Model, job: Job, run: DeviceRun, work: Path) -> list[str]:
    if run.failure is not None or not run.outputs.count:
        return []
    shifted = _shift_reciprocals(model, job, work / "shifted.onnx")
    session = CpuSession(shifted, SessionSettings(level=Level.DISABLED))
    wanted = [session.run(sample) for sample in job.samples]
    reports = compare_outputs(msgspec.structs.replace(job.samples, read=lambda: iter(wanted)), run.outputs)
    below = [output for output in reports if output.sqnr_db is not None and output.sqnr_db < _LEAST_DB]
    return [f"output '{output.name}' lies at {output.sqnr_db:.1f} dB" for output in below]


def _shift_reciprocals(model: Model, job: Job, out: Path) -> Path:
    """Returns a copy of the model in which each Reciprocal that Core ML takes reads its input plus the epsilon."""
    proto = read_proto(model)
    taken = {node.name for node in job.check.node_list if node.taken and node.op == "Reciprocal"}
    proto.graph.initializer.append(numpy_helper.from_array(np.array(_EPSILON, np.float32), "epsilon"))
    nodes = list[onnx.NodeProto]()
    for node in proto.graph.node:
        if node.name in taken:
            shifted = f"{node.input[0]}_beside_{node.name}"
            nodes.append(onnx.helper.make_node("Add", [node.input[0], "epsilon"], [shifted], shifted))
            node.input[0] = shifted
        nodes.append(node)
    set_nodes(proto.graph, nodes)
    return save_proto(proto, out).path


def _own_peak() -> int:
    return peak_bytes(resource.getrusage(resource.RUSAGE_SELF))


def _report(ends: Counter[str], far: list[str], largest: int, grown: int, elapsed_s: float) -> int:
    for end, count in ends.most_common():
        print(f"{count:5d} {end}")
    for line in far:
        print(line)
    print(f"{ends.total()} sessions in {elapsed_s:.0f} s; the largest took {largest / 1e6:.0f} MB;", end=" ")
    print(f"this process grew by {grown / 1e6:.0f} MB; {len(far)} outputs below {_LEAST_DB:g} dB")
    broken = any(end.startswith(("SIGNAL", "HUNG")) for end in ends)
    return int(broken or grown > _MOST_GROWTH or bool(far))


if __name__ == "__main__":
    sys.exit(main())
