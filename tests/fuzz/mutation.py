"""Ways to make something wrong of something valid: plain values (of msgpack, JSON, YAML) and bytes."""

import copy
import math
from collections.abc import Callable
from random import Random
from typing import Any

Place = tuple[Any, ...]
"""Keys and indices from the top of a plain value."""

_MOST_PLACES = 1000
_EDGES = (0, 1, -1, 2, 127, 128, 255, 256, 65535, 2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1)
_NUMBERS = (0.0, -0.0, 1e-300, 1e300, -1.5, math.nan, math.inf, -math.inf)
_TEXTS = ("", "x", "null", "../../x", "/etc/passwd", "\0", "\x1b[2J\x1b]0;x\x07", "é\u202e", "1.5", "[0:16]", "9" * 400)


def wild(chance: Random, *, depth: int = 2) -> Any:
    """Return any plain value: an edge of a range, a text that means something elsewhere, a container of such."""
    kind = chance.randrange(9 if depth else 6)
    if kind == 0:
        return chance.choice((None, True, False))
    if kind == 1:
        return chance.choice(_EDGES) if chance.random() < 0.7 else -chance.choice(_EDGES[:-3])
    if kind == 2:
        return chance.choice(_NUMBERS)
    if kind == 3:
        return chance.choice(_TEXTS)
    if kind == 4:
        return "a" * chance.choice((1, 64, 255, 256, 257, 513, 70_000))
    if kind == 5:
        return chance.randbytes(chance.choice((0, 1, 32, 300)))
    if kind == 6:
        return [wild(chance, depth=depth - 1) for _ in range(chance.choice((0, 1, 2, 3, 20)))]
    if kind == 7:
        return {chance.choice(_TEXTS): wild(chance, depth=depth - 1) for _ in range(chance.choice((0, 1, 2, 5)))}
    return nested(chance.choice((3, 40, 200)), table=chance.random() < 0.5)


def nested(levels: int, *, table: bool = False) -> Any:
    """Return lists in lists, or tables in tables."""
    value: Any = 1
    for _ in range(levels):
        value = {"x": value} if table else [value]
    return value


def places(value: Any) -> list[Place]:
    """Return where something stands in a plain value, the top included."""
    found: list[Place] = [()]
    for place in found:  # which grows meanwhile
        held = _at(value, place)
        if isinstance(held, dict):
            found += [(*place, key) for key in held]
        elif isinstance(held, list | tuple):
            found += [(*place, index) for index in range(len(held))]
        if len(found) > _MOST_PLACES:
            break
    return found


def changed(chance: Random, value: Any, *, times: int = 1, odd: Callable[[Random], Any] = wild) -> Any:
    """Return a plain value with something in it replaced, taken out, added, doubled or put elsewhere."""
    value = _mutable(value)
    for _ in range(times):
        value = _changed_once(chance, value, odd)
    return value


def _changed_once(chance: Random, value: Any, odd: Callable[[Random], Any]) -> Any:
    place = chance.choice(places(value))
    if not place:
        return odd(chance) if chance.random() < 0.2 else _widened(chance, value, odd)
    holder, key = _at(value, place[:-1]), place[-1]
    act = chance.randrange(8)
    if act < 4:
        holder[key] = odd(chance)
    elif act == 4:
        del holder[key]
    elif act == 5:
        holder[key] = _near(chance, holder[key])
    elif act == 6:
        holder[key] = copy.deepcopy(_at(value, chance.choice(places(value))))
    else:
        holder[key] = _widened(chance, holder[key], odd)
    return value


def _near(chance: Random, value: Any) -> Any:
    """Return what is almost this: off by one, of another type, cut."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return chance.choice((value + 1, value - 1, -value, float(value), str(value), [value], bool(value)))
    if isinstance(value, str):
        return chance.choice((value[:-1], value + "x", value.upper(), value.encode(), [value], {value: value}))
    if isinstance(value, list):
        return chance.choice(
            (value[:-1], value + value, value * 40, {str(k): one for k, one in enumerate(value)}, value[::-1])
        )
    if isinstance(value, bytes):
        return corrupted(chance, value)
    return [value]


def _widened(chance: Random, value: Any, odd: Callable[[Random], Any]) -> Any:
    if isinstance(value, dict):
        return {**value, chance.choice(_TEXTS): odd(chance)}
    if isinstance(value, list):
        return [*value, odd(chance)] if chance.random() < 0.5 else [odd(chance), *value]
    return [value, odd(chance)]


def _at(value: Any, place: Place) -> Any:
    for key in place:
        value = value[key]
    return value


def _mutable(value: Any) -> Any:
    """Return a copy with lists for tuples."""
    if isinstance(value, dict):
        return {key: _mutable(entry) for key, entry in value.items()}
    return [_mutable(entry) for entry in value] if isinstance(value, list | tuple) else value


def corrupted(chance: Random, data: bytes) -> bytes:
    """Return bytes with some flipped, cut out, doubled, inserted, or cut off."""
    act = chance.randrange(6)
    if act == 0 or not data:
        return data + chance.randbytes(chance.randrange(1, 40))
    at = chance.randrange(len(data))
    if act == 1:
        return data[:at]
    if act == 2:
        return data[:at] + chance.randbytes(chance.randrange(1, 9)) + data[at:]
    if act == 3:
        return data[:at] + data[at : at + chance.randrange(1, 40)] + data[at:]
    if act == 4:
        return data[:at] + data[at + chance.randrange(1, 9) :]
    found = bytearray(data)
    for _ in range(chance.choice((1, 1, 1, 2, 8))):
        found[chance.randrange(len(found))] = chance.randrange(256)
    return bytes(found)
