"""Who has joined as which device, who is lost and why: decisions, with the time as an argument and no lock."""

from abc import ABC, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Self

from spantrain.core.names import file_stem
from spantrain.core.records import Record
from spantrain.errors import InternalError, PeerLostError, SpanTrainError, UsageError, WorkerError
from spantrain.recovery.detection import LONGEST_SILENCE_S, LossDetector
from spantrain.runtime.control.plane import A, Order, read_answer
from spantrain.runtime.control.requests import HeldState, Introduction, OrderFailure, OrderOutcome
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.control.protocol import RemoteRefusal

RANK_PREFIX = "rank-"
"""A worker of this name and a number stands for the device of that number."""
_REPLACED_PART = 1 / 3
"""Of the silence that makes a worker lost: after that, another one of its name may take its place."""
_MAX_TEXT = 2000


def join_command(join: str, token: str, device: str) -> str:
    """Return what to run on a device's machine; the token is not among its options, which others there can see."""
    return f"SPANTRAIN_TOKEN={token} spantrain worker --join {join} --name {device}"


class WorkerStarter:
    """Whoever has started the workers: here people, of whom nothing is heard."""

    def check(self) -> None:
        """Raise what ends everything; asked again and again."""

    def ended(self) -> Mapping[str, str]:
        """Return, by device, how workers have ended since this was asked last: silence need not be waited for."""
        return {}

    def where_is_log(self, device: str) -> str:
        """Return where a worker's output goes."""
        del device
        return "what its worker has printed, on its own machine"


class LoggedWorkers(WorkerStarter, ABC):
    """Whose output comes to files of this machine; a context that leaves none of them."""

    def __init__(self, log_folder: Path) -> None:
        self._log_folder = log_folder
        self._closing = False

    def log_of(self, device: str) -> Path:
        """Return the file of this machine that a worker's output comes to."""
        return self._log_folder / f"{file_stem(device)}.log"

    def where_is_log(self, device: str) -> str:
        """Return where a worker's output goes."""
        return str(self.log_of(device))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.expect_ends()
        self.close()

    @abstractmethod
    def close(self) -> None:
        """End those that are still there."""

    def expect_ends(self) -> None:
        """From now on workers may end: the run is over."""
        self._closing = True


class _DeviceError(SpanTrainError):
    """Names a device; made of a text alone, too, as whoever adds to the text of an error makes it anew."""

    def __init__(self, text: str, *, device: str = "", why: str = "") -> None:  # the text alone: `cli` adds to it
        super().__init__(text)
        self.device = device
        self.why = why


class OrderAbandonedError(_DeviceError, PeerLostError):
    """A device gave up an order and lays it on another one, which may not have noticed."""


class DeviceLostError(_DeviceError, PeerLostError):
    """A device that takes part in an order has gone."""


class DeviceMemoryError(_DeviceError, WorkerError):
    """A device that takes part in an order ran out of memory; its worker is there."""


@dataclass
class RosterEntry:
    """One worker, and the order that it has."""

    name: str
    """Of the device."""
    peer: str
    """As its certificate says."""
    address: PeerAddress | None = None
    """None: it has joined, and not introduced itself yet."""
    held: HeldState | None = None
    """What it has brought of a run whose coordinator it had lost."""
    order: tuple[int, Order[Any]] | None = None
    outcome: OrderOutcome | None = None
    ended_orders: int = -1
    reason: str = ""
    left: bool = False
    leaving: str = ""
    """Why it wants to leave behind a step, if it does."""
    dismissed: bool = False
    """Whether there are no more orders for it."""

    @property
    def is_busy(self) -> bool:
        """Whether it has an order that it has not told the end of."""
        return self.order is not None and self.outcome is None

    @property
    def failure(self) -> OrderFailure | None:
        """Why its order was not carried out; None: it was, or is not over."""
        return self.outcome.failure if self.outcome else None

    def note_outcome(self, outcome: OrderOutcome) -> None:
        """Take what it says of its order, once; of another order, nothing."""
        if self.order is None or outcome.order_id != self.order[0] or self.outcome is not None:
            return
        failure = outcome.failure
        if failure is not None:
            failure = replace(failure, error=printable(failure.error or "it does not say why"))
        self.outcome = replace(outcome, failure=failure)


class Departure(Record):
    """A worker that is here no longer."""

    device: str
    peer: str
    reason: str


class Roster:
    """The workers of a session, by the devices that they stand for. Not for several threads at once."""

    def __init__(
        self, devices: Sequence[str], lost_after_s: float | None, sites: Mapping[str, str] = MappingProxyType({})
    ) -> None:
        """Await these devices, let in all with a site; `lost_after_s`: what silence is a loss, None: as measured."""
        self._devices = tuple(devices)
        self._sites, self._spare = sites, frozenset(sites) - frozenset(devices)
        self.patience_s = lost_after_s or LONGEST_SILENCE_S
        """The longest silence that is borne, on either side."""
        self._detector = LossDetector(lost_after_s)
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
        held = self._found(peer)
        return held is None or self._may_replace(now_s, held)

    def _may_replace(self, now_s: float, held: RosterEntry) -> bool:
        """Who has work is not replaced before it is lost; who waits, when it is silent or was told to leave."""
        silent = self._detector.silence_s(now_s, held.name) > self.patience_s * _REPLACED_PART
        return not held.is_busy and (held.dismissed or silent)

    def _device_of(self, peer: str) -> str:
        rank, count = peer.removeprefix(RANK_PREFIX), len(self._devices)
        if rank == peer:
            device = peer
        elif rank.isdecimal() and int(rank) < count:
            device = self._devices[int(rank)]
        else:
            raise RemoteRefusal(f"{peer}: this run has {count} devices, ranks 0 to {count - 1}")
        if device not in self._devices and device not in self._spare:
            others = f", and lets {', '.join(sorted(self._spare))} join" if self._spare else ""
            raise RemoteRefusal(f"there is no device {device} here; this run has {', '.join(self._devices)}{others}")
        return device

    def introduce(self, peer: str, said: Introduction) -> None:
        """Take how a worker's mailbox is reached; said again, it must be the same.

        Raises:
            RemoteRefusal: it is not, or is no address.
        """
        member = self._joined(peer)
        try:
            site = self._sites.get(member.name, "")
            address = PeerAddress(
                name=member.name, endpoint=said.endpoint, public_key=said.public_key,
                near=said.near if site else "", site=site,
            )  # fmt: skip
        except ValueError as error:
            raise RemoteRefusal(str(error)) from None
        if member.address not in (None, address):
            raise RemoteRefusal(f"device {member.name} has introduced itself already, as somebody else")
        member.address, member.held = address, said.held

    def of(self, peer: str) -> RosterEntry:
        """Return the worker that holds a certificate's name.

        Raises:
            RemoteRefusal: it was released, or has not introduced itself.
        """
        member = self._joined(peer)
        if member.address is None:
            raise RemoteRefusal(f"device {member.name} has not introduced itself")
        return member

    def _found(self, peer: str) -> RosterEntry | None:
        return next((member for member in self._members.values() if member.peer == peer), None)

    def _joined(self, peer: str) -> RosterEntry:
        member = self._found(peer)
        if member is None:
            raise RemoteRefusal(f"{peer} is not a member of this run any more")
        return member

    def heard(self, now_s: float, peer: str, round_trip_s: float = 0.0, leaving: str = "") -> RosterEntry:
        """Note a sign of life, how long the one before took to be answered, and why it wants to leave, if it does.

        Raises:
            RemoteRefusal: it was released.
        """
        member = self._joined(peer)
        self._detector.on_heartbeat(now_s, member.name, round_trip_s)
        member.leaving = member.leaving or printable(leaving)
        return member

    def note_line(self, now_s: float, peer: str, line: int, is_open: bool) -> None:
        """Note that a worker's connection of this number has opened, or closed; nothing happens if it was released."""
        member = self._found(peer)
        if member is not None and is_open:
            self._detector.on_open(member.name, line)
        elif member is not None:
            self._detector.on_close(now_s, member.name, line)

    def depart(self, peer: str, reason: str) -> None:
        """Note that a worker goes by itself; nothing happens if it was released."""
        if (member := self._found(peer)) is not None:
            self._remove(member.name, printable(reason))

    def lose(self, device: str, reason: str) -> None:
        """Note that a device's worker is known to be lost; nothing happens if it is gone already."""
        if device in self._members:
            self._remove(device, reason)

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


def error_of(device: str, failure: OrderFailure, log: str) -> SpanTrainError:
    """Return the error of a run that a device's failure ends; `log` says where more of it stands."""
    if failure.usage:
        return UsageError(f"device {device}: {failure.error}")
    if failure.internal:
        return InternalError(
            f"device {device} failed by an error of SpanTrain itself: {failure.error}; the traceback is in its log: "
            f"{log}; to report the error, send that"
        )
    if failure.out_of_memory:
        return DeviceMemoryError(
            f"device {device} ran out of memory: {failure.error}; its log: {log}", device=device, why=failure.error
        )
    return WorkerError(f"device {device} failed: {failure.error}; its log: {log}")


def printable(text: str) -> str:
    """Return what another machine says as a terminal may be given it: no control characters, not without end."""
    return "".join(
        letter if letter.isprintable() or letter == "\n" else "\N{REPLACEMENT CHARACTER}" for letter in text
    )[:_MAX_TEXT]


def results_of(orders: Mapping[str, Order[A]], outcomes: Mapping[str, OrderOutcome]) -> dict[str, A]:
    """Return what came of orders.

    Raises:
        OrderAbandonedError: one gave up for another's sake.
    """
    results = {}
    for name, outcome in outcomes.items():
        if outcome.failure is not None:
            why = outcome.failure.error
            raise OrderAbandonedError(f"device {name} gave up: {why}", device=name, why=why)
        results[name] = read_answer(orders[name], outcome.result)
    return results
