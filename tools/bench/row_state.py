"""Rows of a benchmark, stored in a folder so that an interrupted run continues: `--state DIR`.

Stored rows are used as long as edgekit's code, the targets and the benchmarks are the same to the byte.
"""

import argparse
import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

import msgspec

from edgekit._files import write_file

_ROOT = Path(__file__).parents[2]
_CODE = ("edgekit/**/*.py", "edgekit/**/*.toml", "targets/**/*.toml", "tools/bench/**/*.py")

Row = TypeVar("Row", bound=msgspec.Struct)


def list_options(title: str | None, models: Collection[str], targets: Collection[str]) -> argparse.ArgumentParser:
    """Returns the options of a benchmark that measures models on targets."""
    parser = argparse.ArgumentParser(description=title, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="*", default=list(models))
    parser.add_argument("--targets", default=",".join(targets))
    parser.add_argument("--state", type=Path, metavar="DIR", help="keep what was measured, and go on from it")
    return parser


def resume_rows(state: Path | None, name: str, kind: type[Row], make: Callable[[], Iterable[Row]]) -> Iterator[Row]:
    """Yields the rows that `make` returns for a name, or the stored ones of an earlier run with the same code."""
    if state is None:
        yield from make()
        return
    path = state / f"{name.replace('/', '_').replace(':', '_').replace(' ', '_')}-{digest_code()}.json"
    if path.is_file():
        yield from msgspec.json.decode(path.read_bytes(), type=list[kind])  # type: ignore[valid-type] # a type as a value
        return
    rows: list[Row] = []
    for row in make():
        rows.append(row)
        yield row
    state.mkdir(parents=True, exist_ok=True)
    write_file(path, msgspec.json.encode(rows))


@functools.cache
def digest_code() -> str:
    """Returns a digest of everything on which figures depend."""
    digest = hashlib.sha256()
    for path in sorted(path for pattern in _CODE for path in _ROOT.glob(pattern)):
        digest.update(str(path.relative_to(_ROOT)).encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]
