"""What decoders hold what came against: bounded msgpack, lists, numbers, texts; and how often something was refused;
and how many connections are taken in a while.
"""

import logging
import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import msgpack

from spantrain.errors import ProtocolError

HELLO, BYE, RESET, WHO = b"H", b"B", b"R", b"?"
"""Kinds of frames that both planes have, by their first byte; WHO answers ZeroMQ's probe, where a plane sends one."""
_MAX_SHOWN = 1000
_LOG = logging.getLogger(__name__)


class Refusal(ProtocolError):
    """Something from the network breaks a rule; `reason` is what is counted."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {printable(detail)}")
        self.reason = reason


class RefusalCounter:
    """How often each reason was given for a refusal, from any thread."""

    def __init__(self, name: str = "") -> None:
        """`name`: who refuses, where the first, second, fourth, ... for each reason are told, or nothing is."""
        self.name, self._counts = name, Counter[str]()
        self.tell: Callable[[str], None] = _LOG.warning
        self._lock = threading.Lock()

    def add(self, reason: str, text: str = "", *, count: int = 1) -> None:
        """Count refusals for one reason; `text` is what to tell of it, if anything."""
        with self._lock:
            self._counts[reason] += count
            number = self._counts[reason]
        if self.name and text and number & (number - 1) == 0:
            self.tell(f"{self.name} refused ({reason}, {number} by now): {printable(text)}")

    def refuse(self, refusal: Refusal, source: str) -> None:
        """Count something of somebody that was not accepted."""
        self.add(refusal.reason, f"something of {source}: {refusal}")

    def snapshot(self) -> dict[str, int]:
        """Return the counts so far."""
        with self._lock:
            return dict(self._counts)


def printable(told: str) -> str:
    """Return what came as a log or a terminal may be given it: no control characters, not without end.

    >>> printable("0.weight\x1b[2J")
    '0.weight?[2J'
    """
    return "".join(letter if letter.isprintable() else "?" for letter in told[:_MAX_SHOWN])


def shown(value: Any) -> str:
    """Return what came in a few characters; of a list, which may be of any depth, only that it is one."""
    return f"a list of {len(value)}" if type(value) is list else f"{value!r:.50}"


def packed(fields: Sequence[object]) -> bytes:
    """Return a msgpack array."""
    data: bytes = msgpack.packb(fields)
    return data


def unpack(data: bytes | memoryview, length: int, *, max_text: int, max_entries: int) -> list[Any]:
    """Return the fields of a msgpack array of a length, with nothing in it but numbers, texts and arrays.

    Raises:
        Refusal: it is something else, or breaks a bound.
    """
    bounds = {"max_str_len": max_text, "max_array_len": max_entries, "max_map_len": 0, "max_bin_len": 0}
    try:
        fields = msgpack.unpackb(data, raw=False, max_ext_len=0, **bounds)
    except (ValueError, msgpack.UnpackException) as error:
        raise Refusal("malformed", f"not msgpack within bounds: {error}") from error
    return array(fields, length, length)


def array(value: Any, least: int, most: int) -> list[Any]:
    """Return a list with so many entries.

    Raises:
        Refusal: it is none.
    """
    if type(value) is not list or not least <= len(value) <= most:
        raise Refusal("malformed", f"need an array of {least} to {most} entries")
    return value


def whole_number(value: Any, least: int, end: int) -> int:
    """Return a whole number from `least` up to, not including, `end`.

    Raises:
        Refusal: it is none.
    """
    if type(value) is not int or not least <= value < end:
        raise Refusal("malformed", f"need a whole number from {least} up to {end}, got {shown(value)}")
    return value


def check_version(value: Any, own: int) -> None:
    """Refuse another version of the protocol than this side's.

    Raises:
        Refusal: it is one.
    """
    if type(value) is not int or value != own:
        raise Refusal("wrong version", f"this side speaks {own}, got {shown(value)}")


def text(value: Any, most: int) -> str:
    """Return a text of 1 to `most` bytes of UTF-8.

    Raises:
        Refusal: it is none.
    """
    if type(value) is not str or not value or len(value.encode()) > most:
        raise Refusal("malformed", "need a text that is neither empty nor long")
    return value


@dataclass(kw_only=True)
class ConnectionPace:
    """A bucket of tokens.

    >>> pace = ConnectionPace(burst=2, per_s=4.0)
    >>> [pace.wait_s(now_s) for now_s in (0.0, 0.0, 0.0, 0.25)]
    [0.0, 0.0, 0.25, 0.0]
    """

    burst: int
    per_s: float
    _spent: float = 0.0
    _seen_s: float = -math.inf

    def wait_s(self, now_s: float) -> float:
        """Take one if there is one, and return 0; else return after how many seconds there is one."""
        self._spent = max(0.0, self._spent - (now_s - self._seen_s) * self.per_s)
        self._seen_s = now_s
        if self._spent + 1.0 > self.burst + 1e-9:
            return (self._spent + 1.0 - self.burst) / self.per_s
        self._spent += 1.0
        return 0.0

    def is_full(self, now_s: float) -> bool:
        """Whether nothing has been taken for so long that it is as good as new."""
        return (now_s - self._seen_s) * self.per_s >= self._spent
