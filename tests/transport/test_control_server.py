"""Joining and calling over real servers on loopback and on socket files."""

import contextlib
import gc
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import pytest

from spantrain.errors import PeerLostError, ProtocolError, UsageError
from spantrain.transport.control.address import Address
from spantrain.transport.control.client import ControlClient, fetch_certificate
from spantrain.transport.control.credentials import Authority, WorkerIdentity, pem_of_der
from spantrain.transport.control.protocol import (
    MESSAGE_LIMIT_BYTES,
    RemoteRefusal,
    channel_options,
    encode,
    method_path,
)
from spantrain.transport.control.server import ControlServer
from testing.patience import PATIENCE_S, no_threads_left
from testing.tokens import token_with_wrong_secret


class Coordinator:
    """Handlers worth calling, behind a real server."""

    def __init__(self, bind: str, max_peers: int = 4) -> None:
        self.release_blocked = threading.Event()
        self.joined: list[tuple[str, dict[str, Any]]] = []
        self.blocked = threading.Semaphore(0)
        self.server = ControlServer(
            bind=bind,
            handlers={
                "echo": lambda peer, payload: {"peer": peer, "payload": payload},
                "refuse": self._refuse,
                "block": self._block,
                "crash": lambda _peer, payload: {"value": payload["missing"]},
                "flood": lambda _peer, _payload: {"data": bytes(MESSAGE_LIMIT_BYTES)},
            },
            on_join=self._on_join,
            max_peers=max_peers,
        )

    def _on_join(self, name: str, facts: dict[str, Any]) -> dict[str, Any]:
        if facts.get("bad"):
            raise RemoteRefusal("no such device in this plan")
        self.joined.append((name, facts))
        return {"generation": 3, "name": name}

    @staticmethod
    def _refuse(peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        raise RemoteRefusal(f"{peer} is too early: step 3 has not begun — wait")

    def _block(self, _peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        self.blocked.release()
        self.release_blocked.wait(PATIENCE_S)
        return {}


@pytest.fixture(params=["tcp", "unix"])
def bind(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return "127.0.0.1:0" if request.param == "tcp" else f"unix:{tmp_path}/join"


@pytest.fixture
def coordinator(bind: str) -> Iterator[Coordinator]:
    yield from _running(bind)


@pytest.fixture
def tcp_coordinator() -> Iterator[Coordinator]:
    yield from _running("127.0.0.1:0")


def _running(bind: str) -> Iterator[Coordinator]:
    coordinator = Coordinator(bind)
    coordinator.server.start()
    yield coordinator
    coordinator.release_blocked.set()
    coordinator.server.stop(0.1)


@pytest.fixture
def join() -> Iterator[Callable[..., ControlClient]]:
    with contextlib.ExitStack() as stack:

        def run(coordinator: Coordinator, name: str = "edge-1", **facts: Any) -> ControlClient:
            server = coordinator.server
            client = ControlClient.join(server.join_address, server.token, name=name, facts=facts, timeout_s=PATIENCE_S)
            stack.callback(client.close)
            return client

        yield run


Join = Callable[..., ControlClient]


def test_a_worker_joins_and_calls(coordinator: Coordinator, join: Join) -> None:
    client = join(coordinator, "edge-1", memory_bytes=8 << 30, tags=["a", None, 1.5, True, b"\0"])
    assert client.welcome == {"generation": 3, "name": "edge-1"}
    assert coordinator.joined == [("edge-1", {"memory_bytes": 8 << 30, "tags": ["a", None, 1.5, True, b"\0"]})]
    assert client.call("echo", {"x": 1}, timeout_s=PATIENCE_S) == {"peer": "edge-1", "payload": {"x": 1}}
    assert coordinator.server._members.names == ("edge-1",)
    assert coordinator.server._refusals.snapshot() == {}


def test_the_peer_in_a_handler_is_the_certificate_s_not_the_payload_s(coordinator: Coordinator, join: Join) -> None:
    join(coordinator, "cloud-1")
    edge = join(coordinator, "edge-1")
    assert edge.call("echo", {"peer": "cloud-1", "name": "cloud-1"}, timeout_s=PATIENCE_S)["peer"] == "edge-1"


def test_a_refusal_arrives_with_its_text(coordinator: Coordinator, join: Join) -> None:
    with pytest.raises(RemoteRefusal, match=r"^edge-1 is too early: step 3 has not begun — wait$"):
        join(coordinator).call("refuse", {}, timeout_s=PATIENCE_S)


def test_on_join_may_refuse_and_the_name_stays_free(coordinator: Coordinator, join: Join) -> None:
    with pytest.raises(RemoteRefusal, match="no such device in this plan"):
        join(coordinator, "edge-1", bad=True)
    assert coordinator.server._refusals.snapshot() == {"join_refused": 1}
    join(coordinator, "edge-1")


def test_a_name_joins_once_until_it_is_released(coordinator: Coordinator, join: Join) -> None:
    first = join(coordinator, "edge-1")
    with pytest.raises(RemoteRefusal, match="joined as edge-1 already"):
        join(coordinator, "edge-1")
    coordinator.server.release("edge-1")
    with pytest.raises(RemoteRefusal, match="not a member"):
        first.call("echo", {}, timeout_s=PATIENCE_S)
    second = join(coordinator, "edge-1")
    assert second.call("echo", {}, timeout_s=PATIENCE_S)["peer"] == "edge-1"
    with pytest.raises(RemoteRefusal):
        first.call("echo", {}, timeout_s=PATIENCE_S)
    assert coordinator.server._refusals.snapshot() == {"join_refused": 1, "unknown_peer": 2}


def test_a_full_run_refuses(tcp_coordinator: Coordinator, join: Join) -> None:
    for index in range(4):
        join(tcp_coordinator, f"edge-{index}")
    with pytest.raises(RemoteRefusal, match="full: 4 workers"):
        join(tcp_coordinator, "edge-4")


@pytest.mark.parametrize("name", ["", "a" * 65, "edge 1", "ëdge", "../x", "a\nb"])
def test_a_name_that_cannot_stand_in_a_certificate(tcp_coordinator: Coordinator, join: Join, name: str) -> None:
    with pytest.raises(UsageError, match="a name has"):
        join(tcp_coordinator, name)


def test_a_wrong_token_is_refused_counted_and_slowed_down(coordinator: Coordinator, join: Join) -> None:
    server = coordinator.server
    wrong = token_with_wrong_secret(server.token)
    for _ in range(10):
        with pytest.raises(UsageError, match=r"the coordinator at .* refused the token: take the one"):
            ControlClient.join(server.join_address, wrong, name="edge-1", facts={}, timeout_s=PATIENCE_S)
    with pytest.raises(UsageError, match=r"too many wrong ones from here; wait \d+ s"):
        join(coordinator)
    assert server._refusals.snapshot() == {"wrong_token": 10, "throttled": 1}
    assert coordinator.joined == []


def test_a_man_in_the_middle_is_noticed(bind: str, tmp_path: Path, join: Join) -> None:
    with contextlib.ExitStack() as stack:
        honest, other = Coordinator("127.0.0.1:0"), Coordinator(bind)
        for each in (honest, other):
            each.server.start()
            stack.callback(each.server.stop, 0.1)
        with pytest.raises(UsageError, match="not the coordinator that made this token"):
            ControlClient.join(
                other.server.join_address, honest.server.token, name="edge-1", facts={}, timeout_s=PATIENCE_S
            )
        assert other.joined == []
        assert other.server._refusals.snapshot() == {}


def _control_target(coordinator: Coordinator) -> str:
    address = coordinator.server._control
    assert address is not None
    return address.target


@contextlib.contextmanager
def _fails_with(*codes: grpc.StatusCode) -> Iterator[None]:
    with pytest.raises(grpc.RpcError) as caught:
        yield
    assert caught.value.code() in codes


def _unary(channel: grpc.Channel, method: str) -> "grpc.UnaryUnaryMultiCallable[bytes, bytes]":
    return channel.unary_unary(method_path(method))


def _raw_call(coordinator: Coordinator, credentials: grpc.ChannelCredentials, body: bytes = b"\x80") -> bytes:
    target = _control_target(coordinator)
    with grpc.secure_channel(target, credentials, options=channel_options()) as channel:
        return _unary(channel, "echo")(body, timeout=PATIENCE_S)


def _root_pem(coordinator: Coordinator) -> bytes:
    where = Address.parse(coordinator.server.join_address)
    return pem_of_der(fetch_certificate(where, time.monotonic() + PATIENCE_S, None, "coordinator"))


def test_a_call_without_a_certificate_does_not_get_past_tls(coordinator: Coordinator) -> None:
    with _fails_with(grpc.StatusCode.UNAVAILABLE):
        _raw_call(coordinator, grpc.ssl_channel_credentials(_root_pem(coordinator)))


def test_a_certificate_of_another_authority_does_not_get_past_tls(coordinator: Coordinator, join: Join) -> None:
    join(coordinator, "edge-1")
    mine = WorkerIdentity.create("edge-1")
    request, name = Authority.read_request(mine.request_der)
    forged = pem_of_der(Authority.create().sign(request, name))
    with _fails_with(grpc.StatusCode.UNAVAILABLE):
        _raw_call(coordinator, grpc.ssl_channel_credentials(_root_pem(coordinator), mine.key_pem, forged))


def test_plain_text_does_not_get_past_tls(tcp_coordinator: Coordinator, join: Join) -> None:
    with grpc.insecure_channel(_control_target(tcp_coordinator)) as channel, _fails_with(grpc.StatusCode.UNAVAILABLE):
        _unary(channel, "echo")(b"\x80", timeout=PATIENCE_S)
    assert join(tcp_coordinator).call("echo", {}, timeout_s=PATIENCE_S)["peer"] == "edge-1"


@pytest.mark.parametrize("body", [b"", b"\xc1", b"\x81\xa1x", b"\x90", b"\x80\x80", b"\x81\xa1t\xd6\xff\0\0\0\0"])
def test_malformed_bytes_are_refused_and_the_server_goes_on(
    tcp_coordinator: Coordinator, join: Join, body: bytes
) -> None:
    client = join(tcp_coordinator)
    call = _unary(client._channel, "echo")
    with _fails_with(grpc.StatusCode.INVALID_ARGUMENT):
        call(body, timeout=PATIENCE_S)
    assert tcp_coordinator.server._refusals.snapshot() == {"malformed": 1}
    assert client.call("echo", {}, timeout_s=PATIENCE_S)["peer"] == "edge-1"


@pytest.mark.parametrize("body", [b"\xc1", encode({"code": ""}, limit_bytes=99), bytes(2 << 20)])
def test_malformed_requests_to_join_are_refused(tcp_coordinator: Coordinator, join: Join, body: bytes) -> None:
    credentials = grpc.ssl_channel_credentials(_root_pem(tcp_coordinator))
    address = tcp_coordinator.server.join_address
    with grpc.secure_channel(f"dns:///{address}", credentials, options=channel_options()) as channel:
        with _fails_with(grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED):
            _unary(channel, "join")(body, timeout=PATIENCE_S)
        with _fails_with(grpc.StatusCode.UNIMPLEMENTED):  # no other method on this port
            _unary(channel, "echo")(b"\x80", timeout=PATIENCE_S)
    join(tcp_coordinator)


def test_an_oversized_message_is_refused_on_both_ends_and_the_server_goes_on(
    coordinator: Coordinator, join: Join
) -> None:
    client = join(coordinator)
    with pytest.raises(ProtocolError, match="may have 8388608 bytes"):
        client.call("echo", {"data": bytes(MESSAGE_LIMIT_BYTES)}, timeout_s=PATIENCE_S)
    # A client that does not keep to its own limit.
    options = [(key, -1 if "send" in key else value) for key, value in channel_options()]
    mine = WorkerIdentity.create("edge-1")
    credentials = client_credentials(coordinator, mine)
    with (
        grpc.secure_channel(_control_target(coordinator), credentials, options=options) as channel,
        _fails_with(grpc.StatusCode.RESOURCE_EXHAUSTED),
    ):
        _unary(channel, "echo")(bytes(MESSAGE_LIMIT_BYTES + 1), timeout=PATIENCE_S)
    with pytest.raises(ProtocolError, match="cannot be sent"):
        client.call("flood", {}, timeout_s=PATIENCE_S)
    big = bytes(MESSAGE_LIMIT_BYTES - 1000)
    assert client.call("echo", {"data": big}, timeout_s=PATIENCE_S)["payload"]["data"] == big


def client_credentials(coordinator: Coordinator, mine: WorkerIdentity) -> grpc.ChannelCredentials:
    """A certificate that this run's authority signed, outside joining."""
    request, _ = Authority.read_request(mine.request_der)
    certificate_der = coordinator.server._joins.authority.sign(request, "edge-1")
    return grpc.ssl_channel_credentials(_root_pem(coordinator), mine.key_pem, pem_of_der(certificate_der))


def test_a_signed_certificate_that_did_not_join_is_nobody_s(tcp_coordinator: Coordinator, join: Join) -> None:
    join(tcp_coordinator, "edge-1")
    with _fails_with(grpc.StatusCode.UNAUTHENTICATED):
        _raw_call(tcp_coordinator, client_credentials(tcp_coordinator, WorkerIdentity.create("edge-1")))
    assert tcp_coordinator.server._refusals.snapshot() == {"unknown_peer": 1}


def test_handlers_that_block_starve_nobody_and_one_peer_has_six(coordinator: Coordinator, join: Join) -> None:
    clients = [join(coordinator, f"edge-{index}") for index in range(4)]
    threads = []
    for client in clients:
        for _ in range(5):
            threads.append(threading.Thread(target=client.call, args=("block", {}), kwargs={"timeout_s": PATIENCE_S}))
    for thread in threads:
        thread.start()
    for _ in threads:
        assert coordinator.blocked.acquire(timeout=PATIENCE_S)
    for client in clients:
        client.call("echo", {}, timeout_s=PATIENCE_S)
    threads.append(threading.Thread(target=clients[0].call, args=("block", {}), kwargs={"timeout_s": PATIENCE_S}))
    threads[-1].start()
    assert coordinator.blocked.acquire(timeout=PATIENCE_S)
    with pytest.raises(ProtocolError, match="edge-0 has too many calls"):
        clients[0].call("echo", {}, timeout_s=PATIENCE_S)
    assert clients[1].call("echo", {}, timeout_s=PATIENCE_S)["peer"] == "edge-1"
    coordinator.release_blocked.set()
    for thread in threads:
        thread.join(PATIENCE_S)
    assert clients[0].call("echo", {}, timeout_s=PATIENCE_S)["peer"] == "edge-0"
    assert coordinator.server._refusals.snapshot() == {"too_many_calls": 1}


def test_a_deadline_ends_a_call_and_names_the_coordinator(coordinator: Coordinator, join: Join) -> None:
    client = join(coordinator)
    with pytest.raises(PeerLostError, match=r"the coordinator at .* did not answer 'block' within 0.2 s"):
        client.call("block", {}, timeout_s=0.2)


def test_a_handler_that_fails_and_an_unknown_method(coordinator: Coordinator, join: Join) -> None:
    client = join(coordinator)
    with pytest.raises(ProtocolError, match="failed at 'crash'"):
        client.call("crash", {}, timeout_s=PATIENCE_S)
    with pytest.raises(ProtocolError, match="failed at 'nothing': UNIMPLEMENTED"):
        client.call("nothing", {}, timeout_s=PATIENCE_S)
    assert client.call("echo", {}, timeout_s=PATIENCE_S)["peer"] == "edge-1"


def test_a_call_on_a_closed_client(coordinator: Coordinator, join: Join) -> None:
    client = join(coordinator)
    client.close()
    with pytest.raises(PeerLostError, match="closed"):
        client.call("echo", {}, timeout_s=PATIENCE_S)


def _stop_under_a_long_poll(bind: str) -> str:
    coordinator = Coordinator(bind)
    server = coordinator.server
    server.start()
    address = server.join_address
    client = ControlClient.join(address, server.token, name="edge-1", facts={}, timeout_s=PATIENCE_S)

    def wake() -> None:
        server.stopping.wait(PATIENCE_S)
        coordinator.release_blocked.set()

    def poll() -> None:
        assert client.call("block", {}, timeout_s=PATIENCE_S) == {}

    threads = [threading.Thread(target=wake), threading.Thread(target=poll)]
    for thread in threads:
        thread.start()
    assert coordinator.blocked.acquire(timeout=PATIENCE_S)
    server.stop(PATIENCE_S)
    for thread in threads:
        thread.join(PATIENCE_S)
    with pytest.raises(PeerLostError):
        client.call("echo", {}, timeout_s=0.3)
    client.close()
    return address


def test_stop_lets_calls_end_and_leaves_no_threads_ports_or_files(bind: str, tmp_path: Path) -> None:
    with no_threads_left():
        address = _stop_under_a_long_poll(bind)
        gc.collect()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(OSError, match=r"refused|No such file"):
        Address.parse(address).dial(1.0)


def test_stop_does_not_wait_for_a_handler_that_never_ends(
    tcp_coordinator: Coordinator, join: Join, caplog: pytest.LogCaptureFixture
) -> None:
    client = join(tcp_coordinator)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(client.call, "block", {}, timeout_s=PATIENCE_S)
        assert tcp_coordinator.blocked.acquire(timeout=PATIENCE_S)
        tcp_coordinator.server.stop(0.1)
        assert isinstance(waiting.exception(PATIENCE_S), PeerLostError)
    assert "block of edge-1" in caplog.text
