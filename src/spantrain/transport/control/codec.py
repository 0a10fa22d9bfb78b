"""Strict msgpack: dicts of plain values, within limits. Nothing that arrives is executed (DESIGN idea 9).

Plain values are None, booleans, integers of 64 bits, floats, text, bytes, lists and dicts with text as keys.
A tuple is sent as a list. Extension types, timestamps, other keys, repeated keys and trailing bytes are refused.
"""

from collections.abc import Iterable
from typing import Any

import msgpack

from spantrain.errors import ProtocolError

_DEPTH_LIMIT = 32
_KEY_LIMIT = 512
_VALUES_LIMIT = 2**20
"""Of one message: what takes a byte on the way takes up to a hundred when it is read."""
_SCALARS = (bool, int, float, str, bytes)

_Problem = tuple[str, str]
"""Where, from the value on that was looked at, and what."""


def encode(payload: dict[str, Any], *, limit_bytes: int) -> bytes:
    """Return the bytes of a payload.

    Raises:
        TypeError: it holds something that is not plain; the message says where.
        ProtocolError: it takes more than the limit.
    """
    if type(payload) is not dict:
        raise TypeError(f"a control message must be a dict, got {type(payload).__name__}")
    problem = _problem(payload, 0)
    if problem:
        raise TypeError("payload{}: {}".format(*problem))
    data: bytes = msgpack.packb(payload, use_bin_type=True)
    if len(data) > limit_bytes:
        raise ProtocolError(f"a control message may have {limit_bytes} bytes, this one has {len(data)}: send less")
    return data


def decode(data: bytes, *, limit_bytes: int) -> dict[str, Any]:
    """Return the payload in some bytes from the network.

    Raises:
        ProtocolError: too long, not msgpack, too many values, or not a dict of plain values.
    """
    if len(data) > limit_bytes:
        raise ProtocolError(f"a control message may have {limit_bytes} bytes, got {len(data)}")
    counted = _Counted()
    try:
        payload = msgpack.unpackb(
            data,
            raw=False,
            strict_map_key=True,
            object_pairs_hook=counted.table,
            list_hook=counted.row,
            ext_hook=_refuse_extension,
            max_array_len=_VALUES_LIMIT,
            max_map_len=_VALUES_LIMIT,
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not msgpack of plain values: {error}") from None
    if not isinstance(payload, dict):
        raise ProtocolError(f"a control message must be a dict, got {type(payload).__name__}")
    problem = _problem(payload, 0)
    if problem:
        raise ProtocolError("message{}: {}".format(*problem))
    return payload


class _Counted:
    """Counts the values of a message while they are read: what is refused then has not taken much."""

    def __init__(self) -> None:
        self._values = 0

    def row(self, entries: list[Any]) -> list[Any]:
        self._add(len(entries))
        return entries

    def table(self, pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
        self._add(2 * len(pairs))
        table = dict(pairs)
        if len(table) != len(pairs):
            raise ValueError("a key is given twice")
        return table

    def _add(self, count: int) -> None:
        self._values += count
        if self._values > _VALUES_LIMIT:
            raise ValueError(f"it holds over {_VALUES_LIMIT} values")


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} of {len(data)} bytes is not allowed")


def _problem(value: object, depth: int) -> _Problem | None:
    """Return what is not plain about a value, and where; None if all is well."""
    if depth > _DEPTH_LIMIT:
        return "", f"a control message may be nested {_DEPTH_LIMIT} deep, this one goes deeper"
    if value is None or isinstance(value, _SCALARS):
        return _scalar_problem(value)
    # msgpack's own extension and time types are tuples or plain objects: exact types keep them out.
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return _first(enumerate(value), depth, "[{}]")
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str):
                return "", f"keys must be text, got {key!r:.60}"
            if len(key) > _KEY_LIMIT:
                return "", f"keys may have {_KEY_LIMIT} characters, got {key[:60]!r}..."
        return _first(value.items(), depth, ".{}")
    return "", f"{type(value).__name__} is not a plain value"


def _first(entries: Iterable[tuple[object, object]], depth: int, place: str) -> _Problem | None:
    # Where it is told only of what is wrong: to write that down for each value would take far longer than to look.
    for key, entry in entries:
        problem = _problem(entry, depth + 1)
        if problem is not None:
            return place.format(key) + problem[0], problem[1]
    return None


def _scalar_problem(value: object) -> _Problem | None:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return "", "a number does not fit in 64 bits"
    return None
