"""The coordinator: who is here, what each is to do, and what became of it."""

import itertools
import queue
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from spantrain.errors import PeerLostError
from spantrain.runtime.checkpoint.saver import SavedFile
from spantrain.runtime.coordinator.barrier import StepBarrier
from spantrain.runtime.coordinator.batches import BatchQueue
from spantrain.runtime.coordinator.roster import Roster, RosterEntry, failure_of
from spantrain.runtime.coordinator.training_run import TrainingRun
from spantrain.runtime.coordinator.worker_service import ProgressListener, UnderWay, WorkerService
from spantrain.runtime.outer.meetings import StageMeetings
from spantrain.runtime.worker.worker_protocol import Order, PeerEntry, TrainOrder
from spantrain.transport.control.server import ControlServer

HEARTBEAT_TIMEOUT_S = 6.0
"""So that a run ends within ten seconds of a loss; the time to tell everybody and to end all workers is added."""

_TICK_S = 0.1
_LEAVE_S = 3.0
_LEAVE_AFTER_FAILURE_S = 2.0
"""Who does not leave by then is left to end by itself: its heartbeats told it to."""
_STOP_S = 0.2
"""For calls that are just being answered."""


class Coordinator:
    """Serves workers; its methods are called by the one thread that runs the use case."""

    def __init__(
        self,
        *,
        bind: str,
        devices: Sequence[str],
        watch: Callable[[], None] = lambda: None,
        where_is_log: Callable[[str], str] = lambda _name: "what its worker has printed, on its own machine",
        heartbeat_timeout_s: float = HEARTBEAT_TIMEOUT_S,
    ) -> None:
        self._watch = watch
        self._where_is_log = where_is_log
        self._roster = Roster(devices, heartbeat_timeout_s)
        self._desk = WorkerService(self._roster, heartbeat_timeout_s, self.later)
        self._changed = self._desk.changed
        self._order_ids = itertools.count()
        self._news: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What listeners are to be told, by the one thread: if they fail, the run fails, not a worker's call."""
        self._leave_s = _LEAVE_S
        self._server = ControlServer(
            bind=bind, on_join=self._desk.join, handlers=self._desk.handlers, may_replace=self._desk.may_replace
        )

    @property
    def join_address(self) -> str:
        """Where workers join."""
        return self._server.join_address

    @property
    def token(self) -> str:
        """What workers need to join."""
        return self._server.token

    def join_command(self, device: str) -> str:
        """Return what to run on a device's machine; the token is not among its options, which others there can see."""
        return f"SPANTRAIN_TOKEN={self.token} spantrain worker --join {self.join_address} --name {device}"

    def start(self) -> None:
        """Listen."""
        self._server.start()

    def stop(self) -> None:
        """Tell the workers to leave, then stop listening."""
        with self._changed:
            self._desk.closing = True
            self._changed.notify_all()
            deadline_s = time.monotonic() + self._leave_s
            while any(member.address and not member.left for member in self._roster) and time.monotonic() < deadline_s:
                self._changed.wait(_TICK_S)
        self._server.stop(_STOP_S)

    def wait_for(
        self,
        names: Sequence[str],
        timeout_s: float,
        on_tick: Callable[[int], None],
        on_news: Callable[[str], None] = lambda _text: None,
    ) -> None:
        """Wait until these devices have joined; the place of one that is lost meanwhile is free for another worker.

        Args:
            names: of the devices.
            timeout_s: how long to wait for the last one.
            on_tick: hears, again and again, how many have joined.
            on_news: hears of each that comes or goes, and how to start it again.

        Raises:
            PeerLostError: some did not come in time.
        """
        deadline_s = time.monotonic() + timeout_s
        missing = list(names)
        while missing:
            for device, reason in self._gone().items():
                on_news(f"Device {device} is gone: {reason}. It is waited for again: {self.join_command(device)}")
            with self._changed:
                before, missing = missing, self._roster.missing(names)
                if missing and missing == before:
                    self._changed.wait(_TICK_S)
            for device in before:
                if device not in missing:
                    on_news(f"Device {device} has joined, {len(names) - len(missing)} of {len(names)}")
            on_tick(len(names) - len(missing))
            self._watch()
            if missing and time.monotonic() > deadline_s:
                raise PeerLostError(
                    f"{', '.join(missing)} did not join within {timeout_s:.0f} s; start there: "
                    f"{self.join_command(missing[0])}"
                )

    def _gone(self) -> dict[str, str]:
        """Return which devices have gone since this was asked last, and why; other workers may join in their names."""
        with self._changed:
            gone = self._roster.departures(time.monotonic())
        for one in gone:
            self._server.release(one.peer)
        return {one.device: one.reason for one in gone}

    def peers(self, names: Sequence[str]) -> tuple[PeerEntry, ...]:
        """Return how these devices' mailboxes are reached."""
        with self._changed:
            found = [self._roster[name].address for name in names]
        return tuple(address for address in found if address is not None)

    def perform(
        self,
        orders: Mapping[str, Order],
        *,
        until: Sequence[str] = (),
        on_progress: ProgressListener = lambda _device, _done, _total, _text: None,
        should_abort: Callable[[], bool] = lambda: False,
        on_begin: Callable[[float], None] = lambda _begun_s: None,
    ) -> dict[str, dict[str, Any]]:
        """Give each device an order and wait for the results of `until` (default: of all); end the others.

        `on_begin` hears when all were ready for their first step, on this machine's monotonic clock, if they say so.

        Raises:
            WorkerError, PeerLostError: a device failed or went away; all others have been told to stop.
        """
        under_way = UnderWay.of(orders, on_progress=on_progress, on_begin=on_begin)
        return self._perform(orders, under_way, until or tuple(orders), should_abort)

    def train(
        self,
        orders: Mapping[str, TrainOrder],
        barrier: StepBarrier,
        on_saved: Callable[[SavedFile], Sequence[int]],
        should_abort: Callable[[], bool],
        batches: BatchQueue | None = None,
        on_begin: Callable[[float], None] = lambda _begun_s: None,
    ) -> dict[str, dict[str, Any]]:
        """Carry out train orders that meet at a barrier, on batches that a user's loop gives if there is a desk.

        `on_saved` hears of every device's part of a checkpoint, in the thread of that device's call, and returns the
        steps whose checkpoints are not kept any longer. `on_begin` as of `perform`.

        Raises:
            WorkerError, PeerLostError: as `perform`.
        """
        meetings = StageMeetings(frozenset(orders)) if any(order.outer for order in orders.values()) else None
        run = TrainingRun(barrier=barrier, on_saved=on_saved, batches=batches, meetings=meetings)
        return self._perform(orders, UnderWay.of(orders, run=run, on_begin=on_begin), tuple(orders), should_abort)

    def later(self, call: Callable[[], None]) -> None:
        """Have the thread that runs the use case make a call, after all that it was asked for before."""
        self._news.put(call)
        with self._changed:
            self._changed.notify_all()

    # What the one thread does.

    def _perform(
        self,
        orders: Mapping[str, Order],
        under_way: UnderWay,
        awaited: Sequence[str],
        should_abort: Callable[[], bool],
    ) -> dict[str, dict[str, Any]]:
        members = self._give(orders, under_way)
        try:
            self._wait_for_results(awaited, members, should_abort)
            self._end_orders(members, "no longer needed")
            self._wait_for_results(tuple(members), members, should_abort)
        except BaseException as error:
            self._leave_s = _LEAVE_AFTER_FAILURE_S
            reason = str(error) or "it was interrupted"
            under_way.abort(reason)
            self._end_orders(members, reason)
            raise
        self._tell_news()
        with self._changed:
            return {name: dict(member.result or {}) for name, member in members.items()}

    def _give(self, orders: Mapping[str, Order], under_way: UnderWay) -> dict[str, RosterEntry]:
        """Put orders where workers find them.

        Raises:
            PeerLostError: a device is not here any more.
        """
        self._news = queue.SimpleQueue()
        gone = self._gone()
        with self._changed:
            for name in self._roster.missing(orders):
                raise self._loss(name, gone.get(name, "its worker has gone"))
            members = {name: self._roster[name] for name in orders}
            self._desk.under_way = under_way
            for name, order in orders.items():
                members[name].order, members[name].result = (next(self._order_ids), order), None
            self._changed.notify_all()
        return members

    def _loss(self, device: str, reason: str) -> PeerLostError:
        return PeerLostError(f"device {device} was lost: {reason}; its log: {self._where_is_log(device)}")

    def _tell_news(self) -> None:
        while not self._news.empty():
            self._news.get()()

    def _wait_for_results(
        self, awaited: Sequence[str], members: Mapping[str, RosterEntry], should_abort: Callable[[], bool]
    ) -> None:
        while True:
            self._tell_news()
            with self._changed:
                failure = failure_of(list(members.values()), self._where_is_log)
                if failure is not None:
                    raise failure
                if not any(members[name].is_busy for name in awaited):
                    return
                self._changed.wait(_TICK_S)
            self._watch()
            for device, reason in self._gone().items():
                if device in members and members[device].is_busy:
                    raise self._loss(device, reason)
            if should_abort():
                raise KeyboardInterrupt

    def _end_orders(self, members: Mapping[str, RosterEntry], reason: str) -> None:
        with self._changed:
            for member in members.values():
                assert member.order is not None
                member.ended_orders, member.reason = member.order[0], reason
            self._changed.notify_all()
