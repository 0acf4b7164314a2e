from other_machine.fixtures import adb, arm_runner, host_runner, own_adb_server

__all__ = ["adb", "arm_runner", "host_runner", "own_adb_server"]
