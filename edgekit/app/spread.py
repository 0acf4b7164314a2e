"""Cells built by processes side by side: each is one `edgekit run --only CELL`, and its result lies in its folder."""

import sys
from collections.abc import Iterator, Sequence
from functools import partial

import msgspec

from edgekit._proc import Finished, run_process
from edgekit.app.cells import cell_folder
from edgekit.app.config import App, Cell
from edgekit.app.result import CellResult, read_result
from edgekit.app.run import Spread
from edgekit.devices.parallel import run_together
from edgekit.progress import Progress

# Days: planning has a budget of its own, and what hangs in a device has a limit there.
_TIMEOUT_S = 7 * 24 * 3600.0
_TRIES = 3
# Exit codes of a child that came to its end: pass, fail, not proven.
_VERDICTS = frozenset({0, 1, 3})


class _Answer(msgspec.Struct, frozen=True):
    cells: tuple[CellResult, ...]


def spread_processes(app: App, workers: int, progress: Progress) -> Spread:
    """Returns what builds cells in so many processes at a time.

    A process that is killed, or dies of a native library, is started again, three times in all; nothing that another
    one finished is lost.
    """

    def spread(cells: Sequence[Cell]) -> Iterator[CellResult | None]:
        yield from run_together([partial(_build, app, cell, progress) for cell in cells], at_once=workers)

    return spread


def _build(app: App, cell: Cell, progress: Progress) -> CellResult:
    progress(f"{cell.name}: build")
    argv = [sys.executable, "-m", "edgekit", "run", str(app.path), "--only", cell.name, "--bare", "--json", "--quiet"]
    done: Finished | None = None
    for _ in range(_TRIES):
        done = run_process(argv, timeout_s=_TIMEOUT_S)
        if done.status in _VERDICTS:
            return msgspec.json.decode(done.stdout, type=_Answer).cells[0]
        # It may have been killed after its result was written.
        kept = read_result(cell_folder(app, cell))
        if kept is not None:
            return kept
    said = "" if done is None else f": {done.ending}; {done.stderr.strip()[-300:]}"
    return CellResult(
        model=cell.model, target=cell.target, key="", state="failed", verdict="fail",
        headline=f"Its process died {_TRIES} times{said}.",
    )  # fmt: skip
