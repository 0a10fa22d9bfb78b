"""A worker's end of the control plane: join with a token, then call."""

import contextlib
import socket
import ssl
import threading
import time
from collections.abc import Callable
from typing import Any, TypeVar, cast

import grpc

from spantrain.config.files.text_files import own_code
from spantrain.errors import PeerLostError, ProtocolError, UsageError
from spantrain.transport.control import protocol
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import JoinToken, WorkerIdentity, pem_of_der
from spantrain.transport.control.members import check_name

_T = TypeVar("_T")
_RETRY_PAUSE_S = 0.2
_SILENT_TIMES = 3
_DIAL_S = 2.0
"""One attempt to reach the coordinator's machine: a network that was cut and is back is noticed by the next."""
_LOST = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED, grpc.StatusCode.CANCELLED)


class ControlClient:
    """A worker that has joined. Safe from any thread."""

    def __init__(
        self, *, who: str, address: Address, credentials: grpc.ChannelCredentials, welcome: dict[str, Any]
    ) -> None:
        """Use `join` instead; messages call the other end `who`."""
        self._who, self._address, self.address = who, address, str(address)
        """The coordinator's control port, as it was dialled."""
        self._credentials = credentials
        self._channel = grpc.secure_channel(address.target, credentials, options=protocol.channel_options())
        self._closed = threading.Event()
        self.welcome = welcome
        """What the coordinator's `on_join` answered."""

    @classmethod
    def join(
        cls,
        address: str,
        token: str,
        *,
        name: str,
        facts: dict[str, Any],
        timeout_s: float = 30.0,
        cancelled: threading.Event | None = None,
        role: str = "coordinator",
    ) -> "ControlClient":
        """Join a run as a device; wait for a coordinator that is not there yet, until the time is up or `cancelled`.

        First the coordinator's certificate is fetched and checked against the token; from then on it is the only
        one trusted. Then the secret is proved for a new key, which is answered with a certificate for that key.
        Messages call the coordinator by its `role`.

        Raises:
            UsageError: the token is mistyped, of another run, or refused; the name or address is not one.
            RemoteRefusal: the name is taken, the run is full, or `on_join` refused.
            PeerLostError: nobody answered in time.
        """
        deadline_s = time.monotonic() + timeout_s
        where, parsed = Address.parse(address), JoinToken.parse(token)
        check_name(name)
        server_der = fetch_certificate(where, deadline_s, cancelled, role)
        if not parsed.matches(server_der):
            raise UsageError(
                f"what answers at {where} is not the {role} that made this token: "
                "take address and token from the same run, or somebody stands in between"
            )
        identity = WorkerIdentity.create(name)
        root_pem = pem_of_der(server_der)
        request = identity.request_der
        body = {"code": own_code(), "request": request, "proof": parsed.proof(request), "facts": facts}
        encoded = protocol.encode(body, limit_bytes=protocol.JOIN_REQUEST_LIMIT_BYTES)
        who = f"the {role} at {where}"
        answer = _ask_to_join(where, who, root_pem, encoded, deadline_s)
        client = cls(
            who=who,
            address=_control_address(where, answer),
            credentials=grpc.ssl_channel_credentials(
                root_pem, identity.key_pem, pem_of_der(_field(answer, "certificate", bytes))
            ),
            welcome=_field(answer, "welcome", dict),
        )
        client._greet(where, deadline_s)
        return client

    def another(self) -> "ControlClient":
        """Return the same member on a connection of its own: what holds up this one does not hold up that one."""
        return ControlClient(who=self._who, address=self._address, credentials=self._credentials, welcome=self.welcome)

    def call(self, method: str, payload: dict[str, Any], *, timeout_s: float) -> dict[str, Any]:
        """Return the answer of the coordinator's handler.

        While the connection is down the call waits for it, up to `timeout_s`.

        Raises:
            RemoteRefusal: the handler said no, or this worker was released.
            PeerLostError: no answer in time, or the connection went away under the call.
            ProtocolError: the message is over the limit, or the coordinator cannot make sense of it, or failed at it.
        """
        return self.begin(method, payload, timeout_s=timeout_s).result()

    def begin(
        self, method: str, payload: dict[str, Any], *, timeout_s: float, done: Callable[[], None] | None = None
    ) -> "PendingCall":
        """Begin a call and do not wait for it; `done` is called in a thread of gRPC when it has ended in any way.

        Raises:
            PeerLostError: the connection was closed.
            ProtocolError: the message is over the limit.
        """
        body = protocol.encode(payload, limit_bytes=protocol.MESSAGE_LIMIT_BYTES)
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = self._channel.unary_unary(protocol.method_path(method))
            future = call.future(body, timeout=timeout_s, wait_for_ready=True)
        except ValueError:
            # gRPC's answer to a call on a closed channel.
            if not self._closed.is_set():
                raise
            raise self._closed_error() from None
        if done is not None:
            future.add_done_callback(lambda _future: done())
        return PendingCall(future, lambda error: self._translated(error, method, timeout_s))

    def _closed_error(self) -> PeerLostError:
        return PeerLostError(f"the connection to {self._who} is closed")

    def close(self) -> None:
        """End the connection and all calls that run."""
        self._closed.set()
        self._channel.close()

    def _translated(self, error: Exception, method: str, timeout_s: float) -> Exception:
        if isinstance(error, grpc.FutureCancelledError):
            return self._closed_error()
        code, details = _status(error)
        if code is grpc.StatusCode.UNAUTHENTICATED:
            return protocol.RemoteRefusal(f"{self._who} refused {method!r}: {details}")
        if code is grpc.StatusCode.DEADLINE_EXCEEDED:
            return PeerLostError(f"{self._who} did not answer {method!r} within {timeout_s:g} s: {details}")
        if code in _LOST:
            return PeerLostError(f"the connection to {self._who} went away under {method!r}: {details}")
        return ProtocolError(f"{self._who} failed at {method!r}: {code.name}, {details}")

    def _greet(self, where: Address, deadline_s: float) -> None:
        try:
            self.call(protocol.HELLO, {}, timeout_s=_left_s(deadline_s))
        except PeerLostError as error:
            self.close()
            raise PeerLostError(
                f"joined at {where}, but the control port {self._address} does not answer; both ports must be open. "
                f"{error}"
            ) from None


class PendingCall:
    """A call that was begun."""

    def __init__(self, future: "grpc.Future[bytes]", translated: Callable[[Exception], Exception]) -> None:
        """`translated` says what the caller gets for gRPC's errors."""
        self._future = future
        self._translated = translated

    @property
    def ended(self) -> bool:
        """Whether there is an answer, or will be none."""
        return self._future.done()

    def cancel(self) -> None:
        """Wait for it no longer."""
        self._future.cancel()

    def result(self) -> dict[str, Any]:
        """Wait for the answer and return it; errors are those of `ControlClient.call`."""
        try:
            answer = self._future.result()
        except (grpc.FutureCancelledError, grpc.RpcError) as error:
            raise self._translated(error) from None
        return protocol.unwrap(answer)


def fetch_certificate(address: Address, deadline_s: float, cancelled: threading.Event | None, role: str) -> bytes:
    """Return the certificate (DER) of whoever answers, untrusted; dial again until the deadline (monotonic).

    Raises:
        PeerLostError: nobody answered in time, or before `cancelled`.
        UsageError: what answers does not speak TLS, or is the port of those who have joined.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # No trust is needed here: the bytes are compared with the token's fingerprint by the caller.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["h2"])
    cancelled, silent = cancelled or threading.Event(), 0
    while True:
        try:
            with address.dial(min(_DIAL_S, _left_s(deadline_s))) as raw, context.wrap_socket(raw) as tls:
                certificate_der = tls.getpeercert(binary_form=True)
                assert certificate_der is not None
                if tls.recv(1):  # HTTP/2's settings, which a join port sends to everybody
                    return certificate_der
            silent, reason = silent + 1, OSError("it ends the connection at once")
            if silent >= _SILENT_TIMES:
                raise UsageError(
                    f"what answers at {address} ends the connection at once, as a {role} does at its second port, for "
                    "those who have joined; join at its first, the one before, which it printed"
                )
        except (ssl.SSLEOFError, ssl.SSLZeroReturnError) as error:
            reason = error
        except ssl.SSLError as error:
            raise UsageError(f"what answers at {address} is not a {role}: {error.reason}") from None
        except OSError as error:
            reason = error
        if deadline_s - time.monotonic() < _RETRY_PAUSE_S or cancelled.wait(_RETRY_PAUSE_S):
            known = not isinstance(reason, socket.gaierror)
            told = (reason.strerror or str(reason)) if known else "the name is unknown"
            raise PeerLostError(f"no {role} answers at {address}: {told}")


def _left_s(deadline_s: float) -> float:
    return max(0.05, deadline_s - time.monotonic())


def _ask_to_join(where: Address, who: str, root_pem: bytes, body: bytes, deadline_s: float) -> dict[str, Any]:
    credentials = grpc.ssl_channel_credentials(root_pem)
    with contextlib.closing(
        grpc.secure_channel(where.target, credentials, options=protocol.channel_options())
    ) as channel:
        try:
            call: grpc.UnaryUnaryMultiCallable[bytes, bytes] = channel.unary_unary(protocol.method_path(protocol.JOIN))
            return protocol.unwrap(call(body, timeout=_left_s(deadline_s), wait_for_ready=True))
        except grpc.RpcError as error:
            raise _join_error(who, error) from None
        except protocol.RemoteRefusal as refusal:
            raise protocol.RemoteRefusal(f"{who} refused: {refusal}") from None


def _join_error(who: str, error: grpc.RpcError) -> Exception:
    code, details = _status(error)
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return UsageError(f"{who} refused the token: take the one that it printed, or wrote down, for this run")
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return UsageError(f"{who} refused the token: too many wrong ones from here; {details}")
    if code in _LOST:
        return PeerLostError(f"{who} did not answer in time: {details}")
    return ProtocolError(f"{who} failed at joining: {code.name}, {details}")


def _control_address(dialled: Address, answer: dict[str, Any]) -> Address:
    match _field(answer, "control", dict):
        case {"port": int(port)} if not dialled.path and 0 < port < 65536:
            return dialled.at_port(port)
        case {"path": str(path)} if dialled.path:
            return Address(path=path)
        case other:
            raise ProtocolError(f"the answer to joining told no control port that fits: {other}")


def _field(answer: dict[str, Any], key: str, kind: type[_T]) -> _T:
    value = answer.get(key)
    if not isinstance(value, kind):
        raise ProtocolError(f"the answer to joining lacks {key!r}")
    return value


def _status(error: Exception) -> tuple[grpc.StatusCode, str]:
    # What a call raises is also the call (gRPC has no type for that).
    call = cast(grpc.Call, error)
    return call.code(), call.details() or ""
