"""What goes between machines, each way, tried by a small program on each of them before any worker runs there."""

import json
import secrets
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import field, replace
from itertools import combinations
from typing import TypeVar

from spantrain.errors import PeerLostError, ProtocolError
from spantrain.reach.facts import CheckedAnswer, MachineFacts, program, read_answer
from spantrain.reach.machines import Machine, RemoteProgram, at_once

LOAD_S = 1.0
"""Of a load, before what a long way takes more."""
_ANSWER_S = 60.0
_START_S = 30.0
_MOST_ADDRESSES = 8

A = TypeVar("A")

Pair = tuple[str, str]
"""Names of the machine that dials and of the one that listens."""


class PairReport(CheckedAnswer):
    """What one machine found on its way to another's listener; where it found none, `errors` say why."""

    errors: Mapping[str, str] = field(default_factory=dict)
    """By address."""
    address: str = ""
    local_address: str = ""
    seen_address: str = ""
    """What the other side takes this one's address for."""
    round_trip_s: float = 0.0
    """The least of some."""
    clock_offset_s: float = 0.0
    """The other clock less this one, by the quickest exchange of some."""
    interface_mtu: int | None = None
    path_mtu: int | None = None
    """The largest packet that arrived undivided, of usual sizes; None where no datagram did."""
    up_bytes_per_s: float | None = None
    down_bytes_per_s: float | None = None

    @property
    def is_open(self) -> bool:
        """Whether there is a way."""
        return not self.errors


class _ListenedPort(CheckedAnswer):
    """Where a machine listens; what a program answers first has nothing of that yet."""

    port: int = 0
    errors: Mapping[str, str] = field(default_factory=dict)


class PairPrograms:
    """The programs on some machines, which listen and dial as they are told; they end with the block."""

    def __init__(self, machines: Sequence[Machine]) -> None:
        self._machines = machines
        self.stop = threading.Event()
        """Ends all waits for the programs when it is set."""
        self._secret = secrets.token_hex(16)
        self._stack = ExitStack()
        self._programs: dict[str, RemoteProgram] = {}
        self._ports: dict[str, int] = {}

    def __enter__(self) -> "PairPrograms":
        """Start all of them, and have each listen on any port.

        Raises:
            PeerLostError, ProtocolError: one does not start, or does not listen.
        """

        def begin(machine: Machine) -> int:
            self._ask(_ListenedPort, machine.name, {"secret": self._secret, "name": machine.name}, _START_S)
            return self.listen(machine.name, 0)

        try:
            source = program("pair")
            for machine in self._machines:
                self._programs[machine.name] = self._stack.enter_context(RemoteProgram(machine, source, stop=self.stop))
            self._ports = dict(zip(self._programs, at_once(begin, self._machines, self.stop), strict=True))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def listen(self, machine: str, port: int) -> int:
        """Have a machine listen on a port, 0 for any; return which.

        Raises:
            PeerLostError: it cannot; the message says why.
        """
        found = self._ask(_ListenedPort, machine, {"listen": port}, _START_S)
        if found.errors:
            raise PeerLostError(f"{machine} cannot listen on port {port}: {', '.join(found.errors.values())}")
        return found.port

    def dial(
        self, source: str, target: str, addresses: Sequence[str], *, seconds: float = 0.0, port: int | None = None
    ) -> PairReport:
        """Have a machine try the addresses of another one.

        Args:
            source: who dials.
            target: who listens.
            addresses: of the target, the best first.
            seconds: of a load each way; 0 for none.
            port: the target's, where it is not the one that it began with.
        """
        if not addresses:
            return PairReport(errors={"": "it has no address that others could reach"})
        asked = {"name": target, "addresses": list(addresses[:_MOST_ADDRESSES]), "seconds": seconds}
        try:
            wanted = {"connect": asked | {"port": self._ports[target] if port is None else port}}
            return self._ask(PairReport, source, wanted, _ANSWER_S + 4 * seconds)
        except (PeerLostError, ProtocolError) as error:
            return PairReport(errors={"": str(error)[:300]})

    def _ask(self, kind: type[A], machine: str, question: object, timeout_s: float) -> A:
        running = self._programs[machine]
        running.send(json.dumps(question))
        return read_answer(kind, running.line(time.monotonic() + timeout_s), f"answer of {running.machine}")


def addresses_of(machine: Machine, facts: MachineFacts) -> tuple[str, ...]:
    """Return where others may reach a machine: where ssh does, then its own addresses."""
    found = dict.fromkeys(one for one in (machine.called(), *facts.addresses) if one)
    return tuple(found) or ("127.0.0.1",)


def try_ways(programs: PairPrograms, addresses: Mapping[str, Sequence[str]]) -> dict[Pair, PairReport]:
    """Have every machine dial every other; each dials one after the other, all of them at once."""
    names = list(addresses)

    def from_one(source: str) -> dict[Pair, PairReport]:
        return {(source, to): programs.dial(source, to, addresses[to]) for to in names if to != source}

    return {pair: found for rows in at_once(from_one, names, programs.stop) for pair, found in rows.items()}


def load_ways(
    programs: PairPrograms, ways: dict[Pair, PairReport], pairs: Iterable[Pair], *, seconds: float = LOAD_S
) -> dict[Pair, PairReport]:
    """Return the ways with the rates of some pairs, measured one pair after the other, over either way that is open."""
    found = dict(ways)
    for one, other in pairs:
        source, target = (one, other) if ways[one, other].is_open else (other, one)
        way = ways[source, target]
        if not way.is_open:
            continue
        loaded = programs.dial(source, target, [way.address], seconds=seconds)
        up, down = loaded.up_bytes_per_s, loaded.down_bytes_per_s
        found[source, target] = replace(way, up_bytes_per_s=up, down_bytes_per_s=down)
        if ways[target, source].is_open:
            found[target, source] = replace(ways[target, source], up_bytes_per_s=down, down_bytes_per_s=up)
    return found


def pairs_of(names: Sequence[str]) -> list[Pair]:
    """Return each pair once."""
    return list(combinations(names, 2))
