"""A history of reports in a SQLite file, and which times of a benchmark are longer than the last recorded ones."""

import contextlib
import sqlite3
from collections.abc import Generator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from edgekit.bench.bench import BenchReport, BenchRun
from edgekit.errors import DataError, OutputError, quote_error, reraised
from edgekit.machine import describe_machine
from edgekit.serialize import UNDECODABLE, ready_type, to_json

_VERSION = 1
_RowT = TypeVar("_RowT")


@contextlib.contextmanager
def opened_history(path: Path) -> Generator[sqlite3.Connection]:
    """Opens a history; the changes of the block are stored completely or not at all.

    SQLite writes the file itself, with its own journal: this is the only code besides `_files` that writes files.

    Raises:
        DataError: the file is no history, or of a newer edgekit.
        OutputError: the file cannot be written.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=30.0)) as connection, connection:
            if int(connection.execute("PRAGMA user_version").fetchone()[0]) > _VERSION:
                raise DataError(f"'{path}' is a history of a newer edgekit", hint="update edgekit")
            yield connection
    except sqlite3.OperationalError as error:
        raise OutputError(f"cannot use the history '{path}': {error}", hint="choose a place you may write") from error
    # SQLite's message about a damaged file quotes bytes of it, which may be no valid text.
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        words = f"'{path}' is no history: {quote_error(error)}"
        raise DataError(words, hint="give a file that --history made") from error


class Table(msgspec.Struct, Generic[_RowT], frozen=True, kw_only=True):
    """A table of a history; its rows are read as structs of the type `kind`.

    A row has a number `id`, the UTC `time` of recording, `columns` (with their SQL types) by which it is found, and a
    `report` as JSON. `noun` is the word for a row in messages.
    """

    name: str
    columns: Mapping[str, str]
    kind: type[_RowT]
    noun: str

    def add(self, path: Path, columns: Sequence[object], report: object) -> int:
        """Adds a report to a history, which is created if necessary, and returns the report's number.

        Raises:
            DataError: the file is no history.
            OutputError: the file cannot be written.
        """
        if not path.parent.is_dir():
            raise OutputError(f"there is no folder '{path.parent}'", hint="make it first")
        row = (datetime.now(UTC).isoformat(timespec="seconds"), *columns, to_json(report))
        types = {"id": "INTEGER PRIMARY KEY AUTOINCREMENT", "time": "TEXT", **self.columns, "report": "TEXT"}
        fields = [f"{name} {kind}" + (" NOT NULL" if name != "id" else "") for name, kind in types.items()]
        with opened_history(path) as connection:
            connection.execute(" ".join(("CREATE TABLE IF NOT EXISTS", self.name, "(", ", ".join(fields), ")")))
            connection.execute(f"PRAGMA user_version = {_VERSION}")
            marks = ", ".join("?" for _ in row)
            words = ("INSERT INTO", self.name, "(", ", ".join(list(types)[1:]), ") VALUES (", marks, ")")
            return int(connection.execute(" ".join(words), row).lastrowid or 0)

    def select(self, path: Path, order: str = "id", **values: object) -> tuple[_RowT, ...]:
        """Returns the rows of a history that have these values in their columns, oldest first.

        A value of None matches any row. A history without this table has no rows; `order` is SQL after ORDER BY.

        Raises:
            DataError: there is no such file, it is no history, or a report in it is malformed.
        """
        if not path.is_file():
            raise DataError(f"there is no history '{path}'", hint="edgekit verify BUNDLE --history FILE makes it")
        known = "SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?"
        conditions = " AND ".join(f"coalesce(?, {name}) = {name}" for name in values)
        with opened_history(path) as connection:
            if connection.execute(known, (self.name,)).fetchone() is None:
                return ()
            names = ("id", "time", *self.columns, "report")
            words = ("SELECT", ", ".join(names), "FROM", self.name, "WHERE", conditions, "ORDER BY", order)
            rows = connection.execute(" ".join(words), tuple(values.values())).fetchall()
        found: list[_RowT] = []
        for row in rows:
            malformed = DataError(f"{self.noun} {row[0]} of '{path}' is malformed", hint="use another history file")
            with reraised((*UNDECODABLE, ValueError), malformed, quote=True):
                fields = {**dict(zip(names, row, strict=True)), "report": msgspec.json.decode(str(row[-1]))}
                # SQLite has no type for truth values: they are the integers 0 and 1.
                found.append(msgspec.convert(fields, ready_type(self.kind), strict=False))
        return tuple(found)

    def find_last(self, path: Path, **values: object) -> _RowT | None:
        """Returns the last row of a history with these values in its columns; None without one, or without the file.

        Raises:
            DataError: the file is no history.
        """
        return next(iter(self.select(path, "id DESC LIMIT 1", **values)), None) if path.exists() else None


class PastBench(msgspec.Struct, frozen=True, kw_only=True):
    """A recorded benchmark: `time` is in UTC, `machine` is the one on which edgekit ran."""

    id: int
    time: str
    subject: str
    machine: str
    report: BenchReport


_BENCHES = Table(name="benches", columns={"subject": "TEXT", "machine": "TEXT"}, kind=PastBench, noun="benchmark")


def record_bench(path: Path, report: BenchReport) -> int:
    """Adds a benchmark to a history file, which is created if necessary, and returns its number.

    Raises:
        DataError: the file is no history.
        OutputError: the file cannot be written.
    """
    return _BENCHES.add(path, (report.subject, _name_machine()), report)


def list_benches(path: Path, *, subject: str | None = None) -> tuple[PastBench, ...]:
    """Returns the recorded benchmarks, oldest first, of all subjects or of one.

    Raises:
        DataError: there is no such file, or it is no history.
    """
    return _BENCHES.select(path, subject=subject)


def compare_with_last(report: BenchReport, path: Path, max_slowdown: float | None) -> BenchReport:
    """Returns a report with a comparison of its times with the last of its subject on a machine like this one.

    Compared are runs on the same device with the same settings. A median of more than `max_slowdown` times the earlier
    one is a regression, if the confidence intervals do not overlap. Runs recorded at different times are not
    interleaved, so `compare_on` is more reliable.

    Raises:
        DataError: the file is no history.
    """
    if (last := _BENCHES.find_last(path, subject=report.subject, machine=_name_machine())) is None:
        return report
    earlier = {_run_key(run): run for run in last.report.runs if run.failure is None and run.median_ms > 0}
    notes, regressions = list(report.notes), list[str]()
    for run in (run for run in report.runs if run.failure is None):
        if (other := earlier.get(_run_key(run))) is None:
            continue
        device, settings = _run_key(run)
        ratio = run.median_ms / other.median_ms
        apart = run.interval_ms[0] > other.interval_ms[1] or run.interval_ms[1] < other.interval_ms[0]
        source = f"{other.median_ms:.3g} ms of run {last.id} of {last.time}"
        line = f"{device}{f' ({settings})' if settings else ''}: {run.median_ms:.3g} ms, {ratio:.2f} times the {source}"
        line += "" if apart else "; the intervals overlap"
        notes.append(line)
        if max_slowdown is not None and apart and ratio > max_slowdown:
            regressions.append(f"{line}, more than {max_slowdown:g} times")
    return msgspec.structs.replace(report, notes=tuple(notes), regressions=tuple(regressions))


def _run_key(run: BenchRun) -> tuple[str, str]:
    parts = {"batch": run.batch, "at once": run.concurrency, "threads": run.threads, "IO binding": int(run.io_binding)}
    usual = {"batch": 1, "at once": 1, "threads": 0, "IO binding": 0}
    changed = [f"{name} {value}" for name, value in parts.items() if value != usual[name]]
    queue = f"queue {run.queue}" if run.queue else ""
    return run.device, ", ".join(filter(None, [*changed, run.execution, queue]))


def _name_machine() -> str:
    machine = describe_machine()
    return f"{machine['cpu']}, {machine['cores']} cores, {machine['system']}"
