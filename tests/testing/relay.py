"""A network between workers and a coordinator, without any rights: what passes can be held up, or end."""

import math
import selectors
import socket
import threading
import time

NEAR, FAR = "127.0.0.1", "127.0.0.2"
"""Where a coordinator listens, and where its workers find it."""


class Relay:
    """Carries TCP connections from one address to another, on some ports, in a thread of its own."""

    def __init__(self, *ports: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._listeners = {socket.create_server((FAR, port)): port for port in ports}
        for listener in self._listeners:
            self._selector.register(listener, selectors.EVENT_READ)
        self._other: dict[socket.socket, socket.socket] = {}
        self._held: set[socket.socket] = set()
        """Ends that nothing is taken from."""
        self._holds = False
        self._late_s = math.inf
        """When those that were held up are served again."""
        self._lock = threading.Lock()
        self._ends = False
        self._thread = threading.Thread(target=self._run, name="relay", daemon=True)
        self._thread.start()

    def hold_up(self) -> None:
        """Let nothing through, on old and new connections."""
        with self._lock:
            self._holds, self._late_s = True, math.inf
            for end in self._other:
                self._hold(end)

    def go_on(self, late_s: float) -> None:
        """Let new connections through; those from before so much later, as TCP finds out by and by."""
        with self._lock:
            self._holds, self._late_s = False, time.monotonic() + late_s

    def close(self) -> None:
        """End everything."""
        self._ends = True
        self._thread.join()
        for end in (*self._listeners, *self._other):
            end.close()
        self._selector.close()

    def _run(self) -> None:
        while not self._ends:
            ready = self._selector.select(0.02)
            with self._lock:
                if time.monotonic() >= self._late_s:
                    self._late_s = math.inf
                    for end in self._held:
                        self._selector.register(end, selectors.EVENT_READ)
                    self._held.clear()
                for key, _ in ready:
                    end = key.fileobj
                    assert isinstance(end, socket.socket)
                    if end in self._listeners:
                        self._accept(end)
                    elif end in self._other and end not in self._held:
                        self._carry(end)

    def _hold(self, end: socket.socket) -> None:
        if end not in self._held:
            self._held.add(end)
            self._selector.unregister(end)

    def _accept(self, listener: socket.socket) -> None:
        near = listener.accept()[0]
        try:
            far = socket.create_connection((NEAR, self._listeners[listener]))
        except OSError:
            near.close()
            return
        for end, other in ((near, far), (far, near)):
            self._other[end] = other
            self._selector.register(end, selectors.EVENT_READ)
            if self._holds:
                self._hold(end)

    def _carry(self, end: socket.socket) -> None:
        try:
            data = end.recv(1 << 16)
            if data:
                self._other[end].sendall(data)
        except OSError:
            data = b""
        if not data:
            for gone in (end, self._other[end]):
                del self._other[gone]
                if gone not in self._held:
                    self._selector.unregister(gone)
                self._held.discard(gone)
                gone.close()
