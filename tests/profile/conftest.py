import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "devices"))

from other_machine.fixtures import adb, arm_runner, host_runner, own_adb_server

__all__ = ["adb", "arm_runner", "host_runner", "own_adb_server"]
