"""Runs as a file in Chrome's trace format, which Perfetto and chrome://tracing open.

The format: "Trace Event Format", google/catapult. ONNX Runtime's own file is one too, but holds one session, the runs
that warm up, and no names for processes and threads.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from edgekit.profile.events import Execution, Step
from edgekit.profile.measure import Profiled
from edgekit.profile.nodes import count_work

_RUNS = 0


def encode_chrome(profiled: Sequence[Profiled]) -> bytes:
    """Returns the runs of profiles as a trace file: a process a profile, a thread a thread, one row for the runs.

    The sessions of a profile follow each other without the pauses between them.
    """
    events = [event for number, one in enumerate(profiled, 1) for event in _list_events(number, one)]
    facts = {"made by": "edgekit profile", "devices": ", ".join(one.profile.device for one in profiled)}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


def _list_events(process: int, one: Profiled) -> Iterator[dict[str, Any]]:
    name = f"{one.profile.subject} on {one.profile.device}"
    most = max((len(_threads(run)) for run in one.executions), default=0)
    yield {"ph": "M", "pid": process, "tid": _RUNS, "name": "process_name", "args": {"name": name}}
    yield {"ph": "M", "pid": process, "tid": _RUNS, "name": "thread_name", "args": {"name": "runs"}}
    for index in range(1, most + 1):
        yield {"ph": "M", "pid": process, "tid": index, "name": "thread_name", "args": {"name": f"thread {index}"}}
    start = 0
    for number, run in enumerate(one.executions):
        shift = start - run.start_us
        threads = _threads(run)
        yield _span(process, _RUNS, f"run {number}", "run", start, run.duration_us, {})
        for step in run.steps:
            facts = _describe(step)
            yield _span(
                process, threads[step.thread], step.op, step.name, step.start_us + shift, step.duration_us, facts
            )
        start += run.duration_us


def _threads(run: Execution) -> dict[int, int]:
    """Returns the threads of a run, numbered in the order in which they began; each session has its own."""
    return {thread: index for index, thread in enumerate(dict.fromkeys(step.thread for step in run.steps), 1)}


def _span(
    process: int, thread: int, name: str, category: str, start: int, duration: int, facts: dict[str, Any]
) -> dict[str, Any]:
    return {
        "ph": "X", "pid": process, "tid": thread, "name": name, "cat": category, "ts": start, "dur": duration,
        "args": facts,
    }  # fmt: skip


def _describe(step: Step) -> dict[str, Any]:
    return {
        "node": step.name,
        "provider": step.provider,
        "self_us": step.self_us,
        "inputs": " ".join(map(str, step.inputs)),
        "outputs": " ".join(map(str, step.outputs)),
        "macs": count_work(step),
        "bytes": step.bytes,
    }
