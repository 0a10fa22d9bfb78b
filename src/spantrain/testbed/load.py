"""Competing traffic between two hosts of a testbed: TCP at a rate, with plain sockets, counted apart by the router.

Also the script that runs on the hosts: `load.py sink|pour ...`, standard library only. Both roles end when their
standard input does, so that nothing is left however the program that started them ends.
"""

import contextlib
import json
import os
import select
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spantrain.testbed.testbed import Testbed

_BLOCK_BYTES = 1 << 16
_UNSENT_BYTES = 1 << 17
"""What the kernel may hold that TCP cannot send yet: little, so that a slow link is felt at once."""
_TICK_S = 0.005
_CREDIT_S = 0.05
"""A load that a slow link has held back makes up for so many seconds at most."""
_REPORT_S = 0.1
_TCP_NOTSENT_LOWAT = 25


class Load(contextlib.AbstractContextManager["Load"]):
    """Traffic from one host to another until it is stopped; a context manager that leaves nothing behind."""

    def __init__(
        self, testbed: "Testbed", source: str, target: str, *, bytes_per_s: float | None, connections: int = 1
    ) -> None:
        """Begin.

        Args:
            testbed: Where.
            source: Host that sends.
            target: Host that receives.
            bytes_per_s: Of TCP payload, over all connections; None: as fast as they can.
            connections: How many share the work; the network shares fairly by connection.
        """
        from spantrain.testbed.shaper import LOAD_TYPE_OF_SERVICE

        address = testbed.address(target)
        self._received_bytes = 0
        self._sink = _start(testbed, target, "sink", address)
        port = _read(self._sink)["port"]
        rate = "" if bytes_per_s is None else repr(bytes_per_s)
        words = (address, str(port), rate, str(connections), str(LOAD_TYPE_OF_SERVICE))
        self._source = _start(testbed, source, "pour", *words)
        _read(self._source)
        self._began_s = time.monotonic()

    @property
    def running(self) -> bool:
        """Whether both ends are there."""
        return self._source.poll() is None and self._sink.poll() is None

    @property
    def elapsed_s(self) -> float:
        """Seconds since it began."""
        return time.monotonic() - self._began_s

    def received_bytes(self, wait_s: float = 0.0) -> int:
        """Return the bytes that have arrived so far; look for news for at most so many seconds."""
        assert self._sink.stdout is not None
        deadline_s = time.monotonic() + wait_s
        while True:
            left_s = max(0.0, deadline_s - time.monotonic())
            if not select.select([self._sink.stdout], [], [], left_s)[0]:
                return self._received_bytes
            line = self._sink.stdout.readline()
            if not line:
                return self._received_bytes
            self._received_bytes = json.loads(line)["received_bytes"]

    def stop(self) -> int:
        """End both sides; return the bytes that had arrived."""
        for process in (self._source, self._sink):
            assert process.stdin is not None
            assert process.stdout is not None
            if process.stdout.closed:
                continue
            process.stdin.close()
            with process.stdout as said:
                for line in said:
                    self._received_bytes = json.loads(line).get("received_bytes", self._received_bytes)
            process.wait()
        return self._received_bytes

    def __exit__(self, *_: object) -> None:
        self.stop()


def _start(testbed: "Testbed", host: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), *arguments]
    # A session of its own: Ctrl-C is for the program, which then ends both sides in order.
    return testbed.popen(
        host, command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
    )


def _read(process: "subprocess.Popen[bytes]") -> dict[str, int]:
    assert process.stdout is not None
    answer: dict[str, int] = json.loads(process.stdout.readline())
    return answer


def _say(*, wait: bool = True, **fields: int) -> None:
    """Tell the program that started this; without waiting, nothing if it does not listen."""
    os.set_blocking(1, wait)
    with contextlib.suppress(BlockingIOError, BrokenPipeError):
        os.write(1, json.dumps(fields).encode() + b"\n")


def _sink(address: str) -> None:
    received, said, next_s = 0, -1, 0.0
    buffer = bytearray(_BLOCK_BYTES)
    with socket.create_server((address, 0)) as listener:
        _say(port=listener.getsockname()[1])
        sockets: list[socket.socket | int] = [0, listener]
        while True:
            for ready in select.select(sockets, [], [], _REPORT_S)[0]:
                if ready == 0:
                    _say(received_bytes=received)
                    return
                if ready is listener:
                    sockets.append(listener.accept()[0])
                elif isinstance(ready, socket.socket):
                    try:
                        count = ready.recv_into(buffer)
                    except ConnectionError:
                        count = 0
                    received += count
                    if not count:
                        sockets.remove(ready)
                        ready.close()
            if received != said and time.monotonic() >= next_s:
                _say(wait=False, received_bytes=received)
                said, next_s = received, time.monotonic() + _REPORT_S


def _pour(address: str, port: str, bytes_per_s: str, connections: str, type_of_service: str) -> None:
    opened = [_connect(address, int(port), int(type_of_service)) for _ in range(int(connections))]
    _say(connections=len(opened))
    rate = float(bytes_per_s) if bytes_per_s else None
    block, credit, then_s = bytes(_BLOCK_BYTES), 0.0, time.monotonic()
    while True:
        if rate is not None:
            now_s = time.monotonic()
            credit = min(credit + (now_s - then_s) * rate, max(rate * _CREDIT_S, _BLOCK_BYTES))
            then_s = now_s
        can_send = rate is None or credit >= 1
        ended, free, _ = select.select([0], opened if can_send else [], [], _TICK_S)
        if ended:
            break
        for connection in free:
            most = _BLOCK_BYTES if rate is None else min(_BLOCK_BYTES, int(credit / len(free)))
            credit -= connection.send(block[:most]) if most else 0
        if rate is not None:
            # Small packets at each turn would cost more than they carry; the end is heard meanwhile.
            select.select([0], [], [], _TICK_S)
    for connection in opened:
        # What the network has not taken yet is dropped, so that the load ends now.
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        connection.close()


def _connect(address: str, port: int, type_of_service: int) -> socket.socket:
    connection = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    connection.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, type_of_service)
    connection.setsockopt(socket.IPPROTO_TCP, _TCP_NOTSENT_LOWAT, _UNSENT_BYTES)
    connection.connect((address, port))
    connection.setblocking(False)
    return connection


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {"sink": _sink, "pour": _pour}
    roles[sys.argv[1]](*sys.argv[2:])
