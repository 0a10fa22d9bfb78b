"""Targets: well-formed messages in any order, from an admitted but hostile peer, to what stands behind the decoders."""

from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch

from fuzz.target import Target
from spantrain.core.messages import MessageKey
from spantrain.core.outer.events import Ticket, TransferWay
from spantrain.core.outer.layers import ParameterSpec
from spantrain.core.span import Span
from spantrain.transport.connection.bounds import Refusal
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.layers.arrivals import Arrivals
from spantrain.transport.layers.copiers import BufferPool, Copiers
from spantrain.transport.layers.departures import Departures
from spantrain.transport.layers.format import Opening
from spantrain.transport.layers.interface import LayerKey, LayerLimits, LayerLink, LayerTerms
from spantrain.transport.mailbox import wire
from spantrain.transport.mailbox.exchange import Exchange
from spantrain.transport.mailbox.interface import Limits
from spantrain.transport.mailbox.outbox import OutgoingMessage
from testing.outer.layer_wires import SilentLink

Step = tuple[str, tuple[Any, ...]]
_FAR = (0, 1, 2, 3, 5, wire.MAX_AHEAD, wire.MAX_AHEAD + 1, 2**31, 2**62, 2**63 - 2)


def _steps(kinds: Mapping[str, Callable[[Random], tuple[Any, ...]]], most: int) -> Callable[[Random], list[Step]]:
    def make(chance: Random) -> list[Step]:
        names = [chance.choice(list(kinds)) for _ in range(chance.randrange(1, most))]
        return [(name, kinds[name](chance)) for name in names]

    return make


# The mailbox: its exchange, inbox and outbox.


@cache
def _a_tensor(*sizes: int) -> torch.Tensor:
    return torch.empty(sizes, dtype=torch.uint8)


@cache
def _headers() -> tuple[bytes, ...]:
    """Of messages with nothing, little and much in them, and of other generations."""
    found = []
    for generation in (0, 1, 2):
        key = MessageKey(generation=generation, step=1, lane="forward", cut=0, span=Span(0, 4))
        for sizes in ((), ((0, 3),), ((5,),), ((40_000,),), ((200_000,), (3,)), ((0,),) * 256):
            tensors = [_a_tensor(*size) for size in sizes]
            found.append(wire.encode_header(wire.header_of(key, tensors, 0.0)))
    return tuple(found)


def _done(chance: Random) -> tuple[tuple[int, tuple[int, ...]], ...]:
    return tuple((chance.choice(_FAR), tuple(chance.choice(_FAR) for _ in range(chance.randrange(3)))) for _ in "ab")


_MAILBOX = {
    "chunk": lambda chance: (
        chance.randrange(2), chance.choice((1, 1, 2, 3, *_FAR)), chance.choice((0, 0, 1, wire.CHUNK_BYTES, 2**40)),
        chance.randrange(len(_headers())), chance.choice((None, None, None, 0, 7)),
    ),
    "acknowledge": lambda chance: (_done(chance), chance.choice(_FAR)),
    "greet": lambda chance: (
        chance.choice((0, 1, 2)), _done(chance), (chance.choice(_FAR[1:]), chance.choice(_FAR[1:])),
        chance.choice(_FAR), chance.random() < 0.5,
    ),
    "offer": lambda chance: (chance.choice((0, 5, 40_000)),),
    "collect": lambda chance: (),
    "flush": lambda chance: (),
    "peers": lambda chance: (chance.choice((1, 1, 2)),),
}  # fmt: skip
_WINDOW = 2**20


def _mailbox(case: list[Step], _folder: Path) -> object:
    exchange = Exchange(
        name="here", limits=Limits(max_message_bytes=_WINDOW // 2, receive_queue_bytes=_WINDOW), encrypted=True,
        dialable=True,
    )  # fmt: skip
    evil = PeerAddress(name="evil", endpoint="", public_key="")
    exchange.set_peers(1, [evil], dial=True)
    refused: list[Refusal] = []

    def chunk(track: int, number: int, offset: int, header: int, size: int | None) -> None:
        known, head = exchange.peers["evil"], _headers()[header]
        payload_bytes = wire.decode_header(head, _WINDOW).payload_bytes
        length = max(0, min(wire.CHUNK_BYTES, payload_bytes - offset)) if size is None else size
        exchange.take_chunk(known, wire.Chunk(track, number, offset, 0, head), memoryview(bytes(length)))

    def greet(session: int, done: Any, first: Any, granted: int, fresh: bool) -> None:
        known = exchange.peers["evil"]
        greeting = wire.Greeting(
            name="evil", session=session, peer_session=known.session if fresh else 0, epoch=1, connection=0,
            connections=3, done=done, first=first, granted_bytes=granted,
        )  # fmt: skip
        exchange.begin(known, greeting, fresh_link=fresh)

    def offer(size: int) -> None:
        key = MessageKey(generation=exchange.generation, step=1, lane="forward", cut=0, span=Span(0, 4))
        exchange.offer("evil", OutgoingMessage.pack(key, [_a_tensor(size)], _WINDOW, 0.0), 0.0)

    def flush() -> None:
        known = exchange.peers["evil"]
        for track in (wire.EXPRESS, wire.BULK):
            while (outgoing := known.outbox.peek(track, 0.0)) is not None:
                known.outbox.advance(outgoing)
        wire.decode_acknowledgement(wire.encode_acknowledgement(known.inbox.take_acknowledgement()))
        known.greeting("here", 1, 0, 3)

    acts: dict[str, Callable[..., object]] = {
        "chunk": chunk,
        "acknowledge": lambda done, granted: exchange.take_acknowledgement(
            exchange.peers["evil"], wire.Acknowledgement(done=done, granted_bytes=granted)
        ),
        "greet": greet,
        "offer": offer,
        "collect": lambda: exchange.collect(0.0),
        "flush": flush,
        "peers": lambda generation: exchange.set_peers(max(generation, exchange.generation), [evil], dial=True),
    }
    for name, values in (("greet", (1, ((0, ()), (0, ())), (1, 1), 2**30, True)), *case):
        try:
            acts[name](*values)
        except Refusal as refusal:
            refused.append(refusal)
        inbox = exchange.peers["evil"].inbox
        halves = sum(partial.header.charge_bytes for partial in inbox._partials.values())
        assert inbox._queued_bytes + halves <= inbox._window_bytes
        assert all(len(later) <= wire.MAX_AHEAD for _, later in inbox.done)
    return _told(refused)


def _told(refused: list[Refusal]) -> object:
    """Raise the last refusal, so that it is counted."""
    if refused:
        raise refused[-1]
    return None


# Layers: what comes and what goes.


_SPECS = (
    (ParameterSpec(name="w", shape=(100,)),),
    (ParameterSpec(name="w", shape=(40_000,)), ParameterSpec(name="b", shape=(3,), dtype="bfloat16")),
    (ParameterSpec(name="w", shape=(100,)),) * 2,
    (ParameterSpec(name="v", shape=(2**31, 2**20)),),
)


def _a_key(chance: Random) -> LayerKey:
    return LayerKey(
        ticket=Ticket(1, chance.randrange(2)), way=chance.choice(list(TransferWay)), layer=chance.randrange(2)
    )


def _number(chance: Random) -> int:
    return chance.choice((0, 0, 1, 2, 2**64 - 1))


_LAYERS: dict[str, Callable[[Random], tuple[Any, ...]]] = {
    "open": lambda chance: (_number(chance), _a_key(chance), chance.randrange(len(_SPECS))),
    "data": lambda chance: (_number(chance), chance.choice((None, None, None, 0, 5, 2**63)), chance.choice(
        (0, 1, 400, 4096, 65536))),
    "cancel": lambda chance: (_number(chance),),
    "granted": lambda chance: (_number(chance), chance.choice((0, 10, 400, 65536, 2**64 - 1))),
    "done": lambda chance: (_number(chance),),
    "refused": lambda chance: (_number(chance),),
    "expect": lambda chance: (_a_key(chance), chance.randrange(2)),
    "send": lambda chance: (_a_key(chance), chance.choice((1, 5, 70_000))),
    "forget": lambda chance: (Ticket(1, chance.randrange(2)),),
    "overdue": lambda chance: (),
    "meet": lambda chance: (),
    "lose": lambda chance: (),
}  # fmt: skip


def _layers(case: list[Step], _folder: Path) -> object:
    limits = LayerLimits(frame_bytes=65536, window_bytes=131072, no_progress_s=1.0, copiers=0)
    told: Counter[tuple[str, LayerKey]] = Counter()
    wanted: Counter[tuple[str, LayerKey]] = Counter()

    def lost(_peer: str, key: LayerKey, _reason: str) -> None:
        told["end", key] += 1

    def hand_over(layer: Any) -> None:
        if arrivals.claim(layer):
            told["end", layer.key] += 1
            layer.tensors()

    progressed: list[Any] = []
    copiers = Copiers(0, name="here", every_bytes=32768, progressed=progressed.append, hand_over=hand_over, died=print)
    arrivals = Arrivals(limits, BufferPool(), copiers, lost=lost)
    departures = Departures(limits, sent=lambda _peer, key: lost("", key, ""), lost=lost)
    link, now_s, came = SilentLink(limits, "evil"), 0.0, Counter[int]()
    refused: list[Refusal] = []

    def meet() -> None:
        link.state = LayerTerms(frame_bytes=65536, window_bytes=65536)

    def data(number: int, offset: int | None, size: int) -> None:
        piece = memoryview(bytes(size))
        try:
            arrivals.data(link, number, came[number] if offset is None else offset, piece, now_s)
        finally:
            came[number] += size

    def opened(number: int, key: LayerKey, specs: int) -> None:
        came[number] = 0
        arrivals.opened(link, Opening(number=number, key=key, parameters=_SPECS[specs]), now_s)

    def expect(key: LayerKey, specs: int) -> None:
        if not wanted["end", key]:
            wanted["end", key] += 1
            arrivals.expect(link, "evil", key, _SPECS[specs], now_s)

    def send(key: LayerKey, numbers: int) -> None:
        if not wanted["end", key]:
            wanted["end", key] += 1
            departures.send(link, "evil", key, {"w": _a_tensor(numbers)}, now_s)

    def lose() -> None:
        arrivals.link_lost("evil", "it has gone")
        departures.link_lost("evil", "it has gone")

    meet()
    links: dict[str, LayerLink] = {"evil": link}
    acts: dict[str, Callable[..., object]] = {
        "open": opened, "data": data, "expect": expect, "send": send, "lose": lose,
        "cancel": lambda number: arrivals.cancelled(link, number),
        "granted": lambda number, upto: departures.granted(link, number, upto, now_s),
        "done": lambda number: departures.done(link, number, now_s),
        "refused": lambda number: departures.refused(link, number, "no", now_s),
        "forget": lambda ticket: (arrivals.forget(ticket, links), departures.forget(ticket, links)),
        "overdue": lambda: (arrivals.overdue(now_s, links), departures.overdue(now_s, links)),
        "meet": meet,
    }  # fmt: skip
    for name, values in case:
        now_s += 0.3
        try:
            acts[name](*values)
        except Refusal as refusal:
            refused.append(refusal)
        while progressed:
            arrivals.progressed(link, progressed.pop(0))
    assert all(told[what] <= wanted[what] for what in told), "a layer is told of once"
    return _told(refused)


STATE_TARGETS: tuple[Target, ...] = (
    Target(name="state-mailbox", make=_steps(_MAILBOX, 24), run=_mailbox, refusals=(Refusal,)),
    Target(name="state-layers", make=_steps(_LAYERS, 24), run=_layers, refusals=(Refusal,)),
)
