"""What workers ask of the coordinator, and what it answers (`runtime.control.plane`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from spantrain.core.checkpoint import StoredFile
from spantrain.core.outer.stages import StageMeeting, StageReport
from spantrain.core.plan import Plan
from spantrain.core.records import Record
from spantrain.core.speed import LinkReport
from spantrain.core.trace import DeviceStep
from spantrain.devices.meters import MeterReading
from spantrain.errors import Interrupted, PeerLostError
from spantrain.runtime.control import data_requests as data
from spantrain.runtime.control.plane import OrderRequest, Request
from spantrain.transport.connection.peers import PeerAddress
from spantrain.transport.control.protocol import HEARTBEAT

_LAST_S = 2.0
"""How long a process may take to end by itself, once there is nothing left to do for it."""
_ORDER_S = 30.0
"""How long it may take to leave an order that has been ended, to be there for the next one."""


class Done(Record):
    """The answer that says no more than that it came."""


class WorkerWelcome(Record):
    """What a worker hears when it has joined."""

    device: str
    """That it stands for."""
    patience_s: float
    """After what silence each side takes the other for lost."""


# Being there.


class HeldState(Record):
    """What a worker holds in memory of a training run."""

    steps: int
    """Whose updates are in it."""
    summed: bool
    """Whether it has the gradients of the step behind these as well."""

    def reaches(self, step: int) -> bool:
        """Whether it can begin that step, once it knows the verdict on the one before."""
        return self.steps == step or (self.summed and self.steps == step - 1)


class Introduction(Request[Done], name="introduce"):
    """How a worker's mailbox is reached."""

    endpoint: str
    public_key: str
    near: str = ""  # where those of its site reach it, if that is elsewhere
    held: HeldState | None = None
    """Of a run whose coordinator it has lost."""


class Goodbye(Request[Done], name="leave"):
    """A worker goes by itself; its name is free."""

    reason: str = "it has left"


class Standing(Record):
    """What a worker knows of the coordinator's will."""

    ended_orders: int = -1
    """Orders up to this number are over."""
    reason: str = ""
    leave: bool = False
    """Whether no orders will come any more."""
    lost: str | None = None
    """Why the coordinator must be taken for lost, as the worker itself has found."""
    comes_back: bool = False
    """Whether the worker waits for a coordinator that is lost."""
    asks_reach: int = 0
    """The number of the question which peers it cannot reach; 0: none."""

    def why_over(self, order_id: int | None) -> PeerLostError | Interrupted | None:
        """Return why an order is over (None: being without one), or None if it is not."""
        if self.lost is not None:
            return PeerLostError(self.lost)
        if order_id is not None and (self.leave or order_id <= self.ended_orders):
            return Interrupted(self.reason or "the coordinator has ended this run")
        return None

    def patience_s(self, order_id: int | None) -> float | None:
        """Return how long a process may still go on with an order, or with none; None: for ever."""
        if self.lost is not None and self.comes_back:
            return None if order_id is None else _ORDER_S
        if self.lost is not None or self.leave:
            return _LAST_S
        return None if self.why_over(order_id) is None else _ORDER_S


class Heartbeat(Request[Standing], name=HEARTBEAT):
    """A sign of life."""

    round_trip_s: float = 0.0
    """How long the one before took to be answered."""
    leaving: str = ""
    """Why the worker wants to leave the run behind a step; empty: it does not."""


class ClockReading(Record):
    """The coordinator's monotonic clock."""

    now_s: float


class ReadClock(Request[ClockReading], name="clock"):
    """Asks what the coordinator's clock says."""


# Orders.


class OrderFailure(Record):
    """Why an order was not carried out, so that the right thing is said of it."""

    error: str
    caused_elsewhere: bool = False
    """Whether another device's failure was the cause."""
    usage: bool = False  # a person can mend it
    internal: bool = False  # it is an error of SpanTrain's own
    out_of_memory: bool = False
    holds: bool = True  # all that it should of a training run: not where an update failed half-way
    unfinished: DeviceStep | None = None
    """What the device had done in the step under way."""


class OrderOutcome(Record):
    """What became of an order."""

    order_id: int
    result: Any = None
    """Plain, of the type that the order names."""
    failure: OrderFailure | None = None


class GivenOrder(Record):
    """An order on its way."""

    order_id: int
    name: str
    """One of `orders.ORDERS`."""
    body: Any
    """The order itself, plain."""


class NextOrder(Record):
    """What a worker is to do now."""

    order: GivenOrder | None = None
    """None: there will be no more."""
    standing: Standing = field(default_factory=Standing)


class AskForOrder(Request[NextOrder], name="next_order"):
    """Tells what became of the last order, and waits for the next."""

    after: int = -1
    """The last order that it knows."""
    outcome: OrderOutcome | None = None


class Progress(OrderRequest[Done], name="progress"):
    """How far an order is."""

    done: int
    total: int
    text: str


class Ready(OrderRequest[Done], name="ready"):
    """Admits the others; answered when all have, so that none dials a peer that would refuse it."""


class Begin(OrderRequest[Done], name="begin"):
    """Is ready for the first step; answered when all are: time and network traces count from then on."""


class MeetingPoint(Record):
    """Where the devices of a stage meet."""

    host: str
    port: int


class FindMeetingPoint(OrderRequest[MeetingPoint], name="meeting_point"):
    """Asks where the devices of a stage meet; the first of them tells it."""

    generation: int
    stage: int
    opened: MeetingPoint | None = None
    """By who asks."""


# Steps.


@dataclass(frozen=True, slots=True)
class AheadCopy:
    """Units of the present plan that one device is to have of another, which holds its stage whole."""

    giver: str
    taker: str
    units: tuple[int, ...]


class AheadChange(Record):
    """What is copied ahead from now on, in the place of all that was before; without copies: nothing more."""

    number: int
    """Of a leg's, by which its messages are told from those of one that was given up."""
    generation: int
    """Of the plan that runs."""
    copies: tuple[AheadCopy, ...] = ()
    """One at most for each two devices."""
    newcomers: tuple[PeerAddress, ...] = ()
    """Takers that have no part in the present plan (`runtime.control.orders.FollowOrder`)."""


class AheadState(StrEnum):
    """How far a giver is."""

    COPYING = "copying"
    LEVEL = "level"
    """All of the steps before this one is on its way: a change now is one of a moment."""
    FULL = "full"
    """More waits than what was to be copied: the way is too slow for it."""


class StepVerdict(Record):
    """What all workers do after the barrier, in the same way."""

    grad_norm: float
    checkpoint: bool
    stop: bool
    evaluate: bool
    skip_update: bool = False
    """Under float16: gradients overflowed somewhere, so nobody updates and all lower the loss scale."""
    data_differs: str = ""
    """Who reads other data than whom; empty: all read the same."""
    plan: Plan | None = None
    """What all run from the next step on, in its own schedule; None: what they run now."""
    outer: StageMeeting | None = None
    """What all do for the outer optimizer, where the run takes part in one."""
    pause: bool = False
    """Whether the order ends behind this step, with all that is held kept for the next one."""
    record: bool = False
    """Whether all tell, beside their further work, what they did in this step (`TellStep`)."""
    ahead: AheadChange | None = None
    """What is copied from the next step on, ahead of another plan; None: what was."""


class SwitchReport(Record):
    """What it took a device, or all of them, to go over to a new plan."""

    duration_s: float
    """From the verdict to the first action that it may run."""
    received_bytes: int
    """Of parameters and optimizer state, from other devices."""


class DeviceReport(OrderRequest[StepVerdict], name="commit_step"):
    """What a worker brings to the barrier at the end of a step."""

    generation: int
    step: int
    loss_sum: float | None
    """Of the last stage's replicas: the sum over their samples."""
    grad_square: float | None
    """Of each stage's first replica, where each device counts what it alone holds."""
    busy_s: float
    peak_held_samples: int
    duration_s: float = 0.0
    """From the step's first action to the barrier, gradient sums included."""
    overflow: bool = False
    """Under float16: whether a gradient of this device is infinite or no number."""
    loss_overflows: bool = False
    """Under float16: whether the loss is; `loss_sum` is 0 then."""
    evaluation_loss_sum: float | None = None
    sent_bytes: Mapping[str, int] = field(default_factory=dict)
    """To each peer, in this step."""
    data_digest: str | None = None
    """Of the data that it reads, in its first report under each plan that moves units; None where it reads none."""
    dataset_size: int | None = None
    """Samples of the data that it reads; None where it reads none, or gets batches."""
    switch: SwitchReport | None = None
    """In the first step under a new plan."""
    links: tuple[LinkReport, ...] = ()
    """What it knows of the links to its peers, if it leads a replica."""
    outer: StageReport | None = None
    """Of the first device of a stage, where the run takes part in an outer optimizer."""
    kept: tuple[str, ...] = ()
    """First devices of stages of which it has a copy that is whole, this step's gradients included."""
    ahead: AheadState | None = None
    """How far what it gives ahead of another plan is; None: it gives nothing."""
    meters: MeterReading | None = None
    """What the device's own meters said last; None: it has none."""

    def __post_init__(self) -> None:
        names = ("grad_square", "busy_s", "peak_held_samples", "duration_s", "dataset_size")
        amounts = {name: getattr(self, name) or 0 for name in names}
        amounts |= {f"sent_bytes to {peer}": size for peer, size in self.sent_bytes.items()}
        wrong = [f"{name} is {value}" for name, value in amounts.items() if not 0 <= value < math.inf]
        losses = {"loss_sum": self.loss_sum, "evaluation_loss_sum": self.evaluation_loss_sum}
        wrong += [f"{name} is {value}" for name, value in losses.items() if not math.isfinite(value or 0.0)]
        if wrong:
            raise ValueError(f"step {self.step}: {'; '.join(wrong)}")


class TellStep(OrderRequest[Done], name="tell_step"):
    """What a device did in a step that the verdict on it asked about."""

    told: DeviceStep


class OuterCall(OrderRequest[StageMeeting], name="meet_stages"):
    """What a worker brings to a meeting outside of steps, where the run takes part in an outer optimizer."""

    number: int
    """Of the meeting."""
    report: StageReport | None
    """Of the first device of a stage."""


class DroppedCheckpoints(Record):
    """Steps whose checkpoints are not kept any longer: devices remove their own files."""

    steps: tuple[int, ...]


class SavedFile(OrderRequest[DroppedCheckpoints], name="checkpoint_saved"):
    """What a device tells the coordinator when its file is on the disk."""

    step: int
    """Steps done."""
    name: str
    file: StoredFile
    scalars: Mapping[str, float]


class Reach(OrderRequest[Done], name="reach"):
    """Which devices of its order a worker cannot reach now, as the answer to the question of a number."""

    number: int
    unreached: tuple[str, ...]


REQUESTS: tuple[type[Request[Any]], ...] = (
    Introduction, Goodbye, Heartbeat, ReadClock, AskForOrder, Progress, Ready, Begin, FindMeetingPoint, DeviceReport,
    TellStep, SavedFile, data.OfferFile, data.NotSaved, data.PutPiece, data.FetchPiece, OuterCall, data.AskNextStep,
    data.FetchRows, Reach, data.FollowJournal,
)  # fmt: skip
"""All that a worker may ask."""
