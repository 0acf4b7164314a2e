"""adb's messages: a header of six numbers, then a payload; and the streams that they carry."""

import queue
import socket
import struct
import threading
from collections.abc import Callable
from typing import NamedTuple

from adb_daemon.faults import Faults

VERSION = 0x01000001
MAX_DATA = 1 << 20
_HEADER = struct.Struct("<6I")


def command(name: bytes) -> int:
    return int.from_bytes(name, "little")


CNXN, AUTH, OPEN, OKAY, CLSE, WRTE = (command(n) for n in (b"CNXN", b"AUTH", b"OPEN", b"OKAY", b"CLSE", b"WRTE"))
SUMMED = frozenset({CNXN, AUTH})
"""Messages from before the versions are known carry the sum of their bytes; later ones 0."""


class Message(NamedTuple):
    command: int
    arg0: int
    arg1: int
    data: bytes


class Link:
    """One connection of an adb server, with a lock around what is sent."""

    def __init__(self, sock: socket.socket, faults: Faults) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.sock = sock
        self.faults = faults
        self.stalled = threading.Event()
        self.max_data = MAX_DATA
        self._lock = threading.Lock()

    def send(self, kind: int, arg0: int, arg1: int, data: bytes = b"") -> None:
        if self.stalled.is_set():
            return
        total = sum(data) & 0xFFFFFFFF if kind in SUMMED else 0
        header = _HEADER.pack(kind, arg0, arg1, len(data), total, kind ^ 0xFFFFFFFF)
        with self._lock:
            try:
                self.sock.sendall(header + data)
            except OSError:
                self.cut()

    def send_garbage(self) -> None:
        with self._lock:
            self.sock.sendall(_HEADER.pack(WRTE, 1, 1, 0x7FFFFFFF, 0, WRTE ^ 0xFFFFFFFF) + b"\xff" * 64)

    def receive(self) -> Message | None:
        header = self._exactly(_HEADER.size)
        if header is None:
            return None
        kind, arg0, arg1, size, _, magic = _HEADER.unpack(header)
        if magic != kind ^ 0xFFFFFFFF or size > MAX_DATA:
            return None
        data = self._exactly(size)
        return None if data is None else Message(kind, arg0, arg1, data)

    def cut(self) -> None:
        try:
            self.sock.shutdown(socket.SHUT_RDWR)
        except OSError:
            return

    def _exactly(self, size: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < size:
            try:
                part = self.sock.recv(size - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)


class Stream:
    """A service's two-way pipe: one message in flight each way, acknowledged when consumed."""

    def __init__(self, link: Link, own: int, peer: int, service: str) -> None:
        self.link = link
        self.own = own
        self.peer = peer
        self.service = service
        self.closed = threading.Event()
        self.pids: list[int] = []
        self.on_close: Callable[[], None] = lambda: None
        self._inbox: queue.Queue[bytes | None] = queue.Queue()
        self._acknowledged = threading.Semaphore(0)
        self._left = memoryview(b"")

    def write(self, data: bytes) -> bool:
        """Sends bytes to the host; False where the host has closed the stream."""
        for start in range(0, len(data), self.link.max_data):
            part = self.link.faults.pass_out(self, data[start : start + self.link.max_data])
            if self.closed.is_set():
                return False
            if part:
                self.link.send(WRTE, self.own, self.peer, part)
                self._acknowledged.acquire()
        return not self.closed.is_set()

    def read(self) -> bytes | None:
        """Returns what the host sent next, None at the end."""
        if self._left:
            data, self._left = bytes(self._left), memoryview(b"")
            return data
        item = self._inbox.get()
        if item is not None:
            self.link.send(OKAY, self.own, self.peer)
            item = self.link.faults.pass_in(self, item)
        return None if self.closed.is_set() and not item else item

    def read_exactly(self, size: int) -> bytes | None:
        parts: list[memoryview] = []
        missing = size
        while missing:
            if not self._left:
                data = self.read()
                if data is None:
                    return None
                self._left = memoryview(data)
            parts.append(self._left[:missing])
            self._left = self._left[missing:]
            missing -= len(parts[-1])
        return b"".join(parts)

    def deliver(self, data: bytes) -> None:
        self._inbox.put(data)

    def acknowledge(self) -> None:
        self._acknowledged.release()

    def close(self, *, tell: bool = True) -> None:
        if not self.closed.is_set():
            self.closed.set()
            if tell:
                self.link.send(CLSE, self.own, self.peer)
            self.on_close()
        self._inbox.put(None)
        self._acknowledged.release()
