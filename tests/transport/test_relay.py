"""A relay and its tunnels over real sockets: what comes through, what is refused, what a flood costs."""

import asyncio
import concurrent.futures
import contextlib
import gc
import os
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import pytest

from spantrain.errors import PeerLostError, UsageError
from spantrain.transport.control.address import Address
from spantrain.transport.relay import protocol, server
from spantrain.transport.relay import tunnel as tunnels
from spantrain.transport.relay.protocol import RelayAccess, greeting, proof
from spantrain.transport.relay.server import RelayLimits, RelayNews, RelayServer
from spantrain.transport.relay.tunnel import TunnelEnd, tunnel
from testing.patience import PATIENCE_S, until

HOST = "127.0.0.1"
TOKENS = {"lab": "l" * 32, "home": "h" * 40}


def free_ports(count: int) -> range:
    """Some ports beside each other that nobody has."""
    while True:
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            first = stack.enter_context(socket.create_server((HOST, 0))).getsockname()[1]
            for port in range(first + 1, first + count):
                stack.enter_context(socket.create_server((HOST, port)))
            return range(first, first + count)


@dataclass
class RunningRelay:
    """A relay in a thread of its own."""

    limits: RelayLimits = field(default_factory=RelayLimits)
    ports: range = field(default_factory=lambda: free_ports(4))
    listen: int = 0
    news: list[RelayNews] = field(default_factory=list)

    def __enter__(self) -> "RunningRelay":
        found: concurrent.futures.Future[Address] = concurrent.futures.Future()
        self._loop = asyncio.new_event_loop()
        self.server = RelayServer(
            listen=Address(host=HOST, port=self.listen), ports=self.ports, tokens=TOKENS, limits=self.limits,
            told=self.news.append,
        )  # fmt: skip

        def run() -> None:
            with asyncio.Runner(loop_factory=lambda: self._loop) as runner, contextlib.suppress(asyncio.CancelledError):
                self._task = self._loop.create_task(self.server.serve(found.set_result))
                runner.run(self._wait())

        self._thread = threading.Thread(target=run)
        self._thread.start()
        self.address = found.result(PATIENCE_S)
        return self

    async def _wait(self) -> None:
        await self._task

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._task.cancel)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()

    def access(self, name: str = "lab") -> RelayAccess:
        return RelayAccess(address=self.address, token=TOKENS[name])

    def dial(self, first: bytes = b"") -> socket.socket:
        return dial(self.address, first)


def dial(where: Address, first: bytes = b"") -> socket.socket:
    line = socket.create_connection((where.host, where.port), timeout=PATIENCE_S)
    line.sendall(first)
    return line


def ended(line: socket.socket) -> bool:
    """Whether the other end closes it, whatever comes before that."""
    with line, contextlib.suppress(ConnectionError):
        while line.recv(2**16):
            pass
    return True


def refused(error: type[Exception], says: str, access: RelayAccess, *ends: TunnelEnd) -> None:
    """See that there is no such tunnel, and what is said."""
    with pytest.raises(error, match=says), tunnel(access, ends):
        pass


@pytest.fixture
def echo() -> Iterator[Address]:
    """Something that says everything again."""
    listening = socket.create_server((HOST, 0), backlog=512)

    def serve(line: socket.socket) -> None:
        with line, contextlib.suppress(OSError):
            while data := line.recv(2**16):
                line.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield Address(host=HOST, port=listening.getsockname()[1])
    listening.shutdown(socket.SHUT_RDWR)
    listening.close()


def answers(where: Address, said: bytes = b"hello") -> bool:
    """Whether what is said there comes back."""
    with dial(where, said) as line:
        got = b""
        while len(got) < len(said) and (more := line.recv(2**16)):
            got += more
        return got == said


def test_bytes_come_through_equal_and_an_end_is_one_on_the_other_side(echo):
    with RunningRelay() as relay, tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,):
        assert place.host == relay.address.host
        assert place.port in relay.ports
        sent = os.urandom(5_000_000)
        with dial(place) as line:
            talk = threading.Thread(target=lambda: (line.sendall(sent), line.shutdown(socket.SHUT_WR)))
            talk.start()
            got = b"".join(iter(lambda: line.recv(2**16), b""))
            talk.join()
        assert got == sent
        until(lambda: not relay.server._accounts[0].connections)
    assert [news.event for news in relay.news] == ["joined", "left"]
    assert relay.news[1].bytes == 2 * len(sent)
    assert str(relay.news[0]).startswith("lab: 127.0.0.1 has joined, port ")


def test_a_tunnel_has_the_ports_that_it_asks_for_and_frees_them(echo):
    with RunningRelay() as relay:
        wanted = [TunnelEnd(at=echo, port=relay.ports[2]), TunnelEnd(at=echo, port=relay.ports[3])]
        with tunnel(relay.access(), wanted) as places:
            assert [place.port for place in places] == [relay.ports[2], relay.ports[3]]
            refused(UsageError, f"port in use: {relay.ports[3]}", relay.access("home"), wanted[1])
            given = f"port not given: it gives ports {relay.ports[0]} to {relay.ports[3]}, and was asked for 80"
            refused(UsageError, given, relay.access(), TunnelEnd(at=echo, port=80))
        with tunnel(relay.access("home"), wanted) as places:
            assert all(answers(place) for place in places)


def test_who_has_no_token_or_a_wrong_one_gets_nothing():
    with RunningRelay() as relay:
        wrong = RelayAccess(address=relay.address, token="w" * 32)
        says = "does not know the token in SPANTRAIN_RELAY_TOKEN: take one from"
        refused(UsageError, says, wrong, TunnelEnd(at=relay.address))
        with relay.dial(greeting(b"T", bytes(32))) as line:
            line.sendall(proof("", b"dials", line.recv(32) + bytes(32)))
            assert line.recv(64) == bytes(32)
        until(lambda: relay.server.refused["wrong token"] == 2)
        assert not relay.news


def test_a_proof_that_was_seen_is_good_for_no_other_tunnel():
    with RunningRelay() as relay:
        with relay.dial(greeting(b"T", bytes(32))) as line:
            seen = proof(TOKENS["lab"], b"dials", line.recv(32) + bytes(32))
            line.sendall(seen)
            assert line.recv(32) != bytes(32)
        with relay.dial(greeting(b"T", bytes(32))) as line:
            line.recv(32)
            line.sendall(seen)
            assert line.recv(64) == bytes(32)


def test_one_that_does_not_know_the_token_is_no_relay():
    with socket.create_server((HOST, 0)) as listening:

        def pretend() -> None:
            with listening.accept()[0] as line:
                line.recv(100)
                line.sendall(bytes(32))
                line.recv(32)
                line.sendall(b"x" * 32)

        threading.Thread(target=pretend, daemon=True).start()
        access = RelayAccess(address=Address(host=HOST, port=listening.getsockname()[1]), token=TOKENS["lab"])
        refused(UsageError, "does not know the token", access, TunnelEnd(at=access.address))


def test_where_nothing_is_or_something_else_it_is_said(monkeypatch):
    monkeypatch.setattr(tunnels, "_PATIENCE_S", 0.3)
    port = free_ports(1)[0]
    access = RelayAccess(address=Address(host=HOST, port=port), token=TOKENS["lab"])
    says = f"no relay answers at 127.0.0.1:{port}: Connection refused; start `spantrain relay` there"
    refused(PeerLostError, says, access, TunnelEnd(at=access.address))
    with socket.create_server((HOST, port)) as listening:

        def hang_up() -> None:
            with contextlib.suppress(OSError):
                while True:
                    listening.accept()[0].close()

        threading.Thread(target=hang_up, daemon=True).start()
        refused(UsageError, "is no relay", access, TunnelEnd(at=access.address))
        listening.shutdown(socket.SHUT_RDWR)


def test_whatever_is_said_first_is_refused_within_bounds(echo):
    with RunningRelay() as relay, tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,):
        for first in (b"GET / HTTP/1.1\r\n" * 10, bytes(2**20), greeting(b"X", bytes(32)), greeting(b"B", bytes(32))):
            line = relay.dial()
            with contextlib.suppress(ConnectionError):
                line.sendall(first)
            assert ended(line)
        until(lambda: relay.server.refused["no greeting"] == 3 and relay.server.refused["nobody waits"] == 1)
        for frame in (b"\xff\xff", b"\x00\x00", b"\x00\x01\xc0", b"\x00\x05\x93\xa1x\xa1x\x90"):
            line = relay.dial(greeting(b"T", bytes(32)))
            line.sendall(proof(TOKENS["home"], b"dials", line.recv(32) + bytes(32)) + frame)
            assert ended(line)
        until(lambda: relay.server.refused["malformed"] == 4)
        assert answers(place)


def test_the_number_of_a_connection_is_good_once(echo, monkeypatch):
    numbers = []
    real = tunnels.protocol.greeting
    monkeypatch.setattr(
        tunnels.protocol, "greeting", lambda kind, word: numbers.append((kind, word)) or real(kind, word)
    )
    with RunningRelay() as relay, tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,):
        with dial(place, b"a") as line:
            assert line.recv(1) == b"a"
            (word,) = {word for kind, word in numbers if kind == b"B"}
            assert len(word) == 32
            assert ended(relay.dial(real(b"B", word)))
            line.sendall(b"b")
            assert line.recv(1) == b"b"
        assert relay.server.refused["nobody waits"] == 1


def test_a_thousand_that_say_nothing_hold_up_nobody(echo):
    with (
        RunningRelay() as relay,
        tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,),
        contextlib.ExitStack() as held,
        dial(place, b"a") as line,
    ):
        assert line.recv(1) == b"a"
        for where in (relay.address, place):
            for number in range(500):
                held.enter_context(dial(where, b"S" * (number % 2) if where is relay.address else b""))
        line.sendall(b"b")
        assert line.recv(1) == b"b"
        assert answers(place)
        with tunnel(relay.access("home"), [TunnelEnd(at=echo)]) as (other,):
            assert answers(other)
        until(lambda: len(relay.server._greeting) <= 256 and len(relay.server._calling) <= 256)


def test_who_is_slow_is_let_go(echo, monkeypatch):
    monkeypatch.setattr(protocol, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr(server, "_SILENT_S", 0.2)
    with RunningRelay() as relay, tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,):
        assert ended(relay.dial(b"STRE"))
        assert ended(dial(place))
        assert relay.server.refused["too slow"] == 2


def test_ports_connections_and_waiting_are_limited_for_each_token(echo, monkeypatch):
    monkeypatch.setattr(protocol, "DIAL_BACK_S", 0.3)
    with RunningRelay(RelayLimits(ports=1, connections=2, waiting=1)) as relay:
        with tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,):
            says = "too many ports: its token has 1 of 1 already"
            refused(UsageError, says, relay.access(), TunnelEnd(at=echo))
            with dial(place, b"a") as one, dial(place) as two:
                assert one.recv(1) == b"a"
                two.sendall(b"a")
                assert two.recv(1) == b"a"
                assert ended(dial(place, b"a"))
                with tunnel(relay.access("home"), [TunnelEnd(at=echo)]) as (other,):
                    assert answers(other)
            until(lambda: not relay.server._accounts[0].connections)
            assert answers(place)
        assert relay.server.refused["too many connections"] == 1
        # One that never dials back.
        with relay.dial(greeting(b"T", bytes(32))) as line:
            line.sendall(proof(TOKENS["lab"], b"dials", line.recv(32) + bytes(32)))
            line.recv(32)
            line.sendall(b"\x00\x0c\x93\xa6listen\xa1x\x91\x00")
            until(lambda: relay.news and relay.news[-1].event == "joined")
            place = relay.address.at_port(relay.news[-1].ports[0])
            waits = dial(place, b"a")
            until(lambda: relay.server._accounts[0].waiting == 1)
            assert ended(dial(place, b"a"))
            assert ended(waits)
            assert relay.server.refused["too slow"] == 1
            waits = dial(place, b"a")
            until(lambda: relay.server._accounts[0].waiting == 1)
        assert ended(waits)  # at once: its tunnel has gone
        assert relay.server.refused["too slow"] == 1


def test_a_call_that_comes_as_its_tunnel_goes_leaves_no_words(echo):
    """It is written of to a line that has just broken, and let go before that is noticed."""
    left: list[object] = []

    async def lost() -> type:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: left.append(context))
        (held,) = relay.server._tunnels
        call = asyncio.create_task(relay.server._met(held, next(iter(held.listeners))))
        held.writer.transport.abort()
        await asyncio.sleep(0)
        held.let_go()
        return type((await asyncio.gather(call, return_exceptions=True))[0])

    with RunningRelay() as relay, tunnel(relay.access(), [TunnelEnd(at=echo)]):
        until(lambda: relay.server._tunnels)
        assert asyncio.run_coroutine_threadsafe(lost(), relay._loop).result(PATIENCE_S) is ConnectionResetError
        gc.collect()
    assert not left


def test_a_rate_holds_back_what_goes_through():
    meter = server.Meter(1000.0)

    async def all_of_it() -> float:
        begun_s = time.monotonic()
        await asyncio.gather(*(meter.pass_on(100) for _ in range(4)))
        return time.monotonic() - begun_s

    assert asyncio.run(all_of_it()) >= 0.29  # 400 bytes, of which a tenth of a second's are at once
    assert meter.bytes == 400


def test_a_relay_that_comes_back_gives_the_same_ports(echo):
    ports, listen = free_ports(3), free_ports(1)[0]
    with contextlib.ExitStack() as stack:
        with RunningRelay(ports=ports, listen=listen) as relay:
            wanted = [TunnelEnd(at=echo, port=ports[1]), TunnelEnd(at=echo)]
            places = stack.enter_context(tunnel(relay.access(), wanted))
            line = stack.enter_context(dial(places[0], b"a"))
            assert line.recv(1) == b"a"
        assert ended(line)
        with RunningRelay(ports=ports, listen=listen) as relay:
            until(lambda: relay.news)
            assert all(answers(place) for place in places)
            stack.close()


def test_who_dials_again_takes_over_its_ports_from_a_tunnel_that_is_not_known_to_be_dead(echo):
    with RunningRelay() as relay, tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,):
        (held,) = relay.server._tunnels
        frozen = held.writer
        with relay.dial(greeting(b"T", bytes(32))) as line:
            line.sendall(proof(TOKENS["lab"], b"dials", line.recv(32) + bytes(32)))
            line.recv(32)
            data = b"\x93\xa6listen" + b"\xd9\x20" + held.session.encode() + b"\x91\xcd" + place.port.to_bytes(2, "big")
            line.sendall(len(data).to_bytes(2, "big") + data)
            until(lambda: frozen.is_closing() and len(relay.news) >= 2)


def test_who_calls_faster_than_that_is_refused_and_what_is_open_stays(echo):
    with RunningRelay() as relay, tunnel(relay.access(), [TunnelEnd(at=echo)]) as (place,), dial(place, b"a") as line:
        assert line.recv(1) == b"a"
        for _ in range(1000):
            with contextlib.suppress(ConnectionError):
                dial(place, b"rubbish").close()
        until(lambda: relay.server.refused["too many calls"] > 0)
        line.sendall(b"b")
        assert line.recv(1) == b"b"
