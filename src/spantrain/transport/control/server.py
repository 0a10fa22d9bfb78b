"""The coordinator's end of the control plane: two ports, a token, handlers.

One gRPC server on one address: TLS, limits, a bounded thread pool, unary methods over bytes.
"""

import contextlib
import functools
import logging
import ssl
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc

from spantrain.errors import UsageError
from spantrain.transport.connection.bounds import RefusalCounter
from spantrain.transport.control import protocol
from spantrain.transport.control.address import Address
from spantrain.transport.control.credentials import Credentials, ServerIdentity
from spantrain.transport.control.members import Denied, JoinThrottle, Members
from spantrain.transport.control.services import CallDispatcher, JoinService, LineListener

Method = Callable[[bytes, grpc.ServicerContext], bytes]
"""(body, what gRPC knows of the caller) -> answer; may raise Denied."""


class RpcServer:
    """Methods on an address; it listens from `start` to `stop`."""

    def __init__(
        self,
        *,
        identity: ServerIdentity,
        client_root_pem: bytes | None,
        methods: Mapping[str, Method],
        max_threads: int,
        receive_limit_bytes: int,
    ) -> None:
        """`client_root_pem`: who signs clients' certificates, which are then demanded; None demands none."""
        self._credentials = grpc.ssl_server_credentials(
            [(identity.key_pem, identity.certificate_pem)],
            root_certificates=client_root_pem,
            require_client_auth=client_root_pem is not None,
        )
        handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            name: grpc.unary_unary_rpc_method_handler(_denying(method)) for name, method in methods.items()
        }
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix="control")
        self._server = grpc.server(
            self._pool,
            handlers=[grpc.method_handlers_generic_handler(protocol.SERVICE, handlers)],
            options=protocol.server_options(receive_limit_bytes),
            maximum_concurrent_rpcs=max_threads,
        )
        self._path: Path | None = None
        self._started = False

    def listen(self, address: Address) -> Address:
        """Take the address and return it with the port that it got.

        Raises:
            UsageError: it is in use, or cannot be listened on.
        """
        address.check_free()
        try:
            port = self._server.add_secure_port(str(address), self._credentials)
        except RuntimeError as error:
            raise UsageError(f"cannot listen on {address}: {error}") from None
        if not address.path:
            return address.at_port(port)
        self._path = Path(address.path)
        self._path.chmod(0o600)
        return address

    def start(self) -> None:
        """Answer from now on."""
        self._server.start()
        self._started = True

    def stop(self, grace_s: float) -> threading.Event:
        """Take no more calls, and cut those that run after `grace_s`; the answer is set when that is done."""
        if not self._started:
            # gRPC gives a port back only when a server that was started stops.
            self.start()
        return self._server.stop(grace_s)

    def close(self, *, wait: bool) -> None:
        """End the threads and leave no socket file; `wait` for handlers that run."""
        if self._path is not None:
            self._path.unlink(missing_ok=True)
        self._pool.shutdown(wait=wait, cancel_futures=True)


def _denying(method: Method) -> Method:
    def run(body: bytes, context: grpc.ServicerContext) -> bytes:
        try:
            return method(body, context)
        except Denied as denied:
            context.abort(denied.code, denied.text[:1000])

    return run


def certificate_of(context: grpc.ServicerContext) -> bytes | None:
    """Return the certificate (DER) whose key the caller has shown to hold, as TLS checked it."""
    properties = cast(Mapping[str, Sequence[bytes]], context.auth_context())
    chain = properties.get("x509_pem_cert", ())
    if len(chain) != 1:
        return None
    with contextlib.suppress(ValueError):
        return ssl.PEM_cert_to_DER_cert(chain[0].decode())
    return None


_CALLS_PER_PEER = 6
"""A long poll, a heartbeat, one that shows that it is there, one that brings a file, and two more."""
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

    Handlers run in threads, a few at once for one peer (`_CALLS_PER_PEER`). A long poll must end by itself or watch
    `stopping`. A handler that raises a SpanTrainError refuses with its message. Anything else it raises is logged, and
    the caller gets a ProtocolError.
    """

    _control: Address | None = None
    _join: Address | None = None

    def __init__(
        self,
        *,
        bind: str,
        handlers: Mapping[str, protocol.Handler],
        on_join: protocol.Handler,
        max_peers: int = 64,
        credentials: Credentials | None = None,
        may_replace: Callable[[str, str], bool] = lambda _held, _by: False,
        on_line: LineListener = lambda _name, _line, _is_open: None,
        refusals: RefusalCounter | None = None,
    ) -> None:
        """`bind`: HOST:PORT (port 0 takes any two) or unix:/path. `on_join`: (name, facts) -> welcome; should not wait
        for anything, since `stop` waits for it. `credentials`, `refusals`: new ones, if none are given. `may_replace`:
        as of `Members`. `on_line` hears of workers' connections.

        Raises:
            UsageError: `bind` is not an address.
        """
        self._bind = Address.parse(bind)
        self._refusals = refusals or RefusalCounter()
        self._members = Members(max_peers=max_peers, may_replace=may_replace)
        credentials = credentials or Credentials.create()
        self._calls = CallDispatcher(
            handlers, on_line=on_line, members=self._members, calls_per_peer=_CALLS_PER_PEER, refusals=self._refusals
        )
        self._joins = JoinService(
            token=credentials.token,
            authority=credentials.authority,
            members=self._members,
            on_join=on_join,
            refusals=self._refusals,
            throttle=JoinThrottle(attempts=_WRONG_TOKENS, window_s=_WRONG_TOKENS_WINDOW_S),
        )
        self._control_server = RpcServer(
            identity=credentials.identity,
            client_root_pem=credentials.authority.certificate_pem,
            methods=self._methods(),
            max_threads=_CALLS_PER_PEER * max_peers + _SPARE_THREADS,
            receive_limit_bytes=protocol.MESSAGE_LIMIT_BYTES,
        )
        self._join_server = RpcServer(
            identity=credentials.identity,
            client_root_pem=None,
            methods={protocol.JOIN: self._answer_join},
            max_threads=_JOIN_THREADS,
            receive_limit_bytes=protocol.JOIN_REQUEST_LIMIT_BYTES,
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
            self._control = self._control_server.listen(self._bind.control_neighbour())
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
        self._calls.let_go()
        for stopped in [server.stop(grace_s) for server in (self._join_server, self._control_server)]:
            stopped.wait()
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
        return self._joins.token.text

    def release(self, name: str) -> None:
        """Free a name for another worker; calls of the one that held it are refused from now on."""
        self._members.release(name)

    def nudge(self, names: Collection[str]) -> None:
        """Have some members' next heartbeats come at once: there is news for them."""
        self._calls.nudge(names)

    def _methods(self) -> dict[str, Method]:
        calls = {name: functools.partial(self._answer_call, name) for name in self._calls.methods}
        return {protocol.PRESENCE: self._hold_line, **calls}

    def _answer_join(self, body: bytes, context: grpc.ServicerContext) -> bytes:
        assert self._control is not None
        peer = context.peer()
        source = peer.rpartition(":")[0] or peer  # without its port
        return self._joins.answer(body, source=source, now_s=time.monotonic(), control=self._control)

    def _hold_line(self, _body: bytes, context: grpc.ServicerContext) -> bytes:
        ended = threading.Event()
        if not context.add_callback(ended.set):
            ended.set()
        return self._calls.hold(ended, certificate_der=certificate_of(context))

    def _answer_call(self, method: str, body: bytes, context: grpc.ServicerContext) -> bytes:
        return self._calls.answer(method, body, certificate_der=certificate_of(context))
