"""How much of a float model a target can compute in integers at all: known before anything is calibrated."""

from collections.abc import Callable

from edgekit.check.macs import count_macs
from edgekit.check.report import CheckReport
from edgekit.check.rules.rulebook import RuleBook, load_rules
from edgekit.graph.graph import Graph, Node
from edgekit.model.model import find_integer_ops
from edgekit.target import INTEGERS, Precision, Target


def explain_no_gain(graph: Graph, target: Target, precision: Precision, check: Callable[[], CheckReport]) -> str | None:
    """Returns why a graph gains nothing from integers on a target: it takes less of the work then, and too little.

    None where it is quantized already, and where integers may be worth it, as far as the operators alone tell.
    What is too little is the target's `min_taken_macs`. `check` tells what the target takes of the graph as it is, and
    is asked only where the operators do not decide.

    Raises:
        TargetError: the target's `rules.toml` is missing or malformed.
    """
    if precision not in INTEGERS or find_integer_ops(graph.model):
        return None
    # The share of the multiply-accumulates in nodes whose operator the provider has in integers; 1 if none.
    book = load_rules(target)
    form = f"qdq-{target.quantization.activation}"
    counts = [(count_macs(graph, node), node) for node in graph.nodes]
    total = sum(macs for macs, _ in counts)
    most = sum(macs for macs, node in counts if macs and _has_form(node, book, form)) / total if total else 1.0
    if most >= target.thresholds.min_taken_macs:
        return None
    taken = check().taken_macs
    if taken <= most:
        return None
    return f"{target.name} takes at most {most:.0%} of this model's work in {precision}, and {taken:.0%} in float"


def _has_form(node: Node, book: RuleBook, form: str) -> bool:
    entries = [op for op in book.op if node.op_type in op.types]
    return bool(entries) and all(not op.forms or form in op.forms for op in entries)
