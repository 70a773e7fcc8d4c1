"""A link between a device and a server that can be cut, and that counts what crosses it."""

import contextlib
import socket
import threading

from tests.helpers.superlink import HOST


class CutLink:
    """A port on loopback that passes bytes on to another, until so many have crossed one way."""

    def __init__(self, address: str) -> None:
        host, port = address.split(":")
        self._target = (host, int(port))
        self._server = socket.create_server((HOST, 0))
        self.address = f"{HOST}:{self._server.getsockname()[1]}"
        self._lock, self._ends = threading.Lock(), set[socket.socket]()
        self.heal()
        threading.Thread(target=self._accept, daemon=True).start()

    def heal(self, *, up: int | None = None, down: int | None = None) -> None:
        """Pass bytes on from now on, at most so many in a direction."""
        with self._lock:
            self.crossed = {"up": 0, "down": 0}
            self._room = {"up": up, "down": down}
            self.cut = False

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = self._server.accept()
                far = None if self.cut else self._reach()
                if far is None:
                    near.close()
                    continue
                self._ends |= {near, far}
                for source, sink, way in ((near, far, "up"), (far, near, "down")):
                    threading.Thread(
                        target=self._pass, args=(source, sink, way), daemon=True
                    ).start()

    def _reach(self) -> socket.socket | None:
        with contextlib.suppress(ConnectionError):
            return socket.create_connection(self._target)
        return None

    def _pass(self, source: socket.socket, sink: socket.socket, way: str) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 14):
                with self._lock:
                    self.crossed[way] += len(data)
                    room = self._room[way]
                    if room is not None and self.crossed[way] > room:
                        self.cut = True
                if self.cut:
                    break
                sink.sendall(data)
        ends = (source, sink) if not self.cut else tuple(self._ends)
        for end in ends:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()

    def close(self) -> None:
        self._server.close()
        for end in list(self._ends):
            end.close()
