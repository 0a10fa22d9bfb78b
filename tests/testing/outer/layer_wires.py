"""Layer wires on loopback, and a listener that remembers what it was told."""

import contextlib
import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import ParameterSpec
from spantrain.transport.connection.bounds import HELLO
from spantrain.transport.connection.links import PeerLink
from spantrain.transport.connection.peers import KeyPair, PeerAddress
from spantrain.transport.layers.format import WELCOME, LayerHello, Opening, encode_hello, encode_opening
from spantrain.transport.layers.interface import LayerKey, LayerLimits, LayerTerms
from spantrain.transport.layers.transport import LayerTransport
from testing.patience import PATIENCE_S

KIB = 1024


def patient(**bounds: Any) -> LayerLimits:
    """Limits under which nothing is given up only because the machine is slow."""
    return LayerLimits(**{"no_progress_s": 2 * PATIENCE_S, "welcome_s": PATIENCE_S, **bounds})


class Heard:
    """What a wire told."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self.whole: dict[tuple[str, LayerKey], dict[str, torch.Tensor]] = {}
        self.gone: list[tuple[str, LayerKey]] = []
        self.missing: dict[tuple[str, LayerKey], str] = {}
        self.faults: list[str] = []

    def arrived(self, peer: str, key: LayerKey, tensors: Mapping[str, torch.Tensor]) -> None:
        with self._changed:
            assert (peer, key) not in self.whole
            self.whole[peer, key] = dict(tensors)
            self._changed.notify_all()

    def sent(self, peer: str, key: LayerKey) -> None:
        with self._changed:
            self.gone.append((peer, key))
            self._changed.notify_all()

    def lost(self, peer: str, key: LayerKey, reason: str) -> None:
        with self._changed:
            assert (peer, key) not in self.whole
            self.missing[peer, key] = reason
            self._changed.notify_all()

    def died(self, fault: str) -> None:
        with self._changed:
            self.faults.append(fault)
            self._changed.notify_all()

    def until(self, holds: Any) -> Any:
        with self._changed:
            assert self._changed.wait_for(lambda: holds(self), PATIENCE_S), f"it never came true: {vars(self)}"
            return holds(self)

    def layer(self, peer: str, key: LayerKey) -> dict[str, torch.Tensor]:
        return self.until(lambda told: told.whole.get((peer, key)))

    def reason(self, peer: str, key: LayerKey) -> str:
        return self.until(lambda told: told.missing.get((peer, key)))


class Wires(contextlib.ExitStack):
    """A shard `s` and workers that dial it."""

    def __init__(self, *, encrypted: bool = True, limits: LayerLimits | None = None) -> None:
        super().__init__()
        self.encrypted = encrypted
        self.limits = limits or patient(frame_bytes=64 * KIB, window_bytes=256 * KIB)
        self.keys: dict[str, KeyPair] = {}
        self.heard: dict[str, Heard] = {}
        self.listeners: dict[str, type[Heard]] = {}
        """Of those that hear otherwise."""
        self.wires: dict[str, LayerTransport] = {}

    def open(self, name: str, *, bind: str = "", limits: LayerLimits | None = None) -> LayerTransport:
        keys = self.keys.setdefault(name, KeyPair.generate())
        self.heard[name] = self.listeners.get(name, Heard)()
        wire = LayerTransport(
            name=name, bind=bind, keypair=keys if self.encrypted else None, listener=self.heard[name],
            limits=limits or self.limits,
        )  # fmt: skip
        self.wires[name] = wire
        self.callback(wire.close)
        return wire

    def address(self, name: str) -> PeerAddress:
        wire = self.wires[name]
        return PeerAddress(name=name, endpoint=wire.endpoint, public_key=wire.public_key)

    def met(self, *workers: str, limits: LayerLimits | None = None) -> tuple[LayerTransport, ...]:
        """Open a shard and workers that know each other."""
        shard = self.open("s", bind="tcp://127.0.0.1:0", limits=limits)
        opened = [self.open(name, limits=limits) for name in workers]
        shard.set_peers([self.address(name) for name in workers])
        for wire in opened:
            wire.set_peers([self.address("s")])
        return (shard, *opened)


def a_key(layer: int = 0, *, way: TransferWay = TransferWay.PUSH, number: int = 1) -> LayerKey:
    return LayerKey(ticket=Ticket(1, number), way=way, layer=layer)


def a_layer(seed: int = 0) -> dict[str, torch.Tensor]:
    """Large and small parameters of several types; over a window in all."""
    chance = torch.Generator().manual_seed(seed)
    return {
        "norm.weight": torch.randn(37, generator=chance),
        "up.weight": torch.randn(300, 301, generator=chance),
        "up.bias": torch.randn(301, generator=chance).to(torch.bfloat16),
        "scale": torch.randn((), generator=chance).double(),
        "down.weight": torch.randn(301, 300, generator=chance).t(),
        "half": torch.randn(70_001, generator=chance).half(),
    }


def specs(tensors: Mapping[str, torch.Tensor]) -> tuple[ParameterSpec, ...]:
    return tuple(
        ParameterSpec(name=name, shape=tuple(one.shape), dtype=str(one.dtype).removeprefix("torch."))
        for name, one in tensors.items()
    )


def same(got: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> bool:
    return got.keys() == wanted.keys() and all(
        got[name].dtype == one.dtype and torch.equal(got[name], one) for name, one in wanted.items()
    )


def has_refused(wire: LayerTransport, wanted: Mapping[str, int]) -> None:
    """Wait until a wire has counted this: whoever is refused hears of it before, and so does the owner."""
    deadline_s = time.monotonic() + PATIENCE_S
    while (counted := wire.counters().refused) != wanted and time.monotonic() < deadline_s:
        time.sleep(0.002)
    assert counted == wanted


WORDS = (ParameterSpec(name="w", shape=(100,)),)


def hello_of(name: str, *, session: int = 1, connection: int = 0, window_bytes: int = 64 * KIB) -> bytes:
    """What a side says on one of two connections, for pieces of 64 KiB."""
    hello = LayerHello(
        name=name, session=session, connection=connection, connections=2, frame_bytes=64 * KIB,
        window_bytes=window_bytes,
    )  # fmt: skip
    return encode_hello(HELLO, hello)


class SilentLink(PeerLink[LayerTerms]):
    """A link of two connections that is up and notes what is sent by it."""

    def __init__(self, limits: LayerLimits, name: str = "a") -> None:
        terms = LayerTerms(frame_bytes=limits.frame_bytes, window_bytes=limits.window_bytes)
        super().__init__(PeerAddress(name=name, endpoint="", public_key=""), terms)
        self.connections = 2
        self.up = True
        self.out: list[bytes] = []

    def send(self, connection: int, frames: Any, *, copy: bool = True) -> bool:
        assert 0 <= connection < 2
        self.out.append(frames[0])
        return True


def greet(sockets, name, session=7):
    for line, socket in enumerate(sockets):
        socket.send(hello_of(name, session=session, connection=line, window_bytes=256 * KIB))
    assert sockets[0].recv()[:1] == WELCOME


def opened(key, parameters, number=0):
    return encode_opening(Opening(number=number, key=key, parameters=tuple(parameters)))


def still_takes(wires, shard, worker, number=99):
    """A layer of a peer that does as it should."""
    shard.expect("a", a_key(number=number), specs(a_layer()))
    worker.send("s", a_key(number=number), a_layer())
    assert same(wires.heard["s"].layer("a", a_key(number=number)), a_layer())
