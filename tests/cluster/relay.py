"""A way to a server whose connections can be cut: no byte comes through, and no end either."""

from __future__ import annotations

import contextlib
import socket
import threading


class Relay:
    """Passes on, byte by byte, what comes to `address`; `cut` all connections that there are.

    A new connection works, as it does when a network is mended and an old one waits for TCP.
    """

    def __init__(self, to: str) -> None:
        host, _, port = to.rpartition(":")
        self._to = host, int(port)
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._cut = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def connections(self) -> int:
        """How many there have been."""
        return len(self._pairs)

    def cut(self) -> None:
        self._cut = len(self._pairs)

    def close(self) -> None:
        self._listener.close()
        for pair in self._pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):  # closed
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(self._to)
                number = len(self._pairs)
                self._pairs.append((here, there))
                for one, other in ((here, there), (there, here)):
                    threading.Thread(
                        target=self._pass_on, args=(number, one, other), daemon=True
                    ).start()

    def _pass_on(self, number: int, one: socket.socket, other: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := one.recv(1 << 16):
                if number >= self._cut:
                    other.sendall(data)
            if number >= self._cut:
                other.shutdown(socket.SHUT_WR)
