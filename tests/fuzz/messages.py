"""Bytes of control messages and heads, valid but for what was changed in them."""

from collections.abc import Callable
from random import Random
from typing import Any

import msgpack

from fuzz.mutation import changed, corrupted, wild


def packed(chance: Random, value: Any) -> bytes:
    """Return msgpack of a plain value, sometimes with its bytes changed; what it cannot hold becomes an extension."""
    act = chance.random()
    if act < 0.02:
        return bytes([chance.choice((0x91, 0x81))]) * chance.choice((100, 2000, 100_000))
    try:
        data: bytes = msgpack.packb(value, default=lambda one: msgpack.ExtType(5, repr(one)[:500].encode()))
    except ValueError:  # deeper than its packer goes
        return b"\x91" * 1000
    if act < 0.15:
        return corrupted(chance, data)
    return _twice(value) if act < 0.2 and isinstance(value, dict) and value else data


def _twice(table: dict[str, Any]) -> bytes:
    """Return a table in which each key is there twice."""
    packer = msgpack.Packer(default=repr)
    data: bytes = packer.pack_map_pairs([*table.items(), *table.items()])
    return data


def altered(chance: Random, value: Any, odd: Callable[[Random], Any] = wild) -> Any:
    """Return a valid plain value as it is, or with one or a few things wrong, or any other."""
    act = chance.random()
    if act < 0.1:
        return value
    if act < 0.15:
        return odd(chance)
    return changed(chance, value, times=1 if act < 0.8 else chance.randrange(2, 5), odd=odd)
