"""One gRPC server on one address: TLS, limits, a bounded thread pool, unary methods over bytes."""

import contextlib
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import cast

import grpc

from spantrain.errors import UsageError
from spantrain.transport.control.address import Address
from spantrain.transport.control.certificates import ServerIdentity, der_of_pem
from spantrain.transport.control.protocol import method_path, server_options
from spantrain.transport.control.services import Denied

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
        self._pool = ThreadPoolExecutor(max_threads, thread_name_prefix="control")
        self._server = grpc.server(
            self._pool,
            handlers=[_Methods(methods)],
            options=server_options(receive_limit_bytes),
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
            raise UsageError(f"the coordinator cannot listen on {address}: {error}") from None
        if not address.path:
            return address.at_port(port)
        self._path = Path(address.path)
        self._path.chmod(0o600)
        return address

    def start(self) -> None:
        """Answer from now on."""
        self._server.start()
        self._started = True

    def stop(self, grace_s: float) -> Callable[[], None]:
        """Take no more calls, and cut those that run after `grace_s`; the answer waits until that is done."""
        if not self._started:
            # gRPC gives a port back only when a server that was started stops.
            self.start()
        stopped = self._server.stop(grace_s)

        def wait() -> None:
            stopped.wait()
            if self._path is not None:
                self._path.unlink(missing_ok=True)

        return wait

    def close(self, *, wait: bool) -> None:
        """End the threads; `wait` for handlers that run."""
        self._pool.shutdown(wait=wait, cancel_futures=True)


class _Methods(grpc.GenericRpcHandler):
    def __init__(self, methods: Mapping[str, Method]) -> None:
        self._handlers: dict[str, grpc.RpcMethodHandler[bytes, bytes]] = {
            method_path(name): grpc.unary_unary_rpc_method_handler(_denying(method)) for name, method in methods.items()
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> "grpc.RpcMethodHandler[bytes, bytes] | None":
        return self._handlers.get(handler_call_details.method)


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
        return der_of_pem(chain[0])
    return None


def source_of(context: grpc.ServicerContext) -> str:
    """Return the address that a caller comes from, without its port."""
    peer = context.peer()
    return peer.rpartition(":")[0] or peer
