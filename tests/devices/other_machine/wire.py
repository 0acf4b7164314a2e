"""A wire between two ports of this machine, which can be cut, stalled, slowed or made noisy after some bytes."""

import contextlib
import socket
import threading
import time
from types import TracebackType
from typing import Self

KINDS = ("", "cut", "stall", "slow", "garble", "refuse", "noise", "mute")


class Wire:
    """Passes connections to `port` on to `target`.

    `kind` is what goes wrong once `after` bytes have passed `towards` the target ("in") or from it ("out") on one
    connection that was made after the fault was set; it happens `times` times.
    """

    def __init__(self, target: int) -> None:
        self.target = target
        self.kind = ""
        self.after = 0
        self.towards = "out"
        self.times = 1
        self.seconds = 0.0
        self.connections = 0
        self._faults = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._open: list[socket.socket] = []
        self.port: int = self._listener.getsockname()[1]

    def fail(self, kind: str, *, after: int = 0, towards: str = "out", times: int = 1, seconds: float = 0.0) -> None:
        assert kind in KINDS
        self.kind, self.after, self.towards, self.times, self.seconds = kind, after, towards, times, seconds
        self._faults += 1

    def __enter__(self) -> Self:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._listener.close()
        self.cut()

    def cut(self) -> None:
        """Ends every connection that is open."""
        for sock in self._open:
            with contextlib.suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
            sock.close()
        self._open.clear()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self.kind in {"refuse", "noise", "mute"} and self.times > 0:
                self._turn_away(near)
                continue
            try:
                machine = socket.create_connection(("127.0.0.1", self.target))
            except OSError:
                near.close()
                continue
            self._open += [near, machine]
            for source, sink, towards in ((near, machine, "in"), (machine, near, "out")):
                sink.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                threading.Thread(target=self._pass, args=(source, sink, towards), daemon=True).start()

    def _turn_away(self, near: socket.socket) -> None:
        self.times -= 1
        if self.kind == "mute":
            self._open.append(near)
            return
        if self.kind == "noise":
            near.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n\x00\xff" * 40)
        near.close()

    def _pass(self, source: socket.socket, sink: socket.socket, towards: str) -> None:
        passed, faults = 0, self._faults
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 18):
                passed += len(data)
                due = self.kind and self.towards == towards and self.times > 0 and passed > self.after
                if due and faults == self._faults:
                    if self.kind == "slow":
                        time.sleep(self.seconds)
                    else:
                        self.times -= 1
                        data = self._fail_at(data, len(data) - (passed - self.after), (source, sink))
                if not data:
                    return
                sink.sendall(data)
            sink.shutdown(socket.SHUT_WR)

    def _fail_at(self, data: bytes, keep: int, ends: tuple[socket.socket, socket.socket]) -> bytes:
        """Returns what is still passed on; nothing where the connection is over, or passes nothing any more."""
        keep = max(0, keep)
        if self.kind == "garble":
            return data[:keep] + bytes([data[keep] ^ 0xFF]) + data[keep + 1 :]
        if self.kind == "cut":
            ends[1].sendall(data[:keep])
            for sock in ends:
                sock.shutdown(socket.SHUT_RDWR)
        return b""
