"""Tables and lines for a terminal: sizes, differences, packages, groups of models, quantizations; and helpers."""

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import msgspec
from rich.box import SIMPLE_HEAD
from rich.table import Table
from rich.text import Text

from edgekit.convert.ort_form import TimedFile
from edgekit.evidence import Verdict, worst_verdict
from edgekit.inspect.diff import Delta
from edgekit.inspect.inspect import SizeReport
from edgekit.package.package import PackageReport
from edgekit.quantize.accuracy.loss import MEASURES, ONE_ANSWER
from edgekit.quantize.accuracy.predict import Prediction, name_unit, wanted_samples
from edgekit.quantize.mixed_precision.plan_search import Searched, changes_many, loses_much, may_lose_much
from edgekit.quantize.mixed_precision.sensitivity import TensorError
from edgekit.quantize.plan import NarrowConstants, QuantPlan
from edgekit.quantize.ranges import TensorRange
from edgekit.report.summary import ActivationReport, QuantizeReport, TargetBuild, TrialReport
from edgekit.serialize import fill
from edgekit.verify.metrics.tensor_metrics import DB_LIMIT
from edgekit.verify.on_devices import GroupReport, GroupRun
from edgekit.verify.task_scores import describe_difference, format_score


def make_table(*columns: str, rows: Iterable[Sequence[str | Text]] = ()) -> Table:
    """Returns a table with these columns and rows; long cells wrap."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table


def format_count(count: int) -> str:
    """Returns a number in readable form, such as `1.2 M`."""
    size, unit = _scale(count, ("", "k", "M", "G", "T"))
    return f"{size:.0f}" if not unit else f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"


def format_bytes(size_bytes: int) -> str:
    """Returns a size in readable form, in decimal units."""
    size, unit = _scale(size_bytes, ("B", "kB", "MB", "GB"))
    return f"{size:.0f} {unit}" if unit in {"B", "kB"} else f"{size:.1f} {unit}"


def format_or_dash(value: float | None, form: str) -> str:
    """Returns a figure in a format such as `{:.1f} dB`, or a dash if it is None."""
    return "-" if value is None else form.format(value)


def format_sqnr(sqnr_db: float | None) -> str:
    """Returns an SQNR in dB, or "equal" if outputs differ at most in the sign of zero, or a dash if it is None."""
    return "equal" if sqnr_db is not None and sqnr_db >= DB_LIMIT else format_or_dash(sqnr_db, "{:.1f} dB")


def format_times(file: TimedFile) -> tuple[str, str, str]:
    """Returns the times to load and to run, and the ratio to another's with its 95 % interval, each "-" if unknown."""
    doubt = "" if file.interval is None else " (95 %: {:.2f} to {:.2f})".format(*file.interval)
    times = format_or_dash(file.load_ms, "{:.1f} ms"), format_or_dash(file.median_ms, "{:.3g} ms")
    return *times, format_or_dash(file.ratio, "{:.2f}") + doubt


def _scale(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    """Returns a value and the first of the units (each 1000 times the previous one) in which it is below 1000."""
    for unit in units[:-1]:
        if value < 1000:
            return value, unit
        value /= 1000
    return value, units[-1]


_MAX_ROWS = 25


def table_files(sizes: Mapping[str, int]) -> Table:
    """Returns the files of a bundle, model or package as a table, the 25 largest first; the others are one row."""
    ranked = sorted(sizes.items(), key=lambda pair: (-pair[1], pair[0]))
    shown, rest, total = ranked[:_MAX_ROWS], ranked[_MAX_ROWS:], sum(sizes.values())
    if rest:
        shown.append((f"{len(rest)} smaller files", sum(size_bytes for _, size_bytes in rest)))
    rows = [(name, f"{size_bytes:,}", _share(size_bytes, total)) for name, size_bytes in shown]
    return make_table("file", "bytes", "share", rows=[*rows, ("all", f"{total:,}", "")])


def table_layer_sizes(report: SizeReport) -> Table:
    """Returns the 25 largest layers of a model as a table; the others are one row."""
    total = sum(layer.weight_bytes for layer in report.layers) + report.other_bytes
    table = Table(f"layer of {report.model}", "operator", "weight bytes", "share", "MACs", box=SIMPLE_HEAD)
    heavy = [layer for layer in report.layers if layer.weight_bytes]
    for layer in heavy[:_MAX_ROWS]:
        macs = format_or_dash(layer.macs, "{:,}")
        table.add_row(layer.name, layer.op, f"{layer.weight_bytes:,}", _share(layer.weight_bytes, total), macs)
    if rest := heavy[_MAX_ROWS:]:
        size_bytes = sum(layer.weight_bytes for layer in rest)
        table.add_row(f"{len(rest)} more (all with --json)", "", f"{size_bytes:,}", _share(size_bytes, total), "")
    table.add_row("the graph itself", "", f"{report.other_bytes:,}", _share(report.other_bytes, total), "")
    return table


def list_changes(delta: Delta) -> Iterator[str]:
    """Yields a line for each difference, and at the end the bytes of an update."""
    yield from (f"file {file.name}: {_size(file.old_bytes, file.new_bytes)}" for file in delta.files)
    yield from (f"{fact.key}: {_move(fact.old, fact.new)}" for fact in delta.facts)
    yield from (f"placement {fact.key}: {_move(fact.old, fact.new)}" for fact in delta.placement)
    place = {None: "absent", True: "provider", False: "CPU"}
    nodes = [f"node {node.name} ({node.op}): {place[node.old]} -> {place[node.new]}" for node in delta.nodes]
    sizes = [(layer, _size(layer.old_bytes, layer.new_bytes)) for layer in delta.layers]
    layers = [f"layer {layer.name} ({_move(layer.old_op, layer.new_op)}): {size}" for layer, size in sizes]
    for lines in (nodes, layers):
        yield from lines[:_MAX_ROWS]
        if len(lines) > _MAX_ROWS:
            yield f"... and {len(lines) - _MAX_ROWS} more (all with --json)"
    for figure in delta.accuracy:
        yield f"accuracy {figure.device}, {figure.output}, {figure.measure}: {_move(figure.old, figure.new)}"
    if delta.is_same:
        yield f"the same to the byte: {delta.new_bytes:,} bytes"
        return
    update = f"an update downloads {delta.update_bytes:,} bytes"
    yield f"size: {_move(delta.old_bytes, delta.new_bytes)} bytes ({delta.new_bytes - delta.old_bytes:+,}), {update}"


def _size(old: int | None, new: int | None) -> str:
    return f"other content, {_word(old)} bytes" if old == new else f"{_move(old, new)} bytes"


def _move(old: object, new: object) -> str:
    return _word(old) if old == new else f"{_word(old)} -> {_word(new)}"


def _word(value: object) -> str:
    match value:
        case None:
            return "absent"
        case bool() | str():
            return str(value)
        case int():
            return f"{value:,}"
        case float():
            return f"{value:.6g}"
        case _:
            text = str(value)
            return text if len(text) <= 80 else f"{text[:77]}..."


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"


def list_size_remarks(report: PackageReport) -> Iterator[str]:
    """Yields the size of the package, and a warning if most of that is not the models."""
    rest = report.size_bytes - report.model_bytes
    yield f"models {format_bytes(report.model_bytes)}, all else {format_bytes(rest)}"
    if report.outweighs:
        largest, times = max(report.sizes, key=lambda name: report.sizes[name]), rest / max(1, report.model_bytes)
        yield f"warning: all else is {times:.1f} times as large as the models; the largest file is '{largest}'"


class GroupTarget(TargetBuild, frozen=True, kw_only=True):
    """A group of models for one target.

    `notes` come from the builds of the members. `shared_bytes` are weights that several members use and that the folder
    holds once. `size_bytes` are all model files that an app loads, with shared weights counted once.
    """

    size_bytes: int = 0
    shared_bytes: int = 0
    verify: GroupReport | None = None


class GroupBuild(msgspec.Struct, frozen=True, kw_only=True):
    """The result of building a group for its targets; `members` has the sha256 of each model."""

    group: str
    members: dict[str, str]
    calibration_samples: int
    golden_samples: int
    targets: tuple[GroupTarget, ...]
    seconds: float

    @property
    def verdict(self) -> Verdict:
        """The worst verdict of the targets."""
        return worst_verdict(target.verdict for target in self.targets)


def describe_group_build(report: GroupBuild) -> Iterator[str]:
    """Yields the lines of a group's build."""
    yield f"{report.group}: {', '.join(report.members)}; {report.golden_samples} samples judge the whole"
    for target in report.targets:
        if target.path is None:
            yield f"- {target.target}: {target.failure}"
            continue
        shared = f", {format_bytes(target.shared_bytes)} of them shared" if target.shared_bytes else ""
        yield f"{target.path}: {format_bytes(target.size_bytes)}{shared}: {target.verdict}"
        yield from () if target.verify is None else describe_group(target.verify)
        yield from (f"- {note}" for note in target.notes)


def headline_group(target: GroupTarget) -> str:
    """Returns the result of a group on a target in one sentence."""
    if target.path is None:
        return f"It cannot be built: {target.failure}."
    if target.verify is None or not target.verify.runs:
        return "It ran nowhere."
    shown = next((run for run in target.verify.runs if run.verdict != "pass"), target.verify.runs[0])
    failing = next((name for name, member in target.verify.members.items() if member.verdict != "pass"), None)
    member = "" if failing is None else f"; {failing} by itself: {target.verify.members[failing].verdict}"
    return f"{shown.device}: {_describe_metric(shown)}: {shown.verdict}{member}."


def describe_group(report: GroupReport) -> Iterator[str]:
    """Yields the lines of a group's verification: the whole on each device, then each member."""
    for run in report.runs:
        yield f"  {run.device} ({run.evidence}): {_describe_metric(run)}: {run.verdict}"
        yield from (f"  - {line}" for line in (*run.judgement.failures, *run.judgement.unproven))
    for name, member in report.members.items():
        yield f"  {name} by itself: {member.verdict}"
        yield from (f"  - {line}" for line in (*member.failures, *member.unproven))
        for found in member.runs:
            yield from (f"  - {found.device}: {line}" for line in (*found.failures, *found.unproven))
        yield from (f"  - {skip.device} did not run: {skip.reason}" for skip in member.skipped)


def _describe_metric(run: GroupRun) -> str:
    calls = ", ".join(f"{name} {count}" for name, count in run.runs.items())
    if run.task is None:
        return f"{run.samples} samples, runs: {calls}"
    scores = f"{format_score(run.task, run.task.got)}, float {format_score(run.task, run.task.reference)}"
    return f"{run.task.name} {scores}, {describe_difference(run.task)} points, {run.samples} samples, runs: {calls}"


# Quantizations: the parts of the report, and its lines for a terminal.


def describe_trials(searched: Searched | None, *, goal: bool) -> tuple[TrialReport, ...]:
    """Returns the trials in order; none if there is no `goal` and only one trial, which is no search."""
    if searched is None or (not goal and len(searched.trials) == 1):
        return ()
    return tuple(fill(TrialReport, trial, trial.prediction) for trial in searched.trials)


def describe_layers(
    plan: QuantPlan, seen: Mapping[str, TensorRange], errors: Sequence[TensorError]
) -> Iterator[ActivationReport]:
    """Yields the quantized activations of a plan in graph order, with their observed ranges and the loss of each."""
    ranked = {error.name: error for error in errors}
    for name in (name for name in plan.ranges if name in ranked):
        # A tensor with 16 bits has its own range.
        wide_range = plan.wide.get(name)
        planned = wide_range or plan.ranges[name]
        yield fill(
            ActivationReport,
            ranked[name],
            planned,
            tensor=name,
            bits=16 if wide_range is not None or plan.activation == "uint16" else 8,
            seen_low=seen[name].low,
            seen_high=seen[name].high,
        )


# Fewer bytes of float constants are not mentioned.
_NOTABLE_BYTES = 500
_LARGE_BYTES = 10_000
_MAX_LINES = 5


def describe_quantization(report: QuantizeReport) -> Iterator[str]:
    """Yields the lines of a quantization: size, float nodes, expected loss, trials, and warnings about the samples."""
    size = f"{report.size_before / 1e3:.0f} to {report.size_after / 1e3:.0f} kB"
    kept = f"{report.quantized_nodes} nodes are {report.precision}, {len(report.float_nodes)} stay float"
    size += f", {report.float_bytes / 1e3:.0f} kB of it float constants" if report.float_bytes >= _NOTABLE_BYTES else ""
    yield f"{report.out}: {kept}; {size}"
    reasons = Counter(node.reason for node in report.float_nodes)
    yield from (f"- {count} in float: {reason}" for reason, count in reasons.most_common(_MAX_LINES))
    if len(reasons) > _MAX_LINES:
        yield f"- {len(report.float_nodes)} in float for {len(reasons)} reasons in all: --json lists them"
    large = list_large("in float", report.float_constants)
    large += list_large("in 16 bits, which 8 bits do not hold", report.wide_constants)
    yield from (f"- {line}" for line in large)
    if report.narrow.bits:
        yield f"- {describe_narrow(report.narrow)}"
    yield f"expected: {describe_prediction(report.predicted)}"
    share = f"{report.target} takes {report.taken} of it, {100 * report.taken_macs:.1f} % of the work"
    yield share
    if report.refused:
        yield f"no session of it is expected, {report.refusal}; edgekit build leaves such nodes in float"
    if report.advice:
        missed = "no plan loses nothing" if report.max_drop is None else "no plan meets the goal"
        tests = {"much is lost": loses_much, "many decisions change": changes_many, "much may be lost": may_lose_much}
        why = next((words for words, is_so in tests.items() if is_so(report.predicted)), missed)
        yield f"{why}; {report.advice}"
    wanted, samples = wanted_samples(report.predicted), report.predicted.samples
    if wanted is not None:
        more = "only --labels would tell more" if math.isinf(wanted) else f"about {wanted:g} would do"
        yield f"{samples} samples leave more than half a point of doubt; {more}"
    yield from describe_answers(report.predicted)
    note, unit = f" {report.goal_note}" if report.goal_note else "", name_unit(report.predicted)
    if report.max_drop is not None:
        yield f"the goal of {report.max_drop:g} {unit} is {'met' if report.met else 'not met by any plan'}{note}:"
    elif report.trials:
        yield "plans that were measured:"
    for trial in report.trials:
        drop = "no classes" if trial.drop_estimate is None else f"drop {100 * trial.drop_estimate:z.2f} {unit}"
        work = f"{100 * trial.taken_macs:.1f} % of the work on the target, {100 * trial.integer_macs:.1f} % in integers"
        part = f" over {trial.samples} of {samples} samples, where it was left out" if trial.samples < samples else ""
        ratio = "" if math.isinf(trial.sqnr_db) else f", {trial.sqnr_db:.1f} dB"
        yield f"- {trial.step}: {drop}{ratio}{part}, {work}"
    for tried in report.steps:
        more = ", channels equalized" if tried.equalized else ""
        more += f", {tried.eight_bit_share:.1%} of the weights keep 8 bits" if tried.eight_bit_share else ""
        yield f"- {tried.method}, {tried.rounding}{more}: {tried.sqnr_db:.1f} dB on held-out samples"
    if report.left_out:
        yield f"the time budget ended; left out: {', '.join(report.left_out)}"
    yield from (f"left out, since it failed: {step} ({why})" for step, why in report.failed.items())
    risks = [report.float_warning] if report.float_warning else []
    yield from (f"warning: {warning}" for warning in (*risks, *report.data_warnings, *report.calibration.notes))


def list_large(how: str, sizes: Mapping[str, int]) -> list[str]:
    """Returns a line that names the large ones of constants that are stored so; no line without any."""
    large = [f"'{name}' {size / 1e3:.0f} kB" for name, size in sizes.items() if size >= _LARGE_BYTES]
    more = f" and {len(large) - _MAX_LINES} more" if len(large) > _MAX_LINES else ""
    return [f"large constants {how}: {', '.join(large[:_MAX_LINES])}{more}"] if large else []


def describe_narrow(narrow: NarrowConstants) -> str:
    """Returns in one line how many bytes fewer bits save on float constants, and what that costs."""
    counts = Counter(narrow.bits.values())
    stored = " and ".join(f"{counts[bits]} in {bits} bits" for bits in sorted(counts))
    saved = f"{narrow.saved_bytes / 1e3:.0f} kB less"
    return f"of these constants {stored}: {saved}; that alone keeps {narrow.ratio_db:.0f} dB on held-out samples"


def describe_answers(predicted: Prediction) -> Iterator[str]:
    """Yields a warning if the samples show only one answer: what leads to another may lie beyond the ranges."""
    if predicted.source == ONE_ANSWER:
        same = f"all {predicted.samples} samples have the same answer"
        yield f"warning: {same}, and ranges may cut off what leads to others: add samples that have them"


def describe_prediction(predicted: Prediction) -> str:
    """Returns a prediction in one line."""
    each = " or more in each output" if predicted.outputs else ""
    ratio = f"{predicted.sqnr_db:.1f} dB{each} over {predicted.samples} samples"
    if math.isinf(predicted.sqnr_db):
        # Whole numbers have no ratio.
        ratio = f"over {predicted.samples} samples"
        if predicted.drop_estimate is None:
            return "no output holds numbers that could be compared"
    if predicted.drop_estimate is None:
        return f"{ratio}; {predicted.source}"
    others = f"nearest neighbours among {predicted.candidates} others"
    what = "decisions" if predicted.candidates is None else others
    same = "" if predicted.top1_agreement is None else f", {100 * predicted.top1_agreement:.1f} % of {what} the same"
    known = "" if predicted.got is None else f" from {predicted.reference:.4g} to {predicted.got:.4g},"
    low, high = (100 * end for end in predicted.drop_interval or (math.nan, math.nan))
    outputs = ", ".join(f"'{name}'" for name in predicted.outputs[:_MAX_LINES])
    if predicted.measure == MEASURES["values"].name:
        lost = f"{100 * predicted.drop_estimate:z.2f} % ({low:.2f} to {high:.2f})"
        what = f"{outputs} loses most and" if outputs else "the output"
        loses = f"{what} decides nothing that is known, and its spread (R2) falls by"
        return f"{ratio}; {loses} {lost}; [outputs] of a recipe states what it is"
    ends = "too few samples for an interval" if predicted.drop_interval is None else f"{low:.2f} to {high:.2f}"
    most = f" of {outputs}, which loses most," if outputs else ""
    lost = f"{100 * predicted.drop_estimate:z.2f} {name_unit(predicted)} ({ends}; from {predicted.source})"
    return f"{ratio}{same}; {predicted.measure}{most} down{known} by {lost}"
