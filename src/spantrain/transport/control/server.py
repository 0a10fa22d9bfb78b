"""The coordinator's end of the control plane: two ports, a token, handlers."""

import functools
import logging
import threading
import time
from collections.abc import Callable, Mapping

import grpc

from spantrain.errors import UsageError
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import Credentials
from spantrain.transport.control.guard import JoinThrottle, RefusalCounter
from spantrain.transport.control.members import Members
from spantrain.transport.control.protocol import JOIN, JOIN_REQUEST_LIMIT_BYTES, MESSAGE_LIMIT_BYTES
from spantrain.transport.control.rpc import RpcServer, certificate_of, source_of
from spantrain.transport.control.services import CallDesk, Handler, JoinDesk

_CALLS_PER_PEER = 4
"""A long poll, a heartbeat, and two more."""
_SPARE_THREADS = 8
_JOIN_THREADS = 16
_WRONG_TOKENS = 10
_WRONG_TOKENS_WINDOW_S = 30.0

_log = logging.getLogger(__name__)


class ControlServer:
    """Let workers join with a token, and answer the calls of those that did.

    Joining has a port of its own, without client certificates and with few threads, so that nothing that a
    stranger does there takes threads from members. The control port is the next one (the file `PATH.control`
    for a socket); there, TLS itself turns away who has no certificate of this run.

    Handlers run in threads, at most four at once for one peer. A long poll must end by itself or watch `stopping`.
    A handler that raises a SpanTrainError refuses with its message. Anything else it raises is logged, and the
    caller gets a ProtocolError.
    """

    def __init__(
        self,
        *,
        bind: str,
        handlers: Mapping[str, Handler],
        on_join: Handler,
        max_peers: int = 64,
        credentials: Credentials | None = None,
        may_replace: Callable[[str], bool] = lambda _name: False,
    ) -> None:
        """`bind`: HOST:PORT (port 0 takes any two) or unix:/path. `on_join`: (name, facts) -> welcome;
        it should not wait for anything, since `stop` waits for it. `credentials`: new ones, if none are given.
        `may_replace`: whether who joins under this name, which is in use, takes it over; else it is refused.

        Raises:
            UsageError: `bind` is not an address.
        """
        self._bind = Address.parse(bind)
        self._control_bind = self._bind.control_neighbour()
        self._control: Address | None = None
        self._join: Address | None = None
        self._refusals = RefusalCounter()
        self._members = Members(max_peers=max_peers, calls_per_peer=_CALLS_PER_PEER, may_replace=may_replace)
        credentials = credentials or Credentials.create()
        self._token = credentials.token
        self._calls = CallDesk(handlers=handlers, members=self._members, refusals=self._refusals)
        self._joins = JoinDesk(
            token=self._token,
            authority=credentials.authority,
            members=self._members,
            on_join=on_join,
            refusals=self._refusals,
            throttle=JoinThrottle(attempts=_WRONG_TOKENS, window_s=_WRONG_TOKENS_WINDOW_S),
        )
        self._control_server = RpcServer(
            identity=credentials.identity,
            client_root_pem=credentials.authority.certificate_pem,
            methods={name: functools.partial(self._answer_call, name) for name in self._calls.methods},
            max_threads=_CALLS_PER_PEER * max_peers + _SPARE_THREADS,
            receive_limit_bytes=MESSAGE_LIMIT_BYTES,
        )
        self._join_server = RpcServer(
            identity=credentials.identity,
            client_root_pem=None,
            methods={JOIN: self._answer_join},
            max_threads=_JOIN_THREADS,
            receive_limit_bytes=JOIN_REQUEST_LIMIT_BYTES,
        )
        self.stopping = threading.Event()
        """Set when `stop` begins: long polls should end."""

    def start(self) -> None:
        """Listen and answer.

        Raises:
            UsageError: a port is in use, or cannot be listened on.
        """
        try:
            self._join = self._join_server.listen(self._bind)
            self._control = self._control_server.listen(self._control_bind)
        except UsageError:
            self.stop(0.0)
            raise
        self._control_server.start()
        self._join_server.start()

    def stop(self, grace_s: float = 1.0) -> None:
        """Take no more calls, give those that run `grace_s`, then cut them; no port or socket file is left.

        A handler that runs on is left to end by itself and named in the log.
        """
        self.stopping.set()
        waits = [server.stop(grace_s) for server in (self._join_server, self._control_server)]
        for wait in waits:
            wait()
        running = self._calls.wait_idle(grace_s)
        if running:
            _log.warning("the control server stopped while handlers still ran: %s", ", ".join(running))
        self._join_server.close(wait=True)
        self._control_server.close(wait=not running)

    @property
    def join_address(self) -> str:
        """Where workers join, as they can dial it; on all addresses: by this machine's name."""
        assert self._join is not None, "not started"
        return str(self._join.as_dialled())

    @property
    def token(self) -> str:
        """What workers join with, besides the address: a secret and the fingerprint of this server's certificate."""
        return self._token.text

    @property
    def peers(self) -> tuple[str, ...]:
        """Who has joined and was not released, sorted."""
        return self._members.names

    @property
    def refusals(self) -> Mapping[str, int]:
        """How often something was refused, by reason.

        `wrong_token`, `throttled`, `malformed`, `join_refused`, `unknown_peer`, `too_many_calls`.
        """
        return self._refusals.snapshot()

    def release(self, name: str) -> None:
        """Free a name for another worker; calls of the one that held it are refused from now on."""
        self._members.release(name)

    def _answer_join(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        assert self._control is not None
        return self._joins.answer(body, source=source_of(context), now_s=time.monotonic(), control=self._control)

    def _answer_call(self, method: str, body: bytes, context: grpc.ServicerContext) -> bytes:
        return self._calls.answer(method, body, certificate_der=certificate_of(context))
