"""Recommends which of the checked targets to use, in which file form and precision.

The opinion of ONNX Runtime's own mobile usability checker is reported too.
"""

import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import msgspec

from edgekit._ort import CPU_PROVIDER
from edgekit._proc import run_process
from edgekit.check.macs import count_macs, count_unsized
from edgekit.check.report import VERDICTS, CheckReport, PlacedNodes, Verdict, count_of
from edgekit.check.rules.rulebook import load_rules
from edgekit.evidence import Evidence
from edgekit.graph.constants import ML_DOMAIN
from edgekit.graph.graph import Graph
from edgekit.model.model import find_integer_ops
from edgekit.serialize import ready_type
from edgekit.target import INTEGERS, Form, Precision, Target


class Recommendation(msgspec.Struct, frozen=True, kw_only=True):
    """The target to use, the form of the file and the precision to build, and the reasons, the most important first.

    `target` is None if no target is worth using; then the CPU is. `rest` names the other targets, the best first.
    `loss` says what the precision makes worse than floats do, "" if nothing.
    """

    target: str | None
    style: Form | None = None
    precision: Precision | None = None
    reasons: tuple[str, ...]
    rest: tuple[str, ...] = ()
    loss: str = ""


def recommend_target(
    reports: Mapping[str, CheckReport],
    targets: Mapping[str, Target],
    refused: Collection[str] = (),
    floats: Mapping[str, str] = MappingProxyType({}),
) -> Recommendation:
    """Returns what to use: ordered by verdict, share of work taken, fewest crossings, and strength of evidence.

    ONNX Runtime's CPU provider takes every model, so a CPU target is recommended only if no accelerator is worth using.
    `refused` names targets whose vendor's own code made no session; these are not recommended, whatever the rules say.
    `floats` says for each target why integers gain nothing there.
    """
    fit = [name for name, report in reports.items() if report.verdict != "no" and name not in refused]
    # The CPU takes everything in one partition, and would win every comparison of shares.
    cpus = {name for name, target in targets.items() if target.provider == CPU_PROVIDER}
    usable = [name for name in fit if name not in cpus] or fit
    if not usable:
        # Such as numbers for open dimensions, without which some providers take nothing.
        gains = [(report, advice) for report in reports.values() for advice in report.advice]
        gains = [(report, advice) for report, advice in gains if advice.fix == "automatic"]
        helps = any(2 * (report.taken + advice.gain_nodes) >= report.nodes for report, advice in gains)
        what = "follow the automatic advice, and check again" if helps else "use the CPU"
        if any(reports[name].is_refused for name in cpus & reports.keys()):
            what = "the CPU refuses it too, so follow the advice, and check again"
        # What the rules would take, and the real provider did not.
        failed = [name for name, report in reports.items() if report.verdict != "no" and name in refused]
        words = [f"{name} made no session when it was asked" for name in failed]
        if len(failed) < len(reports):
            words.append(f"each{' other' * bool(failed)} refuses the model or takes less than half of its work")
        return Recommendation(target=None, reasons=("; ".join([*words, what]),), rest=tuple(reports))
    name = max(usable, key=lambda at: rank_report(reports[at]))
    best, target = reports[name], targets.get(name)
    others = [other for other in reports if other != name]
    rest = tuple(sorted(others, key=lambda at: rank_report(reports[at]), reverse=True))
    reasons = [f"{name}: {best.verdict}, {describe_share(best)}"]
    reasons += [
        f"{other} refused the model when it was asked"
        if other in refused
        else f"{other}: {reports[other].verdict}, {describe_share(reports[other])}"
        for other in rest
    ]
    if target is None:
        return Recommendation(target=name, reasons=tuple(reasons), rest=rest)
    is_quantized = any(node.is_quantizer for node in best.node_list)
    precision: Precision = "int8" if is_quantized else target.precision
    why = "the model is quantized already" if is_quantized else target.precision_reason
    if name in floats and "fp32" in target.precisions:
        precision, why = "fp32", floats[name]
    style = target.conversion.forms[0]
    reasons += [f"{precision}: {why}", f"{style}: {target.conversion.reason}"]
    return Recommendation(target=name, style=style, precision=precision, reasons=tuple(reasons), rest=rest)


def rank_report(report: CheckReport) -> tuple[int, float, float, int, int]:
    """Returns the sort key of reports; more is better."""
    # From the most important to the least: verdict, work, memory traffic, copies, and strength of evidence.
    verdict = VERDICTS.index(report.verdict)
    evidence = list(Evidence).index(Evidence(report.evidence))
    return verdict, report.taken_macs, report.taken_bytes, -report.crossings, -evidence


def describe_share(report: CheckReport) -> str:
    """Returns in one line how much of the work a target takes, and in how many partitions."""
    return (
        f"{report.taken_macs:.0%} of the MACs and {report.taken_bytes:.0%} of the activation bytes in"
        f" {count_of(report.partitions, 'partition')}; {report.crossings} values ({report.crossing_bytes} bytes) cross"
    )


_PROGRAM = Path(__file__).parent / "standalone" / "ort_usability.py"
# The checker itself runs BASIC optimisation and shape inference on the whole model; it has no time limit of its own.
_TIMEOUT_S = 120.0
_RANKS: tuple[Verdict, ...] = ("no", "maybe", "yes")


class OrtOpinion(PlacedNodes, frozen=True, kw_only=True):
    """The checker's opinion of one provider: "NNAPI", "CoreML NeuralNetwork" or "CoreML MLProgram".

    `unknown_ops` are the operators that its table lacks; `dynamic_nodes` counts those it refuses for a dynamic shape.
    """

    provider: str
    verdict: Verdict
    unknown_ops: tuple[str, ...]
    dynamic_nodes: int


class OrtOpinions(msgspec.Struct, frozen=True, kw_only=True):
    """The checker's opinion of each provider it knows, or how it failed."""

    opinions: tuple[OrtOpinion, ...] = ()
    failure: str | None = None


def ask_ort_checker(model: Path) -> OrtOpinions:
    """Returns what ONNX Runtime's checker says of the user's own model; if it crashes, the result says so.

    Raises:
        DeviceError: the child process cannot be started.
    """
    # A child process, because the checker crashes on valid models: a Transpose without perm raises IndexError in
    # 1.31.1.
    finished = run_process([sys.executable, "-P", str(_PROGRAM), str(model.resolve())], timeout_s=_TIMEOUT_S)
    lines = finished.stdout.strip().splitlines()
    if not finished.succeeded or not lines:
        # The last line that names an error is the exception itself; what follows may come from the interpreter.
        errors = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
        last = next((line for line in reversed(errors) if "Error" in line), errors[-1] if errors else "")
        shown = "".join(letter for letter in last if letter.isprintable())[:300]
        return OrtOpinions(failure=f"it {finished.ending}" + (f": {shown}" if shown else ""))
    try:
        return OrtOpinions(opinions=msgspec.json.decode(lines[-1], type=ready_type(tuple[OrtOpinion, ...])))
    except msgspec.DecodeError as error:
        return OrtOpinions(failure=f"it gave no answer: {error}")


def find_opinion(opinions: OrtOpinions, report: CheckReport) -> OrtOpinion | None:
    """Returns the checker's opinion of the target of a report, or None if it does not know the target."""
    provider = {"nnapi": "NNAPI", "coreml": f"CoreML {report.settings.get('model_format', '')}"}.get(report.target)
    return next((opinion for opinion in opinions.opinions if opinion.provider == provider), None)


def explain_difference(opinion: OrtOpinion, report: CheckReport) -> Iterator[str]:
    """Yields the reasons why the checker and a report disagree, one per line; nothing if they agree."""
    if opinion.verdict == report.verdict:
        return
    if lacking := sorted({node.op for node in report.node_list if node.taken} & set(opinion.unknown_ops)):
        yield f"its table lacks {', '.join(lacking)}, which the provider takes"
    if opinion.dynamic_nodes:
        yield f"it refuses {opinion.dynamic_nodes} nodes for a dynamic shape, and counts omitted optional inputs as one"
    if _RANKS.index(opinion.verdict) > _RANKS.index(report.verdict):
        refused = [node for node in report.node_list if not node.taken and node.op not in opinion.unknown_ops]
        if refused:
            worst = max(refused, key=lambda node: (node.macs, node.bytes))
            why = f" ({worst.op} '{worst.name}': {worst.reasons[0]})" if worst.reasons else ""
            yield f"it knows operator names only; check finds {len(refused)} refused nodes that it passes{why}"
        if report.is_refused or report.risks:
            yield "it does not know what makes a session fail"
        if any(node.is_quantizer for node in report.node_list):
            yield "it does not know units of QuantizeLinear and DequantizeLinear"
    if gone := sorted(set(opinion.unknown_ops) - {node.op for node in report.node_list}):
        yield f"{', '.join(gone)} is no longer there: edgekit rewrites it before the check"
    yield (
        f"it counts nodes ({opinion.taken} of {opinion.nodes} in {count_of(opinion.partitions, 'partition')}); check"
        f" weighs work ({report.taken_macs:.0%} in {count_of(report.partitions, 'partition')})"
    )


# The share of a float model that a target can compute in integers: known before anything is calibrated.


def explain_no_gain(graph: Graph, target: Target, precision: Precision, check: Callable[[], CheckReport]) -> str | None:
    """Returns why integers gain nothing on a target, or None.

    There are two reasons. Nothing can be quantized, as in a model of decision trees; or the target would take less of
    the work in integers than in float, and less than its `min_taken_macs`: `cpu` computes an LSTM in float. The result
    is None for a model that is quantized already, and if the operators alone do not rule integers out. `check` returns
    what the target takes of the graph as it is, and is called only if the operators do not decide.

    Raises:
        TargetError: the target's `rules.toml` is missing or malformed.
    """
    if precision not in INTEGERS or find_integer_ops(graph.model):
        return None
    # Without a list any operator may be quantized.
    quantized = frozenset(target.quantization.op_types or (node.op_type for node in graph.nodes))
    if not any(node.op_type in quantized for node in graph.nodes):
        return f"{target.name} quantizes no operator of this model"
    # The share of the multiply-accumulates in nodes whose operator the provider supports in integers; 1 if none
    # multiply.
    book = load_rules(target)
    form = f"qdq-{target.quantization.activation}"
    counts = [(count_macs(graph, node), node) for node in graph.nodes]
    total = sum(macs for macs, _ in counts)
    # Trees split at exact limits of their inputs, which 8 bits move.
    trees = {node.op_type for node in graph.nodes if node.domain == ML_DOMAIN}
    if trees and not total and not count_unsized(graph):
        return f"the work of this model is in {', '.join(sorted(trees))}, which {target.name} does not quantize"
    supported = 0
    for macs, node in counts:
        entries = [op for op in book.op if node.op_type in op.types]
        is_supported = bool(entries) and all(not op.forms or form in op.forms for op in entries)
        supported += macs if is_supported and node.op_type in quantized else 0
    most = supported / total if total else 1.0
    if most >= target.thresholds.min_taken_macs:
        return None
    taken = check().taken_macs
    if taken <= most:
        return None
    return f"{target.name} takes at most {most:.0%} of this model's work in {precision}, and {taken:.0%} in float"
