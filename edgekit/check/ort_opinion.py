"""What ONNX Runtime's own mobile usability checker says of a model, and why check says otherwise.

Its rules and its faults are those of `onnxruntime/tools/mobile_helpers/usability_checker.py` of 1.31: it counts nodes
whose operator stands in a table and whose shapes are fixed, and wants them in one partition.
"""

import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec

from edgekit._proc import Finished, run_process
from edgekit.check.report import CheckReport, Verdict

_PROGRAM = Path(__file__).parent / "far" / "ort_usability.py"
# The checker itself runs BASIC optimisation and shape inference on the whole model; it has no bound of its own.
_TIMEOUT_S = 120.0
_RANKS: tuple[Verdict, ...] = ("no", "maybe", "yes")


class OrtOpinion(msgspec.Struct, frozen=True, kw_only=True):
    """What the checker says of one provider: "NNAPI", "CoreML NeuralNetwork" or "CoreML MLProgram".

    `unknown_ops` are those that its table lacks; `dynamic_nodes` counts those it refuses for a shape that is not fixed.
    """

    provider: str
    verdict: Verdict
    nodes: int
    taken: int
    partitions: int
    unknown_ops: tuple[str, ...]
    dynamic_nodes: int


class OrtOpinions(msgspec.Struct, frozen=True, kw_only=True):
    """What the checker says of each provider it knows, or how it failed."""

    opinions: tuple[OrtOpinion, ...] = ()
    failure: str | None = None


def ask_ort_checker(model: Path) -> OrtOpinions:
    """Returns what ONNX Runtime's checker says of the model as the user has it; if it dies, that is what it says.

    Raises:
        DeviceError: the child process cannot be started.
    """
    # In a child process, because it dies of valid models: a Transpose without perm raises IndexError in 1.31.1.
    finished = run_process([sys.executable, "-P", str(_PROGRAM), str(model.resolve())], timeout_s=_TIMEOUT_S)
    lines = finished.stdout.strip().splitlines()
    if not finished.succeeded or not lines:
        return OrtOpinions(failure=_describe_death(finished))
    try:
        return OrtOpinions(opinions=msgspec.json.decode(lines[-1], type=tuple[OrtOpinion, ...]))
    except msgspec.DecodeError as error:
        return OrtOpinions(failure=f"it gave no answer: {error}")


def find_opinion(opinions: OrtOpinions, report: CheckReport) -> OrtOpinion | None:
    """Returns the checker's opinion of the target of a report, None where it does not know the target."""
    provider = {"nnapi": "NNAPI", "coreml": f"CoreML {report.settings.get('model_format', '')}"}.get(report.target)
    return next((opinion for opinion in opinions.opinions if opinion.provider == provider), None)


def explain_difference(opinion: OrtOpinion, report: CheckReport) -> tuple[str, ...]:
    """Returns why the checker's verdict is not that of a report, a reason a line; nothing where they agree."""
    return () if opinion.verdict == report.verdict else tuple(_reasons(opinion, report))


def _reasons(opinion: OrtOpinion, report: CheckReport) -> Iterator[str]:
    taken_ops = {node.op for node in report.node_list if node.taken}
    if lacking := sorted(taken_ops & set(opinion.unknown_ops)):
        yield f"its table lacks {', '.join(lacking)}, which the provider takes"
    if opinion.dynamic_nodes:
        yield f"it refuses {opinion.dynamic_nodes} nodes for a dynamic shape, and counts omitted optional inputs as one"
    if _RANKS.index(opinion.verdict) > _RANKS.index(report.verdict):
        yield from _overlooked(opinion, report)
    if gone := sorted(set(opinion.unknown_ops) - {node.op for node in report.node_list}):
        yield f"{', '.join(gone)} is no longer there: edgekit rewrites it before the check"
    yield (
        f"it counts nodes ({opinion.taken} of {opinion.nodes} in {opinion.partitions} partitions); check weighs work"
        f" ({report.taken_macs:.0%} in {report.partitions} partitions)"
    )


def _overlooked(opinion: OrtOpinion, report: CheckReport) -> Iterator[str]:
    refused = [node for node in report.node_list if not node.taken and node.op not in opinion.unknown_ops]
    if refused:
        worst = max(refused, key=lambda node: (node.macs, node.bytes))
        why = f" ({worst.op} '{worst.name}': {worst.reasons[0]})" if worst.reasons else ""
        yield f"it knows operator names only; check finds {len(refused)} refused nodes that it passes{why}"
    if report.is_refused or report.risks:
        yield "it does not know what makes a session fail"
    if any(node.is_quantizer for node in report.node_list):
        yield "it does not know units of QuantizeLinear and DequantizeLinear"


def _describe_death(finished: Finished) -> str:
    # The last line that names an error is the exception's own; what follows it may be the interpreter's.
    lines = [line.strip() for line in finished.stderr.splitlines() if line.strip()]
    last = next((line for line in reversed(lines) if "Error" in line), lines[-1] if lines else "")
    shown = "".join(letter for letter in last if letter.isprintable())[:300]
    return f"it {finished.ending}" + (f": {shown}" if shown else "")
