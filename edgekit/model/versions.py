"""Which versions of the format each ONNX Runtime reads: the one table that every command asks."""

from typing import NamedTuple

from edgekit.target import read_version


class Reads(NamedTuple):
    """The newest IR version, opset of ai.onnx and version of the ORT format with which an ONNX Runtime makes a session.

    It refuses anything newer at load.
    """

    since: str
    ir_version: int
    opset: int
    ort_format: int


# Measured 2026-11-22 with the wheels 1.19.2, 1.20.1, 1.22.1, 1.23.2, 1.24.4, 1.26.0, 1.28.0 to 1.30.0, 1.31.1 and
# 1.32.0: a model of one Relu. ORT format: core/session/ort_version_check.h and flatbuffers/ort_format_version.h; all
# of these read and write version 6.
READS = (
    Reads("1.19.0", 10, 21, 6),
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


def find_reader(ir_version: int, opset: int) -> str | None:
    """Returns the oldest ONNX Runtime that reads both, None where no version that was tried does."""
    return next((row.since for row in READS if ir_version <= row.ir_version and opset <= row.opset), None)
