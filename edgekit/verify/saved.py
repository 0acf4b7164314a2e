"""`verify.json`: what a verification found, beside a bundle; written, and read as history."""

from pathlib import Path
from typing import TypeVar

import msgspec

from edgekit._files import open_regular, write_file
from edgekit.bundle.folder import VERIFY, Bundle
from edgekit.errors import DataError
from edgekit.serialize import to_json
from edgekit.verify.report import VerifyReport

_Report = TypeVar("_Report")

# A report of a thousand layers on eight devices has some megabytes.
_MAX_REPORT_BYTES = 64 << 20


def write_report(bundle: Bundle, report: VerifyReport) -> Path:
    """Writes `verify.json` into the bundle, beside what the manifest covers, and returns its path.

    Raises:
        OutputError: the bundle cannot be written.
    """
    path = bundle.folder / VERIFY
    write_file(path, to_json(report).encode())
    return path


def read_report(path: Path) -> VerifyReport:
    """Returns the facts of a `verify.json`; the verdicts in it are not believed but computed again.

    Raises:
        DataError: the file is missing or malformed.
    """
    return read_facts(path, VerifyReport)


def read_facts(path: Path, kind: type[_Report]) -> _Report:
    """Returns a `verify.json` as a report of some kind.

    Raises:
        DataError: the file is missing or malformed.
    """
    try:
        with open_regular(path) as file:
            data = file.read(_MAX_REPORT_BYTES + 1)
        if len(data) > _MAX_REPORT_BYTES:
            raise DataError(f"'{path}' has more than {_MAX_REPORT_BYTES} bytes", hint="edgekit verify BUNDLE writes it")
        return msgspec.json.decode(data, type=kind)
    except OSError as error:
        raise DataError(f"cannot read '{path}': {error.strerror}", hint="edgekit verify BUNDLE writes it") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise DataError(f"'{path}' is malformed: {error}", hint="edgekit verify BUNDLE writes it again") from error


def read_known(bundle: Bundle) -> VerifyReport | None:
    """Returns what an earlier verification of exactly this bundle found, None where there is none that can be read.

    No digest covers it, and anybody may have written it: it is history, and no verdict may rest on it.
    """
    try:
        report = read_report(bundle.folder / VERIFY)
    except DataError:
        return None
    return report if report.bundle_sha256 == bundle.sha256 else None
