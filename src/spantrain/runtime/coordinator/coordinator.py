"""The coordinator: who is here, what each is to do, and what became of it."""

import math
import queue
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from spantrain.recovery.policy import DeviceFailed, EndOnLoss
from spantrain.runtime.checkpoint.coordinator_files import CoordinatorFiles
from spantrain.runtime.control.orders import FollowOrder, GiveOrder, TrainOrder, TrainResult
from spantrain.runtime.control.plane import A, Order
from spantrain.runtime.control.requests import OrderFailure, OrderOutcome
from spantrain.runtime.coordinator import roster
from spantrain.runtime.coordinator import worker_service as service
from spantrain.runtime.coordinator.barrier import StepBarrier
from spantrain.runtime.coordinator.batches import BatchQueue
from spantrain.runtime.coordinator.journal_feed import JournalFeed
from spantrain.runtime.coordinator.meetings import StageMeetings
from spantrain.transport.connection.bounds import RefusalCounter
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.control.credentials import Credentials
from spantrain.transport.control.server import ControlServer

_TICK_S = 0.1
_LEAVE_S = 3.0
_LEAVE_AFTER_FAILURE_S = 2.0
"""Who does not leave by then is left to end by itself: its heartbeats told it to."""
_BLAME_S = 20.0
"""And twice the patience with silence: then nobody was lost, whom a device that has failed could have meant."""
_STOP_S = 0.2
"""For calls that are just being answered."""

FollowerGone = Callable[[str, str], None]
"""(device, why)"""


class Coordinator:
    """Serves workers; its methods are called by the one thread that runs the use case."""

    def __init__(
        self,
        *,
        bind: str,
        reached_at: str = "",
        devices: Sequence[str],
        sites: Mapping[str, str] | None = None,
        starter: roster.WorkerStarter | None = None,
        heartbeat_timeout_s: float | None = None,
        credentials: Credentials | None = None,
    ) -> None:
        """Take where to listen, and whom to await.

        Args:
            bind: HOST:PORT, or `unix:PATH`.
            reached_at: Where workers join, if that is elsewhere.
            devices: Those that are awaited.
            sites: Of all devices that may join, by name; None: no others may.
            starter: Who has started the workers; None: people.
            heartbeat_timeout_s: After what silence a worker is lost; None: as measured, 6 s at most.
            credentials: What workers know it by, of one that went before it; None: new ones.
        """
        self._reached_at = reached_at
        self._starter = starter or roster.WorkerStarter()
        self._roster = roster.Roster(devices, heartbeat_timeout_s, sites or {})
        self._service = service.WorkerService(self._roster, self.later)
        self._changed = self._service.changed
        self._deferred: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        """What listeners are to be told, by the one thread: if they fail, the run fails, not a worker's call."""
        self._followers: dict[str, roster.RosterEntry] = {}  # they take state ahead, beside the orders under way
        self._follower_gone: FollowerGone = lambda _device, _why: None
        self._leave_s = _LEAVE_S
        self.refusals = RefusalCounter()  # of what is not let in, in any thread; told as soon as it has a name
        self._server = ControlServer(
            bind=bind,
            on_join=self._service.join,
            handlers=self._service.handlers,
            may_replace=self._service.may_replace,
            on_line=self._service.on_line,
            credentials=credentials,
            refusals=self.refusals,
        )

    @property
    def join_address(self) -> str:
        """Where workers join."""
        return self._reached_at or self._server.join_address

    @property
    def token(self) -> str:
        """What workers need to join."""
        return self._server.token

    def join_command(self, device: str) -> str:
        """Return what to run on a device's machine."""
        return roster.join_command(self.join_address, self.token, device)

    def give_journal(self, feed: JournalFeed) -> None:
        """Have a device keep a copy of the run's journal."""
        self._service.journal = feed

    def start(self) -> None:
        """Listen."""
        self._server.start()

    def stop(self) -> None:
        """Tell the workers to leave, then stop listening."""
        with self._changed:
            self._service.closing = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: all(one.left or not one.address for one in self._roster), self._leave_s)
        self._server.stop(_STOP_S)

    def missing(self, names: Sequence[str], *, unlike: Sequence[str] = ()) -> list[str]:
        """Return those of some devices that have no worker now; a moment later where they are those of `unlike`."""
        self._note_ended()
        with self._changed:
            found = self._roster.missing(names)
            if found and found == list(unlike):
                self._changed.wait(_TICK_S)
                found = self._roster.missing(names)
        if unlike:
            self._starter.check()
        return found

    def gone(self, needed: Sequence[str]) -> dict[str, str]:
        """Return which devices have gone since this was asked last, and why; other workers may join in their names.

        Raises:
            DeviceLostError: the worker of one that is needed, which was started here, has ended.
        """
        for device, how in self._note_ended().items():
            if device in needed:
                raise self._loss(device, how)
        return self._gone()

    def _note_ended(self) -> Mapping[str, str]:
        """Take the workers that are known to have ended for gone; return which they are, and how they ended."""
        ended = self._starter.ended()
        with self._changed:
            for device, how in ended.items():
                self._roster.lose(device, how)
        return ended

    def _gone(self) -> dict[str, str]:
        """Return which devices have gone since this was asked last, and why; other workers may join in their names."""
        self._note_ended()
        with self._changed:
            gone = self._roster.departures(time.monotonic())
        for one in gone:
            self._server.release(one.peer)
        return {one.device: one.reason for one in gone}

    def peers(self, names: Sequence[str]) -> tuple[PeerAddress, ...]:
        """Return how these devices' mailboxes are reached.

        Raises:
            DeviceLostError: one is not here any more.
        """
        with self._changed:
            self._check_here(names, {})
            found = [self._roster[name].address for name in names]
        return tuple(address for address in found if address is not None)

    def perform(
        self,
        orders: Mapping[str, Order[A]],
        *,
        until: Sequence[str] = (),
        on_progress: service.ProgressListener = lambda _device, _done, _total, _text: None,
        on_begin: Callable[[float], None] = lambda _begun_s: None,
        files: CoordinatorFiles | None = None,
    ) -> dict[str, A]:
        """Give each device an order and return the results of `until` (default: of all); end the others' orders.

        `on_begin` hears when all were ready for their first step, on this machine's monotonic clock, if they say so.
        `files` are taken and given.

        Raises:
            WorkerError, PeerLostError: a device failed or went away; all others have been told to stop.
            OrderAbandonedError: one that results are wanted of gave up for another's sake.
        """
        under_way = service.UnderWay.of(orders, on_progress=on_progress, on_begin=on_begin, files=files)
        return roster.results_of(orders, self._perform(under_way, until or tuple(orders), lambda: False))

    def train(
        self,
        orders: Mapping[str, TrainOrder | GiveOrder],
        barrier: StepBarrier,
        files: CoordinatorFiles,
        should_abort: Callable[[], bool],
        batches: BatchQueue | None = None,
        on_begin: Callable[[float], None] = lambda _begun_s: None,
        on_standstill: Callable[[str], None] = lambda _text: None,
    ) -> dict[str, TrainResult]:
        """Carry out train orders that meet at a barrier, on batches that a user's loop gives if there is a queue.

        `files` hears of every device's part of a checkpoint, takes and gives them. `on_begin` as of `perform`.
        `on_standstill`: who waits.

        Raises:
            DeviceLostError: a device was lost; all others have been told to stop, and keep what they hold.
            WorkerError, PeerLostError: as `perform`.
        """
        trained = {name: order for name, order in orders.items() if isinstance(order, TrainOrder)}
        meetings = StageMeetings(barrier.members) if any(order.outer for order in trained.values()) else None
        watch = service.StandstillWatch(barrier, self._roster.patience_s, on_standstill, own_loop=batches is not None)
        run = service.TrainingRun(
            barrier=barrier, on_saved=files.saved, batches=batches, meetings=meetings, standstill=watch
        )
        under_way = service.UnderWay.of(orders, run=run, on_begin=on_begin, files=files)
        outcomes = self._perform(under_way, tuple(orders), should_abort)
        return roster.results_of(trained, {name: outcomes[name] for name in trained})

    def follow(self, orders: Mapping[str, FollowOrder], on_gone: FollowerGone) -> None:
        """Have these devices, and no others, follow the train orders under way, until those end with a pause.

        `on_gone` hears of one that went away or failed: all of them have been told to stop then.

        Raises:
            DeviceLostError: one is not here any more.
        """
        self._end_orders(self._followers, "no longer needed")
        with self._changed:
            self._check_here(orders, {})
            self._followers, self._follower_gone = self._service.add(orders), on_gone

    def here(self) -> tuple[str, ...]:
        """Return the devices that have joined, can be given orders, and do not want to leave."""
        with self._changed:
            return tuple(member.name for member in self._roster if member.address is not None and not member.leaving)

    def leaving(self) -> dict[str, str]:
        """Return which devices want to leave behind a step, and why."""
        with self._changed:
            return {member.name: member.leaving for member in self._roster if member.leaving and not member.dismissed}

    def ask_to_leave(self, device: str, why: str) -> bool:
        """Take it that a device wants to leave; return whether it is here."""
        with self._changed:
            if is_here := not self._roster.missing([device]):
                self._roster[device].leaving = self._roster[device].leaving or why
            return is_here

    def dismiss(self, devices: Collection[str]) -> None:
        """Let devices go that want to leave: there are no more orders for them."""
        with self._changed:
            for name in set(devices) - set(self._roster.missing(devices)):
                self._roster[name].dismissed = True
            self._changed.notify_all()

    def holders(self, step: int) -> tuple[str, ...]:
        """Return whose workers can begin a step with what they have brought; they had lost their coordinator."""
        with self._changed:
            return tuple(one.name for one in self._roster if one.order is None and one.held and one.held.reaches(step))

    def failures(self) -> dict[str, OrderFailure]:
        """Return what devices have told of orders that failed or were ended."""
        with self._changed:
            return {one.name: one.failure for one in self._roster if one.failure is not None}

    def settle(self, names: Sequence[str], within_s: float = math.inf) -> tuple[str, ...]:
        """Wait until devices have left the orders that were ended; return those of them that are still here.

        A worker that has joined since in the name of one of them is none: it holds nothing.
        """
        deadline_s = time.monotonic() + within_s
        while True:
            self._make_deferred_calls()
            self._gone()
            with self._changed:
                gone = self._roster.missing(names)
                present = [name for name in names if name not in gone and self._roster[name].order is not None]
                following = [name for name in self._followers if not self._roster.missing([name])]
                are_busy = any(self._roster[name].is_busy for name in (*present, *following))
                if not are_busy or time.monotonic() > deadline_s:
                    break
                self._changed.wait(_TICK_S)
            self._starter.check()
        self._make_deferred_calls()
        return tuple(present)

    def later(self, call: Callable[[], None]) -> None:
        """Have the thread that runs the use case make a call, after all that it was asked for before."""
        self._deferred.put(call)
        with self._changed:
            self._changed.notify_all()

    def _perform(
        self, under_way: service.UnderWay, awaited: Sequence[str], should_abort: Callable[[], bool]
    ) -> dict[str, OrderOutcome]:
        """Carry out orders; return what became of those that were awaited."""
        entries = self._give(under_way)
        recovery = EndOnLoss(under_way.orders, _BLAME_S + 2 * self._roster.patience_s)
        try:
            self._wait_for_outcomes(awaited, entries, recovery, should_abort)
            if under_way.run is not None and under_way.run.barrier.paused and under_way.run.barrier.goes_ahead:
                self._wait_for_outcomes(tuple(self._followers), entries, EndOnLoss(under_way.orders), should_abort)
            self._end_orders(entries | self._followers, "no longer needed")
            self._wait_for_outcomes((*entries, *self._followers), entries, EndOnLoss(under_way.orders), should_abort)
        except BaseException as error:
            self._leave_s = _LEAVE_AFTER_FAILURE_S
            reason = str(error) or "it was interrupted"
            under_way.abort(reason)
            self._end_orders(entries | self._followers, reason)
            raise
        self._make_deferred_calls()
        with self._changed:
            return {name: outcome for name in awaited if (outcome := entries[name].outcome) is not None}

    def _give(self, under_way: service.UnderWay) -> dict[str, roster.RosterEntry]:
        """Put orders where workers find them.

        Raises:
            PeerLostError: a device is not here any more.
        """
        self._end_orders(self._followers, "no longer needed")
        self._deferred, self._followers = queue.SimpleQueue(), {}
        gone = self._gone()
        with self._changed:
            self._check_here(under_way.orders, gone)
            return self._service.give(under_way)

    def _check_here(self, names: Collection[str], gone: Mapping[str, str]) -> None:
        """Raise a `DeviceLostError` if nobody stands for a device, by why it has gone."""
        for name in self._roster.missing(names):
            raise self._loss(name, gone.get(name, "its worker has gone"))

    def _loss(self, device: str, reason: str) -> roster.DeviceLostError:
        text = f"device {device} was lost: {reason}; its log: {self._starter.where_is_log(device)}"
        return roster.DeviceLostError(text, device=device, why=reason)

    def _make_deferred_calls(self) -> None:
        while not self._deferred.empty():
            self._deferred.get()()

    def _wait_for_outcomes(
        self,
        awaited: Sequence[str],
        entries: Mapping[str, roster.RosterEntry],
        recovery: EndOnLoss,
        should_abort: Callable[[], bool],
    ) -> None:
        """Wait for what becomes of orders, doing what the policy says of devices that fail or go away meanwhile."""
        failed: set[str] = set()
        while True:
            self._make_deferred_calls()
            with self._changed:
                events, ordered = self._failures(entries, failed), {**entries, **self._followers}
                waits = any(entry.is_busy for name, entry in ordered.items() if name in awaited)
                if waits and not events:
                    self._changed.wait(_TICK_S)
            recovery.check(time.monotonic(), events)
            if not waits:
                return
            self._starter.check()
            self._look_at_steps(entries)
            gone = self._gone()
            self._look_at_followers(gone)
            lost = {name: why for name, why in gone.items() if name in entries and entries[name].is_busy}
            recovery.check(time.monotonic(), [DeviceFailed(name, self._loss(name, why)) for name, why in lost.items()])
            if should_abort():
                raise KeyboardInterrupt

    def _look_at_followers(self, gone: Mapping[str, str]) -> None:
        """Tell of one that went away or failed, having ended what the others do."""
        failed = {name: entry.failure.error for name, entry in self._followers.items() if entry.failure is not None}
        for name, why in (failed | {name: why for name, why in gone.items() if name in self._followers}).items():
            self._end_orders(self._followers, f"{name} went away")
            tell, self._followers = self._follower_gone, {}
            tell(name, why)
            return

    def _look_at_steps(self, entries: Mapping[str, roster.RosterEntry]) -> None:
        """Have devices asked whom they cannot reach when a step stands still, and give up who is cut off."""
        run = self._service.under_way.run
        asks, cut_off = run.standstill.look() if run and run.standstill else (False, {})
        if asks:
            self._server.nudge([entry.peer for entry in entries.values() if entry.is_busy])
        for name, why in cut_off.items():
            with self._changed:
                self._roster.lose(name, why)

    def _failures(self, entries: Mapping[str, roster.RosterEntry], told: set[str]) -> list[DeviceFailed]:
        """Return the devices that have failed and are not among those told; from now on they are."""
        events = []
        for name, entry in entries.items():
            if entry.failure is not None and name not in told:
                told.add(name)
                error = roster.error_of(name, entry.failure, self._starter.where_is_log(name))
                events.append(DeviceFailed(name, error, entry.failure.caused_elsewhere))
        return events

    def _end_orders(self, entries: Mapping[str, roster.RosterEntry], reason: str) -> None:
        with self._changed:
            for entry in entries.values():
                assert entry.order is not None
                entry.ended_orders, entry.reason = entry.order[0], reason
            self._changed.notify_all()
        self._server.nudge([entry.peer for entry in entries.values() if entry.is_busy])
