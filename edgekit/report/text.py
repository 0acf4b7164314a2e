"""Reports as tables for a terminal, and the headline of each: the verdict and the reason for it."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import cast

from rich.table import Table
from rich.text import Text

from edgekit.check.report import count_of
from edgekit.convert.ort_format.report import OrtFileReport
from edgekit.data.data_check import ALIKE
from edgekit.evidence import Evidence, Verdict
from edgekit.inspect.inspect import OnnxReport
from edgekit.report.checked import describe_disagreement, describe_taken
from edgekit.report.summary import BuildReport, BundleSummary
from edgekit.report.tables import format_bytes, format_count, format_or_dash, make_table
from edgekit.report.timing import describe_forecast
from edgekit.serialize import to_builtins
from edgekit.verify.layers.comparison import LayerReport, Located, explain_layers
from edgekit.verify.metrics.outputs import OutputReport, weigh_output
from edgekit.verify.report import VerifyReport
from edgekit.verify.run_report import RunReport
from edgekit.verify.task_scores import TaskReport, describe_accuracy, describe_difference, format_score
from edgekit.verify.two_models import ModelComparison, limit_ratio

_GOOD, _BAD, _UNKNOWN = "green", "red", "yellow"
# Further reasons of one run are only counted.
_MAX_LINES = 6
# Two lines of a terminal; the message of an exception may be much longer.
_MAX_REASON = 240
_COLORS: Mapping[Verdict, str] = {"pass": _GOOD, "fail": _BAD, "not proven": _UNKNOWN}


def table_build(report: BuildReport) -> Table:
    """Returns a build as a table: a row for each target."""
    table = make_table("target", "precision", "nodes taken", "parts", "size", "agreement", "evidence", "result")
    for bundle in report.bundles:
        result = color_verdict(bundle.verdict)
        if bundle.path is None:
            result = Text("no bundle", _BAD)
        elif bundle.verify is None or not bundle.verify.runs:
            result = Text("not verified" if bundle.verify is None else "nothing ran", _UNKNOWN)
        parts = "-" if bundle.placed is None else f"{bundle.placed.partitions}, {bundle.placed.evidence}"
        judged = (describe_size(bundle), describe_agreement(bundle.verify), describe_evidence(bundle.verify), result)
        table.add_row(bundle.target, bundle.precision or "-", describe_taken(bundle.placed), parts, *judged)
    return table


def list_remarks(report: BuildReport) -> list[str]:
    """Returns the remarks on each target (failures, skipped devices, decisions), then those on the samples."""
    fixes = [f"rewritten before the check: {name} ({count_of(count, 'node')})" for name, count in report.fixes.items()]
    remarks = group_lines((bundle.target, remark) for bundle in report.bundles for remark in describe_remarks(bundle))
    axes = [f"fixed axis: {line}" for line in report.fixed_axes]
    forecast = [] if report.forecast is None else [describe_forecast(report.forecast)]
    return [*forecast, *remarks, *(f"samples: {warning}" for warning in report.data_warnings), *axes, *fixes]


def group_lines(lines: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Yields each distinct line once, after the names that it applies to: "nnapi, xnnpack: ..."."""
    names: dict[str, dict[str, None]] = {}
    for name, line in lines:
        names.setdefault(line, {})[name] = None
    yield from (f"{', '.join(each)}: {line}" for line, each in names.items())


def describe_remarks(bundle: BundleSummary) -> Iterator[str]:
    """Yields what a user must know about a bundle, worst first."""
    if bundle.failure is not None:
        yield bundle.failure
    if bundle.verify is not None:
        yield from list_verify_remarks(bundle.verify)
    yield from bundle.notes


def list_verify_remarks(report: VerifyReport) -> Iterator[str]:
    """Yields a line for each failure, remark on a run, and skipped device with the command that installs it."""
    yield from report.failures
    yield from (line for line in report.unproven if line != report.chance)
    placed = report.placed
    if placed is not None and (found := placed.disagreements):
        predicted = placed.taken + sum(each.predicted for each in found) - sum(each.observed for each in found)
        first = f"{found[0].op} '{found[0].name}' {describe_disagreement(found[0])}"
        first += f", and {len(found) - 1} more" if len(found) > 1 else ""
        taken = f"{placed.taken} of {placed.nodes} nodes are taken in {count_of(placed.partitions, 'piece')}"
        yield f"{placed.device}: {taken}, {predicted} were predicted: {first}"
    yield from group_lines((run.device, line) for run in report.runs for line in _list_run_remarks(run))
    yield from explain_layers(report.layers)
    yield from report.notes
    yield from map(str, report.skipped)


def _list_run_remarks(run: RunReport) -> Iterator[str]:
    yield from list_task(run.task)
    yield from _shorten(run.failures)
    yield from (f"not proven: {line}" for line in _shorten(run.unproven))
    yield from run.notes
    state = run.state
    if state and (names := [each.output for each in state.drift if each not in state.read]):
        yield f"state is judged by what it does to the other outputs: {', '.join(map(repr, names))}"
    for drift in state.read if state else ():
        first, last, lost = drift.fed_back[0], drift.fed_back[-1], drift.lost_db
        if state and first is not None and last is not None and lost is not None:
            ran = f"{count_of(state.sequences, 'sequence')} of {state.steps} steps with its own state"
            ends = f"output '{drift.output}' has {first:.1f} dB at the first step and {last:.1f} dB at the last"
            yield f"{ran}: {ends}; its second half has {lost:.1f} dB less than with the float model's state"
    if run.sizes:
        # The worst SQNR for each size, against the float model run at the samples' own lengths.
        worst = ((size, _describe_worst(size.outputs)) for size in run.sizes.sizes)
        sizes = ", ".join(f"{size.size} ({count_of(len(size.lengths), 'sample')}{ratio})" for size, ratio in worst)
        yield f"each sample compared with the float model at its own '{run.sizes.dim}': {sizes}"
    for file in (file for file in run.files if file.failure is None):
        nodes = ", ".join(f"{count_of(count, 'node')} on {provider}" for provider, count in file.provider_nodes.items())
        yield f"'{file.file}' opens too: {nodes or 'nodes unknown'}{_describe_worst(file.outputs)}"
    # If no layer explains the failure, the failure's own text says so.
    if run.located and (run.located.layer or not run.failures):
        yield from list_located(run.located)


def _shorten(lines: Sequence[str]) -> Iterator[str]:
    """Yields the first lines and the number of the others."""
    yield from lines[:_MAX_LINES]
    if len(lines) > _MAX_LINES:
        yield f"and {len(lines) - _MAX_LINES} more reasons of this kind: --json lists them"


def _describe_worst(outputs: Iterable[OutputReport]) -> str:
    worst = min((output.sqnr_db for output in outputs if output.sqnr_db is not None), default=None)
    return "" if worst is None else f", {worst:.1f} dB"


def table_verify(report: VerifyReport) -> Table:
    """Returns a verification as a table: a row for each output of each run."""
    table = make_table("device", "evidence", "output", "cosine", "SQNR", "agreement", "ms", "result")
    if is_labelled := any(run.accuracy is not None for run in report.runs):
        table.add_column("accuracy: float -> here, points", overflow="fold")
    for run in report.runs:
        for output in run.outputs:
            own = run.accuracy if run.accuracy is not None and run.accuracy.output == output.name else None
            accuracy = (describe_accuracy(own) if own else "-",) if is_labelled else ()
            name = f"{output.name} (state)" if output.is_state else output.name
            values = (output.cosine, output.sqnr_db, output.agreed, run.latency_ms.median if run.latency_ms else None)
            figures = map(format_or_dash, values, ("{:.5f}", "{:.1f} dB", "{:.1%}", "{:.1f}"))
            table.add_row(run.device, run.evidence.value, name, *figures, color_verdict(run.verdict), *accuracy)
        if not run.outputs:
            table.add_row(run.device, run.evidence.value, *("-" for _ in range(5)), color_verdict(run.verdict))
    for skip in report.skipped:
        table.add_row(skip.device, "-", "-", "-", "-", "-", "-", Text("skipped", _UNKNOWN))
    return table


def list_task(task: TaskReport | None) -> Iterator[str]:
    """Yields a metric of the task on both sides, and the difference with its interval, in one line."""
    if task is not None:
        count = f"{task.samples} of {task.labelled}" if task.is_partial else f"{task.samples}"
        got = f"{format_score(task, task.reference)} on the float model, {format_score(task, task.got)} here"
        line = f"{task.name} on {count} labelled samples: {got}, {describe_difference(task)} points at 95 %"
        same = f"; the device ran {task.ran} of them, and scores these as the bundle's own model does on this machine"
        yield line + (same if task.ran else "")


def find_worst(run: RunReport) -> tuple[float | None, float | None]:
    """Returns the lowest SQNR and the lowest agreement of the outputs that are no state."""
    judged = [output for output in run.outputs if not output.is_state]
    figures = ([output.sqnr_db for output in judged], [output.agreed for output in judged])
    sqnr_db, agreed = (min((value for value in side if value is not None), default=None) for side in figures)
    return sqnr_db, agreed


def name_twins(report: VerifyReport) -> list[str]:
    """Returns for each run the first device before it whose outputs were the same to the bit, "" without one."""
    first = {run.outputs_sha256: run.device for run in reversed(report.runs) if run.outputs_sha256}
    names = [first.get(run.outputs_sha256, run.device) for run in report.runs]
    return ["" if name == run.device else name for name, run in zip(names, report.runs, strict=True)]


def table_device_figures(report: VerifyReport) -> Table:
    """Returns the devices of a verification side by side: a row for each device."""
    columns = ("device", "SQNR", "agreement", "accuracy", "median", "p95", "p99", "nodes", "memory", "outputs")
    table = make_table(*columns)
    for run, twin in zip(report.runs, name_twins(report), strict=True):
        (sqnr_db, agreed), accuracy = find_worst(run), None if run.accuracy is None else run.accuracy.got
        shares = (format_or_dash(share, "{:.1%}") for share in (agreed, accuracy))
        times = (getattr(run.latency_ms, name, None) for name in ("median", "p95", "p99"))
        nodes = f"{run.provider_nodes.get(run.provider, 0)}/{sum(run.provider_nodes.values())}"
        costs = (nodes, format_bytes(run.peak_rss_bytes), f"as {twin}" if twin else "own")
        shown_times = (format_or_dash(time, "{:.2f} ms") for time in times)
        table.add_row(run.device, format_or_dash(sqnr_db, "{:.1f} dB"), *shares, *shown_times, *costs)
    return table


def table_contents(report: OnnxReport | OrtFileReport) -> Table:
    """Returns the contents of a model as a table: a row for each fact."""
    table = make_table("", "")
    table.show_header = False
    # From the data of --json, so that the table has the same facts in the same order.
    for name, value in to_builtins(report).items():
        shown = "yes" if value is True else "no" if value is False else value
        if name in {"inputs", "outputs", "fixed_axes"}:
            shown = "\n".join(str(spec) for spec in getattr(report, name))
        elif name == "weight_bytes":
            shown = ", ".join(f"{kind} {format_bytes(size)}" for kind, size in value.items())
        elif isinstance(shown, dict):
            shown = ", ".join(f"{key} {item}" for key, item in cast("dict[str, object]", shown).items())
        elif name.endswith("_bytes") or name == "size":
            shown = format_bytes(value)
        elif name in {"macs", "parameters"}:
            shown = format_count(value)
        elif isinstance(shown, list):
            shown = ", ".join(map(str, cast("list[object]", shown)))
        if name == "counted_at" and shown:
            shown = f"{shown}: assumed, and given by --dim NAME=INT"
        if name == "unsized_nodes" and shown:
            # The graph computes these sizes.
            shown = f"{shown}: each dimension without a number counts as one; edgekit prepare computes them"
        table.add_row(name.replace("_", " "), "-" if shown is None else str(shown) or "-")
    return table


def table_outputs(report: ModelComparison) -> Table:
    """Returns a comparison of two models as a table: a row for each output."""
    table = make_table("output", "cosine", "SQNR", "max error", "top-1", "equal", "remark")
    for output in report.outputs:
        values, forms = (output.cosine, output.sqnr_db, output.max_abs), ("{:.5f}", "{:.1f} dB", "{:.4g}")
        shares = (format_or_dash(share, "{:.1%}") for share in (output.top1_agreement, output.exact_match))
        remark = output.mismatch or (f"{output.non_finite} values are not finite" if output.non_finite else "")
        table.add_row(output.name, *map(format_or_dash, values, forms), *shares, remark)
    return table


def judge_output(output: OutputReport, min_sqnr_db: float | None = None) -> Verdict:
    """Returns the verdict of `edgekit compare` on an output."""
    return weigh_output(output, limit_ratio(min_sqnr_db)).verdict


def list_comparison_remarks(report: ModelComparison, min_sqnr_db: float | None = None) -> Iterator[str]:
    """Yields why two models differ, how their tensors were matched, the metric, and the first bad layer."""
    found = report.weigh(min_sqnr_db)
    yield from found.failures
    yield from (f"not proven: {line}" for line in found.unproven)
    yield from (f"compared with '{mine}' by its position: '{theirs}'" for theirs, mine in report.renamed.items())
    yield from list_task(report.task)
    yield from explain_layers(report.layers)


def table_layers(layers: Sequence[LayerReport]) -> Table:
    """Returns layers as a table: the accumulated error, and the error of each layer alone on correct inputs."""
    table = make_table("layer", "op", "SQNR so far", "own SQNR", "max error")
    for layer in layers:
        ratios = (format_or_dash(ratio, "{:.1f} dB") for ratio in (layer.sqnr_db, layer.own_sqnr_db))
        table.add_row(layer.name, layer.op, *ratios, format_or_dash(layer.max_abs, "{:.4g}"))
    return table


def list_located(found: Located) -> Iterator[str]:
    """Yields the first layer whose result is wrong on a device, how it was found, and what the device did otherwise."""
    how = count_of(found.cuts, "cut") if found.found_by == "cuts" else count_of(len(found.layers), "layer")
    yield f"first bad layer: {found.layer or 'none'} ({count_of(found.runs, 'run')}, {how})"
    yield from found.notes


def describe_size(bundle: BundleSummary) -> str:
    """Returns the size before and after."""
    return f"{format_bytes(bundle.size_before)} -> {format_bytes(bundle.size_after)}" if bundle.size_after else "-"


def describe_agreement(verify: VerifyReport | None) -> str:
    """Returns the lowest agreement with the float model over all runs: of detections, of top-1, and the SQNR in dB.

    Outputs of runs over whole sequences, in which a model gets its own state, count too; state itself does not.
    """
    runs = () if verify is None else verify.runs
    outputs = [output for run in runs for output in run.outputs if not output.is_state]
    outputs += [output for run in runs if run.state is not None for output in run.state.outputs]
    detections = [each.share for output in outputs for each in output.agreements if each.of == "detections"]
    other_outputs = [output for output in outputs if not any(each.of == "detections" for each in output.agreements)]
    top1 = [output.agreed for output in other_outputs if output.agreed is not None]
    sqnr = [output.sqnr_db for output in other_outputs if output.sqnr_db is not None]
    parts = [f"{min(detections):.1%} of detections"] if detections else []
    parts += [f"{min(top1):.1%} agree"] if top1 else []
    parts += [f"{min(sqnr):.1f} dB"] if sqnr else []
    return ", ".join(parts) or "-"


def describe_evidence(verify: VerifyReport | None) -> str:
    """Returns the kinds of evidence among the runs, the best first."""
    if verify is None or not verify.runs:
        return "none"
    # The members of Evidence are declared from the best to the weakest.
    kinds = [(kind.value, run.device) for kind in Evidence for run in verify.runs if run.evidence is kind]
    return ", ".join(dict.fromkeys(kind if kind == device else f"{kind} ({device})" for kind, device in kinds))


def color_verdict(verdict: Verdict) -> Text:
    """Returns a verdict in its colour."""
    return Text(verdict, _COLORS[verdict])


def headline_verify(report: VerifyReport) -> str:
    """Returns whether a bundle agrees with the float model and on which devices, or the first reason why not."""
    if not report.runs:
        skip = next(iter(report.skipped), None)
        return "Nothing ran" + (f": {skip.device}: {skip.reason}." if skip else ".")
    if report.passed:
        devices = ", ".join(run.device for run in report.runs)
        return f"It does what the float model does on {devices}: at worst {describe_agreement(report)}."
    verdict = "It fails" if report.verdict == "fail" else "It is not proven"
    return f"{verdict}: {_find_reason(report)}.{_find_next(report)}"


def headline_build(report: BuildReport) -> str:
    """Returns how many targets have a bundle that passed, and why the first of the others did not."""
    count = len(report.bundles)
    passed = [bundle for bundle in report.bundles if bundle.path is not None and (bundle.passed or not report.verified)]
    headline = f"{len(passed)} of {count} {'bundle' if count == 1 else 'bundles'}"
    if not report.verified:
        headline += " made, none verified"
    elif passed:
        headline += " do what the float model does" if len(passed) > 1 else " does what the float model does"
    else:
        headline = "The bundle does not pass" if count == 1 else f"None of {count} bundles passes"
    if (not_passed := next((bundle for bundle in report.bundles if bundle not in passed), None)) is None:
        return f"{headline}." if report.verified else f"{headline}. Next: edgekit verify BUNDLE."
    is_unproven = not_passed.verdict == "not proven"
    if is_unproven and count == 1:
        headline = "The bundle is not proven"
    step = "" if not_passed.verify is None or not_passed.failure is not None else _find_next(not_passed.verify)
    # A higher precision does not help if calibration saw other inputs than the app's.
    data_warning = next((warning for warning in report.data_warnings if warning.endswith(ALIKE)), None)
    step = f" Next: {data_warning}." if step and data_warning and not is_unproven else step
    if not_passed.failure is not None:
        reason = _quote(not_passed.failure)
    elif not_passed.verify is None or not not_passed.verify.runs:
        reason = "not verified" if not_passed.verify is None else "nothing ran"
    else:
        reason = ("not proven: " if is_unproven and count > 1 else "") + _find_reason(not_passed.verify)
    return f"{headline}; {not_passed.target}: {reason}.{step}"


_NEXT: Mapping[str, str] = {
    "run": "edgekit devices test {device} says whether the device works at all",
    "output": "edgekit compare SOURCE MODEL --data DATA --layers names the layer; --precision int16 or fp16 loses less",
    "metric": "calibrate with more data like yours, or build with --precision int16 or fp16",
    "placement": "edgekit check MODEL --target {target} says why a node is left to the CPU",
    "costs": "edgekit bench BUNDLE --against OTHER compares both on a quiet device",
}
"""What to do about a run that does not pass, by its first gate that fails."""


def _find_reason(report: VerifyReport) -> str:
    """Returns the first reason why a bundle does not pass, with its explanation."""
    failing = next((run for run in report.runs if run.failures), None)
    if not report.failures and failing is not None:
        cause = "".join(f"; {line}" for line in failing.explanations[:1])
        return f"{failing.device}: {_quote(failing.failures[0])}{cause}"
    unproven = (*report.unproven, *(f"{run.device}: {line}" for run in report.runs for line in run.unproven))
    return _quote(next(iter((*report.failures, *unproven)), "no reason is known"))


def _find_next(report: VerifyReport) -> str:
    """Returns the next step as a sentence, "" if the reason names it already or none is known."""
    run = next((run for run in report.runs if run.failures), None)
    if not report.failures and run is None and report.unproven:
        absent = next((skip for skip in report.skipped if skip.command), None)
        return "" if absent is None else f" Next: {absent.command}, so that {absent.device} runs it."
    if report.failures or run is None:
        return ""
    gate = next(gate.name for gate in run.gates if gate.failures)
    step = _NEXT.get(gate, "").format(device=run.device, target=report.target)
    step = report.advice if gate == "output" and report.advice else step
    return f" Next: {step}." if step else ""


def _quote(reason: str) -> str:
    """Returns a reason without ONNX Runtime's error codes, cut to the length that a headline may have."""
    cleaned = re.sub(r"\[ONNXRuntimeError\] : \d+ : \w+ : ", "ONNX Runtime says: ", " ".join(reason.split()))
    return (cleaned if len(cleaned) <= _MAX_REASON else f"{cleaned[:_MAX_REASON]}...").rstrip(".")
