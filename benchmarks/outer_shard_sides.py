"""The processes of `outer_shard.py`: shards and workers that do what the conductor says by standard input.

Real: the shard server, the wire, the arithmetic, memory. Instead of the master: lines of JSON by pipes, so that what is
measured is data, not control.
"""

import argparse
import json
import os
import re
import resource
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import psutil
import torch
import zmq

from spantrain.core.outer.commands import Move
from spantrain.core.outer.events import LayerTransfer, Moved, OuterEvent, TransferLost, TransferWay
from spantrain.core.outer.layers import ShardLayout
from spantrain.outer.link.codec import decode_command, decode_value, encode_message
from spantrain.outer.link.link import LinkListener, MasterWelcome, MemberFacts
from spantrain.outer.policy.settings import OuterSettings
from spantrain.outer.rules.nesterov import Nesterov
from spantrain.outer.shard.server import ShardServer
from spantrain.outer.shard.snapshots import FolderSnapshots
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.layers.interface import LayerKey, LayerLimits
from spantrain.transport.layers.transport import LayerTransport

_SAY = threading.Lock()


def say(**fields: Any) -> None:
    """Tell the conductor something."""
    with _SAY:
        sys.stdout.write(json.dumps(fields) + "\n")
        sys.stdout.flush()


def usage() -> dict[str, float]:
    """Return processor seconds, pages that were made, resident bytes now and at most."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "cpu_s": own.ru_utime + own.ru_stime,
        "pages": own.ru_minflt,
        "resident_bytes": psutil.Process().memory_info().rss,
        "most_bytes": _most_bytes(),
    }


def _most_bytes() -> int:
    """Return what was resident at most since this program began; `ru_maxrss` has what its parent held as it forked."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    return int(re.search(r"^VmHWM:\s+(\d+) kB$", status, re.MULTILINE)[1]) * 1024


class PipeLink:
    """A shard's link to the conductor."""

    def __init__(self, facts: MemberFacts, listener: LinkListener) -> None:
        self.facts, self.listener = facts, listener

    def start(self) -> None:
        """Say where the shard is reached."""
        say(address=asdict(PeerAddress(name="", endpoint=self.facts.endpoint, public_key=self.facts.public_key)))

    def tell(self, *events: OuterEvent) -> None:
        """Tell events."""
        for event in events:
            say(event=encode_message(event), at_s=time.monotonic())

    def register_again(self, reason: str) -> None:
        """Say what went wrong."""
        say(problem=reason)

    def close(self) -> None:
        """End."""


def peers_of(order: Mapping[str, Any]) -> tuple[PeerAddress, ...]:
    """Return the peers that the conductor tells of."""
    return tuple(PeerAddress(**peer) for peer in order["peers"])


def run_shard(name: str, bind: str, folder: Path, encrypted: bool, limits: LayerLimits) -> None:
    """Be a shard."""
    links: list[PipeLink] = []

    def link_of(facts: MemberFacts, listener: LinkListener) -> PipeLink:
        links.append(PipeLink(facts, listener))
        return links[0]

    store = FolderSnapshots(folder, keep=1)
    with ShardServer(
        name=name, bind=bind, snapshots=store, link_of=link_of, encrypted=encrypted, limits=limits
    ) as server:
        for order in map(json.loads, sys.stdin):
            if "command" in order:
                links[0].listener.commanded(decode_command(order["command"]))
            elif "layout" in order:
                layout = decode_value(ShardLayout, order["layout"], "layout")
                links[0].listener.joined(
                    MasterWelcome(
                        layout=layout, rule=Nesterov(), settings=OuterSettings(), peers=peers_of(order)
                    )
                )  # fmt: skip
                say(ready=True)
            else:
                say(usage=usage(), refused=server.counters().refused)


class Worker:
    """A worker of a cluster: sends and takes in layers."""

    def __init__(self, name: str, encrypted: bool, limits: LayerLimits) -> None:
        self.keys = KeyPair.generate() if encrypted else None
        self.wire = LayerTransport(name=name, bind="", keypair=self.keys, listener=self, limits=limits)
        self.moves: dict[LayerKey, LayerTransfer] = {}
        self.layout: ShardLayout | None = None
        self.tensors: dict[int, dict[str, torch.Tensor]] = {}

    def set_layout(self, layout: ShardLayout) -> None:
        """Make a model of this layout."""
        self.layout = layout
        for k, layer in enumerate(layout.layers):
            self.tensors[k] = {one.name: torch.full(one.shape, 0.01) for one in layer.parameters}

    def move(self, command: Move) -> None:
        """Send a layer, or expect one."""
        transfer = command.transfer
        key = LayerKey(ticket=transfer.ticket, way=command.way, layer=transfer.layer)
        self.moves[key] = transfer
        if command.way is TransferWay.PUSH:
            self.wire.send(transfer.shard, key, self.tensors[transfer.layer])
        else:
            assert self.layout is not None
            self.wire.expect(transfer.shard, key, self.layout.layers[transfer.layer].parameters)

    def arrived(self, peer: str, key: LayerKey, tensors: Mapping[str, torch.Tensor]) -> None:  # noqa: ARG002
        """Tell the conductor."""
        say(event=encode_message(Moved(way=TransferWay.PULL, transfer=self.moves.pop(key))), at_s=time.monotonic())

    def sent(self, peer: str, key: LayerKey) -> None:  # noqa: ARG002
        """The shard tells."""
        self.moves.pop(key)

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:  # noqa: ARG002
        """Tell the conductor."""
        event = TransferLost(way=key.way, transfer=self.moves.pop(key), reason=reason)
        say(event=encode_message(event), at_s=time.monotonic())

    def died(self, fault: str) -> None:
        """End: the conductor notices."""
        print(fault, file=sys.stderr)
        os._exit(1)


def run_worker(name: str, encrypted: bool, limits: LayerLimits) -> None:
    """Be a worker."""
    worker = Worker(name, encrypted, limits)
    say(address=asdict(PeerAddress(name=name, endpoint="", public_key=worker.wire.public_key)))
    for order in map(json.loads, sys.stdin):
        if "command" in order:
            command = decode_command(order["command"])
            assert isinstance(command, Move)
            worker.move(command)
        elif "layout" in order:
            worker.set_layout(decode_value(ShardLayout, order["layout"], "layout"))
            worker.wire.set_peers(peers_of(order))
            say(ready=True)
        else:
            say(usage=usage(), refused=worker.wire.counters().refused)
    worker.wire.close()


# ZeroMQ alone: frames are sent from one buffer, and dropped where they come.


def raw_socket(context: "zmq.Context[zmq.Socket[bytes]]", kind: int, keys: KeyPair | None) -> "zmq.Socket[bytes]":
    """Return a socket with a few frames of room."""
    socket = context.socket(kind)
    socket.setsockopt(zmq.SNDHWM, 4)
    socket.setsockopt(zmq.RCVHWM, 4)
    if keys is not None:
        socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, keys.secret_key.encode())
    return socket


def run_raw_sink(bind: str, encrypted: bool) -> None:
    """Take frames, and drop them."""
    keys = KeyPair.generate() if encrypted else None
    socket = raw_socket(zmq.Context(), zmq.PULL, keys)
    if encrypted:
        socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.bind(bind)
    endpoint = socket.getsockopt_string(zmq.LAST_ENDPOINT)
    say(address={"endpoint": endpoint, "public_key": keys.public_key if keys else ""})
    for order in map(json.loads, sys.stdin):
        if "usage" in order:
            say(usage=usage())
            continue
        for _ in range(order["frames"]):
            socket.recv(copy=False)
        say(done_s=time.monotonic())


def run_raw_source(encrypted: bool, frame_bytes: int) -> None:
    """Send frames to all sinks in turn."""
    context, sockets = zmq.Context(), []
    say(address={})
    data = memoryview(bytearray(2**28))
    for order in map(json.loads, sys.stdin):
        if "usage" in order:
            say(usage=usage())
            continue
        for sink in order.get("sinks", ()):
            socket = raw_socket(context, zmq.PUSH, KeyPair.generate() if encrypted else None)
            if encrypted:
                socket.setsockopt(zmq.CURVE_SERVERKEY, sink["public_key"].encode())
            socket.connect(sink["endpoint"])
            sockets.append(socket)
        say(begun_s=time.monotonic())
        for k in range(order.get("frames", 0)):
            begin = k * frame_bytes % (len(data) - frame_bytes)
            for socket in sockets:
                socket.send(data[begin : begin + frame_bytes], copy=False)


def main() -> None:
    """Be one side."""
    parser = argparse.ArgumentParser()
    parser.add_argument("role", choices=["shard", "worker", "raw-sink", "raw-source"])
    parser.add_argument("--name", default="")
    parser.add_argument("--bind", default="tcp://127.0.0.1:0")
    parser.add_argument("--folder", type=Path, default=Path())
    parser.add_argument("--plain", action="store_true")
    parser.add_argument("--limits", default="{}")
    told = parser.parse_args()
    torch.set_num_threads(1)
    limits = LayerLimits(**json.loads(told.limits))
    if told.role == "shard":
        run_shard(told.name, told.bind, told.folder, not told.plain, limits)
    elif told.role == "worker":
        run_worker(told.name, not told.plain, limits)
    elif told.role == "raw-sink":
        run_raw_sink(told.bind, not told.plain)
    else:
        run_raw_source(not told.plain, limits.frame_bytes)


if __name__ == "__main__":
    main()
