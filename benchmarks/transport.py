"""Throughput and latency of the mailbox between two sites: `benchmarks/transport.py [--latency-ms 10] [--runs 3]`.

Emulated: the network between the two sites (the testbed's router gives rate and delay; on loopback nothing is
emulated, and nothing limits the rate). Real: two processes, TCP, ZeroMQ, encryption, the mailbox, the clock.

Each line has new processes and connections, since after a live re-shape TCP takes seconds to find the new rate. One
transfer, not counted, comes first: TCP's start, and the processes' own. Of the counted ones, the window is from the
first chunk to the last; the bytes are those of all tensors, less a chunk for each connection, for so much may have come
before the window began. So no ratio exceeds 1, and figures are up to 3 % too low. Nothing else is under way. IP, TCP,
ZeroMQ and encryption take their part of the shaped rate.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from spantrain.core.cluster import Cluster, Host, Link, Site
from spantrain.core.messages import ControlKey
from spantrain.errors import TestbedError
from spantrain.testbed.testbed import Testbed
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.mailbox.interface import Limits, Message
from spantrain.transport.mailbox.mailbox import Mailbox
from spantrain.transport.mailbox.wire import EXPRESS_BYTES

SIZES_BYTES = (16_000, 256_000, 1_000_000)
RATES_BYTES_PER_S = {"100 Mbit/s": 12.5e6, "1 Gbit/s": 125e6}
SIDES = ("sender", "receiver")
PORT = 5555
PINGS = 7
BOUND = 0.9


@dataclass(frozen=True, kw_only=True)
class Order:
    """One transfer."""

    size_bytes: int
    messages: int
    pings: int


def key(step: int) -> ControlKey:
    """Address a message of this benchmark."""
    return ControlKey(generation=0, step=step, lane="probe")


def receive_one_by_one(mailbox: Mailbox) -> Iterator[Message]:
    """Yield messages as they come."""
    while True:
        yield from mailbox.receive(60.0)


def answer(mailbox: Mailbox) -> None:
    """Receive transfers, tell the sender how fast they came and what they cost here; return pings."""
    messages: list[Message] = []
    cpu_s = 0.0
    for message in receive_one_by_one(mailbox):
        if message.key.step < 0:
            return
        if message.key.step == 0:  # a ping
            mailbox.send(message.source, message.key, message.tensors)
            continue
        if not messages:
            cpu_s = time.process_time()
        messages.append(message)
        if len(messages) == message.key.step >> 32:
            figures = [window_rate(messages), (time.process_time() - cpu_s) / len(messages)]
            mailbox.send(message.source, key(1), [torch.tensor(figures, dtype=torch.float64)])
            messages = []


def window_rate(messages: list[Message]) -> float:
    """Return bytes per second from the first chunk of a transfer to its last."""
    first = min(messages, key=lambda message: message.started_s)
    connections = 1 if first.size_bytes <= EXPRESS_BYTES else Limits().bulk_connections
    came = sum(message.size_bytes for message in messages) - connections * first.first_chunk_bytes
    return came / (max(message.received_s for message in messages) - first.started_s)


def send_all(mailbox: Mailbox, incoming: Iterator[Message], payload: torch.Tensor, messages: int) -> list[float]:
    """Send one transfer; return the receiver's figures."""
    for number in range(1, messages + 1):
        mailbox.send("receiver", key(messages << 32 | number), [payload])
    return [float(figure) for figure in next(incoming).tensors[0]]


def transfer(mailbox: Mailbox, order: Order) -> dict[str, float]:
    """Send one transfer, then pings; return the rate, the processors' time and the median one-way time."""
    payload = torch.zeros(order.size_bytes, dtype=torch.uint8)
    incoming = receive_one_by_one(mailbox)
    cpu_s = time.process_time()
    rate, receiver_cpu_s = send_all(mailbox, incoming, payload, order.messages)
    cpu_s = time.process_time() - cpu_s
    round_trips_s = []
    for _ in range(order.pings):
        start_s = time.monotonic()
        mailbox.send("receiver", key(0), [payload])
        next(incoming)
        round_trips_s.append(time.monotonic() - start_s)
    return {
        "rate": rate,
        "one_way_s": statistics.median(round_trips_s) / 2,
        "sender_cpu_s": cpu_s / order.messages,
        "receiver_cpu_s": receiver_cpu_s,
    }


def run_side(role: str, address: str, encrypted: bool) -> None:
    """Be the sender or receiver process; keys and orders come by standard input."""
    torch.set_num_threads(1)
    setup = json.loads(sys.stdin.readline())
    own, other = KeyPair(**setup[role]), setup["sender" if role == "receiver" else "receiver"]["public_key"]
    bind = f"tcp://{address}:{PORT}" if role == "receiver" else ""
    mailbox = Mailbox(name=role, bind=bind, keypair=own, encrypted=encrypted)
    if role == "receiver":
        mailbox.set_peers(0, [PeerAddress(name="sender", endpoint="", public_key=other)])
        answer(mailbox)
    else:
        endpoint = f"tcp://{address}:{PORT}"
        mailbox.set_peers(0, [PeerAddress(name="receiver", endpoint=endpoint, public_key=other)])
        for line in sys.stdin:
            print(json.dumps(transfer(mailbox, Order(**json.loads(line)))), flush=True)
        mailbox.send("receiver", ControlKey(generation=0, step=-1, lane="probe"), [])
    mailbox.close()


class Sides:
    """The two processes, wherever they run."""

    def __init__(self, start, address: str, encrypted: bool) -> None:
        self._processes = []
        pairs = {role: KeyPair.generate() for role in ("receiver", "sender")}
        setup = {role: {"public_key": p.public_key, "secret_key": p.secret_key} for role, p in pairs.items()}
        for role in ("receiver", "sender"):
            argv = [sys.executable, __file__, "--role", role, "--address", address]
            argv += [] if encrypted else ["--plain"]
            process = start(role, argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            process.stdin.write(json.dumps(setup).encode() + b"\n")
            process.stdin.flush()
            self._processes.append(process)

    def transfer(self, order: Order) -> dict[str, float]:
        """Let the sender do one transfer."""
        sender = self._processes[1]
        sender.stdin.write(json.dumps(vars(order)).encode() + b"\n")
        sender.stdin.flush()
        return json.loads(sender.stdout.readline())

    def close(self) -> None:
        """End both processes."""
        for process in reversed(self._processes):
            process.stdin.close()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()


@contextmanager
def network(latency_s: float):
    """Yield (start, address, shape, what is emulated)."""
    sites = tuple(Site(name=n, hosts=(n,), bandwidth_bytes_per_s=1.25e9, latency_s=0.0) for n in ("receiver", "sender"))
    hosts = tuple(Host(name=site.name, site=site.name, devices=()) for site in sites)
    links = tuple(
        Link(source=a, target=b, bandwidth_bytes_per_s=125e6, latency_s=latency_s)
        for a, b in (("sender", "receiver"), ("receiver", "sender"))
    )
    cluster = Cluster(name="transport-benchmark", kinds=(), sites=sites, hosts=hosts, devices=(), links=links)
    try:
        testbed = Testbed.up(cluster)
    except TestbedError as error:
        print(f"no testbed here ({error}); loopback, unshaped")
        yield lambda _, argv, **options: subprocess.Popen(argv, **options), "127.0.0.1", None
        return
    with testbed:

        def shape(rate: float) -> None:
            for link in links:
                testbed.shape(link.source, link.target, bandwidth_bytes_per_s=rate)

        yield testbed.popen, testbed.address("receiver"), shape


def measure(arguments: argparse.Namespace) -> None:
    """Print the table."""
    latency_s = arguments.latency_ms / 1000
    with network(latency_s) as (start, address, shape):
        print(
            f"emulated: {f'rate, and {arguments.latency_ms} ms each way, by the testbed' if shape else 'nothing'};",
            end=" ",
        )
        print(f"real: processes, TCP, ZeroMQ, encryption. Median of {arguments.runs} runs.")
        print("Each line has new processes and connections: after a live re-shape, TCP needs seconds to find its rate.")
        ratios = []
        for name, rate in RATES_BYTES_PER_S.items() if shape else {"loopback": 0.0}.items():
            if shape:
                shape(rate)
            for encrypted in (True, False):
                for size in SIZES_BYTES:
                    messages = max(8, round((rate or 250e6) * arguments.seconds / size))
                    sides = Sides(start, address, encrypted)
                    order = Order(size_bytes=size, messages=messages, pings=PINGS)
                    runs = [sides.transfer(order) for _ in range(1 + arguments.runs)][1:]
                    sides.close()
                    ratio = print_row(name, rate, latency_s if shape else 0.0, size, encrypted, runs)
                    if size == max(SIZES_BYTES):
                        ratios.append(ratio)
        if shape:
            verdict = "held" if min(ratios) >= BOUND else "not held"
            print(f"bound: at least {BOUND:.0%} of the shaped rate with 1 MB messages: {verdict}, {min(ratios):.3f}")


def print_row(name, rate, latency_s, size, encrypted, runs) -> float:
    """Print one line of the table; return the part of the rate that was reached."""
    achieved = statistics.median(run["rate"] for run in runs)
    one_way_s = statistics.median(run["one_way_s"] for run in runs)
    sender_cpu_s, receiver_cpu_s = (statistics.median(run[f"{side}_cpu_s"] for run in runs) for side in SIDES)
    over_s = one_way_s - latency_s - (size / rate if rate else 0.0)
    ratio = f"{achieved / rate:5.3f} of the rate" if rate else "     (no rate set)"
    cipher = "curve" if encrypted else "plain"
    print(
        f"{name:>10} {size / 1000:5.0f} kB {cipher}: {achieved * 8 / 1e6:7.1f} Mbit/s, {ratio}; "
        f"one way {one_way_s * 1e3:6.2f} ms, {over_s * 1e3:5.2f} ms over the link's; "
        f"CPU ms/message: {sender_cpu_s * 1e3:.3f} sender, {receiver_cpu_s * 1e3:.3f} receiver",
        flush=True,
    )
    return achieved / rate if rate else 0.0


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--latency-ms", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=0.5, help="length of a transfer at the shaped rate")
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--role", choices=["sender", "receiver"], help=argparse.SUPPRESS)
    parser.add_argument("--address", default="127.0.0.1", help=argparse.SUPPRESS)
    parser.add_argument("--plain", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.role:
        run_side(arguments.role, arguments.address, not arguments.plain)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()
