"""Which versions of the format each ONNX Runtime reads: the one table that every command asks."""

from operator import le
from typing import NamedTuple

from edgekit.target import read_version


class Reads(NamedTuple):
    """The newest IR version, opset of ai.onnx and version of the ORT format with which an ONNX Runtime makes a session.

    It refuses anything newer at load. ORT formats below 5, of ONNX Runtime up to 1.12, are read by full builds alone.
    """

    since: str
    ir_version: int
    opset: int
    ort_format: int


# Measured 2026-11-22 and 2026-11-23 with the wheels 1.15.1, 1.16.0, 1.16.3, 1.17.3, 1.18.0, 1.19.2, 1.20.1, 1.22.1,
# 1.23.2, 1.24.4, 1.26.0, 1.28.0 to 1.30.0, 1.31.1 and 1.32.0: a model of one Relu, and one file of each version of the
# ORT format. Each writes the newest that it reads; its sources call 6 that of 1.15, and 1.15.1 refuses it.
READS = (
    Reads("1.15.0", 9, 19, 5),
    Reads("1.16.0", 9, 19, 6),
    Reads("1.17.0", 9, 20, 6),
    Reads("1.18.0", 10, 21, 6),
    Reads("1.22.0", 10, 22, 6),
    Reads("1.23.0", 11, 23, 6),
    Reads("1.24.0", 13, 25, 6),
    Reads("1.26.0", 13, 26, 6),
    Reads("1.32.0", 14, 28, 6),
)


def reads_of(version: str) -> Reads:
    """Returns what an ONNX Runtime reads; one older than the table is held to its first row."""
    known = [row for row in READS if read_version(row.since) <= read_version(version)]
    return known[-1] if known else READS[0]


def find_reader(ir_version: int, opset: int, ort_format: int = 0) -> str | None:
    """Returns the oldest ONNX Runtime that reads all of it, None where no version that was tried does.

    `ort_format` is the version of a file in ORT format.
    """
    asked = (ir_version, opset, ort_format)
    return next((row.since for row in READS if all(map(le, asked, row[1:]))), None)
