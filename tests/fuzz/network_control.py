"""Targets: what the control plane reads, of strangers, of members, and of a coordinator or master."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random
from typing import Any, get_args

import msgpack

from fuzz.messages import altered, packed
from fuzz.mutation import corrupted
from fuzz.target import Target
from fuzz.typed import plain_of
from spantrain.config.files.json_codec import from_json
from spantrain.config.files.text_files import own_code
from spantrain.core.outer.commands import OuterCommand
from spantrain.core.outer.events import OuterEvent
from spantrain.core.outer.layers import ShardLayout
from spantrain.errors import ProtocolError, UsageError
from spantrain.outer.link.codec import decode_command, decode_event, decode_value
from spantrain.outer.link.link import MasterWelcome, MemberFacts
from spantrain.outer.link.status import MasterStatus
from spantrain.runtime.control.orders import ORDERS
from spantrain.runtime.control.requests import REQUESTS
from spantrain.transport.connection.bounds import RefusalCounter
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import Authority, JoinToken, WorkerIdentity, pem_of_der
from spantrain.transport.control.members import Denied, JoinThrottle, Members
from spantrain.transport.control.protocol import RemoteRefusal, decode, unwrap
from spantrain.transport.control.services import JoinService

LIMIT_BYTES = 8 * 2**20
MESSAGE = {"connection": 1, "events": [{"kind": "x", "at": [1.5, None]}], "body": b"xy", "name": "a"}


def _of_bytes(name: str, make: Callable[[Random], bytes], read: Callable[[bytes], Any], *refusals: Any) -> Target:
    return Target(
        name=f"control-{name}", make=make, run=lambda case, _: read(case), refusals=refusals or (ProtocolError,)
    )


def _many(chance: Random) -> bytes:
    """A message that takes far more to read than to send."""
    count = chance.choice((10, 1000, 100_000, 2_000_000))
    inner: bytes = msgpack.packb(chance.choice(([], {}, None, [[]], "")))
    if chance.random() < 0.5:
        return b"\x81\xa1x\xdd" + count.to_bytes(4, "big") + inner * count
    key = msgpack.packb("k" * chance.choice((10, 511, 513, 500_000)))
    return b"\x81" + key + b"\xdd" + (count // 10).to_bytes(4, "big") + inner * (count // 10)


def _message(chance: Random) -> bytes:
    return _many(chance) if chance.random() < 0.01 else packed(chance, altered(chance, MESSAGE))


def _envelope(chance: Random) -> bytes:
    return packed(chance, altered(chance, chance.choice(({"answer": MESSAGE}, {"refusal": "no"}))))


# Joining.


@cache
def _authority() -> tuple[JoinToken, Authority, bytes]:
    return JoinToken.create(b"a certificate"), Authority.create(), WorkerIdentity.create("edge-0").request_der


def _join_request(chance: Random) -> bytes:
    """A request to join, mostly with a proof that is right."""
    token, _, valid = _authority()
    der = corrupted(chance, valid) if chance.random() < 0.7 else valid
    request = {"code": own_code(), "request": der, "proof": token.proof(der), "facts": {}}
    return packed(chance, request) if chance.random() < 0.7 else packed(chance, altered(chance, request))


def _joined(body: bytes, _folder: Path) -> object:
    token, authority, _ = _authority()
    service = JoinService(
        token=token,
        authority=authority,
        members=Members(max_peers=2),
        on_join=lambda _name, _facts: {},
        refusals=RefusalCounter(),
        throttle=JoinThrottle(attempts=10**9, window_s=1.0),
    )
    return unwrap(service.answer(body, source="10.0.0.1", now_s=0.0, control=Address(host="h", port=1)))


# What messages hold.


def _typed(name: str, kind: Any, read: Callable[[Any], Any], *refusals: type[Exception]) -> Target:
    """Return a target whose cases are plain values as they come out of a message."""

    def make(chance: Random) -> Any:
        return altered(chance, plain_of(kind, chance))

    return Target(name=f"control-{name}", make=make, run=lambda case, _: read(case), refusals=refusals)


def _from_json(name: str, kind: Any) -> Target:
    return _typed(name, kind, lambda case: from_json(kind, case, name, error=ProtocolError), ProtocolError)


def _decoded(name: str, kind: Any) -> Target:
    return _typed(name, kind, lambda case: decode_value(kind, case, name), ProtocolError)


def _kinds(name: str, union: Any, read: Callable[[Any], Any]) -> Target:
    kinds = get_args(union)

    def make(chance: Random) -> Any:
        kind = chance.choice(kinds)
        value = {"kind": kind.__name__, **plain_of(kind, chance)}
        value.pop("fragment", None)
        return altered(chance, value if chance.random() < 0.8 else {**value, "fragment": chance.choice((1, 2, 2**62))})

    return Target(name=f"control-{name}", make=make, run=lambda case, _: read(case), refusals=(ProtocolError,))


_QUESTIONS = (*REQUESTS, *ORDERS.values())


CONTROL_TARGETS: tuple[Target, ...] = (
    replace(
        _of_bytes("message", _message, lambda case: decode(case, limit_bytes=LIMIT_BYTES)),
        most_s=6.0, most_bytes=2**28,
    ),
    _of_bytes("envelope", _envelope, unwrap, ProtocolError, RemoteRefusal),
    Target(
        name="control-join", make=_join_request, run=_joined, refusals=(Denied, RemoteRefusal, ProtocolError)
    ),
    _of_bytes("certificate", lambda chance: corrupted(chance, _authority()[2]), pem_of_der),
    _of_bytes("token", lambda chance: corrupted(chance, _authority()[0].text.encode()),
              lambda case: JoinToken.parse(case.decode("latin-1")), UsageError),
    _kinds("event", OuterEvent, decode_event),
    _kinds("command", OuterCommand, decode_command),
    *(
        _decoded(f"{kind.__name__}", kind)
        for kind in (MemberFacts, MasterWelcome, MasterStatus, ShardLayout, PeerAddress)
    ),
    *(
        _from_json(f"{kind.__name__}", kind)
        for kind in dict.fromkeys((*_QUESTIONS, *(question.answer for question in _QUESTIONS)))
    ),
)  # fmt: skip
