from other_machine.fixtures import adb, host_runner, own_adb_server

__all__ = ["adb", "host_runner", "own_adb_server"]
