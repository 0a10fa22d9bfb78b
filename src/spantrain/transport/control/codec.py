"""Strict msgpack: dicts of plain values, within limits. Nothing that arrives is executed (DESIGN idea 9).

Plain values are None, booleans, integers of 64 bits, floats, text, bytes, lists and dicts with text as keys.
A tuple is sent as a list. Extension types, timestamps, other keys, repeated keys and trailing bytes are refused.
"""

from collections.abc import Iterable
from typing import Any

import msgpack

from spantrain.errors import ProtocolError

__all__ = ["decode", "encode"]

_DEPTH_LIMIT = 32
_SCALARS = (bool, int, float, str, bytes)


def encode(payload: dict[str, Any], *, limit_bytes: int) -> bytes:
    """Return the bytes of a payload.

    Raises:
        TypeError: it holds something that is not plain; the message says where.
        ProtocolError: it takes more than the limit.
    """
    if type(payload) is not dict:
        raise TypeError(f"a control message must be a dict, got {type(payload).__name__}")
    problem = _problem(payload, "payload", 0)
    if problem:
        raise TypeError(problem)
    data: bytes = msgpack.packb(payload, use_bin_type=True)
    if len(data) > limit_bytes:
        raise ProtocolError(f"a control message may have {limit_bytes} bytes, this one has {len(data)}: send less")
    return data


def decode(data: bytes, *, limit_bytes: int) -> dict[str, Any]:
    """Return the payload in some bytes from the network.

    Raises:
        ProtocolError: too long, not msgpack, or not a dict of plain values.
    """
    if len(data) > limit_bytes:
        raise ProtocolError(f"a control message may have {limit_bytes} bytes, got {len(data)}")
    try:
        payload = msgpack.unpackb(
            data, raw=False, strict_map_key=True, object_pairs_hook=_unique_keys, ext_hook=_refuse_extension
        )
    except (ValueError, RecursionError) as error:
        raise ProtocolError(f"a control message is not msgpack of plain values: {error}") from None
    if not isinstance(payload, dict):
        raise ProtocolError(f"a control message must be a dict, got {type(payload).__name__}")
    problem = _problem(payload, "message", 0)
    if problem:
        raise ProtocolError(problem)
    return payload


def _unique_keys(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    table = dict(pairs)
    if len(table) != len(pairs):
        raise ValueError("a key is given twice")
    return table


def _refuse_extension(code: int, data: bytes) -> None:
    raise ValueError(f"extension type {code} of {len(data)} bytes is not allowed")


def _problem(value: object, where: str, depth: int) -> str | None:
    """Return what is not plain about a value, and where; None if all is well."""
    if depth > _DEPTH_LIMIT:
        return f"a control message may be nested {_DEPTH_LIMIT} deep, this one goes deeper"
    if value is None or isinstance(value, _SCALARS):
        return _scalar_problem(value, where)
    # msgpack's own extension and time types are tuples or plain objects: exact types keep them out.
    if type(value) in (list, tuple):
        assert isinstance(value, list | tuple)
        return _first(_problem(entry, f"{where}[{index}]", depth + 1) for index, entry in enumerate(value))
    if type(value) is dict:
        for key in value:
            if not isinstance(key, str):
                return f"{where}: keys must be text, got {key!r}"
        return _first(_problem(entry, f"{where}.{key}", depth + 1) for key, entry in value.items())
    return f"{where}: {type(value).__name__} is not a plain value"


def _scalar_problem(value: object, where: str) -> str | None:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        return f"{where}: {value} does not fit in 64 bits"
    return None


def _first(problems: Iterable[str | None]) -> str | None:
    return next((problem for problem in problems if problem), None)
