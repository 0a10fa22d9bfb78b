"""Joining and calling, as docs/security.md states it: what a token and a request hold, bounds, what is counted."""

import builtins
import hashlib
import hmac
import io
import os
import socket
import ssl
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import msgpack
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from spantrain.errors import PeerLostError, ProtocolError, UsageError
from spantrain.transport.control import client as client_module
from spantrain.transport.control import credentials as credentials_module
from spantrain.transport.control.address import Address
from spantrain.transport.control.client import ControlClient
from spantrain.transport.control.credentials import Authority, JoinToken, ServerIdentity, WorkerIdentity, pem_of_der
from spantrain.transport.control.members import Denied
from spantrain.transport.control.protocol import (
    RemoteRefusal,
    channel_options,
    decode,
    encode,
    method_path,
    server_options,
)
from spantrain.transport.control.server import ControlServer
from testing.patience import PATIENCE_S
from testing.tokens import token_with_wrong_secret

MIB = 2**20


def server_on(bind: str) -> ControlServer:
    handlers = {"echo": lambda peer, _payload: {"peer": peer}}
    return ControlServer(bind=bind, handlers=handlers, on_join=lambda _name, _facts: {})


@pytest.fixture
def server() -> Iterator[ControlServer]:
    made = server_on("127.0.0.1:0")
    made.start()
    yield made
    made.stop(0.1)


def join(server: ControlServer, name: str = "edge-1") -> ControlClient:
    return ControlClient.join(server.join_address, server.token, name=name, facts={}, timeout_s=PATIENCE_S)


def certificate_of(server: ControlServer) -> bytes:
    host, _, port = server.join_address.rpartition(":")
    return ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate((host, int(port)), timeout=PATIENCE_S))


def refused_with(server: ControlServer, port: int, method: str, body: bytes) -> grpc.StatusCode:
    """How a stranger's call ends who has no certificate, and keeps to no limit of its own."""
    options = [(key, -1 if "send" in key else value) for key, value in channel_options()]
    credentials = grpc.ssl_channel_credentials(pem_of_der(certificate_of(server)))
    with (
        grpc.secure_channel(f"127.0.0.1:{port}", credentials, options=options) as channel,
        pytest.raises(grpc.RpcError) as caught,
    ):
        channel.unary_unary(method_path(method))(body, timeout=PATIENCE_S)
    return caught.value.code()


def ports_of(server: ControlServer) -> tuple[int, int]:
    assert server._control is not None
    return int(server.join_address.rpartition(":")[2]), server._control.port


# Tokens.


def test_a_token_has_128_bits_of_secret_and_160_of_fingerprint_and_is_made_anew() -> None:
    one, other = (server_on("127.0.0.1:0").token for _ in range(2))
    token = JoinToken.parse(one)
    assert (8 * len(token.secret), 8 * len(token.fingerprint)) == (128, 160)
    assert JoinToken.create(b"c").fingerprint == hashlib.sha256(b"c").digest()[:20]
    assert token.secret != JoinToken.parse(other).secret


def test_nothing_is_sent_with_a_mistyped_token() -> None:
    text = JoinToken.create(b"c").text
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        where = f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(UsageError, match="cut or mistyped"):
            ControlClient.join(where, text[:-1] + "0", name="edge-1", facts={}, timeout_s=PATIENCE_S)
        with pytest.raises(BlockingIOError):
            listener.accept()


# Joining.


def test_a_request_has_a_proof_and_neither_the_secret_nor_the_key(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, identity, sent = JoinToken.parse(server.token), WorkerIdentity.create("edge-1"), list[bytes]()
    monkeypatch.setattr(WorkerIdentity, "create", lambda _: identity)
    monkeypatch.setattr(client_module, "_ask_to_join", lambda *given: sent.append(given[3]) or {})
    with pytest.raises(ProtocolError):  # of the answer, which was none
        ControlClient.join(server.join_address, server.token, name="edge-1", facts={}, timeout_s=PATIENCE_S)
    (body,) = sent
    request = decode(body, limit_bytes=2**16)
    digest = hashlib.sha256(request["request"]).digest()
    assert request["proof"] == hmac.new(token.secret, b"spantrain join 1\0" + digest, hashlib.sha256).digest()
    key: Any = load_pem_private_key(identity.key_pem, password=None)
    for secret in (token.secret, key.private_numbers().private_value.to_bytes(32, "big"), b"PRIVATE"):
        assert secret not in body


def test_the_proof_is_looked_at_before_the_request(server: ControlServer) -> None:
    token = JoinToken.parse(server.token)

    def answered(proof: bytes) -> bytes:
        body = encode({"code": "another", "request": b"none", "proof": proof, "facts": {}}, limit_bytes=999)
        return server._joins.answer(body, source="10.0.0.1", now_s=0.0, control=server._bind.control_neighbour())

    with pytest.raises(Denied, match="wrong token"):
        answered(bytes(32))
    assert server._refusals.snapshot() == {"wrong_token": 1}
    assert b"its SpanTrain is not the one here" in answered(token.proof(b"none"))
    assert server._refusals.snapshot() == {"wrong_token": 1, "join_refused": 1}


def test_proofs_and_fingerprints_are_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    token = JoinToken.create(b"c")
    compared: list[tuple[bytes, bytes]] = []
    seam = SimpleNamespace(compare_digest=lambda *pair: bool(compared.append(pair)), digest=hmac.digest)
    monkeypatch.setattr(credentials_module, "hmac", seam)
    assert not token.accepts(b"request", token.proof(b"request")), "the answer is what compare_digest says"
    assert not token.matches(b"c")
    assert compared == [(token.proof(b"request"),) * 2, (token.fingerprint,) * 2]


def test_only_the_certificate_that_was_checked_is_trusted(
    server: ControlServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = server_on("127.0.0.1:0")
    other.start()
    try:
        checked = certificate_of(server)
        monkeypatch.setattr(client_module, "fetch_certificate", lambda *_: checked)
        with pytest.raises(PeerLostError, match="did not answer in time"):
            ControlClient.join(other.join_address, server.token, name="edge-1", facts={}, timeout_s=0.3)
        assert (other._members.names, other._refusals.snapshot()) == ((), {})
        join(server).close()
    finally:
        other.stop(0.1)


def test_certificates_hold_from_1970_on_without_end() -> None:
    authority, mine = Authority.create(), WorkerIdentity.create("edge-1")
    request, name = Authority.read_request(mine.request_der)
    ders = [ServerIdentity.create().certificate_der, authority.sign(request, name)]
    made = [*map(x509.load_der_x509_certificate, ders), x509.load_pem_x509_certificate(authority.certificate_pem)]
    assert {one.not_valid_before_utc.year for one in made} == {1970}
    assert {one.not_valid_after_utc.year for one in made} == {9999}


def test_joining_writes_no_file(server: ControlServer, monkeypatch: pytest.MonkeyPatch) -> None:
    written: list[object] = []
    for module, name in ((os, "open"), (io, "open"), (builtins, "open")):
        real = getattr(module, name)

        def watched(path: Any, mode: Any = "r", *more: Any, real: Any = real, **options: Any) -> Any:
            if set("wax+") & set(mode) if isinstance(mode, str) else mode & (os.O_WRONLY | os.O_RDWR):
                written.append(path)
            return real(path, mode, *more, **options)

        monkeypatch.setattr(module, name, watched)
    second = server_on("127.0.0.1:0")
    second.start()
    client = join(second)
    assert client.call("echo", {}, timeout_s=PATIENCE_S) == {"peer": "edge-1"}
    client.close()
    second.stop(0.1)
    assert written == []


# Ports.


def test_the_control_port_is_the_next_and_port_0_takes_any_two(server: ControlServer) -> None:
    assert min(ports_of(server)) > 0
    assert str(Address.parse("127.0.0.1:7000").control_neighbour()) == "127.0.0.1:7001"


def test_who_dials_the_control_port_is_told_which_is_the_one_to_join_at(server: ControlServer) -> None:
    address = f"127.0.0.1:{ports_of(server)[1]}"
    with pytest.raises(UsageError, match=f"what answers at {address} ends the connection at once.*join at its first"):
        ControlClient.join(address, server.token, name="edge-1", facts={}, timeout_s=600.0)


def test_both_socket_files_are_their_owners(tmp_path: Path) -> None:
    made = server_on(f"unix:{tmp_path}/join")
    made.start()
    try:
        modes = {path.name: path.stat().st_mode & 0o777 for path in tmp_path.iterdir()}
        assert modes == {"join": 0o600, "join.control": 0o600}
    finally:
        made.stop(0.1)


# Who is joined.


def test_messages_name_who_is_joined_by_its_role_and_change_nothing_else(server: ControlServer) -> None:
    """A word was replaced in whatever an error said, names of files and devices too."""
    wrong = token_with_wrong_secret(server.token)
    with pytest.raises(UsageError, match=rf"^the master at {server.join_address} refused the token"):
        ControlClient.join(server.join_address, wrong, name="a", facts={}, timeout_s=PATIENCE_S, role="master")
    client = ControlClient.join(
        server.join_address, server.token, name="a", facts={}, timeout_s=PATIENCE_S, role="master"
    )
    server.release("a")
    with pytest.raises(RemoteRefusal, match=rf"^the master at {server.join_address} refused 'hello'"):
        client.call("hello", {}, timeout_s=PATIENCE_S)
    client.close()


# Limits.


def test_a_request_to_join_may_have_64_kib_and_the_coordinator_goes_on(server: ControlServer) -> None:
    port, _ = ports_of(server)
    assert refused_with(server, port, "join", bytes(64 * 1024)) is grpc.StatusCode.INVALID_ARGUMENT
    assert refused_with(server, port, "join", bytes(64 * 1024 + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    join(server).close()


def test_the_edges_of_what_is_read() -> None:
    def nested(levels: int) -> dict[str, Any]:
        value: Any = 0
        for _ in range(levels - 1):
            value = [value]
        return {"a": value}

    fits = [nested(32), {"k" * 512: 0}, {"a": [None] * (2**20 - 2)}, {"a": bytes(8 * MIB - 8)}]
    over = [nested(33), {"k" * 513: 0}, {"a": [None] * (2**20 - 1)}, {"a": bytes(8 * MIB - 7)}]
    for payload in fits:
        decode(msgpack.packb(payload), limit_bytes=8 * MIB)
    for payload in over:
        with pytest.raises(ProtocolError):
            decode(msgpack.packb(payload), limit_bytes=8 * MIB)


def test_after_10_wrong_tokens_in_30_s_an_address_waits_and_no_other(server: ControlServer) -> None:
    throttle = server._joins.throttle
    for second in range(10):
        assert throttle.wait_s(float(second), "10.0.0.9") == 0.0
        throttle.record_failure(float(second), "10.0.0.9")
    assert throttle.wait_s(9.0, "10.0.0.9") == 21.0
    assert throttle.wait_s(30.0, "10.0.0.9") == throttle.wait_s(9.0, "10.0.0.8") == 0.0


def test_who_keeps_the_join_port_busy_holds_up_no_worker_that_has_joined(server: ControlServer) -> None:
    client, free = join(server), threading.Event()
    pool = server._join_server._pool
    waiting = [pool.submit(free.wait, PATIENCE_S) for _ in range(pool._max_workers)]
    try:
        assert client.call("echo", {}, timeout_s=PATIENCE_S) == {"peer": "edge-1"}
    finally:
        free.set()
        client.close()
    assert all(one.result(PATIENCE_S) for one in waiting)


def test_both_ends_look_for_a_dead_connection_every_10_s_and_wait_10_s_for_an_answer() -> None:
    for options in (dict(channel_options()), dict(server_options(1))):
        names = ("keepalive_time_ms", "keepalive_timeout_ms", "keepalive_permit_without_calls")
        assert [options[f"grpc.{name}"] for name in names] == [10_000, 10_000, 1]
        assert options["grpc.http2.max_pings_without_data"] == 0


def test_what_tls_turns_away_and_what_is_too_large_is_in_no_count(server: ControlServer) -> None:
    port, control_port = ports_of(server)
    assert refused_with(server, control_port, "echo", b"\x80") is grpc.StatusCode.UNAVAILABLE
    assert refused_with(server, port, "join", bytes(2**16 + 1)) is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert server._refusals.snapshot() == {}
