"""What the coordinator answers to bytes from a worker, apart from the network: joining, and calls of members."""

import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import grpc

from spantrain.config.files.text_files import own_code
from spantrain.core.records import Record
from spantrain.errors import ProtocolError, SpanTrainError
from spantrain.transport.connection.bounds import RefusalCounter
from spantrain.transport.control import protocol
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import Authority, JoinToken
from spantrain.transport.control.members import Denied, JoinThrottle, Members, check_name, denied

LineListener = Callable[[str, int, bool], None]
"""Hears, in any thread: (authenticated device name, number of a connection, whether it has opened, or closed)."""
_LOOK_S = 1.0
"""How often it is looked whether who shows that it is there was released."""


class JoinService(Record):
    """Answer workers that hold a token and no certificate yet."""

    token: JoinToken
    authority: Authority
    members: Members
    on_join: protocol.Handler
    refusals: RefusalCounter
    throttle: JoinThrottle

    def answer(self, body: bytes, *, source: str, now_s: float, control: Address) -> bytes:
        """Return a certificate and the welcome for a worker that shows the token's secret, or a refusal.

        Raises:
            Denied: wrong token, too many of them from this address, or not a request to join.
        """
        if (wait_s := self.throttle.wait_s(now_s, source)) > 0:
            raise denied(self.refusals, "throttled", grpc.StatusCode.RESOURCE_EXHAUSTED, f"wait {wait_s:.0f} s")
        try:
            code, request_der, proof, facts = _read_join_request(body)
        except ProtocolError as error:
            raise denied(self.refusals, "malformed", grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None
        # Nothing else is looked at before the proof: who cannot show it gets no further than this line.
        if not self.token.accepts(request_der, proof):
            self.throttle.record_failure(now_s, source)
            raise denied(self.refusals, "wrong_token", grpc.StatusCode.UNAUTHENTICATED, f"wrong token of {source}")
        try:
            return self._admit(code, request_der, facts, control)
        except SpanTrainError as error:
            self.refusals.add("join_refused", f"{source}: {error}")
            return protocol.wrap_refusal(str(error))

    def _admit(self, code: str, request_der: bytes, facts: dict[str, Any], control: Address) -> bytes:
        if code != own_code():
            raise protocol.RemoteRefusal(
                "its SpanTrain is not the one here, and numbers could differ: install the same on both machines "
                "(`spantrain doctor --cluster FILE` says where it is another)"
            )
        signing_request, name = self.authority.read_request(request_der)
        check_name(name)
        with self.members.joining(name) as seat:
            welcome = self.on_join(name, facts)
            certificate_der = self.authority.sign(signing_request, name)
            # A TCP host is known to the worker already, and by a name that works from where it is.
            where = {"path": control.path} if control.path else {"port": control.port}
            message = protocol.wrap_answer({"certificate": certificate_der, "control": where, "welcome": welcome})
            seat.certificate_der = certificate_der
        return message


def _read_join_request(body: bytes) -> tuple[str, bytes, bytes, dict[str, Any]]:
    match protocol.decode(body, limit_bytes=protocol.JOIN_REQUEST_LIMIT_BYTES):
        case {"code": str(code), "request": bytes(request), "proof": bytes(proof), "facts": dict(facts)}:
            return code, request, proof, facts
        case other:
            raise ProtocolError(f"a request to join needs code, request, proof and facts, got {sorted(other)}")


class CallDispatcher:
    """Answer calls of workers that have joined."""

    def __init__(
        self,
        handlers: Mapping[str, protocol.Handler],
        *,
        members: Members,
        calls_per_peer: int,
        refusals: RefusalCounter,
        on_line: LineListener,
    ) -> None:
        assert protocol.HELLO not in handlers, f"{protocol.HELLO} is answered by the server itself"
        self._handlers: Mapping[str, protocol.Handler] = {**handlers, protocol.HELLO: lambda _peer, _payload: {}}
        self.methods = tuple(self._handlers)
        """What can be called."""
        self._members = members
        self._calls_per_peer = calls_per_peer
        self._refusals = refusals
        self._on_line = on_line
        self._lines = itertools.count()
        self._held: dict[threading.Event, tuple[str, int]] | None = {}
        """Ends of calls that show that workers are there, of whom, and their connections' numbers; None: none is held
        any more."""
        self._nudged: dict[str, list[int]] = {}
        """Connections of peers whose calls were answered for news; they are taken for open until the next call."""
        self._running: dict[str, list[str]] = {}
        """Methods of the calls that run, by who makes them."""
        self._changed = threading.Condition()

    def answer(self, method: str, body: bytes, *, certificate_der: bytes | None) -> bytes:
        """Return the handler's answer or refusal.

        Raises:
            Denied: the certificate is nobody's, the payload is malformed, or this peer has too many calls running.
        """
        with self._calling(method, certificate_der) as name:
            try:
                payload = protocol.decode(body, limit_bytes=protocol.MESSAGE_LIMIT_BYTES)
                return self._handle(self._handlers[method], name, payload)
            except ProtocolError as error:
                raise denied(self._refusals, "malformed", grpc.StatusCode.INVALID_ARGUMENT, str(error)) from None

    def hold(self, ended: threading.Event, *, certificate_der: bytes | None) -> bytes:
        """Hold a call that shows whether a worker is there until it has `ended`, or the worker is released.

        Raises:
            Denied: as `answer`.
        """
        with self._calling(protocol.PRESENCE, certificate_der) as name:
            with self._changed:
                line, held = next(self._lines), self._held
                if held is None:
                    return protocol.wrap_answer({})
                held[ended] = name, line
                before = self._nudged.pop(name, [])
            self._on_line(name, line, True)
            for old in before:
                self._on_line(name, old, False)
            while not ended.wait(_LOOK_S) and self._name_of(certificate_der) == name:
                pass
            with self._changed:
                is_told = held.pop(ended, None) is not None and self._held is not None
            if is_told:
                self._on_line(name, line, False)
        return protocol.wrap_answer({})

    def nudge(self, names: Collection[str]) -> None:
        """Answer the calls by which some peers show that they are there: they call again, and ask for news, at once."""
        with self._changed:
            for ended, (name, line) in list((self._held or {}).items()):
                if name in names and self._held is not None:
                    del self._held[ended]
                    self._nudged.setdefault(name, []).append(line)
                    ended.set()

    def let_go(self) -> None:
        """Answer those that show that they are there, and tell of nobody's end any more."""
        with self._changed:
            held, self._held = self._held or {}, None
            for ended in held:
                ended.set()

    def _name_of(self, certificate_der: bytes | None) -> str | None:
        return self._members.name_of(certificate_der) if certificate_der else None

    @contextmanager
    def _calling(self, method: str, certificate_der: bytes | None) -> Iterator[str]:
        """Count a call while it runs, so that no member can take all threads, and give who makes it."""
        name = self._name_of(certificate_der)
        if name is None:
            self._refusals.add("unknown_peer")  # in no log: what one asked before it left may come behind that
            raise Denied(grpc.StatusCode.UNAUTHENTICATED, "not a member of this run any more")
        with self._changed:
            running = self._running.setdefault(name, [])
            has_room = len(running) < self._calls_per_peer
            if has_room:
                running.append(method)
        if not has_room:
            told = f"{name} has too many calls running at once"
            raise denied(self._refusals, "too_many_calls", grpc.StatusCode.RESOURCE_EXHAUSTED, told)
        try:
            yield name
        finally:
            with self._changed:
                running.remove(method)
                if not running:
                    del self._running[name]
                self._changed.notify_all()

    def _handle(self, handler: protocol.Handler, name: str, payload: dict[str, Any]) -> bytes:
        try:
            answer = handler(name, payload)
        except SpanTrainError as error:
            if isinstance(error, ProtocolError):
                self._refusals.add("malformed", f"{name}: {error}")
            return protocol.wrap_refusal(str(error))
        try:
            return protocol.wrap_answer(answer)
        except ProtocolError as error:
            raise Denied(grpc.StatusCode.INTERNAL, f"the answer cannot be sent: {error}") from None

    def wait_idle(self, timeout_s: float) -> tuple[str, ...]:
        """Wait until no handler runs; return those that still do."""
        with self._changed:
            self._changed.wait_for(lambda: not self._running, timeout_s)
            return tuple(sorted({f"{method} of {name}" for name, calls in self._running.items() for method in calls}))
