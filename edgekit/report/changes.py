"""Sizes and differences as tables and lines for a terminal."""

from collections.abc import Iterator

from rich.box import SIMPLE_HEAD
from rich.table import Table

from edgekit.inspect.diff import Delta
from edgekit.inspect.sizes import SizeReport

_MOST_ROWS = 25


def table_files(report: SizeReport) -> Table:
    """Returns the files of a bundle or model as a table, largest first."""
    table = Table("file", "bytes", "share", box=SIMPLE_HEAD)
    for file in report.files:
        table.add_row(file.name, f"{file.size_bytes:,}", _share(file.size_bytes, report.size_bytes))
    table.add_row("all", f"{report.size_bytes:,}", "")
    return table


def table_layer_sizes(report: SizeReport) -> Table:
    """Returns the largest layers of a model as a table, and what is left."""
    total = sum(layer.weight_bytes for layer in report.layers) + report.other_bytes
    table = Table(f"layer of {report.model}", "operator", "weight bytes", "share", "MACs", box=SIMPLE_HEAD)
    heavy = [layer for layer in report.layers if layer.weight_bytes]
    for layer in heavy[:_MOST_ROWS]:
        macs = "-" if layer.macs is None else f"{layer.macs:,}"
        table.add_row(layer.name, layer.op, f"{layer.weight_bytes:,}", _share(layer.weight_bytes, total), macs)
    rest = heavy[_MOST_ROWS:]
    if rest:
        size_bytes = sum(layer.weight_bytes for layer in rest)
        table.add_row(f"{len(rest)} more (all with --json)", "", f"{size_bytes:,}", _share(size_bytes, total), "")
    table.add_row("the graph itself", "", f"{report.other_bytes:,}", _share(report.other_bytes, total), "")
    return table


def list_changes(delta: Delta) -> Iterator[str]:
    """Yields what is different, a line each, and last how many bytes it makes."""
    yield from (f"file {file.name}: {_size(file.old_bytes, file.new_bytes)}" for file in delta.files)
    yield from (f"{fact.key}: {_move(fact.old, fact.new)}" for fact in delta.facts)
    yield from (f"placement {fact.key}: {_move(fact.old, fact.new)}" for fact in delta.placement)
    nodes = [f"node {node.name} ({node.op}): {_place(node.old)} -> {_place(node.new)}" for node in delta.nodes]
    layers = [
        f"layer {layer.name} ({_move(layer.old_op, layer.new_op)}): {_size(layer.old_bytes, layer.new_bytes)}"
        for layer in delta.layers
    ]
    for lines in (nodes, layers):
        yield from lines[:_MOST_ROWS]
        if len(lines) > _MOST_ROWS:
            yield f"... and {len(lines) - _MOST_ROWS} more (all with --json)"
    for figure in delta.accuracy:
        yield f"accuracy {figure.device}, {figure.output}, {figure.measure}: {_move(figure.old, figure.new)}"
    if delta.is_same:
        yield f"the same to the byte: {delta.new_bytes:,} bytes"
        return
    update = f"{delta.update_bytes:,} bytes to fetch for who has the old one"
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


def _place(taken: bool | None) -> str:  # noqa: FBT001 - it is the fact itself
    return {None: "absent", True: "provider", False: "CPU"}[taken]


def _share(part: int, whole: int) -> str:
    return f"{part / whole:.1%}" if whole else "-"
