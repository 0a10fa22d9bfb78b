"""Carries out orders: measuring, training, what installed packages add."""

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import Store

from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.trace import DeviceStep
from spantrain.devices.base import ComputeDevice
from spantrain.devices.registry import open_device
from spantrain.errors import ProtocolError
from spantrain.models.data.choice import with_own_functions
from spantrain.plugins import with_plugins
from spantrain.profiler.compute import Bench, measure_tasks, measure_units
from spantrain.profiler.network import Software, echo_probes, measure_directions
from spantrain.profiler.network_probes import Prober, warm_up_links
from spantrain.runtime.channels import MailboxChannel
from spantrain.runtime.checkpoint.device_files import bring_all
from spantrain.runtime.control import orders
from spantrain.runtime.control.orders import ORDERS, AddedOrder
from spantrain.runtime.control.plane import ControlPlane, Order
from spantrain.runtime.control.requests import Done, FindMeetingPoint, HeldState, MeetingPoint, Progress
from spantrain.runtime.gradients.groups import StageGroups, hold_store, open_groups, reach_store
from spantrain.runtime.step.context import WorkerLinks, admit
from spantrain.runtime.step.emulation import law_of
from spantrain.runtime.worker.carry_on import give
from spantrain.runtime.worker.journal_copy import JournalCopy
from spantrain.runtime.worker.keeping.ahead import FollowSession
from spantrain.runtime.worker.settings import WorkerSettings
from spantrain.runtime.worker.stale_session import session_of
from spantrain.runtime.worker.trainer import TrainSession
from spantrain.runtime.worker.watch import Watch, connections, cut
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.mailbox.mailbox import MailboxLike

ENTRY_POINTS = "spantrain.orders"

Meet = Callable[[int, int, bool], Store]
"""(generation, stage, leads) -> a store where all devices of the order meet."""


class RegisteredOrder(Record):
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


_COLLECTIVE_TIMEOUT_S = 300.0
"""How long a device waits for another of its stage that lives; the watch ends a wait for one that does not."""


class OrderRunner:
    """What one device does of each order."""

    def __init__(
        self,
        name: str,
        settings: WorkerSettings,
        *,
        control: ControlPlane,
        mailbox: MailboxLike,
        check_abort: Callable[[], None],
    ) -> None:
        """Work as this device; `check_abort` raises when the order under way is over."""
        self._name = name
        self.settings, self.mailbox = settings, mailbox
        """Others when this machine's address has changed."""
        self.control = control
        """Reaches the coordinator; another one when that has come back."""
        self._check_abort = check_abort
        self._software = Software(mailbox)
        self._groups: list[StageGroups] = []
        """Those that were opened for the order under way."""
        self._last: TrainSession | FollowSession | None = None
        """The last train order's, or follow order's, for what is still held of it."""
        self.has_part = False
        """Whether this device has a part in a run that has not ended, as far as is known here."""
        self._before: frozenset[tuple[int, str]] | None = None
        """Sockets from before the first of them, if any."""
        self._journal: JournalCopy | None = None

    @property
    def held(self) -> HeldState | None:
        """What is held of the last train order, if anything."""
        return self._last.held if isinstance(self._last, TrainSession) and self.has_part else None

    @property
    def is_whole(self) -> bool:
        """Whether nothing that is held of it was updated in part."""
        return not isinstance(self._last, TrainSession) or self._last.is_whole

    @property
    def unfinished(self) -> DeviceStep | None:
        """What was done in the step under way of the last train order, if there is one."""
        return self._last.teller.unfinished() if isinstance(self._last, TrainSession) else None

    def perform(self, order: object, watch: Watch) -> object:
        """Carry out an order, which the watch is over; return its result."""
        if not isinstance(order, (orders.TrainOrder, orders.GiveOrder, orders.FollowOrder)):
            self._last = None
        try:
            return self._performed(self._as_here(order), watch)
        finally:
            self._groups, self._before = [], None

    def interrupt(self) -> None:
        """End what waits inside of torch for devices of a stage, whose order is over; in any thread."""
        while self._groups:
            self._groups.pop().abort()
        if self._before is not None:
            endpoints = (self.mailbox.endpoint, *(peer.endpoint for peer in self.mailbox.dialled))
            cut(self._before, {endpoint.removeprefix("tcp://") for endpoint in endpoints})

    def _as_here(self, order: object) -> object:
        """Return an order with this worker's functions and folders."""
        own = self.settings.functions
        match order:
            case orders.ComputeOrder() | orders.AddedOrder():
                return replace(order, model=with_own_functions(order.model, own))
            case orders.TrainOrder():
                plan = replace(order.plan, model=with_own_functions(order.plan.model, own))
                out = folder_here(self.settings.folder, order.output_dir, written=True)
                begins = folder_here(self.settings.folder, order.resume_from, written=False)
                journal = folder_here(self.settings.folder, order.journal_dir, written=True)
                return replace(order, plan=plan, output_dir=out, resume_from=begins, journal_dir=journal)
            case orders.FollowOrder():
                return replace(order, plan=replace(order.plan, model=with_own_functions(order.plan.model, own)))
        return order

    def _performed(self, order: object, watch: Watch) -> object:
        match order:
            case orders.ComputeOrder():
                return self._measure_compute(order)
            case orders.ConnectOrder():
                self._admit(order.generation, order.peers)
                warm_up_links(self.mailbox, [peer.name for peer in order.peers if peer.name != self._name])
                return Done()
            case orders.EchoOrder():
                self._admit(order.generation, order.peers)
                echo_probes(self.mailbox, self._software.round_trip_s, should_stop=lambda: watch.cause() is not None)
                return Done()
            case orders.LinkOrder():
                self._admit(order.generation, order.peers)
                prober = Prober(self.mailbox, order.target, self._software.round_trip_s)
                expected = dict(zip((True, False), order.expected_bytes_per_s, strict=True))
                there, back = measure_directions(prober, expected, order.max_payload_bytes, order.rounds)
                prober.dismiss()
                return orders.LinkResult(links=(there, back))
            case orders.AddedOrder():
                return added_orders()[order.wire_name].perform(order, self._links(), self._meet)
            case orders.TrainOrder():
                return self._train(order)
            case orders.GiveOrder():
                return self._give(order)
            case orders.FollowOrder():
                return self._follow(order)
            case orders.BringOrder():
                bring_all(order, Path(folder_here(self.settings.folder, order.folder, written=True)), self.control)
                return Done()
        raise AssertionError(f"no such order: {order}")

    def _train(self, order: orders.TrainOrder) -> orders.TrainResult:
        """Carry out a train order; what the one before has left is held until this one has it.

        What this one leaves is held, too: another device may be lost before it has saved its part.
        """
        self._copy_journal(order.journal_dir)
        left = self._last.leave(order.kept, order.first_step) if self._last and order.kept else None
        if order.kept is None:
            self._last = None
        self.has_part = True
        self._last = session = session_of(order, self._links(), left)
        result = session.run()
        self.has_part = session.paused
        return result

    def _copy_journal(self, run: str) -> None:
        """Keep a copy of the journal in a run's folder, if this device is to, by the coordinator that there is."""
        journal = self._journal
        if not run or (journal is not None and journal.control is self.control):
            return
        if journal is not None:
            journal.close()
        self._journal = JournalCopy(self.control, Path(run))

    def dismissed(self) -> None:
        """Remove the copy of a journal: its run needs this device no more."""
        if self._journal is not None:
            self._journal.remove()

    def _give(self, order: orders.GiveOrder) -> Done:
        """Give others what is held of the last train order; it stays, should they be lost before they go on with it."""
        left = self._last.leave(order.kept, order.first_step) if self._last else None
        self._admit(order.plan.generation, order.peers)
        address = {"generation": order.plan.generation, "step": order.first_step}
        give(self._name, left, order, MailboxChannel(self.mailbox, **address, check_abort=self._check_abort))
        return Done()

    def _follow(self, order: orders.FollowOrder) -> Done:
        """Take ahead what another plan gives this device; it is held for the train order that begins with it."""
        self._admit(order.plan.generation, order.peers)
        self._last = session = FollowSession(order, self._links())
        return session.run()

    def _admit(self, generation: int, peers: tuple[PeerAddress, ...]) -> None:
        admit(self.control, self.mailbox, generation, peers)

    def _links(self) -> WorkerLinks:
        device = open_device(self.settings.backend)
        device.check_abort = self._check_abort
        return WorkerLinks(
            name=self._name,
            device=device,
            mailbox=self.mailbox,
            control=self.control,
            check_abort=self._check_abort,
            open_groups=lambda plan, stage, joined: self._open_groups(plan, stage, device, joined=joined),
        )

    def _measure_compute(self, order: orders.ComputeOrder) -> orders.ComputeResult:
        place = order.cluster.device_by_name[self._name]
        device = open_device(self.settings.backend)
        law = law_of(order.cluster, place.name, order.dtype)
        bench = Bench(
            device=device,
            spec=order.model,
            graph=order.graph,
            kind=place.kind,
            dtype=order.dtype,
            emulate=law.seconds if law else None,
        )
        ask = self.control.ask
        timings = measure_units(
            bench, order.sizes, on_progress=lambda done, total, text: ask(Progress(done=done, total=total, text=text))
        )
        score = measure_tasks(device, name=place.name, law=law)
        return orders.ComputeResult(timings=timings, score=score, real_compute_ratio=device.real_compute_ratio)

    def _open_groups(self, plan: Plan, stage_index: int, device: ComputeDevice, *, joined: bool) -> StageGroups:
        """Meet the other devices of a stage, if it has any."""
        stage, store = plan.stages[stage_index], None
        if len(stage.devices) > 1:
            store = self._meet(plan.generation, stage_index, stage.devices[0] == self._name)
        groups = open_groups(
            plan,
            stage_index,
            self._name,
            store=store,
            torch_device=device.torch_device,
            timeout_s=_COLLECTIVE_TIMEOUT_S,
            joined=joined,
        )
        self._groups.append(groups)
        return groups

    def _meet(self, generation: int, stage: int, leads: bool) -> Store:
        """Meet the other devices of a stage at a store that the first one holds."""
        if self._before is None:
            self._before = connections()
        place = FindMeetingPoint(generation=generation, stage=stage)
        if leads:
            host = self.settings.listens_at.host
            store = hold_store(host)
            self.control.ask(replace(place, opened=MeetingPoint(host=host, port=store.port)))
            return store
        found = self.control.ask(place)
        return reach_store(found.host, found.port)


def folder_here(own: str, folder: str, *, written: bool) -> str:
    """Return where a folder of the coordinator's machine is on this one.

    Args:
        own: below which it is to be; empty: under the same path, or in this user's cache where nothing can be written
            there.
        folder: its path there; empty: there is none.
        written: whether it is there to write to, and not to read what it has.
    """
    path, below = Path(folder), Path(own)
    if folder and not own:
        nearest = next(one for one in (path, *path.parents) if one.exists())
        if os.access(nearest, os.W_OK) or (path.exists() and not written):
            return folder
        below = Path.home() / ".cache" / "spantrain"
    return folder and str(below / path.relative_to(path.anchor))
