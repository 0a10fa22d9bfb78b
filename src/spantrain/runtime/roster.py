"""What the coordinator knows of each worker, and of those that begin together."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from spantrain.errors import InternalError, SpanTrainError, UsageError, WorkerError
from spantrain.runtime.orders import Order

__all__ = ["Gathering", "Member", "failure_of"]


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


def failure_of(members: Sequence[Member], where_is_log: Callable[[str], str]) -> SpanTrainError | None:
    """Return the error of the device that failed first, if one did.

    A device that fails because another did is not the one to name.
    """
    failed = {member.name: member.result for member in members if member.result and "error" in member.result}
    first = next((name for name, result in failed.items() if not result.get("caused_elsewhere")), None)
    if first is None and failed and len(failed) == len(members):
        first = next(iter(failed))
    if first is None:
        return None
    if failed[first].get("usage"):
        return UsageError(str(failed[first]["error"]))
    log, said = where_is_log(first), failed[first]["error"]
    if failed[first].get("internal"):
        where = f"its log: {log}" if log else "what its worker printed on its machine"
        return InternalError(
            f"device {first} failed by an error of SpanTrain itself: {said}; the traceback is in {where}; to report "
            "the error, send that"
        )
    return WorkerError(f"device {first} failed: {said}" + (f"; its log: {log}" if log else ""))
