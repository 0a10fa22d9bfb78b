"""A member of a run that sends a shard's process what it must not: the shard goes on, and clusters train."""

import contextlib
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgpack
import pytest
import torch
import zmq

from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import ParameterSpec
from spantrain.outer.client.optimizer import OuterOptimizer
from spantrain.outer.link.codec import decode_value, encode_value
from spantrain.outer.link.link import MasterWelcome, MemberFacts
from spantrain.transport.connection.bounds import HELLO
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.control.client import ControlClient
from spantrain.transport.layers.format import OPEN, WELCOME, LayerHello, Opening, encode_hello, encode_opening
from spantrain.transport.layers.interface import LayerKey
from testing.patience import PATIENCE_S
from testing.programs import process_of_log

pytestmark = pytest.mark.timeout(300)

CONFIG = """\
name: here
master: {address: "127.0.0.1:0", state: state/master}
shards:
  - {name: s0, address: "127.0.0.1:0", snapshots: state/s0}
settings: {grace: 0.1 s}
"""
NUMBER = bytes(8)
HOSTILE: tuple[bytes, ...] = (
    OPEN + NUMBER + msgpack.packb([1, 1, ["push"], 0, [["w", "float32", [4]]]]),
    OPEN + NUMBER + msgpack.packb([1, 1, {}, 0, [["w", "float32", [4]]]]),
    OPEN + NUMBER + msgpack.packb([[[]] * 9, 1, "push", 0, [["w", "float32", [2**62] * 16]]]),
    OPEN + NUMBER + b"\x95" + b"\x91" * 1000 + b"\x01\x01\xa4push\x00\x90",
    HELLO + msgpack.packb([[1], {}, None, -1, 2**63, 0.5, b""]),
    *(kind + bytes(n) for kind in (b"D", b"G", b"E", b"N", b"C", b"W", b"R", b"\0") for n in (0, 7, 8, 16, 40)),
)


@contextlib.contextmanager
def brought_up(folder: Path) -> Iterator[dict[str, Any]]:
    """Run master and shard; yield what `outer up` says."""
    (folder / "outer.yaml").write_text(CONFIG)
    command = [sys.executable, "-m", "spantrain", "outer", "up", str(folder / "outer.yaml"), "--json"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as up:
        try:
            assert up.stdout
            said = ""
            for line in up.stdout:
                said += line
                if line == "}\n":
                    break
            assert "}" in said, said
            yield json.loads(said[said.index("{") :])
            assert up.poll() is None
        finally:
            up.terminate()


class Hostile:
    """Has joined as a worker, with a key that the shard lets in."""

    def __init__(self, address: str, token: str) -> None:
        self.keys = KeyPair.generate()
        self.context = zmq.Context()
        self.client = ControlClient.join(address, token, name="evil/w", facts={}, timeout_s=PATIENCE_S)
        facts = encode_value(MemberFacts(kind="worker", public_key=self.keys.public_key))
        while True:  # until the shard has told where it is
            answer = self.client.call("enter", {"facts": facts}, timeout_s=PATIENCE_S)
            peers = decode_value(MasterWelcome, answer["welcome"], "welcome").peers
            if peers:
                break
        self.sockets = [self._dialled(peers[0]) for _ in range(2)]
        for line, socket in enumerate(self.sockets):
            hello = LayerHello(
                name="evil/w", session=7, connection=line, connections=2, frame_bytes=2**20, window_bytes=2**22
            )
            socket.send(encode_hello(HELLO, hello))
        assert self.sockets[0].recv()[:1] == WELCOME

    def _dialled(self, shard: PeerAddress) -> "zmq.Socket[bytes]":
        socket = self.context.socket(zmq.DEALER)
        socket.setsockopt(zmq.RCVTIMEO, int(1000 * PATIENCE_S))
        socket.setsockopt(zmq.CURVE_PUBLICKEY, self.keys.public_key.encode())
        socket.setsockopt(zmq.CURVE_SECRETKEY, self.keys.secret_key.encode())
        socket.setsockopt(zmq.CURVE_SERVERKEY, shard.public_key.encode())
        socket.connect(shard.endpoint)
        return socket

    def attack(self) -> None:
        for message in HOSTILE:
            self.sockets[1].send(message)
            self.sockets[0].send(message)

    def open_many(self) -> None:
        key = LayerKey(ticket=Ticket(1, 1), way=TransferWay.PUSH, layer=0)
        many = tuple(ParameterSpec(name=f"{k}", shape=(1,)) for k in range(8192))
        for number in range(1, 5):
            self.sockets[1].send(encode_opening(Opening(number=number, key=key, parameters=many)))

    def close(self) -> None:
        self.client.close()
        self.context.destroy(linger=0)


@pytest.mark.slow
def test_a_hostile_member_stops_no_shard(tmp_path):
    with brought_up(tmp_path) as said:
        log = Path(said["logs"], "s0.log")
        token = Path(said["token_file"]).read_text().strip()
        weight = torch.zeros(3, requires_grad=True)
        with OuterOptimizer(
            {"w": weight}, master=said["address"], token=token, cluster="a", inner_steps=2
        ) as outer, contextlib.closing(Hostile(said["address"], token)) as hostile:  # fmt: skip
            shard = process_of_log(log)
            hostile.open_many()
            for _ in range(6):
                hostile.attack()
                with torch.no_grad():
                    weight.add_(1.0)
                outer.step()
            assert outer.finish(PATIENCE_S), "a push went through the shard, and came back"
        assert process_of_log(log) == shard, "it was not started again"
        told = log.read_text()
        assert "something of evil/w" in told
        assert "Traceback" not in told
