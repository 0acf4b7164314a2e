import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[1] / room) for room in ("bundle", "devices")]

from other_machine.fixtures import adb, host_runner, own_adb_server  # noqa: E402

__all__ = ["adb", "host_runner", "own_adb_server"]
