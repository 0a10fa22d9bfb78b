"""Measure a testbed from inside, with plain sockets on its hosts: rates over time (TCP, UDP), and round trips.

Also the script that runs on the hosts: `traffic.py receive|send|absorb|flood|echo|ping ...`, standard library only.
"""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from spantrain.testbed.testbed import Testbed

_SAMPLE_S = 0.02
_BLOCK_BYTES = 1 << 18
_PING_BYTES = 20
_DATAGRAM_BYTES = 8900
_BEGIN_S, _SILENCE_S = 60.0, 0.5
"""How long a sender of datagrams may take to begin, and after what silence it is taken to have ended."""

Sample = tuple[float, int]
"""A time on this machine's monotonic clock, and the bytes received until then."""


class Flow:
    """Traffic from one host to another for some seconds, running beside the caller.

    One TCP connection that sends as fast as it can; or, with `udp_bytes_per_s`, datagrams at that rate, which shows
    what the network does at once, since no congestion control stands between.
    """

    def __init__(
        self, testbed: "Testbed", source: str, target: str, *, duration_s: float, udp_bytes_per_s: float | None = None
    ) -> None:
        receive, send = (
            ("receive", ["send"]) if udp_bytes_per_s is None else ("absorb", ["flood", str(udp_bytes_per_s)])
        )
        address = testbed.address(target)
        self._receiver = _start(testbed, target, receive, address)
        self._sender = _start(testbed, source, *send, address, _read_line(self._receiver), str(duration_s))

    def finish(self) -> list[Sample]:
        """Wait for the flow's end and return what had arrived when."""
        samples = [(float(at_s), int(total)) for at_s, total in json.loads(_read_line(self._receiver))]
        for process in (self._sender, self._receiver):
            process.communicate()
        return samples


def rate_bytes_per_s(samples: Sequence[Sample], start_s: float, end_s: float) -> float:
    """Return the rate between the first and last sample within the given times."""
    inside = [sample for sample in samples if start_s <= sample[0] <= end_s]
    if len(inside) < 2:
        return 0.0
    return (inside[-1][1] - inside[0][1]) / (inside[-1][0] - inside[0][0])


def measure_round_trips(testbed: "Testbed", source: str, target: str, *, count: int) -> list[float]:
    """Return round-trip times in seconds of small TCP messages, one after the other, shortest first."""
    echo = _start(testbed, target, "echo", testbed.address(target))
    ping = _start(testbed, source, "ping", testbed.address(target), _read_line(echo), str(count))
    answer, _ = ping.communicate()
    echo.communicate()
    return sorted(json.loads(answer))


def _start(testbed: "Testbed", host: str, *arguments: str) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-I", "-S", os.path.abspath(__file__), *arguments]
    return testbed.popen(host, command, stdout=subprocess.PIPE)


def _read_line(process: "subprocess.Popen[bytes]") -> str:
    assert process.stdout is not None
    return process.stdout.readline().decode().strip()


def _write_line(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def _accept(address: str) -> socket.socket:
    with socket.create_server((address, 0)) as listener:
        _write_line(str(listener.getsockname()[1]))
        connection, _ = listener.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


def _receive(address: str) -> None:
    samples, total, next_s = [], 0, 0.0
    buffer = bytearray(_BLOCK_BYTES)
    with _accept(address) as connection:
        while count := connection.recv_into(buffer):
            total += count
            if (now_s := time.monotonic()) >= next_s:
                samples.append((now_s, total))
                next_s = now_s + _SAMPLE_S
    _write_line(json.dumps(samples))


def _send(address: str, port: str, duration_s: str) -> None:
    block = bytes(_BLOCK_BYTES)
    with socket.create_connection((address, int(port))) as connection:
        end_s = time.monotonic() + float(duration_s)
        while time.monotonic() < end_s:
            connection.send(block)


def _absorb(address: str) -> None:
    samples, total, next_s = [], 0, 0.0
    buffer = bytearray(_DATAGRAM_BYTES)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.bind((address, 0))
        datagrams.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 22)
        _write_line(str(datagrams.getsockname()[1]))
        datagrams.settimeout(_BEGIN_S)
        try:
            while True:
                total += datagrams.recv_into(buffer)
                datagrams.settimeout(_SILENCE_S)
                if (now_s := time.monotonic()) >= next_s:
                    samples.append((now_s, total))
                    next_s = now_s + _SAMPLE_S
        except TimeoutError:
            pass  # the sender has ended
    _write_line(json.dumps(samples))


def _flood(bytes_per_s: str, address: str, port: str, duration_s: str) -> None:
    datagram, sent, start_s = bytes(_DATAGRAM_BYTES), 0, time.monotonic()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as datagrams:
        datagrams.connect((address, int(port)))
        while (passed_s := time.monotonic() - start_s) < float(duration_s):
            while sent * _DATAGRAM_BYTES < passed_s * float(bytes_per_s):
                datagrams.send(datagram)
                sent += 1
            time.sleep(0.001)


def _echo(address: str) -> None:
    with _accept(address) as connection:
        while part := connection.recv(_PING_BYTES):
            connection.sendall(part)


def _ping(address: str, port: str, count: str) -> None:
    times = []
    with socket.create_connection((address, int(port))) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        for _ in range(int(count)):
            start_s = time.monotonic()
            connection.sendall(bytes(_PING_BYTES))
            connection.recv(_PING_BYTES, socket.MSG_WAITALL)
            times.append(time.monotonic() - start_s)
    _write_line(json.dumps(times))


if __name__ == "__main__":
    roles: dict[str, Callable[..., None]] = {
        "receive": _receive,
        "send": _send,
        "absorb": _absorb,
        "flood": _flood,
        "echo": _echo,
        "ping": _ping,
    }
    roles[sys.argv[1]](*sys.argv[2:])
