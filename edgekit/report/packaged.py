"""What a package weighs, file by file."""

from collections.abc import Iterator

from rich.table import Table

from edgekit.package.package import PackageReport
from edgekit.report.tables import format_bytes, make_table

_MOST_ROWS = 25


def table_sizes(report: PackageReport) -> Table:
    """Returns the files of a package as a table, largest first."""
    table = make_table("file", "bytes", "share")
    ranked = sorted(report.sizes.items(), key=lambda pair: (-pair[1], pair[0]))
    for name, size_bytes in ranked[:_MOST_ROWS]:
        table.add_row(name, f"{size_bytes:,}", _share(size_bytes, report))
    rest = ranked[_MOST_ROWS:]
    if rest:
        left = sum(size_bytes for _, size_bytes in rest)
        table.add_row(f"{len(rest)} smaller files", f"{left:,}", _share(left, report))
    table.add_row("all", f"{report.size_bytes:,}", "")
    return table


def list_size_remarks(report: PackageReport) -> Iterator[str]:
    """Yields what the package weighs, and a warning where that is mostly no model."""
    rest = report.size_bytes - report.model_bytes
    yield f"models {format_bytes(report.model_bytes)}, all else {format_bytes(rest)}"
    if report.outweighs:
        largest = max(report.sizes, key=lambda name: report.sizes[name])
        yield (
            f"warning: what is no model weighs {rest / max(1, report.model_bytes):.1f} times as much as the models;"
            f" the largest file is '{largest}'"
        )


def _share(size_bytes: int, report: PackageReport) -> str:
    return f"{size_bytes / report.size_bytes:.1%}"
