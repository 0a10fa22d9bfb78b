"""Probes over a mailbox: what is asked, how it is answered, what came back.

The kind of a probe is in its key's `cut`, its number in the key's `step`.
"""

import time
from collections.abc import Callable, Collection
from enum import IntEnum

import torch

from spantrain.core.messages import ControlKey
from spantrain.errors import PeerLostError, ProtocolError
from spantrain.transport.mailbox.interface import Message
from spantrain.transport.mailbox.mailbox import MailboxLike

MAX_PIECE_BYTES = 124 * 1024
MAX_PIECES = 4096
_LANE = "probe"
_PING_INTS = 5
_GAP_S = 3e-3
"""Pings do not wait for each other, or the processors on the way would fall asleep in between and wake up slowly; and
they are far enough apart for none to wait behind the one before."""
_REPLY_S = 60.0
_KNOCK_POLL_S = 0.01


class _Kind(IntEnum):
    PING = 0
    PONG = 1
    LOAD = 2
    """[pieces] and a piece; the receiver answers the last one with a report."""
    REPORT = 3
    """Arrival times of the pieces, on the receiver's clock."""
    REQUEST = 4
    """[pieces, bytes of one]: send me such a load."""
    ASK_SOFTWARE = 5
    """How long does a round trip take that uses your software on both ends, and no network?"""
    SOFTWARE = 6
    """So many seconds."""
    WARM_UP = 7
    """Nothing: that it was acknowledged says that there is a connection."""
    LAST = 8
    """I shall ask no more."""
    NOTED = 9
    """Then I shall not wait for more."""


_QUESTIONS = (_Kind.PING, _Kind.LOAD, _Kind.REQUEST, _Kind.ASK_SOFTWARE, _Kind.LAST)


def _key(mailbox: MailboxLike, kind: _Kind, number: int) -> ControlKey:
    return ControlKey(generation=mailbox.generation, step=number, lane=_LANE, kind=int(kind))


def _kind_of(message: Message) -> int:
    """Return the kind of a probe; -1 of any other message."""
    key = message.key
    return key.kind if isinstance(key, ControlKey) and key.lane == _LANE else -1


def _send_load(mailbox: MailboxLike, peer: str, number: int, pieces: int, piece_bytes: int) -> None:
    control = torch.tensor([pieces])
    piece = torch.zeros(piece_bytes, dtype=torch.uint8)
    for _ in range(pieces):
        mailbox.send(peer, _key(mailbox, _Kind.LOAD, number), [control, piece])


class Echo:
    """The answering side, one message at a time."""

    def __init__(self, mailbox: MailboxLike, software_round_trip_s: Callable[[], float]) -> None:
        """`software_round_trip_s` measures this side's software when it is asked for."""
        self._mailbox = mailbox
        self._software_round_trip_s = software_round_trip_s
        self._arrivals: dict[tuple[str, int], list[float]] = {}
        self.dismissed = False
        """Whether a prober has said that it asks no more."""

    def take(self, message: Message) -> None:
        """Answer a message; whatever is not a well-formed question is left out."""
        match _kind_of(message):
            case _Kind.PING:
                # How long it lies here until it is answered is no part of the network: the asker takes it off.
                self._answer(message, _Kind.PONG, message.received_s, *message.tensors[:1])
            case _Kind.LOAD:
                if (arrivals := self._load(message)) is not None:
                    times = torch.tensor(arrivals, dtype=torch.float64)
                    self._mailbox.send(message.source, _key(self._mailbox, _Kind.REPORT, message.key.step), [times])
            case _Kind.REQUEST:
                numbers = _integers(message, 2)
                if numbers is not None and 1 <= numbers[0] <= MAX_PIECES and 1 <= numbers[1] <= MAX_PIECE_BYTES:
                    _send_load(self._mailbox, message.source, message.key.step, *numbers)
            case _Kind.ASK_SOFTWARE:
                self._answer(message, _Kind.SOFTWARE, self._software_round_trip_s())
            case _Kind.LAST:
                self.dismissed = True
                self._answer(message, _Kind.NOTED, 0.0)

    def _answer(self, message: Message, kind: _Kind, value: float, *more: torch.Tensor) -> None:
        tensors = [torch.tensor([value], dtype=torch.float64), *more]
        self._mailbox.send(message.source, _key(self._mailbox, kind, message.key.step), tensors)

    def _load(self, message: Message) -> list[float] | None:
        """Note a piece of a load; return all arrival times when the last one is here."""
        numbers = _integers(message, 1)
        if numbers is None:
            return None
        address = (message.source, message.key.step)
        if address not in self._arrivals:
            # A new load of this peer: what is left of an older one was given up.
            self._arrivals = {key: times for key, times in self._arrivals.items() if key[0] != message.source}
        arrivals = self._arrivals.setdefault(address, [])
        arrivals.append(message.received_s)
        if len(arrivals) < min(numbers[0], MAX_PIECES):
            return None
        return sorted(self._arrivals.pop(address))


def _integers(message: Message, count: int) -> list[int] | None:
    if not message.tensors or message.tensors[0].dtype != torch.int64 or message.tensors[0].shape != (count,):
        return None
    return [int(value) for value in message.tensors[0]]


def _number(message: Message) -> float:
    if not message.tensors or message.tensors[0].dtype != torch.float64 or message.tensors[0].shape != (1,):
        raise ProtocolError(f"{message.source} answered a probe with {message.tensors!r:.80}, not one float64")
    return float(message.tensors[0])


def warm_up_links(mailbox: MailboxLike, peers: Collection[str]) -> None:
    """Return when there is a connection to each of the peers, all of which must have been dialled or have dialled.

    Raises:
        PeerLostError: there is none to some of them.
    """
    for peer in peers:
        mailbox.send(peer, _key(mailbox, _Kind.WARM_UP, 0), [])
    missing = set(peers)
    deadline_s = time.monotonic() + _REPLY_S
    while missing and time.monotonic() < deadline_s:
        mailbox.receive(_KNOCK_POLL_S)
        missing -= {interval.peer for interval in mailbox.sent_intervals()}
    if missing:
        raise PeerLostError(f"{mailbox.name} has no connection to {', '.join(sorted(missing))} after {_REPLY_S} s")


class Prober:
    """Asks one peer, and answers whatever others ask meanwhile."""

    def __init__(self, mailbox: MailboxLike, peer: str, software_round_trip_s: Callable[[], float]) -> None:
        """`software_round_trip_s` measures this side's software when it is asked for."""
        self.mailbox = mailbox
        self.peer = peer
        self.software_round_trip_s = software_round_trip_s
        self._echo = Echo(mailbox, software_round_trip_s)
        self._number = time.monotonic_ns()

    def _next_number(self) -> int:
        """Number a probe so that no late answer to an earlier one is taken for its own."""
        self._number += 1
        return self._number

    def ping(self, count: int) -> list[float]:
        """Send five int32 `count` times, `_GAP_S` apart, without waiting for the answers before.

        Returns:
            For each the seconds there and back, less what the other side held it.
        """
        sent_s: dict[int, float] = {}
        found: list[float] = []
        payload = [torch.zeros(_PING_INTS, dtype=torch.int32)]
        due_s = time.monotonic()
        deadline_s = due_s + _REPLY_S
        while len(found) < count and time.monotonic() < deadline_s:
            now_s = time.monotonic()
            if len(sent_s) < count and now_s >= due_s:
                number = self._next_number()
                sent_s[number] = time.monotonic()
                self.mailbox.send(self.peer, _key(self.mailbox, _Kind.PING, number), payload)
                due_s = now_s + _GAP_S
            for message in self._receive(due_s if len(sent_s) < count else deadline_s):
                if (message.source, _kind_of(message)) == (self.peer, _Kind.PONG) and message.key.step in sent_s:
                    held_s = max(0.0, message.sent_s - _number(message))
                    found.append(message.received_s - sent_s[message.key.step] - held_s)
        self._check_complete(len(found), count)
        return found

    def ask_software_round_trip(self) -> float:
        """Return the other side's seconds for a round trip through its own software alone."""
        (answer,) = self._asked(_Kind.ASK_SOFTWARE, _Kind.SOFTWARE)
        return _number(answer)

    def dismiss(self) -> None:
        """Tell the other side that no more questions come, and wait until it knows: then none can be left over."""
        self._asked(_Kind.LAST, _Kind.NOTED)

    def _asked(self, question: _Kind, answer: _Kind, *tensors: torch.Tensor, count: int = 1) -> list[Message]:
        """Ask, and return so many answers of a kind."""
        number = self._next_number()
        self.mailbox.send(self.peer, _key(self.mailbox, question, number), list(tensors))
        return self._replies(answer, number, count)

    def _receive(self, until_s: float) -> list[Message]:
        """Return what comes until then, less the questions of others: those are answered."""
        answers, asked_for = [], (self.peer, _Kind.LOAD, self._number)
        for message in self.mailbox.receive(max(0.0, until_s - time.monotonic())):
            kind = _kind_of(message)
            if kind in _QUESTIONS and (message.source, kind, message.key.step) != asked_for:
                self._echo.take(message)
            else:
                answers.append(message)
        return answers

    def _replies(self, kind: _Kind, number: int, count: int) -> list[Message]:
        """Wait for messages of a kind.

        Raises:
            PeerLostError: they do not come.
        """
        found: list[Message] = []
        deadline_s = time.monotonic() + _REPLY_S
        while len(found) < count and time.monotonic() < deadline_s:
            for message in self._receive(deadline_s):
                if (message.source, message.key.step, _kind_of(message)) == (self.peer, number, kind):
                    found.append(message)
        self._check_complete(len(found), count)
        return found

    def _check_complete(self, found: int, count: int) -> None:
        if found < count:
            raise PeerLostError(
                f"{self.mailbox.name} measures with {self.peer}: {found} of {count} answers after {_REPLY_S} s"
            )

    def push(self, pieces: int, piece_bytes: int) -> list[float]:
        """Send a load; return the other side's arrival times."""
        number = self._next_number()
        _send_load(self.mailbox, self.peer, number, pieces, piece_bytes)
        (report,) = self._replies(_Kind.REPORT, number, 1)
        if len(report.tensors) != 1 or report.tensors[0].dtype != torch.float64 or report.tensors[0].numel() != pieces:
            raise ProtocolError(f"{self.peer} answered a load of {pieces} pieces with {report.tensors!r:.80}")
        return [float(value) for value in report.tensors[0].reshape(-1)]

    def pull(self, pieces: int, piece_bytes: int) -> list[float]:
        """Have a load sent; return its arrival times."""
        load = self._asked(_Kind.REQUEST, _Kind.LOAD, torch.tensor([pieces, piece_bytes]), count=pieces)
        return sorted(message.received_s for message in load)
