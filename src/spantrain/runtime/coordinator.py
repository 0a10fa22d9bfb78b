"""The coordinator: who is here, what each is to do, and what became of it."""

import functools
import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spantrain.config.artefacts import to_json
from spantrain.errors import PeerLostError
from spantrain.runtime.barrier import StepBarrier
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.compare.order import FrameworkOrder
from spantrain.runtime.given import BatchDesk
from spantrain.runtime.meeting import MeetingPoints
from spantrain.runtime.orders import (
    ComputeOrder,
    ConnectOrder,
    EchoOrder,
    LinkOrder,
    Order,
    PeerEntry,
    TrainOrder,
)
from spantrain.runtime.outer_meetings import StageMeetings
from spantrain.runtime.roster import Gathering, Member, failure_of
from spantrain.runtime.training_run import TrainingRun
from spantrain.transport.control.heartbeat import FailureDetector
from spantrain.transport.control.protocol import RemoteRefusal
from spantrain.transport.control.server import ControlServer

__all__ = ["HEARTBEAT_TIMEOUT_S", "RANK_PREFIX", "Coordinator", "ProgressListener"]

HEARTBEAT_TIMEOUT_S = 6.0
"""So that a run ends within ten seconds of a loss; the time to tell everybody and to end all workers is added."""

RANK_PREFIX = "rank-"
"""A worker of this name and a number stands for the device of that number."""

_log = logging.getLogger(__name__)

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
_LEAVE_S = 3.0
_LEAVE_AFTER_FAILURE_S = 0.5
"""Who waits in a collective for one that is lost will not hear in time; its heartbeats tell it later."""


def _ignore(_begun_s: float) -> None:
    """Hear of it, and do nothing."""


class Coordinator:
    """Serves workers; its methods are called by the one thread that runs the use case."""

    def __init__(
        self,
        *,
        bind: str,
        devices: Sequence[str],
        watch: Callable[[], None] = lambda: None,
        where_is_log: Callable[[str], str] = lambda _name: "",
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self._devices = tuple(devices)
        self._watch = watch
        self._where_is_log = where_is_log
        self._name_by_peer: dict[str, str] = {}
        """Devices by the name in their worker's certificate."""
        self._members: dict[str, Member] = {}
        self._changed = threading.Condition()
        self._order_ids = itertools.count()
        self._patience_s = heartbeat_timeout_s
        self._detector = FailureDetector(timeout_s=heartbeat_timeout_s)
        self._meeting = MeetingPoints()
        self._gathering = Gathering()
        self._on_begin: Callable[[float], None] = _ignore
        self._run: TrainingRun | None = None
        self._on_progress: ProgressListener | None = None
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What listeners are to be told, by the one thread: if they fail, the run fails, not a worker's call."""
        self._closing = False
        self._leave_s = _LEAVE_S
        self._server = ControlServer(
            bind=bind,
            on_join=self._join,
            handlers=self._handlers(),
        )

    def _handlers(self) -> dict[str, Callable[[str, dict[str, Any]], dict[str, Any]]]:
        """Return what workers may call, each in a thread of its own."""
        return {
            "introduce": self._introduce,
            "next_order": self._next_order,
            "heartbeat": self._heartbeat,
            "clock": lambda _peer, _payload: {"now_s": time.monotonic()},
            "progress": self._progress,
            "ready": self._await_group,
            "begin": self._await_begin,
            "commit_step": lambda peer, payload: self._under_way().commit_step(self._name_by_peer[peer], payload),
            "checkpoint_saved": lambda peer, payload: self._under_way().note_saved(self._name_by_peer[peer], payload),
            "meeting_point": lambda _peer, payload: self._meeting.answer(payload),
            "meet_stages": lambda peer, payload: self._under_way().meet_stages(self._name_by_peer[peer], payload),
            "given": lambda _peer, payload: self._under_way().answer_given(payload),
        }

    @property
    def join_address(self) -> str:
        """Where workers join."""
        return self._server.join_address

    @property
    def token(self) -> str:
        """What workers need to join."""
        return self._server.token

    def start(self) -> None:
        """Listen."""
        self._server.start()

    def stop(self) -> None:
        """Tell the workers to leave, then stop listening."""
        with self._changed:
            self._closing = True
            self._changed.notify_all()
            deadline_s = time.monotonic() + self._leave_s
            while not all(member.left for member in self._members.values()) and time.monotonic() < deadline_s:
                self._changed.wait(_TICK_S)
        self._server.stop()

    def wait_for(self, names: Sequence[str], timeout_s: float, on_tick: Callable[[int], None]) -> None:
        """Wait until these devices have joined.

        Raises:
            PeerLostError: some did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while True:
            with self._changed:
                missing = [name for name in names if name not in self._members]
                if not missing:
                    return
                self._changed.wait(_TICK_S)
            on_tick(len(names) - len(missing))
            self._watch()
            if time.monotonic() > deadline_s:
                raise PeerLostError(
                    f"{', '.join(missing)} did not join within {timeout_s:.0f} s; start there: "
                    f"spantrain worker --join {self.join_address} --token {self.token} --name {missing[0]}"
                )

    def peers(self, names: Sequence[str]) -> tuple[PeerEntry, ...]:
        """Return how these devices' mailboxes are reached."""
        return tuple(
            PeerEntry(
                name=name,
                endpoint=str(self._members[name].facts["endpoint"]),
                public_key=str(self._members[name].facts["public_key"]),
            )
            for name in names
        )

    def perform(
        self,
        orders: Mapping[str, Order],
        *,
        until: Sequence[str] = (),
        on_progress: ProgressListener | None = None,
        should_abort: Callable[[], bool] = lambda: False,
        on_begin: Callable[[float], None] = _ignore,
    ) -> dict[str, dict[str, Any]]:
        """Give each device an order and wait for the results of `until` (default: of all); end the others.

        `on_begin` hears when all were ready for their first step, on this machine's monotonic clock, if they say so.

        Raises:
            WorkerError, PeerLostError: a device failed or went away; all others have been told to stop.
        """
        awaited = tuple(until) or tuple(orders)
        self._on_progress = on_progress
        self._news = queue.SimpleQueue()
        with self._changed:
            for name, order in orders.items():
                member = self._members[name]
                member.order, member.taken, member.result = (next(self._order_ids), order), False, None
            self._gathering, self._meeting = Gathering(names=frozenset(orders)), MeetingPoints()
            self._on_begin = on_begin
            self._changed.notify_all()
        try:
            self._wait_for_results(awaited, orders, should_abort)
            self._end_orders(orders, "no longer needed")
            self._wait_for_results(tuple(orders), orders, should_abort)
        except BaseException as error:
            self._abort(orders, str(error) or type(error).__name__)
            raise
        self._tell_news()
        with self._changed:
            return {name: dict(self._result(name)) for name in orders}

    def train(
        self,
        orders: Mapping[str, TrainOrder],
        barrier: StepBarrier,
        on_saved: Callable[[SavedFile], Sequence[int]],
        should_abort: Callable[[], bool],
        batches: BatchDesk | None = None,
        on_begin: Callable[[float], None] = _ignore,
    ) -> dict[str, dict[str, Any]]:
        """Carry out train orders that meet at a barrier, on batches that a user's loop gives if there is a desk.

        `on_saved` hears of every device's part of a checkpoint, in the thread of that device's call, and returns the
        steps whose checkpoints are not kept any longer.
        """
        meetings = StageMeetings(frozenset(orders)) if any(order.outer for order in orders.values()) else None
        self._run = TrainingRun(barrier=barrier, on_saved=on_saved, batches=batches, meetings=meetings)
        try:
            return self.perform(orders, should_abort=should_abort, on_begin=on_begin)
        finally:
            self._run = None

    def later(self, call: Callable[[], None]) -> None:
        """Have the thread that runs the use case make a call, after all that it was asked for before."""
        self._news.put(call)
        with self._changed:
            self._changed.notify_all()

    # What the one thread does.

    def _tell_news(self) -> None:
        while not self._news.empty():
            self._news.get()()

    def _result(self, name: str) -> Mapping[str, Any]:
        result = self._members[name].result
        assert result is not None
        return result

    def _wait_for_results(
        self, awaited: Sequence[str], orders: Mapping[str, Order], should_abort: Callable[[], bool]
    ) -> None:
        while True:
            self._tell_news()
            with self._changed:
                failure = failure_of([self._members[name] for name in orders], self._where_is_log)
                if failure is not None:
                    raise failure
                if all(self._members[name].result is not None for name in awaited):
                    return
                self._changed.wait(_TICK_S)
            self._watch()
            self._raise_lost(orders)
            if should_abort():
                raise KeyboardInterrupt

    def _raise_lost(self, orders: Mapping[str, Order]) -> None:
        with self._changed:
            for name, reason in self._detector.lost(time.monotonic()):
                if name in orders and self._members[name].result is None:
                    log = self._where_is_log(name)
                    raise PeerLostError(f"device {name} was lost: {reason}" + (f"; its log: {log}" if log else ""))

    def _end_orders(self, orders: Mapping[str, Order], reason: str) -> None:
        with self._changed:
            for name in orders:
                member = self._members[name]
                assert member.order is not None
                member.ended_orders, member.reason = member.order[0], reason

    def _abort(self, orders: Mapping[str, Order], reason: str) -> None:
        self._leave_s = _LEAVE_AFTER_FAILURE_S
        if self._run is not None:
            self._run.abort(reason)
        self._end_orders(orders, reason)

    # What workers call, each in a thread of its own.

    def _join(self, name: str, _facts: dict[str, Any]) -> dict[str, Any]:
        """Let a worker in, as the device that it names or, under torchrun, the one of its rank."""
        with self._changed:
            device = self._device_of_rank(name) if name.startswith(RANK_PREFIX) else name
            if device not in self._devices:
                raise RemoteRefusal(f"there is no device {device} here; this run has {', '.join(self._devices)}")
            if device in self._name_by_peer.values():
                raise RemoteRefusal(f"device {device} has joined already")
            self._name_by_peer[name] = device
            self._detector.on_heartbeat(time.monotonic(), device)
        return {"device": device, "patience_s": self._patience_s}

    def _device_of_rank(self, name: str) -> str:
        rank = name.removeprefix(RANK_PREFIX)
        if not rank.isdecimal() or int(rank) >= len(self._devices):
            raise RemoteRefusal(
                f"{name}: this run has {len(self._devices)} devices, ranks 0 to {len(self._devices) - 1}"
            )
        return self._devices[int(rank)]

    def _introduce(self, peer: str, facts: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            name = self._name_by_peer[peer]
            self._members[name] = Member(name=name, facts=facts)
            self._changed.notify_all()
        return {}

    def _next_order(self, peer: str, payload: dict[str, Any]) -> dict[str, Any]:
        deadline_s = time.monotonic() + min(float(payload.get("wait_s", 0.0)), 30.0)
        with self._changed:
            member = self._members[self._name_by_peer[peer]]
            self._note_result(member, payload)
            while not self._closing:
                if member.order is not None and not member.taken:
                    member.taken = True
                    order_id, order = member.order
                    return {"id": order_id, "kind": _KINDS[type(order)], "body": to_json(order)}
                if time.monotonic() >= deadline_s:
                    return {}
                self._changed.wait(max(0.0, deadline_s - time.monotonic()))
            member.left = True
            self._changed.notify_all()
            return {"kind": "leave"}

    def _note_result(self, member: Member, payload: dict[str, Any]) -> None:
        if "done" not in payload or member.order is None or payload["done"] != member.order[0]:
            return
        member.result = {
            key: payload[key] for key in ("result", "error", "caused_elsewhere", "usage") if key in payload
        }
        self._changed.notify_all()

    def _heartbeat(self, peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        with self._changed:
            name = self._name_by_peer[peer]
            self._detector.on_heartbeat(time.monotonic(), name)
            member = self._members.get(name)
            if member is None:
                return {}
            return {"ended_orders": member.ended_orders, "reason": member.reason}

    def _progress(self, peer: str, payload: dict[str, Any]) -> dict[str, Any]:
        if self._on_progress is not None:
            figures = (self._name_by_peer[peer], int(payload["done"]), int(payload["total"]), str(payload["text"]))
            self.later(functools.partial(self._on_progress, *figures))
        return {}

    def _await_group(self, peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        """Let go when all of the group have admitted each other, so that none dials a peer that would refuse it."""
        with self._changed:
            self._gathering.ready.add(self._name_by_peer[peer])
        return self._await_all(peer, lambda gathering: gathering.ready)

    def _await_begin(self, peer: str, _payload: dict[str, Any]) -> dict[str, Any]:
        """Let go when all of the group are ready for their first step: time and network traces count from then on."""
        with self._changed:
            if self._gathering.begins_with(self._name_by_peer[peer]):
                begun_s = time.monotonic()
                if self._run is not None:
                    self._run.barrier.begin(begun_s)
                self.later(functools.partial(self._on_begin, begun_s))
        return self._await_all(peer, lambda gathering: gathering.to_begin)

    def _await_all(self, peer: str, come: Callable[[Gathering], set[str]]) -> dict[str, Any]:
        member = self._members[self._name_by_peer[peer]]
        with self._changed:
            self._changed.notify_all()
            order, gathering = member.order, self._gathering
            while not gathering.names <= come(gathering) and not self._closing:
                if order is not None and member.ended_orders >= order[0]:
                    raise RemoteRefusal(member.reason)
                self._changed.wait(_TICK_S)
        return {}

    def _under_way(self) -> TrainingRun:
        run = self._run
        if run is None:
            raise RemoteRefusal("no run is under way")
        return run
