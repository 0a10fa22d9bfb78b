"""A program that listens on its machine, and tries what goes to the listeners of others; `reach.pairs` leads it.

As `probe`, it needs Python 3.6 and nothing else. Lines of JSON come on standard input, one answer to each goes out:
first `{"secret": HEX, "name": ME}`, then `{"listen": PORT}` or `{"connect": ..}`; it ends when its input does. Who
does not know the secret of this run is neither answered nor believed: private addresses are used twice in the world.
"""

import errno
import hmac
import json
import os
import queue
import select
import socket
import struct
import sys
import threading
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

CONNECT_S = 3.0
SILENT_S = 8.0
LONGEST_S = 10.0
PINGS = 12
CHUNK = bytes(2**16)
NONCE, TAG = 16, 32
RAMP_PART = 0.4
"""Of a load, what is not counted: TCP finds its speed."""
SIZES = (9000, 1500, 1492, 1480, 1460, 1450, 1440, 1420, 1400, 1380, 1360, 1340, 1320, 1300, 1280, 1200, 576)
"""Packets that are tried: what networks and tunnels have."""
IP_MTU_DISCOVER, IPV6_MTU_DISCOVER, PROBE_MTU, IP_MTU, IPV6_MTU = 10, 23, 3, 14, 24
"""Of Linux; `socket` does not have them all."""
PING, SEEN, ASK_LOAD = b"p", b"s", b"r"
TALK, UP, DOWN = b"T", b"U", b"D"


class Ends:
    """Both ends' work: a listener for others, and tries towards theirs."""

    def __init__(self, name: str, secret: bytes) -> None:
        self.name, self.secret = name, secret
        self.loads = {}  # type: dict[bytes, float]
        self.changed = threading.Condition()

    def tag(self, *parts: bytes) -> bytes:
        """Return what only who knows the secret can say."""
        return hmac.new(self.secret, b"/".join(parts), "sha256").digest()

    def listen(self, port: int) -> int:
        """Listen on all addresses, for TCP and UDP; return the port."""
        both = socket.has_ipv6 and os.path.exists("/proc/net/if_inet6")
        family = socket.AF_INET6 if both else socket.AF_INET
        sockets = [socket.socket(family, kind) for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM)]
        for one in sockets:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if both:
                one.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            one.bind(("", port))
            port = one.getsockname()[1]
        sockets[0].listen(64)
        start(self.serve, sockets[0])
        start(self.echo, sockets[1])
        return port

    def serve(self, listener: "socket.socket") -> None:
        """Serve everybody who connects."""
        while True:
            connection, where = listener.accept()
            start(self.talk, connection, where[0])

    def echo(self, datagrams: "socket.socket") -> None:
        """Say of each datagram how long it was."""
        wanted = self.tag(b"mtu")
        while True:
            packet, where = datagrams.recvfrom(2**16)
            if hmac.compare_digest(packet[:TAG], wanted):
                datagrams.sendto(self.tag(b"long") + struct.pack("!H", len(packet)), where)

    def talk(self, connection: "socket.socket", where: str) -> None:
        """Serve one connection to its end."""
        with connection:
            try:
                self.answer(connection, where)
            except (OSError, EOFError, struct.error):
                return  # whoever it was has gone, or has never been one of us

    def answer(self, connection: "socket.socket", where: str) -> None:
        """Let the other side prove itself, and do what it wants."""
        connection.settimeout(SILENT_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        nonce = os.urandom(NONCE)
        connection.sendall(nonce)
        said = exactly(connection, NONCE + TAG)
        if not hmac.compare_digest(said[NONCE:], self.tag(b"dial", nonce)):
            return
        connection.sendall(self.tag(b"serve", said[:NONCE], self.name.encode()))
        what = exactly(connection, 1)
        if what == DOWN:
            (seconds,) = struct.unpack("!d", exactly(connection, 8))
            pour(connection, min(seconds, LONGEST_S))
        elif what == UP:
            number, (seconds,) = exactly(connection, NONCE), struct.unpack("!d", exactly(connection, 8))
            rate = take(connection, min(seconds, LONGEST_S))
            with self.changed:
                self.loads[number] = rate
                self.changed.notify_all()
        while what == TALK:
            question = exactly(connection, 1)
            if question == PING:
                connection.sendall(struct.pack("!d", time.time()))
            elif question == SEEN:
                connection.sendall(plain(where).encode().ljust(64))
            else:
                number = exactly(connection, NONCE)
                with self.changed:
                    self.changed.wait_for(lambda: number in self.loads, SILENT_S)  # noqa: B023
                    connection.sendall(struct.pack("!d", self.loads.pop(number, -1.0)))

    def dial(self, name: str, address: str, port: int) -> "socket.socket":
        """Return a connection to a listener that has proved to be that of this name; OSError says why there is none."""
        connection = socket.create_connection((address, port), CONNECT_S)
        try:
            connection.settimeout(SILENT_S)
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            nonce = os.urandom(NONCE)
            connection.sendall(nonce + self.tag(b"dial", exactly(connection, NONCE)))
            if hmac.compare_digest(exactly(connection, TAG), self.tag(b"serve", nonce, name.encode())):
                return connection
            raise EOFError
        except (EOFError, ConnectionError):
            connection.close()
            raise OSError(errno.EPROTO, "another program or machine answers there") from None
        except OSError:
            connection.close()
            raise

    def connect(self, name: str, addresses: "list[str]", port: int, seconds: float) -> "dict[str, Any]":
        """Try all addresses of another listener at once, and go on with the first that has led there."""
        came = queue.Queue()  # type: queue.Queue[tuple[str, Any]]

        def tried(address: str) -> None:
            try:
                came.put((address, self.dial(name, address, port)))
            except OSError as error:
                came.put((address, error))

        for address in addresses:
            start(tried, address)
        errors = dict.fromkeys(addresses, "no answer")  # as of names that nobody resolves in time
        until = time.monotonic() + CONNECT_S + 1
        for _ in addresses:
            try:
                address, found = came.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                break
            if isinstance(found, socket.socket):
                with found:
                    return self.measure(found, name, address, port, seconds)
            errors[address] = reason(found)
        return {"errors": errors}

    def measure(
        self, connection: "socket.socket", name: str, address: str, port: int, seconds: float
    ) -> "dict[str, Any]":
        """Return what a connection tells of the way."""
        connection.sendall(TALK)
        took, offsets = [], []
        for _ in range(PINGS):
            wall, begin = time.time(), time.perf_counter()
            connection.sendall(PING)
            (there,) = struct.unpack("!d", exactly(connection, 8))
            took.append(time.perf_counter() - begin)
            offsets.append(there - (wall + took[-1] / 2))
        best = min(took)
        connection.sendall(SEEN)
        local = plain(connection.getsockname()[0])
        report = {
            "address": address,
            "local_address": local,
            "seen_address": exactly(connection, 64).decode().strip(),
            "round_trip_s": best,
            "clock_offset_s": offsets[took.index(best)],
        }
        v6 = connection.family == socket.AF_INET6
        if sys.platform == "linux":
            level, option = (socket.IPPROTO_IPV6, IPV6_MTU) if v6 else (socket.IPPROTO_IP, IP_MTU)
            report["interface_mtu"] = connection.getsockopt(level, option)
            report["path_mtu"] = self.path_mtu(address, port, int(report["interface_mtu"]), best)
        if seconds > 0:
            seconds += min(10 * best, LONGEST_S / 2)
            number = os.urandom(NONCE)
            with self.dial(name, address, port) as load:
                load.sendall(UP + number + struct.pack("!d", seconds))
                pour(load, seconds + SILENT_S)
            connection.sendall(ASK_LOAD + number)
            (report["up_bytes_per_s"],) = struct.unpack("!d", exactly(connection, 8))
            with self.dial(name, address, port) as load:
                load.sendall(DOWN + struct.pack("!d", seconds))
                report["down_bytes_per_s"] = take(load, seconds)
        return report

    def path_mtu(self, address: str, port: int, most: int, round_trip_s: float) -> "int | None":
        """Return the largest packet of some sizes that arrives undivided; null where no datagram does."""
        family, _, _, _, where = socket.getaddrinfo(address, port, 0, socket.SOCK_DGRAM)[0]
        v6 = family == socket.AF_INET6
        headers = 48 if v6 else 28
        level, option = (socket.IPPROTO_IPV6, IPV6_MTU_DISCOVER) if v6 else (socket.IPPROTO_IP, IP_MTU_DISCOVER)
        largest, tag = None, self.tag(b"mtu")
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.setsockopt(level, option, PROBE_MTU)
            probe.connect(where)
            sizes = sorted({min(most, 2**16 - 1), *(size for size in SIZES if size < most)})
            for _ in range(2):
                for size in sizes:
                    try:
                        probe.send(tag.ljust(size - headers, b"."))
                    except OSError:
                        continue  # this machine knows already that it is too large
                until = time.monotonic() + 0.2 + 3 * round_trip_s
                while largest != sizes[-1] and select.select([probe], [], [], max(0, until - time.monotonic()))[0]:
                    try:
                        said = probe.recv(64)
                    except OSError:
                        continue
                    if len(said) == TAG + 2 and hmac.compare_digest(said[:TAG], self.tag(b"long")):
                        largest = max(largest or 0, struct.unpack("!H", said[TAG:])[0] + headers)
        return largest


def start(work: "Any", *arguments: "Any") -> None:
    """Do something beside."""
    threading.Thread(target=work, args=arguments, daemon=True).start()


def exactly(connection: "socket.socket", size: int) -> bytes:
    """Return so many bytes; EOFError if there are fewer."""
    got = b""
    while len(got) < size:
        piece = connection.recv(size - len(got))
        if not piece:
            raise EOFError
        got += piece
    return got


def pour(connection: "socket.socket", seconds: float) -> None:
    """Send until the other side has enough, at most so long."""
    until = time.monotonic() + seconds
    try:
        while time.monotonic() < until:
            connection.send(CHUNK)
    except OSError:
        return  # it has enough


def take(connection: "socket.socket", seconds: float) -> float:
    """Receive for so long; return bytes per second of the later part."""
    buffer = bytearray(2**18)
    total, count_from, at = connection.recv_into(buffer), 0, 0.0
    begin = now = time.monotonic()
    while total and now < begin + seconds:
        if not at and now >= begin + RAMP_PART * seconds:
            count_from, at = total, now
        got = connection.recv_into(buffer)
        if not got:
            break
        total, now = total + got, time.monotonic()
    return (total - count_from) / max(now - (at or begin), 1e-6)


def plain(address: str) -> str:
    """Return an address as people write it."""
    return address[7:] if address.startswith("::ffff:") else address.partition("%")[0]


def reason(error: OSError) -> str:
    """Say in a word why a connection did not come about."""
    if isinstance(error, ConnectionRefusedError):
        return "refused"
    if isinstance(error, socket.timeout):
        return "no answer"
    return (error.strerror or str(error))[:100]


def main() -> None:
    """Answer line by line."""
    first = json.loads(sys.stdin.buffer.readline().decode())
    ends = Ends(first["name"], bytes.fromhex(first["secret"]))
    print("{}", flush=True)  # noqa: T201 - to whoever sent it
    for line in sys.stdin.buffer:
        asked = json.loads(line.decode())
        try:
            if "listen" in asked:
                said = {"port": ends.listen(asked["listen"])}  # type: dict[str, Any]
            else:
                said = ends.connect(**asked["connect"])
        except (OSError, EOFError) as error:
            said = {"errors": {"": reason(error) if isinstance(error, OSError) else "the connection broke off"}}
        print(json.dumps(said), flush=True)  # noqa: T201 - to whoever sent it
    os._exit(0)  # whatever its threads do


if __name__ == "__main__":
    main()
