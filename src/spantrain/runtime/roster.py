"""What the coordinator knows of each worker, and of where stages meet."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from spantrain.runtime.orders import Order

__all__ = ["Meeting", "Member"]


@dataclass
class Member:
    """One worker, and the order that it has."""

    name: str
    facts: Mapping[str, Any]
    order: tuple[int, Order] | None = None
    taken: bool = False
    result: dict[str, Any] | None = None
    ended_orders: int = -1
    reason: str = ""
    left: bool = False


@dataclass
class Meeting:
    """Host and port of meeting points, by generation and stage."""

    places: dict[tuple[int, int], tuple[str, int]] = field(default_factory=dict)
