"""An adb daemon on a loopback port: it accepts adb servers, says who it is, and opens services."""

import itertools
import json
import socket
import sys
import threading
from typing import Any

from adb_daemon.faults import Faults, later
from adb_daemon.shell import serve_shell
from adb_daemon.wire import AUTH, CLSE, CNXN, MAX_DATA, OKAY, OPEN, VERSION, WRTE, Link, Stream

_FEATURES = "shell_v2,cmd,stat_v2,ls_v2,fixed_push_mkdir,apex,fixed_push_symlink_timestamp"
_BANNER = "device::ro.product.name=edgefake;ro.product.model=Edge Fake 1;ro.product.device=edgefake;"
_TOKEN = bytes(range(20))
_EMULATOR_PORTS = range(5550, 5590)
"""Any adb server on this machine adopts what listens on these."""


def serve(ready: dict[str, Any]) -> None:
    """Serves until standard input ends; each of its lines sets a fault, and is answered with what was seen."""
    daemon = Daemon()
    daemon.listen()
    say({**ready, "port": daemon.port})
    for line in sys.stdin:
        daemon.faults.set(**json.loads(line))
        if daemon.faults.fault.kind == "appear":
            daemon.listen()
        say({"services": daemon.services, "received": daemon.received})
        daemon.services, daemon.received = [], 0


def say(answer: dict[str, Any]) -> None:
    """Writes a line of JSON to the test that started this process."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


class Daemon:
    """The listening socket, the connections, and what was asked of them."""

    def __init__(self) -> None:
        self.faults = Faults(self._vanish)
        self.services: list[str] = []
        self.received = 0
        self.port = 0
        self._listener: socket.socket | None = None
        self._links: list[Link] = []
        self._ids = itertools.count(1)

    def listen(self) -> None:
        while True:
            listener = socket.socket()
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", self.port))
            if listener.getsockname()[1] not in _EMULATOR_PORTS:
                break
            listener.close()
        self.port = listener.getsockname()[1]
        listener.listen(16)
        self._listener = listener
        threading.Thread(target=self._accept, args=(listener,), daemon=True).start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError:
                return
            link = Link(sock, self.faults)
            self._links.append(link)
            threading.Thread(target=self._talk, args=(link,), daemon=True).start()

    def _vanish(self, back_after_s: float) -> None:
        """Ends every connection and listens no more, or not until some seconds have passed."""
        if self._listener is not None:
            self._listener.shutdown(socket.SHUT_RDWR)
            self._listener.close()
        for link in self._links:
            link.cut()
        self._links.clear()
        if back_after_s:
            later(back_after_s, self.listen)

    def _talk(self, link: Link) -> None:
        streams: dict[int, Stream] = {}
        while (message := link.receive()) is not None:
            kind, arg0, arg1, data = message
            stream = streams.get(arg1)
            if kind in {CNXN, AUTH}:
                self._greet(link, kind, arg1)
            elif kind == OPEN:
                self._open(link, streams, arg0, data.rstrip(b"\0").decode())
            elif stream is None:
                if kind == WRTE:
                    link.send(CLSE, 0, arg0)
            elif kind == WRTE:
                stream.deliver(data)
            elif kind == OKAY:
                stream.acknowledge()
            elif kind == CLSE:
                stream.close()
                del streams[arg1]
        for stream in streams.values():
            stream.close(tell=False)
        link.sock.close()

    def _greet(self, link: Link, kind: int, max_data: int) -> None:
        """Answers CNXN at once, or asks for a signature that is never good enough."""
        if kind == CNXN:
            link.max_data = min(MAX_DATA, max_data)
        fault = self.faults.fault
        if fault.kind == "unauthorized":
            if kind == CNXN or fault.times > 0:
                fault.times -= kind == AUTH
                link.send(AUTH, 1, 0, _TOKEN)
            return
        banner = fault.text if fault.kind == "banner" else f"{_BANNER}features={_FEATURES}"
        link.send(CNXN, VERSION, MAX_DATA, banner.encode())

    def _open(self, link: Link, streams: dict[int, Stream], peer: int, service: str) -> None:
        self.services.append(service)
        if self.faults.takes("refuse", service) or not service.startswith(("shell,v2", "reboot:")):
            link.send(CLSE, 0, peer)
            return
        stream = Stream(link, next(self._ids), peer, service)
        streams[stream.own] = stream
        link.send(OKAY, stream.own, peer)
        threading.Thread(target=self._serve, args=(stream,), daemon=True).start()

    def _serve(self, stream: Stream) -> None:
        head, _, text = stream.service.partition(":")
        if head.startswith("shell,v2"):
            self.received += serve_shell(stream, text)
        else:
            self._vanish(1.0)
        stream.close()
