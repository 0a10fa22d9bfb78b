"""Datagrams sent all at once, through an emulated network."""

import sys

from spantrain.testbed.testbed import Testbed

SENDS = """
import socket, sys
address, size, count = (sys.argv[1], int(sys.argv[2])), int(sys.argv[3]), int(sys.argv[4])
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
for _ in range(count):
    sender.sendto(bytes(size), address)
"""
HEADER_BYTES = 28
"""Of a datagram, on a link."""


def burst(testbed: Testbed, source: str, target: str, *, port: int = 9, size_bytes: int, count: int) -> None:
    """Send datagrams; whether someone listens is all the same to the link."""
    words = (testbed.address(target), port, size_bytes, count)
    assert testbed.popen(source, [sys.executable, "-I", "-S", "-c", SENDS, *map(str, words)]).wait() == 0
