"""Histories: SQLite files that keep what earlier commands found, a table a command."""

import contextlib
import sqlite3
from collections.abc import Generator
from pathlib import Path

from edgekit.errors import DataError, OutputError, quote_error

_VERSION = 1


def require_history(path: Path) -> None:
    """Refuses a history that is not there.

    Raises:
        DataError: there is no such file.
    """
    if not path.is_file():
        raise DataError(f"there is no history '{path}'", hint="edgekit verify BUNDLE --history FILE makes it")


def require_folder(path: Path) -> None:
    """Refuses a history whose folder is not there.

    Raises:
        OutputError: there is no such folder.
    """
    if not path.parent.is_dir():
        raise OutputError(f"there is no folder '{path.parent}'", hint="make it first")


@contextlib.contextmanager
def opened_history(path: Path) -> Generator[sqlite3.Connection]:
    """Opens a history; what the block does is kept whole or not at all.

    SQLite writes its own file, with a journal of its own: this is the one writer beside `_files`.

    Raises:
        DataError: the file is no history, or of a newer edgekit.
        OutputError: the file cannot be written.
    """
    try:
        with contextlib.closing(sqlite3.connect(path, timeout=30.0)) as connection, connection:
            version = int(connection.execute("PRAGMA user_version").fetchone()[0])
            if version > _VERSION:
                raise DataError(f"'{path}' is a history of a newer edgekit", hint="update edgekit")
            yield connection
    except sqlite3.OperationalError as error:
        raise OutputError(f"cannot use the history '{path}': {error}", hint="choose a place you may write") from error
    # What SQLite says of a damaged file quotes it, and need not be text.
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:
        raise DataError(
            f"'{path}' is no history: {quote_error(error)}", hint="give a file that --history made"
        ) from error


def prepare_table(connection: sqlite3.Connection, statement: str) -> None:
    """Makes a table where there is none, and marks the file as a history."""
    connection.execute(statement)
    connection.execute(f"PRAGMA user_version = {_VERSION}")


def has_table(connection: sqlite3.Connection, name: str) -> bool:
    """Returns True if a history has a table: one that another command made need not."""
    found = connection.execute("SELECT 1 FROM sqlite_master WHERE type = 'table' AND name = ?", (name,)).fetchone()
    return found is not None
