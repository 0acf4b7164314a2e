"""What every report shares: an empty table, and sizes for people."""

from rich.box import SIMPLE_HEAD
from rich.table import Table


def make_table(*columns: str) -> Table:
    """Returns an empty table with these columns, whose cells fold."""
    table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def format_count(count: int) -> str:
    """Returns a number for people: `1.2 M`."""
    size, unit = _scale(count, ("", "k", "M", "G", "T"))
    return f"{size:.0f}" if not unit else f"{size:.3g} {unit}" if size < 1000 else f"{size:,.0f} {unit}"


def format_bytes(size_bytes: int) -> str:
    """Returns a size for people, in decimal units."""
    size, unit = _scale(size_bytes, ("B", "kB", "MB", "GB"))
    return f"{size:.0f} {unit}" if unit in {"B", "kB"} else f"{size:.1f} {unit}"


def _scale(value: float, units: tuple[str, ...]) -> tuple[float, str]:
    """Returns a value in the first unit, each a thousand times the one before, that keeps it below a thousand."""
    for unit in units[:-1]:
        if value < 1000:
            return value, unit
        value /= 1000
    return value, units[-1]
