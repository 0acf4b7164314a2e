"""Profiles a subject on devices, and compares two profiles."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from edgekit._files import work_folder
from edgekit.bench.blocks import Effort, compare_on
from edgekit.bench.latency import Ratio
from edgekit.bench.subject import Opening, open_subject
from edgekit.devices.device import find_present
from edgekit.devices.parallel import run_each
from edgekit.devices.register import DeviceChoice, choose_devices
from edgekit.profile.causes import find_causes, pair_layers
from edgekit.profile.measure import Profiled, ProfileOptions, profile_subject
from edgekit.profile.nodes import count_work
from edgekit.profile.report import LayerPair, ProfileComparison, ProfileReport
from edgekit.progress import Progress


class ProfileRun(msgspec.Struct, frozen=True, kw_only=True):
    """A report, and the profiles that it was made from."""

    report: ProfileReport
    profiled: tuple[Profiled, ...]


def profile_on(
    path: Path,
    choice: DeviceChoice,
    options: ProfileOptions,
    opening: Opening,
    *,
    against: Path | None,
    progress: Progress,
) -> ProfileRun:
    """Profiles a bundle or a model on devices.

    With `against` the other one is profiled on the first device too, and the two are compared. Profiles of two devices
    are compared as well. A failure of a device is reported in its profile.

    Raises:
        EdgekitError: the bundle, the model, the data, the target or the name of a device is wrong.
    """
    with work_folder() as work:
        subject = open_subject(path, work / "a", opening)
        other = None if against is None else open_subject(against, work / "b", opening)
        devices = choose_devices(choice, subject.target_for, default=(subject.default_device,))
        present, skipped = find_present(devices)
        found = run_each(present, lambda device: profile_subject(subject, device, options, progress), timed=True)
        ratio = None
        if other is not None and present:
            found = (found[0], profile_subject(other, present[0], options, progress))
            seconds = min(options.limit_s, Effort().seconds)
            effort = Effort(runs=options.runs, seconds=seconds, threads=options.threads)
            ratio = compare_on(subject, other, present[0], effort, progress).ratio
    report = ProfileReport(
        profiles=tuple(one.profile for one in found),
        comparison=_compare(found, ratio) if len(found) == 2 else None,
        skipped=skipped,
        notes=subject.notes,
    )
    return ProfileRun(report=report, profiled=found)


def _compare(found: Sequence[Profiled], ratio: Ratio | None) -> ProfileComparison | None:
    """Returns the comparison of two profiles, None if one of them failed."""
    a, b = found
    first, second = a.profile, b.profile
    if first.failure is not None or second.failure is not None:
        return None
    pairs: tuple[LayerPair, ...] = ()
    if a.graph is not None and b.graph is not None:
        pairs = pair_layers(first.nodes, a.graph, second.nodes, b.graph)
    # On one device interleaved rounds decide; two devices have only the medians of their separate profiles.
    is_a_slower = ratio.value < 1 if ratio is not None else first.plain_ms > second.plain_ms
    is_known = ratio is None or ratio.verdict != "no difference can be told"
    whole = [any(node.integers and node.macs for node in one.profile.nodes) for one in (a, b)]
    if not is_known and whole[0] != whole[1]:
        # Integers that bring no gain need an explanation too.
        is_a_slower = whole[0]
    slow, fast = (a, b) if is_a_slower else (b, a)
    causes = find_causes(slow.profile, fast.profile, slow.graph, pairs, slow_is_a=is_a_slower)
    one_device = first.device == second.device
    return ProfileComparison(
        a=first.subject if one_device else f"{first.subject} on {first.device}",
        b=second.subject if one_device else f"{second.subject} on {second.device}",
        a_ms=first.plain_ms,
        b_ms=second.plain_ms,
        ratio=ratio,
        slower=("a" if is_a_slower else "b") if is_known else "",
        pairs=pairs,
        causes=causes if is_known or whole[0] != whole[1] else (),
    )


# Writes runs as a file in Chrome's trace format, which Perfetto and chrome://tracing open.
#
# The format: "Trace Event Format", google/catapult. ONNX Runtime's own file is one too, but holds one session, the runs
# that warm up, and no names for processes and threads.

_RUNS = 0


def encode_chrome(profiled: Sequence[Profiled]) -> bytes:
    """Returns the runs of profiles as a trace file: a process for each profile, a thread for each thread and the runs.

    The sessions of a profile follow each other without the pauses between them.
    """
    events = [event for number, one in enumerate(profiled, 1) for event in _list_events(number, one)]
    facts = {"made by": "edgekit profile", "devices": ", ".join(one.profile.device for one in profiled)}
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": facts})


def _list_events(process: int, one: Profiled) -> Iterator[dict[str, Any]]:
    name = f"{one.profile.subject} on {one.profile.device}"
    yield {"ph": "M", "pid": process, "tid": _RUNS, "name": "process_name", "args": {"name": name}}
    # The threads of each run, numbered in the order in which they began; each session has its own.
    threads = [
        {thread: index for index, thread in enumerate(dict.fromkeys(step.thread for step in run.steps), 1)}
        for run in one.executions
    ]
    for index in range(max(map(len, threads), default=0) + 1):
        label = f"thread {index}" if index != _RUNS else "runs"
        yield {"ph": "M", "pid": process, "tid": index, "name": "thread_name", "args": {"name": label}}
    start = 0
    for number, (run, numbers) in enumerate(zip(one.executions, threads, strict=True)):
        spans = [(_RUNS, f"run {number}", "run", start, run.duration_us, dict[str, Any]())]
        for step in run.steps:
            facts = {
                "node": step.name,
                "provider": step.provider,
                "self_us": step.self_us,
                "inputs": " ".join(map(str, step.inputs)),
                "outputs": " ".join(map(str, step.outputs)),
                "macs": count_work(step),
                "bytes": step.bytes,
            }
            begin = step.start_us + start - run.start_us
            spans.append((numbers[step.thread], step.op, step.name, begin, step.duration_us, facts))
        for thread, title, category, begin, duration, facts in spans:
            yield {
                "ph": "X", "pid": process, "tid": thread, "name": title, "cat": category, "ts": begin,
                "dur": duration, "args": facts,
            }  # fmt: skip
        start += run.duration_us
