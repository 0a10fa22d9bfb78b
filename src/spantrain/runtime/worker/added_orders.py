"""What installed packages have workers do, by the entry points of `spantrain.orders`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch.distributed import Store

from spantrain.errors import ProtocolError
from spantrain.plugins import with_plugins
from spantrain.runtime.control.orders import ORDERS, AddedOrder
from spantrain.runtime.control.plane import Order
from spantrain.runtime.step.context import WorkerLinks

ENTRY_POINTS = "spantrain.orders"

Meet = Callable[[int, int, bool], Store]
"""(generation, stage, leads) -> a store where all devices of the order meet."""


@dataclass(frozen=True, kw_only=True)
class RegisteredOrder:
    """An order of an installed package, and how a worker carries it out."""

    name: str
    """On the wire: of the entry point and of the order's class."""
    kind: type[AddedOrder[Any]]
    perform: Callable[[Any, WorkerLinks, Meet], object]
    """Of such an order; returns its result."""


def added_orders() -> Mapping[str, RegisteredOrder]:
    """Return those that are installed, by name.

    Raises:
        UsageError: one cannot be loaded or is no order.
    """
    return with_plugins({}, ENTRY_POINTS, RegisteredOrder, "order")


def order_kind(name: str) -> type[Order[Any]]:
    """Return what an order of that name is.

    Raises:
        ProtocolError: there is none on this machine.
    """
    if name in ORDERS:
        return ORDERS[name]
    added = added_orders()
    if name not in added:
        raise ProtocolError(f"no order {name!r} here; install the same packages on this machine as the coordinator has")
    return added[name].kind
