"""Corrupts one layer of a deployed model, and asks whether `verify` notices and names the layer.

    python tools/bench/seeded_faults.py [MODEL]... [--layers 3] [--forms int8,fp16,fp32] [--kinds all|promised]
                                        [--state DIR]

For each model, each kind of fault and some layers there are three questions. Does `compare_layers`, which explains and
decides nothing, name the layer? Do the target's limits say no if 15 % of the first classes change, which is more than
any limit allows? On a device that returns only outputs, does bisection name the layer in at most 2 log2(N) runs? A
clean model must pass. A fault that changes no output by more than -60 dB and is not named does not count, because
nobody could notice it.

Bisection is tried for the promised kinds of fault in integers.
"""

import argparse
import functools
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path

import msgspec
import numpy as np
import onnx
from fault_subjects import (
    Seeded,
    Subject,
    deploy,
    listed,
    open_held_out,
    open_zoo,
    put_fault,
    run_all,
    seed_faults,
    view_graph,
)
from held_out_models import MODELS
from layer_faults import FAULTS, HELD_OUT, Fault, find_weight
from other_faults import OTHERS
from row_state import resume_rows
from zoo_tasks import TASKS

from edgekit._ort import CpuSession, Level, SessionSettings
from edgekit.check.check import check_model
from edgekit.data.samples import Samples, limit_samples, select_samples, spread_indices
from edgekit.devices.device import Device, DeviceRun, Job, PlacedNode
from edgekit.errors import RuntimeRefusal
from edgekit.evidence import Evidence, join_judgements
from edgekit.graph.graph import read_graph
from edgekit.model.model import Model, load_model
from edgekit.model.tensors import Tensors
from edgekit.quantize.accuracy.output_kinds import read_output_kinds
from edgekit.target import Target
from edgekit.verify.layers.comparison import LAYER_SAMPLES, compare_layers, find_first_bad
from edgekit.verify.layers.on_device import locate_on_device
from edgekit.verify.metrics.compare import compare_outputs
from edgekit.verify.metrics.outputs import weigh_output

KINDS: Mapping[str, Mapping[str, Fault]] = {"promised": FAULTS, "all": {**FAULTS, **HELD_OUT, **OTHERS}}
_LEAST = {"layer": 0.95, "gate": 1.0, "bisection": 0.95, "clean": 1.0}
_UNNOTICEABLE_DB = 60.0


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """The answer to a question about a kind of fault, right or wrong, with the message."""

    question: str
    kind: str
    right: bool
    words: str


class Miscomputing(Device, frozen=True, kw_only=True):
    """A device that returns only outputs, and has the fault whenever the layer is part of what it runs."""

    fault: Seeded
    name: str = "miscomputing"
    evidence: Evidence = Evidence.EMULATED

    def run_job(self, job: Job, work: Path) -> DeviceRun:
        """Runs the samples on the model with the fault."""
        proto = onnx.load(str(job.model))
        if any(node.name == self.fault.layer for node in proto.graph.node):
            put_fault(proto, self.fault, KINDS["all"][self.fault.kind])
        onnx.save(proto, str(work / "faulty.onnx"))
        session = CpuSession(work / "faulty.onnx", SessionSettings(level=Level.DISABLED))
        rows = [session.run(sample) for sample in job.samples]
        return DeviceRun(
            device=self.name, evidence=self.evidence, outputs=listed(rows), placement=tuple[PlacedNode, ...](),
            placement_source="predicted", load_ms=1.0, latency_ms=tuple(1.0 for _ in rows), peak_rss_bytes=1,
            versions={}, failure=None,
        )  # fmt: skip


def count_changed(clean: Sequence[Tensors], got: Sequence[Tensors]) -> float:
    """Returns the share of samples whose first class changes, in the first output."""
    name = next(iter(clean[0]))
    changed = [
        not np.isfinite(now[name]).all() or int(now[name].argmax()) != int(before[name].argmax())
        for before, now in zip(clean, got, strict=True)
    ]
    return sum(changed) / len(changed)


def judge(
    subject: Subject, reference: Sequence[Tensors], got: Sequence[Tensors], target: Target, *, doubts: bool = False
) -> list[str]:
    """Returns the findings by the target's limits about the outputs, with `doubts` also why nothing is proven."""
    readings = read_output_kinds(read_graph(subject.prepared), reference[:16], {})
    reports = compare_outputs(listed(reference), listed(got), readings)
    whole = join_judgements(weigh_output(report, target.thresholds) for report in reports)
    return [*whole.failures, *(whole.unproven if doubts else ())]


def names_layer(found: str | None, fault: Seeded, proto: onnx.ModelProto) -> bool:
    """Returns True if the report names the layer, the node that the fault added to it, or one that shares its weight.

    If two outputs are exchanged, either of their layers is right.
    """
    if found is None:
        return False
    if fault.kind == "outputs swapped":
        return True
    proto = view_graph(proto, fault.graph)
    mine = find_weight(proto, fault.layer)
    other = find_weight(proto, found)
    is_shared = mine is not None and other is not None and mine[1].name == other[1].name
    return is_shared or found.removesuffix(".seeded") == fault.layer


def measure_model(name: str, form: str, kinds: str, layers: int) -> Iterator[Answer]:
    """Yields the answers about a model in a form, if it has this form."""
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder)
        subject = open_held_out(name, work) if name in MODELS else open_zoo(name, work)
        if form in subject.forms:
            yield from measure_form(subject, form, KINDS[kinds], layers, work)


def measure_form(subject: Subject, form: str, faults: Mapping[str, Fault], layers: int, work: Path) -> Iterator[Answer]:
    """Yields the answers about a model in a form."""
    clean, target = deploy(subject, form, work)
    few = select_samples(subject.judge, spread_indices(subject.judge.count, LAYER_SAMPLES))
    reference, right = run_all(subject.prepared, subject.judge), run_all(clean, subject.judge)
    said = judge(subject, reference, right, target)
    known = f"{subject.name} {form}"
    yield Answer(question="clean", kind="none", right=not said, words=f"{known}: {' / '.join(said)}")
    for fault, proto in seed_faults(clean, faults, layers):
        words = f"{known}: {fault.kind} in {fault.layer}"
        onnx.save(proto, str(work / "broken.onnx"))
        broken = load_model(work / "broken.onnx")
        try:
            got = run_all(broken, subject.judge)
        except RuntimeRefusal:
            continue
        named = find_first_bad(compare_layers(subject.prepared, broken, few))
        moved = measure_move(right, got)
        if moved < _UNNOTICEABLE_DB or named is not None:
            is_named = named is not None and names_layer(named.name, fault, proto)
            text = f"{words}: names {named and named.name} ({moved:.0f} dB)"
            yield Answer(question="layer", kind=fault.kind, right=is_named, words=text)
        changed = count_changed(right, got)
        if changed >= 0.15 and subject.name != "superres_core_224":
            noticed = bool(judge(subject, reference, got, target, doubts=True))
            text = f"{words}: {changed:.0%} of the classes change ({moved:.0f} dB)"
            yield Answer(question="gate", kind=fault.kind, right=noticed, words=text)
        if form == "int8" and fault.kind in FAULTS:
            yield from bisect(clean, target, fault, subject.judge, words)


def measure_move(right: Sequence[Tensors], got: Sequence[Tensors]) -> float:
    """Returns the least SQNR of an output with the fault relative to the clean one; -200 if it is not finite."""
    reports = compare_outputs(listed(right), listed(got))
    return min((-200.0 if item.sqnr_db is None else item.sqnr_db for item in reports), default=-200.0)


def bisect(clean: Model, target: Target, fault: Seeded, samples: Samples, words: str) -> Iterator[Answer]:
    """Yields whether the fault of a device that returns only outputs is found in time, if its outputs show it."""
    job = Job(
        model=clean.path, target=target, precision="int8", outputs=clean.outputs, check=check_model(clean, target),
        samples=limit_samples(samples, 2),
    )  # fmt: skip
    with tempfile.TemporaryDirectory() as folder:
        located = locate_on_device(Miscomputing(fault=fault), job, Path(folder))
    if located.layer is not None:
        enough = located.runs <= 2 * math.log2(max(4, located.cuts))
        told = f"{words}: names {located.layer} in {located.runs} runs of {located.cuts} cuts"
        right = enough and names_layer(located.layer, fault, onnx.load(str(clean.path)))
        yield Answer(question="bisection", kind=fault.kind, right=right, words=told)


def print_table(title: str, rows: Mapping[str, Sequence[Answer]]) -> None:
    """Prints the number of right answers, with a row for each key and a column for each question."""
    width = max(len(key) for key in (title, *rows))
    print(f"{title:<{width}}  " + "  ".join(f"{question:>9}" for question in _LEAST))
    for key, answers in rows.items():
        cells = [[answer.right for answer in answers if answer.question == question] for question in _LEAST]
        texts = (f"{sum(cell)}/{len(cell)}" if cell else "-" for cell in cells)
        print(f"{key:<{width}}  " + "  ".join(f"{text:>9}" for text in texts))


def print_all(state: Mapping[str, Sequence[Answer]]) -> int:
    """Prints all answers by model and form, and the wrong ones; returns 1 if a share is below the promise."""
    every = [answer for answers in state.values() for answer in answers]
    print_table("model and form", state)
    kinds = dict.fromkeys(answer.kind for answer in every)
    print_table("kind of fault", {kind: [answer for answer in every if answer.kind == kind] for kind in kinds})
    print_table("", {"promised kinds": [answer for answer in every if answer.kind in FAULTS], "all": every})
    for answer in every:
        if not answer.right:
            print(f"wrong ({answer.question}) {answer.words}")
    shares = {}
    for question in _LEAST:
        rights = [answer.right for answer in every if answer.question == question]
        shares[question] = sum(rights) / max(1, len(rights)) if rights else 1.0
    print({question: f"{share:.1%}" for question, share in shares.items()})
    return int(any(shares[question] < least for question, least in _LEAST.items()))


def main() -> int:
    """Prints the shares and the wrong answers; returns 1 if a share is below what the project promises."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=(*TASKS, "ultraface_rfb320", *MODELS))
    parser.add_argument("--layers", type=int, default=3)
    parser.add_argument("--forms", default="int8,fp16,fp32")
    parser.add_argument("--kinds", choices=KINDS, default="all")
    parser.add_argument("--state", type=Path)
    options = parser.parse_args()
    state: dict[str, list[Answer]] = {}
    for name, form in product(options.models, options.forms.split(",")):
        key = f"seeded_faults {name} {form} {options.kinds} {options.layers}"
        make = functools.partial(measure_model, name, form, options.kinds, options.layers)
        found = list(resume_rows(options.state, key, Answer, make))
        if found:
            state[f"{name} {form}"] = found
            print_table("", {f"{name} {form}": found})
            wrong = (f"  wrong ({answer.question}) {answer.words}" for answer in found if not answer.right)
            print(*wrong, sep="\n", flush=True)
    return print_all(state)


if __name__ == "__main__":
    sys.exit(main())
