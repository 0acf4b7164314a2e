"""Mending saved runtime optimisations that ONNX Runtime writes but cannot replay.

ORT 1.31 saves the QDQ actions of MatMul and Split without the operator they produce (they have no `RunForSave` of their
own, `qdq_actions.cc`), and then refuses the file where saved optimisations are switched on: "Not enough produced nodes
in the runtime optimization record" (`selector_action_transformer.cc`). Here the operator is written in, and the types
of its arguments with it.
"""

from collections.abc import Callable, Mapping
from typing import cast

from edgekit.convert.ort_format.tables import Record, iterate_graphs, number, records, table, text

_INPUT, _OUTPUT = 0, 1

# Operator -> type parameter -> the arguments of that type, from the schemas of ONNX and of ORT's contrib operators.
_TYPES: Mapping[str, Mapping[str, tuple[tuple[int, int], ...]]] = {
    ":QLinearMatMul:10": {
        "T1": ((_INPUT, 0), (_INPUT, 2)),
        "T2": ((_INPUT, 3), (_INPUT, 5)),
        "T3": ((_INPUT, 7), (_OUTPUT, 0)),
        "a_scale": ((_INPUT, 1),),
        "b_scale": ((_INPUT, 4),),
        "y_scale": ((_INPUT, 6),),
    },
    ":QLinearMatMul:21": {
        "T1": ((_INPUT, 0), (_INPUT, 2)),
        "T2": ((_INPUT, 3), (_INPUT, 5)),
        "T3": ((_INPUT, 7), (_OUTPUT, 0)),
        "TS": ((_INPUT, 1), (_INPUT, 4), (_INPUT, 6)),
    },
    ":Split:13": {"T": ((_INPUT, 0), (_OUTPUT, 0)), "split": ((_INPUT, 1),)},
    ":Split:18": {"T": ((_INPUT, 0), (_OUTPUT, 0)), "split": ((_INPUT, 1),)},
    "com.microsoft:MatMulIntegerToFloat:1": {
        "T1": ((_INPUT, 0), (_INPUT, 4)),
        "T2": ((_INPUT, 1), (_INPUT, 5)),
        "T3": ((_INPUT, 2), (_INPUT, 3), (_INPUT, 6), (_OUTPUT, 0)),
    },
}


def mend_saved(root: Record) -> None:
    """Writes, in place, the operator into each saved action that lacks it."""
    model = table(root, "model")
    # A model may import the main domain twice, as "" and as "ai.onnx": here the newer counts.
    opset = max((number(entry, "version") for entry in records(model, "opset_import") if _is_main(entry)), default=0)
    produced: set[str] = set()
    for graph in iterate_graphs(table(model, "graph")):
        for entry in records(table(graph, "runtime_optimizations"), "records"):
            for saved in records(entry, "runtime_optimization_records"):
                find_op = _PRODUCED.get(text(saved, "action_id"))
                # A later ONNX Runtime may write the operator itself: then its word stands.
                if find_op is not None and not saved.get("produced_op_ids"):
                    op = find_op(saved, opset)
                    saved["produced_op_ids"] = [op.encode()]
                    produced.add(op)
    _add_types(root, produced)


def _is_main(entry: Record) -> bool:
    return text(entry, "domain") in {"", "ai.onnx"}


def _matmul(saved: Record, opset: int) -> str:
    """Returns the operator for a MatMul with a Q node behind it, or for one whose result stays float."""
    if number(table(saved, "nodes_to_optimize_indices"), "num_outputs"):
        return ":QLinearMatMul:21" if opset >= 21 else ":QLinearMatMul:10"
    return "com.microsoft:MatMulIntegerToFloat:1"


def _split(_saved: Record, opset: int) -> str:
    return ":Split:18" if opset >= 18 else ":Split:13"


# The operator that an action produces, by the action's name and the model's opset.
_PRODUCED: Mapping[str, Callable[[Record, int], str]] = {"MatMul": _matmul, "dropSplitQDQ": _split}


def _add_types(root: Record, ops: set[str]) -> None:
    known = cast("list[Record]", table(root, "kernel_type_str_resolver").get("op_kernel_type_str_args", []))
    present = {text(entry, "op_id") for entry in known}
    # A minimal build looks kernels up by these entries; an operator without one is "not found" although it is linked
    # in.
    known.extend(_describe_types(op) for op in sorted(ops - present))


def _describe_types(op: str) -> Record:
    arguments: list[Record] = [
        {"kernel_type_str": name.encode(), "args": [_describe_argument(*place) for place in places]}
        for name, places in _TYPES[op].items()
    ]
    return {"op_id": op.encode(), "kernel_type_str_args": arguments}


def _describe_argument(kind: int, index: int) -> Record:
    """Returns an argument's place; a field that has its default is absent, as ONNX Runtime writes it."""
    fields: Record = {}
    if kind == _OUTPUT:
        fields["arg_type"] = bytes([_OUTPUT])
    if index:
        fields["index"] = index.to_bytes(4, "little")
    return fields
