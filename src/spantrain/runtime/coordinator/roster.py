"""Who has joined as which device, who is lost and why: decisions, with the time as an argument and no lock."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spantrain.errors import InternalError, SpanTrainError, UsageError, WorkerError
from spantrain.runtime.worker.worker_protocol import Order, PeerEntry
from spantrain.transport.control.heartbeat import FailureDetector
from spantrain.transport.control.protocol import RemoteRefusal

RANK_PREFIX = "rank-"
"""A worker of this name and a number stands for the device of that number."""
_REPLACED_PART = 1 / 3
"""Of the silence that makes a worker lost: after that, another one of its name may take its place."""
_MOST_TEXT = 2000


@dataclass
class RosterEntry:
    """One worker, and the order that it has."""

    name: str
    """Of the device."""
    peer: str
    """As its certificate says."""
    address: PeerEntry | None = None
    """None: it has joined, and not introduced itself yet."""
    order: tuple[int, Order] | None = None
    result: dict[str, Any] | None = None
    ended_orders: int = -1
    reason: str = ""
    left: bool = False

    @property
    def is_busy(self) -> bool:
        """Whether it has an order that it has not told the end of."""
        return self.order is not None and self.result is None

    def note_result(self, payload: Mapping[str, Any]) -> None:
        """Take what it says of its order, once; of another order, nothing."""
        if self.order is None or payload.get("done") != self.order[0] or self.result is not None:
            return
        if "result" in payload:
            self.result = {"result": payload["result"]}
        else:
            self.result = {
                "error": printable(str(payload.get("error") or "it does not say why")),
                "caused_elsewhere": payload.get("caused_elsewhere") is True,
                "usage": payload.get("usage") is True,
                "internal": payload.get("internal") is True,
            }


@dataclass(frozen=True, kw_only=True)
class Departure:
    """A worker that is here no longer."""

    device: str
    peer: str
    reason: str


class Roster:
    """The workers of a session, by the devices that they stand for. Not for several threads at once."""

    def __init__(self, devices: Sequence[str], patience_s: float) -> None:
        """Await these devices; who is silent for longer than `patience_s` is lost."""
        self._devices = tuple(devices)
        self._patience_s = patience_s
        self._detector = FailureDetector(timeout_s=patience_s)
        self._members: dict[str, RosterEntry] = {}
        """By device."""
        self._departures: list[Departure] = []
        """Of those that have gone since it was asked for."""

    def join(self, now_s: float, peer: str) -> str:
        """Let a worker in, as the device that it names or, under torchrun, the one of its rank; return the device.

        Raises:
            RemoteRefusal: there is no such device, or another worker stands for it.
        """
        device = self._device_of(peer)
        held = self._members.get(device)
        if held is not None and not self._may_replace(now_s, held):
            raise RemoteRefusal(
                f"device {device} has joined already and was heard "
                f"{self._detector.silence_s(now_s, device):.1f} s ago; if its worker has ended, try again in a moment"
            )
        self._members[device] = RosterEntry(name=device, peer=peer)
        self._detector.forget(device)
        self._detector.on_heartbeat(now_s, device)
        return device

    def may_replace(self, now_s: float, peer: str) -> bool:
        """Whether a worker that joins under a certificate's name in use may take its holder's place."""
        held = next((member for member in self._members.values() if member.peer == peer), None)
        return held is None or self._may_replace(now_s, held)

    def _may_replace(self, now_s: float, held: RosterEntry) -> bool:
        """Who has work is not replaced before it is lost; who waits, when it is silent."""
        return not held.is_busy and self._detector.silence_s(now_s, held.name) > self._patience_s * _REPLACED_PART

    def _device_of(self, peer: str) -> str:
        rank = peer.removeprefix(RANK_PREFIX)
        if rank == peer:
            device = peer
        elif rank.isdecimal() and int(rank) < len(self._devices):
            device = self._devices[int(rank)]
        else:
            raise RemoteRefusal(
                f"{peer}: this run has {len(self._devices)} devices, ranks 0 to {len(self._devices) - 1}"
            )
        if device not in self._devices:
            raise RemoteRefusal(f"there is no device {device} here; this run has {', '.join(self._devices)}")
        return device

    def introduce(self, peer: str, facts: Mapping[str, Any]) -> None:
        """Take how a worker's mailbox is reached; said again, it must be the same.

        Raises:
            RemoteRefusal: it is not.
        """
        member = self._joined(peer)
        match facts:
            case {"endpoint": str(endpoint), "public_key": str(public_key)}:
                address = PeerEntry(name=member.name, endpoint=endpoint, public_key=public_key)
            case _:
                raise RemoteRefusal("an introduction needs endpoint and public_key")
        if member.address not in (None, address):
            raise RemoteRefusal(f"device {member.name} has introduced itself already, as somebody else")
        member.address = address

    def of(self, peer: str) -> RosterEntry:
        """Return the worker that holds a certificate's name.

        Raises:
            RemoteRefusal: it was released, or has not introduced itself.
        """
        member = self._joined(peer)
        if member.address is None:
            raise RemoteRefusal(f"device {member.name} has not introduced itself")
        return member

    def _joined(self, peer: str) -> RosterEntry:
        for member in self._members.values():
            if member.peer == peer:
                return member
        raise RemoteRefusal(f"{peer} is not a member of this run any more")

    def heard(self, now_s: float, peer: str) -> RosterEntry:
        """Note a sign of life.

        Raises:
            RemoteRefusal: it was released.
        """
        member = self._joined(peer)
        self._detector.on_heartbeat(now_s, member.name)
        return member

    def depart(self, peer: str, reason: str) -> None:
        """Note that a worker goes by itself; nothing happens if it was released."""
        for member in list(self._members.values()):
            if member.peer == peer:
                self._remove(member.name, printable(reason))

    def departures(self, now_s: float) -> list[Departure]:
        """Return which workers have gone or been lost since this was asked last; their places are free from now on."""
        for device, reason in self._detector.lost(now_s):
            self._remove(device, reason)
        gone, self._departures = self._departures, []
        return gone

    def _remove(self, device: str, reason: str) -> None:
        member = self._members.pop(device)
        self._detector.forget(device)
        self._departures.append(Departure(device=device, peer=member.peer, reason=reason))

    def __getitem__(self, device: str) -> RosterEntry:
        return self._members[device]

    def __iter__(self) -> Iterator[RosterEntry]:
        return iter(self._members.values())

    def missing(self, devices: Collection[str]) -> list[str]:
        """Return those of some devices that nobody stands for yet."""
        return [name for name in devices if name not in self._members or self._members[name].address is None]


@dataclass(kw_only=True)
class Gathering:
    """The devices whose orders belong together, and how far they have come."""

    names: frozenset[str] = frozenset()
    ready: set[str] = field(default_factory=set)
    """Those that have admitted all others."""
    to_begin: set[str] = field(default_factory=set)
    """Those that are ready for their first step."""

    def begins_with(self, name: str) -> bool:
        """Note that a device is ready for its first step; return whether it was the last one. One may ask twice."""
        known = name in self.to_begin
        self.to_begin.add(name)
        return not known and self.names <= self.to_begin


def failure_of(members: Sequence[RosterEntry], where_is_log: Callable[[str], str]) -> SpanTrainError | None:
    """Return the error of the device that failed first, if one did.

    A device that fails because another did is not the one to name.
    """
    failed = {member.name: member.result for member in members if member.result and "error" in member.result}
    first = next((name for name, result in failed.items() if not result["caused_elsewhere"]), None)
    if first is None and failed and len(failed) == len(members):
        first = next(iter(failed))
    if first is None:
        return None
    if failed[first]["usage"]:
        return UsageError(str(failed[first]["error"]))
    log, said = where_is_log(first), failed[first]["error"]
    if failed[first]["internal"]:
        return InternalError(
            f"device {first} failed by an error of SpanTrain itself: {said}; the traceback is in its log: {log}; to "
            "report the error, send that"
        )
    return WorkerError(f"device {first} failed: {said}; its log: {log}")


def printable(text: str) -> str:
    """Return what another machine says as a terminal may be given it: no control characters, not without end."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )[:_MOST_TEXT]
