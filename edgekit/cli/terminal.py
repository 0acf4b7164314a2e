"""What a command shows: the result on stdout, progress on stderr."""

from collections.abc import Sequence
from pathlib import Path

from edgekit.bench.report import BenchReport
from edgekit.bundle.statement import TestResult
from edgekit.cli.screen import print_table, show_json, show_line, show_lines, showing_progress
from edgekit.convert.equality import Equality
from edgekit.convert.ort_format.report import OrtFileReport
from edgekit.devices.device import DeviceStatus
from edgekit.devices.packages import CoreMlFiles
from edgekit.devices.self_test import SelfTest
from edgekit.inspect.diff import Delta
from edgekit.inspect.inspect import OnnxReport
from edgekit.inspect.sizes import SizeReport
from edgekit.jobs.convert import ConvertReport
from edgekit.jobs.prepare import PrepareReport
from edgekit.jobs.release import Doubt
from edgekit.report import changes, text
from edgekit.report.summary import BuildReport
from edgekit.report.tables import format_bytes
from edgekit.report.timing.bench_text import list_bench_remarks, table_bench
from edgekit.target import Form, Target
from edgekit.verify.facts import Located
from edgekit.verify.layers.outliers import judge_layers
from edgekit.verify.report import VerifyReport
from edgekit.verify.two_models import ModelComparison

__all__ = ["print_table", "show_json", "show_line", "show_lines", "showing_progress"]
"""What commands import from here though it is made elsewhere."""

# Operators whose fate tells nothing by itself.
_PLUMBING = frozenset({"QuantizeLinear", "DequantizeLinear", "Constant"})


def show_build(report: BuildReport) -> None:
    """Prints a build: the table, what must be known, and where the report is."""
    print_table(text.table_build(report))
    for remark in text.list_remarks(report):
        show_line(f"- {remark}")
    show_line(f"report: {report.report}")


def show_doubts(doubts: Sequence[Doubt]) -> None:
    """Says on stderr which bundles were released although they did not pass, so that scripts' output stays as it is."""
    for doubt in doubts:
        show_line(f"allowed: bundle '{doubt.bundle}' {doubt.reason}", aside=True)


def describe_attested(result: TestResult) -> str:
    """Returns in words what the holder of a key says of the verification."""
    devices = ", ".join(dict.fromkeys(run.device for run in result.edgekit_runs))
    failed = "".join(f"; not passed: {name}" for name in result.failed_tests)
    failed += "".join(f"; not proven: {name}" for name in result.warned_tests)
    return f"its verification {result.result}" + (f" on {devices}" if devices else "") + failed


def show_verify(report: VerifyReport) -> None:
    """Prints a verification: the table, each failure, each device that was skipped."""
    print_table(text.table_verify(report))
    if report.comparison:
        print_table(text.table_device_figures(report))
    for remark in text.list_verify_remarks(report):
        show_line(f"- {remark}")
    show_line(f"{report.bundle}: {report.verdict}")


def show_bench(report: BenchReport) -> None:
    """Prints times: the table, each comparison, and what the times are worth."""
    if report.runs or report.skipped:
        print_table(table_bench(report))
    for remark in list_bench_remarks(report):
        show_line(f"- {remark}")


def show_self_test(test: SelfTest) -> None:
    """Prints what was tried on a device."""
    print_table(text.table_self_test(test))
    if test.skipped is not None:
        show_line(f"- not tried: {test.skipped}" + (f"; to run it: {test.command}" if test.command else ""))
    show_line(f"{test.device}: {'pass' if test.passed else 'fail'}")


def show_targets(targets: Sequence[Target]) -> None:
    """Prints targets as a table."""
    print_table(text.table_targets(targets))


def show_target(target: Target) -> None:
    """Prints one target with its parameters."""
    show_line(f"{target.name}: {target.title}\n{target.precision}: {target.precision_reason}")
    print_table(text.table_parameters(target))


def show_devices(statuses: Sequence[DeviceStatus]) -> None:
    """Prints devices as a table."""
    print_table(text.table_devices(statuses))


def show_comparison(report: ModelComparison) -> None:
    """Prints how far two models lie apart, and where that begins."""
    for theirs, mine in report.renamed.items():
        show_line(f"taken for '{mine}' by its place: '{theirs}'")
    print_table(text.table_outputs(report))
    for line in text.list_task(report.task, report.task_limit):
        show_line(line)
    if report.layers:
        print_table(text.table_layers(report.layers))
        show_line(f"first bad layer: {report.first_bad_layer or 'none'}")
        for line in judge_layers(report.layers):
            show_line(f"- {line}")
    if report.failure is not None:
        show_line(f"the device failed: {report.failure}")
    if report.located is not None:
        show_located(report.located, str(report.device))


def show_located(found: Located, device: str) -> None:
    """Prints the layers of a model as a device computes them, and the first that it computes otherwise."""
    if found.layers:
        show_line(f"on {device} against this machine, each layer fed as it was there:")
        print_table(text.table_layers(found.layers))
    first, *notes = text.list_located(found)
    show_line(f"{device}: {first}")
    show_lines([f"- {note}" for note in notes])


def show_prepared(report: PrepareReport, out: Path) -> None:
    """Prints what became of a model that was prepared, and what an app still does to its images."""
    show_line(f"{out}: {report.model.node_count} nodes, opset {report.model.opsets.get('ai.onnx')}")
    for spec in (*report.model.inputs, *report.model.outputs) if report.is_refaced else ():
        show_line(f"- {spec}")
    for fix in report.fixes:
        show_line(f"- {fix.id}: {len(fix.nodes)} nodes")
    if report.gain is not None:
        for when, share in (("before", report.gain.before), ("after", report.gain.after)):
            taken = f"{share.taken}/{share.nodes} nodes, {share.taken_macs:.0%} of MACs"
            show_line(f"{when}: {report.gain.target}: {share.verdict}; {taken} in {share.partitions} partitions")
    if report.preprocess is not None:
        left = report.preprocess
        show_line(f"an app gives {left.color} images of {left.size[0]} x {left.size[1]} as uint8, not normalised")


def show_conversion(report: ConvertReport) -> None:
    """Prints the files of a conversion, why these, and what is known of each."""
    for form in report.files:
        _show_form(report, form)
    if report.fusion is not None:
        fused = ", ".join(f"{count} {op}" for op, count in report.fusion.fused.items())
        nodes = f"{report.fusion.nodes_before} nodes became {report.fusion.nodes_after}"
        show_line(f"fused: {fused}; {nodes}; {describe_equality(report.fusion.equality)}")
    if report.weights is not None:
        sizes = f"{format_bytes(report.weights.size_before)} -> {format_bytes(report.weights.size_after)}"
        show_line(f"{report.weights.form}: the weights of {len(report.weights.changed)} nodes, {sizes}")
        for note in report.weights.notes:
            show_line(f"- {note}")
    if report.quantized:
        show_line(f"quantized already ({report.quantized}): taken as it is")
    if report.coreml is not None:
        _show_coreml(report.coreml, report.out)
    if report.compatibility:
        show_line(f"compatibility: {report.compatibility}")
    show_line(f"why: {report.reason}")


def _show_form(report: ConvertReport, form: Form) -> None:
    names = report.files[form]
    size = format_bytes(sum(report.size_bytes[name] for name in names))
    show_line(f"{form}: {' + '.join(str(report.out / name) for name in names)}, {size}")
    for fate in report.fates.get(form, ()):
        # Only what changed: operators that all became themselves tell nothing.
        if fate.op not in _PLUMBING and fate.became != {fate.op: fate.count}:
            show_line(f"  {fate.sentence}")
    for node in report.unfused.get(form, ()):
        show_line(f"  '{node.name}' ({node.op}) keeps a float {node.activation}")
    if form in report.equality:
        show_line(f"  {describe_equality(report.equality[form])}")
    for trait in report.host_traits.get(form, ()):
        show_line(f"  other bytes on another kind of CPU: {trait}")


def _show_coreml(files: CoreMlFiles, out: Path) -> None:
    for package in files.packages:
        operations = ", ".join(f"{count} {kind}" for kind, count in package.operations.items()) or "a neural network"
        show_line(f"Core ML: {out / package.name}, {format_bytes(package.size_bytes)}: {operations}")
    if files.cache is not None:
        where, size = out / files.cache.folder, format_bytes(files.cache.size_bytes)
        show_line(f"Core ML's cache: {where}, {size}, key {files.cache.key}")
        releases = ", ".join(map(str, files.cache.releases))
        show_line(f"  the same partitions on iOS {releases}; what it saves on a phone was not measured")


def describe_equality(found: Equality) -> str:
    """Returns in words how a file compares with its source."""
    if found.skipped:
        return f"not compared with its source: {found.skipped}"
    if found.bit_equal:
        return f"bit-equal to its source on {found.samples} samples"
    return f"error {found.error:.1g} of {found.tolerance:g} allowed against its source on {found.samples} samples"


def show_contents(report: OnnxReport | OrtFileReport) -> None:
    """Prints what a model contains."""
    print_table(text.table_contents(report))


def show_sizes(report: SizeReport) -> None:
    """Prints where the bytes of a bundle or model are."""
    print_table(changes.table_files(report))
    if report.layers:
        print_table(changes.table_layer_sizes(report))


def show_delta(delta: Delta) -> None:
    """Prints what is different between two versions, a line each."""
    show_lines(changes.list_changes(delta))
