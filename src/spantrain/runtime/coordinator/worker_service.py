"""What workers call, each in a thread of its own: what each may say, and what it is told."""

import functools
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Self

from spantrain.config.files.json_codec import to_json
from spantrain.runtime.comparison.order import FrameworkOrder
from spantrain.runtime.coordinator.meeting import HOLD_S, MeetingPoints, Stages
from spantrain.runtime.coordinator.roster import Gathering, Roster, printable
from spantrain.runtime.coordinator.training_run import TrainingRun
from spantrain.runtime.worker.worker_protocol import (
    ComputeOrder,
    ConnectOrder,
    EchoOrder,
    LinkOrder,
    Order,
    TrainOrder,
)
from spantrain.transport.control.protocol import RemoteRefusal
from spantrain.transport.control.services import Handler

ProgressListener = Callable[[str, int, int, str], None]
"""(device, done, total, text)"""

_KINDS: Mapping[type, str] = {
    ComputeOrder: "compute",
    ConnectOrder: "connect",
    EchoOrder: "echo",
    FrameworkOrder: "framework",
    LinkOrder: "link",
    TrainOrder: "train",
}
_TICK_S = 0.1


@dataclass(frozen=True, kw_only=True)
class UnderWay:
    """Orders that belong together, from when they are given until the next ones are."""

    gathering: Gathering
    meeting: MeetingPoints
    run: TrainingRun | None = None
    """Of train orders."""
    on_progress: ProgressListener = lambda _device, _done, _total, _text: None
    on_begin: Callable[[float], None] = lambda _begun_s: None

    @classmethod
    def of(cls, orders: Mapping[str, Order], *, run: TrainingRun | None = None, **listeners: Any) -> Self:
        """Begin with orders that nobody has heard of."""
        return cls(
            gathering=Gathering(names=frozenset(orders)),
            meeting=MeetingPoints(lambda: _stages(orders, run)),
            run=run,
            **listeners,
        )

    def abort(self, reason: str) -> None:
        """Let all go that wait for others."""
        self.meeting.close()
        if self.run is not None:
            self.run.abort(reason)


def _stages(orders: Mapping[str, Order], run: TrainingRun | None) -> Stages:
    if run is not None:
        plan = run.barrier.plan
        return plan.generation, [stage.devices for stage in plan.stages]
    return 0, [order.devices for order in list(orders.values())[:1] if isinstance(order, FrameworkOrder)]


class WorkerService:
    """Answers workers.

    Who calls is known by its certificate. What a call says of itself besides must be of an order that this worker has,
    and of what is under way there; what waits for others is answered with `again` after a while.
    """

    def __init__(self, roster: Roster, patience_s: float, later: Callable[[Callable[[], None]], None]) -> None:
        """`later` has the thread that runs the use case make a call."""
        self.roster = roster
        self.changed = threading.Condition()
        """Over the roster and all that is here."""
        self.under_way = UnderWay.of({})
        self.closing = False
        """Whether all workers are to leave."""
        self._patience_s = patience_s
        self._later = later

    @property
    def handlers(self) -> dict[str, Handler]:
        """What workers may call."""
        return {
            "introduce": self._introduce,
            "leave": self._leave,
            "next_order": self._next_order,
            "heartbeat": self._heartbeat,
            "clock": lambda _peer, _payload: {"now_s": time.monotonic()},
            "progress": self._progress,
            "ready": self._await_group,
            "begin": self._await_begin,
            "commit_step": lambda peer, payload: self._run_of(peer).commit_step(self._busy(peer), payload),
            "checkpoint_saved": lambda peer, payload: self._run_of(peer).note_saved(self._busy(peer), payload),
            "meeting_point": lambda peer, payload: self.under_way.meeting.answer(self._busy(peer), payload),
            "meet_stages": lambda peer, payload: self._run_of(peer).meet_stages(self._busy(peer), payload),
            "given": lambda peer, payload: self._run_of(peer).answer_given(payload),
        }

    def join(self, peer: str, _facts: dict[str, Any]) -> dict[str, Any]:
        """Let a worker in; tell it as which device, and after what silence each side takes the other for lost."""
        with self.changed:
            device = self.roster.join(time.monotonic(), peer)
        return {"device": device, "patience_s": self._patience_s}

    def may_replace(self, peer: str) -> bool:
        """Whether a worker that joins under a name in use takes it over."""
        with self.changed:
            return self.roster.may_replace(time.monotonic(), peer)

    def _introduce(self, peer: str, facts: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            self.roster.introduce(peer, facts)
            self.changed.notify_all()
        return {}

    def _leave(self, peer: str, payload: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            self.roster.depart(peer, str(payload.get("reason", "it has left")))
            self.changed.notify_all()
        return {}

    def _next_order(self, peer: str, payload: dict[str, Any]) -> dict[str, Any]:
        """Take what became of an order; return the next one, once there is one behind the last that it knows."""
        deadline_s = time.monotonic() + HOLD_S
        with self.changed:
            member = self.roster.of(peer)
            member.note_result(payload)
            self.changed.notify_all()
            while not self.closing:
                if member.order is not None and member.is_busy and member.order[0] != payload.get("after"):
                    order_id, order = member.order
                    return {"id": order_id, "kind": _KINDS[type(order)], "body": to_json(order)}
                if time.monotonic() >= deadline_s:
                    return {"again": True}
                self.changed.wait(max(0.0, deadline_s - time.monotonic()))
            member.left = True
            self.changed.notify_all()
            return {"kind": "leave", "ended_orders": member.ended_orders, "reason": member.reason}

    def _heartbeat(self, peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        with self.changed:
            member = self.roster.heard(time.monotonic(), peer)
            return {"ended_orders": member.ended_orders, "reason": member.reason, "leave": self.closing}

    def _progress(self, peer: str, payload: dict[str, Any]) -> dict[str, Any]:
        device = self._busy(peer)
        match payload:
            case {"done": int(done), "total": int(total), "text": str(text)}:
                tell = self.under_way.on_progress
                self._later(functools.partial(tell, device, done, total, printable(text)))
            case _:
                raise RemoteRefusal("progress has done, total and text")
        return {}

    def _await_group(self, peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        """Let go when all of the group have admitted each other, so that none dials a peer that would refuse it."""
        with self.changed:
            self.under_way.gathering.ready.add(self._busy(peer))
            return self._await_all(peer, lambda gathering: gathering.ready)

    def _await_begin(self, peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        """Let go when all of the group are ready for their first step: time and network traces count from then on."""
        with self.changed:
            under_way = self.under_way
            if under_way.gathering.begins_with(self._busy(peer)):
                begun_s = time.monotonic()
                if under_way.run is not None:
                    under_way.run.barrier.begin(begun_s)
                self._later(functools.partial(under_way.on_begin, begun_s))
            return self._await_all(peer, lambda gathering: gathering.to_begin)

    def _await_all(self, peer: str, come: Callable[[Gathering], set[str]]) -> dict[str, Any]:
        self.changed.notify_all()
        gathering, deadline_s = self.under_way.gathering, time.monotonic() + HOLD_S
        while not gathering.names <= come(gathering) and not self.closing:
            member = self.roster.of(peer)
            if member.order is not None and member.ended_orders >= member.order[0]:
                raise RemoteRefusal(member.reason)
            if time.monotonic() >= deadline_s:
                return {"again": True}
            self.changed.wait(_TICK_S)
        return {}

    def _busy(self, peer: str) -> str:
        """Return the device of a worker that has an order which it has not told the end of.

        Raises:
            RemoteRefusal: it has none.
        """
        with self.changed:
            member = self.roster.of(peer)
            if not member.is_busy or member.name not in self.under_way.gathering.names:
                raise RemoteRefusal(f"device {member.name} has no order")
            return member.name

    def _run_of(self, peer: str) -> TrainingRun:
        device, run = self._busy(peer), self.under_way.run
        if run is None:
            raise RemoteRefusal(f"device {device} takes part in no training run")
        return run
