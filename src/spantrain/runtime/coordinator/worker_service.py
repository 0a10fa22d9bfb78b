"""What workers ask, each in a thread of its own: what each may say, and what it is told."""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import Any

from spantrain.config.files.json_codec import to_json
from spantrain.core.records import Record
from spantrain.recovery.standstill import Standstill
from spantrain.runtime.checkpoint.coordinator_files import CoordinatorFiles
from spantrain.runtime.checkpoint.saver import is_written_by
from spantrain.runtime.control import data_requests, requests
from spantrain.runtime.control.orders import AddedOrder
from spantrain.runtime.control.plane import HOLD_S, Order, OrderRequest, Request, handlers_of
from spantrain.runtime.coordinator.barrier import StepBarrier
from spantrain.runtime.coordinator.batches import BatchQueue
from spantrain.runtime.coordinator.journal_feed import JournalFeed
from spantrain.runtime.coordinator.meetings import StageMeetings
from spantrain.runtime.coordinator.roster import Roster, RosterEntry, printable
from spantrain.transport.control.protocol import Handler, RemoteRefusal

ProgressListener = Callable[[str, int, int, str], None]
"""(device, done, total, text)"""
Stages = tuple[int, Sequence[Sequence[str]]]
"""The generation that runs, and the devices of each of its stages."""
_TICK_S = 0.1


class MeetingPoints:
    """Where the devices of a stage meet, by generation and stage: the first opens a port, the others ask for it."""

    def __init__(self, stages: Callable[[], Stages], *, hold_s: float = HOLD_S) -> None:
        """`stages`: what runs now."""
        self._stages = stages
        self._hold_s = hold_s
        self._changed = threading.Condition()
        self._places: dict[tuple[int, int], requests.MeetingPoint] = {}
        self._over = False

    def close(self) -> None:
        """Let all go that wait: the order is over."""
        with self._changed:
            self._over = True
            self._changed.notify_all()

    def answer(self, device: str, request: requests.FindMeetingPoint) -> requests.MeetingPoint | None:
        """Note the place that a device has opened, if it has; return the place of its stage, None if there is none yet.

        Raises:
            RemoteRefusal: it is none of this device's business.
        """
        running, stages = self._stages()
        key = generation, stage = request.generation, request.stage
        if generation != running:
            raise RemoteRefusal(f"generation {generation} does not run, {running} does")
        members, opens = stages[stage] if 0 <= stage < len(stages) else (), request.opened is not None
        if device not in (members[:1] if opens else members):
            raise RemoteRefusal(f"device {device} has no meeting point {'to open ' if opens else ''}at stage {stage}")
        with self._changed:
            if request.opened is not None:
                self._places[key] = request.opened
                self._changed.notify_all()
            self._changed.wait_for(lambda: key in self._places or self._over, self._hold_s)
            return self._places.get(key)


class StandstillWatch:
    """Has the devices of a run that stands still asked whom they cannot reach (`recovery.standstill` decides).

    `look` is one thread's, `answer` any thread's.
    """

    def __init__(
        self, barrier: StepBarrier, limit_s: float, tell: Callable[[str], None], *, own_loop: bool = False
    ) -> None:
        """`limit_s` as of `Standstill`; `tell`: people; `own_loop`: a user's loop gives batches when it likes."""
        self._barrier, self._tell, self._own_loop = barrier, tell, own_loop
        self._lock = threading.Lock()
        self._step = barrier.committed.step
        self._decides = Standstill(barrier.plan.devices, time.monotonic(), limit_s)

    @property
    def round(self) -> int:
        """The number of the question that devices are to answer; 0: none."""
        return self._decides.round

    def look(self) -> tuple[bool, dict[str, str]]:
        """Return whether devices are to be asked now, and who is to be given up, and why."""
        now_s, step = time.monotonic(), self._barrier.committed.step
        with self._lock:
            if step != self._step:
                self._step = step
                self._decides.on_step(now_s)
            awaited = () if self._own_loop else self._barrier.awaited
            said = self._decides.said(now_s, step, awaited, self._barrier.job.steps)
            found = self._decides.asks(now_s), self._decides.lost(now_s)
        if said:
            self._tell(said)
        return found

    def answer(self, device: str, said: requests.Reach) -> None:
        """Take what a device says."""
        with self._lock:
            self._decides.on_answer(time.monotonic(), device, said.number, said.unreached)


class TrainingRun(Record):
    """The coordinator's side of one run."""

    barrier: StepBarrier
    on_saved: Callable[[requests.SavedFile], Sequence[int]]
    """Hears of every device's part of a checkpoint; returns the steps whose checkpoints are not kept any longer."""
    batches: BatchQueue | None = None
    """There is one if a user's loop gives the batches."""
    meetings: StageMeetings | None = None
    """There is a place for them if the run takes part in an outer optimizer."""
    standstill: StandstillWatch | None = None
    """What finds out why a step does not end, if anything does."""

    def answer(self, device: str, request: OrderRequest[Any]) -> object | None:
        """Answer what a device asks of the run, None: it shall ask again.

        Raises:
            RemoteRefusal: it may not ask that now, or of this run.
            ProtocolError: there are no such rows of a batch.
        """
        match request:
            case requests.DeviceReport():
                return self.barrier.report(device, request)
            case requests.SavedFile(step=step, name=name):
                by_loop = self.batches is not None and self.batches.wants_checkpoint(step)
                if not (by_loop or self.barrier.wants_checkpoint(step)):
                    raise RemoteRefusal(f"device {device} was not told to save anything after {step} steps")
                if device not in self.barrier.members or not is_written_by(request, device):
                    raise RemoteRefusal(f"device {device} has not written {name}")
                return requests.DroppedCheckpoints(steps=tuple(self.on_saved(request)))
            case requests.TellStep(told=told):
                self.barrier.recorded(device, told)
                return requests.Done()
            case requests.Reach():
                if self.standstill is not None:
                    self.standstill.answer(device, request)
                return requests.Done()
            case requests.OuterCall():
                if self.meetings is None:
                    raise RemoteRefusal("this run takes part in no outer optimizer")
                return self.meetings.meet(device, request.number, request.report)
            case data_requests.AskNextStep() | data_requests.FetchRows():
                if self.batches is None:
                    raise RemoteRefusal("no run on batches of a user's own loop is under way")
                return self.batches.answer(request)
        raise AssertionError(f"no such request: {request}")

    def abort(self, reason: str) -> None:
        """Let all go that wait for others."""
        self.barrier.abort(reason)
        if self.meetings is not None:
            self.meetings.abort(reason)


class UnderWay(Record):
    """Orders that belong together, from when they are given until the next ones are."""

    orders: dict[str, Order[Any]] = field(default_factory=dict)
    """By device; others may come to them."""
    meeting: MeetingPoints
    run: TrainingRun | None = None
    """The training run, of train orders."""
    files: CoordinatorFiles | None = None
    """Takes and gives files of checkpoints, where orders are about such."""
    on_progress: ProgressListener = lambda _device, _done, _total, _text: None
    on_begin: Callable[[float], None] = lambda _begun_s: None
    ready: set[str] = field(default_factory=set)
    """Devices that have admitted all others."""
    to_begin: set[str] = field(default_factory=set)
    """Devices that are ready for their first step."""

    _bodies: dict[int, Any] = field(init=False, default_factory=dict)

    def body(self, order: Order[Any]) -> Any:
        """Return one of its orders as it travels; most devices have the same, which is written once."""
        if id(order) not in self._bodies:
            self._bodies[id(order)] = to_json(order)
        return self._bodies[id(order)]

    @property
    def beginners(self) -> frozenset[str]:
        """Who begins a step; the others only give what they hold."""
        return frozenset(self.orders) if self.run is None else self.run.barrier.members

    @classmethod
    def of(cls, orders: Mapping[str, Order[Any]], *, run: TrainingRun | None = None, **listeners: Any) -> "UnderWay":
        """Begin with orders that nobody has heard of."""
        return cls(orders=dict(orders), meeting=MeetingPoints(lambda: _stages(orders, run)), run=run, **listeners)

    def abort(self, reason: str) -> None:
        """Let all go that wait for others."""
        self.meeting.close()
        if self.run is not None:
            self.run.abort(reason)


def _stages(orders: Mapping[str, Order[Any]], run: TrainingRun | None) -> Stages:
    if run is not None:
        plan = run.barrier.plan
        return plan.generation, [stage.devices for stage in plan.stages]
    return 0, [order.devices for order in list(orders.values())[:1] if isinstance(order, AddedOrder)]


class WorkerService:
    """Answers workers.

    Who asks is known by its certificate. What a request says besides must be of an order that this worker has, and of
    what is under way there.
    """

    def __init__(self, roster: Roster, later: Callable[[Callable[[], None]], None]) -> None:
        """`later` has the thread that runs the use case make a call."""
        self.roster = roster
        self.changed = threading.Condition()
        """Over the roster and all that is here."""
        self.under_way = UnderWay.of({})
        self.closing = False
        """Whether all workers are to leave."""
        self.journal: JournalFeed | None = None
        """Of the run, where a device keeps a copy."""
        self._later = later
        self._orders = 0
        """How many were given so far."""

    @property
    def handlers(self) -> dict[str, Handler]:
        """What workers may ask."""
        return handlers_of(requests.REQUESTS, self._answer, admit=self._admit)

    def join(self, peer: str, _facts: dict[str, Any]) -> dict[str, Any]:
        """Let a worker in; tell it as which device, and after what silence each side takes the other for lost."""
        with self.changed:
            device = self.roster.join(time.monotonic(), peer)
        welcome: dict[str, Any] = to_json(requests.WorkerWelcome(device=device, patience_s=self.roster.patience_s))
        return welcome

    def may_replace(self, peer: str, by: str) -> bool:
        """Whether a worker that joins under a name in use takes it over."""
        with self.changed:
            return peer == by and self.roster.may_replace(time.monotonic(), peer)

    def on_line(self, peer: str, line: int, is_open: bool) -> None:
        """Note a connection that shows that a worker is there, or its end."""
        with self.changed:
            self.roster.note_line(time.monotonic(), peer, line, is_open)

    def give(self, under_way: UnderWay) -> dict[str, RosterEntry]:
        """Put orders where workers find them; return who has them."""
        with self.changed:
            self.under_way = under_way
            return self._put(under_way.orders)

    def add(self, orders: Mapping[str, Order[Any]]) -> dict[str, RosterEntry]:
        """Put further orders beside those that are under way; return who has them."""
        with self.changed:
            self.under_way.orders.update(orders)
            return self._put(orders)

    def _put(self, orders: Mapping[str, Order[Any]]) -> dict[str, RosterEntry]:
        entries = {name: self.roster[name] for name in orders}
        for name, order in orders.items():
            entries[name].order, entries[name].outcome = (self._orders, order), None
            self._orders += 1
        self.changed.notify_all()
        return entries

    def _admit(self, peer: str, kind: type[Request[Any]]) -> None:
        if issubclass(kind, OrderRequest):
            self._busy(peer)

    def _answer(self, peer: str, request: Request[Any]) -> object | None:
        match request:
            case requests.ReadClock():
                return requests.ClockReading(now_s=time.monotonic())
            case requests.Heartbeat(round_trip_s=round_trip_s, leaving=leaving):
                with self.changed:
                    return self._standing(self.roster.heard(time.monotonic(), peer, round_trip_s, leaving))
            case requests.AskForOrder():
                return self._next_order(peer, request)
            case requests.Ready():
                return self._await_all(peer, self.under_way.ready, frozenset(self.under_way.orders))
            case requests.Begin():
                return self._await_all(peer, self.under_way.to_begin, self.under_way.beginners, self._all_begin)
            case requests.FindMeetingPoint():
                return self.under_way.meeting.answer(self._busy(peer), request)
            case requests.Progress(done=done, total=total, text=text):
                tell, device = self.under_way.on_progress, self._busy(peer)
                self._later(functools.partial(tell, device, done, total, printable(text)))
                return requests.Done()
            case (
                data_requests.OfferFile()
                | data_requests.NotSaved()
                | data_requests.PutPiece()
                | data_requests.FetchPiece()
            ):
                device, files = self._busy(peer), self.under_way.files
                if files is None:
                    raise RemoteRefusal(f"device {device} has no order that moves files")
                return files.answer(device, request)
            case data_requests.FollowJournal():
                with self.changed:
                    device, journal = self.roster.of(peer).name, self.journal
                if journal is None:
                    raise RemoteRefusal(f"device {device} keeps no copy of a journal")
                return journal.answer(device, request)
            case OrderRequest():
                device, run = self._busy(peer), self.under_way.run
                if run is None:
                    raise RemoteRefusal(f"device {device} takes part in no training run")
                return run.answer(device, request)
        with self.changed:
            self.changed.notify_all()
            match request:
                case requests.Introduction():
                    self.roster.introduce(peer, request)
                case requests.Goodbye():
                    self.roster.depart(peer, request.reason)
        return requests.Done()

    def _standing(self, entry: RosterEntry) -> requests.Standing:
        run = self.under_way.run if entry.is_busy else None
        return requests.Standing(
            ended_orders=entry.ended_orders,
            reason=entry.reason,
            leave=self.closing or entry.dismissed,
            asks_reach=run.standstill.round if run and run.standstill else 0,
        )

    def _next_order(self, peer: str, request: requests.AskForOrder) -> requests.NextOrder | None:
        """Take what became of an order; return the next one, once there is one behind the last that it knows."""
        deadline_s = time.monotonic() + HOLD_S
        with self.changed:
            entry = self.roster.of(peer)
            if request.outcome is not None:
                entry.note_outcome(request.outcome)
            self.changed.notify_all()
            while not (self.closing or entry.dismissed):
                if entry.order is not None and entry.is_busy and entry.order[0] != request.after:
                    order_id, order = entry.order
                    body = self.under_way.body(order)
                    return requests.NextOrder(
                        order=requests.GivenOrder(order_id=order_id, name=order.wire_name, body=body)
                    )
                if time.monotonic() >= deadline_s:
                    return None
                self.changed.wait(max(0.0, deadline_s - time.monotonic()))
            entry.left = True
            self.changed.notify_all()
            return requests.NextOrder(standing=self._standing(entry))

    def _all_begin(self) -> None:
        """Note that all are ready for their first step: time and network traces count from now on."""
        begun_s, under_way = time.monotonic(), self.under_way
        if under_way.run is not None:
            under_way.run.barrier.begin(begun_s)
        self._later(functools.partial(under_way.on_begin, begun_s))

    def _await_all(
        self, peer: str, present: set[str], members: frozenset[str], on_all: Callable[[], None] = lambda: None
    ) -> requests.Done | None:
        """Let go when all members have come; `on_all` is called by the last one. One may come twice."""
        with self.changed:
            device, deadline_s = self._busy(peer), time.monotonic() + HOLD_S
            is_new = device not in present
            present.add(device)
            if is_new and members <= present:
                on_all()
            self.changed.notify_all()
            while not members <= present and not self.closing:
                entry = self.roster.of(peer)
                if entry.order is not None and entry.ended_orders >= entry.order[0]:
                    raise RemoteRefusal(entry.reason)
                if time.monotonic() >= deadline_s:
                    return None
                self.changed.wait(_TICK_S)
            return requests.Done()

    def _busy(self, peer: str) -> str:
        """Return the device of a worker that has an order which it has not told the end of.

        Raises:
            RemoteRefusal: it has none.
        """
        with self.changed:
            entry = self.roster.of(peer)
            if not entry.is_busy or entry.name not in self.under_way.orders:
                raise RemoteRefusal(f"device {entry.name} has no order")
            return entry.name
