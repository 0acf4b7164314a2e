from other_machine.fixtures import adb, board, host_runner, own_adb_server

__all__ = ["adb", "board", "host_runner", "own_adb_server"]
